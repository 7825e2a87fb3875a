//! The compiler's table of slots: how many operations of each kind a bundle may hold, and how many each holds.
//!
//! ```text
//! == CAPACTIY:
//! MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
//!     2     2     4     2     1     3     3     2     2     2
//! == UTILIZATION:
//! 0 0 0 0 0 1 0 0 0 0
//! ```
//!
//! One row a bundle. The table of the last stage before delays are folded away still has a row for every
//! cycle, the final one a row for every bundle. Use of the matrix and cross-lane units is spread over the
//! rows that follow an issue.

use std::io::BufRead;

use super::error::DumpError;
use super::lines::Lines;

/// Most columns that are accepted.
const MOST_COLUMNS: usize = 64;

/// A table of slots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Utilization {
    /// Name of each kind of slot, as the compiler writes it.
    pub names: Vec<String>,
    /// Operations of each kind that fit into one bundle.
    pub capacity: Vec<u32>,
    /// Rows one after the other, one number a kind.
    cells: Vec<u16>,
}

impl Utilization {
    /// Reads a table. `name` is the path that errors show.
    ///
    /// # Errors
    /// The stream fails or is not such a table.
    pub fn read(name: &str, stream: impl BufRead) -> Result<Self, DumpError> {
        let mut lines = Lines::new(name, stream);
        let mut table = Self::default();
        heading(&mut lines, name, "== CAPAC")?;
        match lines.next()? {
            Some(line) => table.names = line.split(',').map(|word| word.trim().to_owned()).collect(),
            None => return Err(ends(name, lines.number(), "the names of the slots")),
        }
        if table.names.len() > MOST_COLUMNS || table.names.iter().any(String::is_empty) {
            let message = "expected the names of the slots, separated by commas";
            return Err(DumpError::syntax(name, lines.number(), 1, message));
        }
        let number = lines.number() + 1;
        let Some(line) = lines.next()? else {
            return Err(ends(name, number, "the capacities of the slots"));
        };
        numbers(name, number, line, table.names.len(), |value| {
            table.capacity.push(value);
        })?;
        heading(&mut lines, name, "== UTILI")?;
        loop {
            let number = lines.number() + 1;
            let Some(line) = lines.next()? else { break };
            if line.trim().is_empty() {
                continue;
            }
            let cells = &mut table.cells;
            numbers(name, number, line, table.names.len(), |value| {
                cells.push(u16::try_from(value).unwrap_or(u16::MAX));
            })?;
        }
        Ok(table)
    }

    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cells.len() / self.names.len().max(1)
    }

    /// Whether there are no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }

    /// Slots used by one bundle, a number a kind; empty beyond the last row.
    #[must_use]
    pub fn row(&self, index: usize) -> &[u16] {
        let width = self.names.len();
        self.cells.get(index * width..(index + 1) * width).unwrap_or(&[])
    }

    /// Which columns say something about the very bundle they stand at: all but those of the units that stay
    /// busy for several cycles.
    #[must_use]
    pub fn own_columns(&self) -> Vec<bool> {
        self.names
            .iter()
            .map(|name| name != "MXU" && name != "XLU")
            .collect()
    }
}

fn ends(name: &str, line: usize, expected: &str) -> DumpError {
    DumpError::syntax(
        name,
        line.max(1),
        1,
        format!("expected {expected}, found the end of the file"),
    )
}

fn heading<R: BufRead>(lines: &mut Lines<'_, R>, name: &str, word: &str) -> Result<(), DumpError> {
    let number = lines.number() + 1;
    match lines.next()? {
        Some(line) if line.starts_with(word) => Ok(()),
        Some(_) => {
            let message = format!("expected a line that starts with `{word}`");
            Err(DumpError::syntax(name, number, 1, message))
        }
        None => Err(ends(name, number, &format!("a line that starts with `{word}`"))),
    }
}

fn numbers(
    name: &str,
    number: usize,
    line: &str,
    expected: usize,
    mut take: impl FnMut(u32),
) -> Result<(), DumpError> {
    let mut count = 0;
    for word in line.split_ascii_whitespace() {
        let Ok(value) = word.parse() else {
            let column = word.as_ptr() as usize - line.as_ptr() as usize + 1;
            let shown: String = word.chars().take(20).collect();
            let message = format!("expected a number of slots, found `{shown}`");
            return Err(DumpError::syntax(name, number, column, message));
        };
        count += 1;
        if count <= expected {
            take(value);
        }
    }
    if count == expected {
        Ok(())
    } else {
        let message = format!("expected {expected} numbers, found {count}");
        Err(DumpError::syntax(name, number, line.len() + 1, message))
    }
}
