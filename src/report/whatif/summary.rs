//! What a sweep found, for people: the table, or the best of it, and what could not be timed.

use std::collections::BTreeMap;
use std::io::{self, Write};

use crate::report::table::{Cell, Column, Table};
use crate::study::whatif::{Axis, Front, Grid, Row, Timing};

/// Rows up to which the table shows all of them.
const SHOWN: u64 = 120;
/// Rows of each chip that are shown otherwise.
const BEST: usize = 10;
/// Reasons that are listed.
const REASONS: usize = 12;

/// Collects rows as they come.
pub struct Summary<'a> {
    grid: &'a Grid,
    front: Front,
    with_front: bool,
    rows: u64,
    /// Rows to be shown: all of them, or the fastest of every chip.
    kept: Vec<Vec<Row>>,
    all: bool,
    /// Points that could not be timed on some chip or plan, and the last of them.
    invalid: u64,
    last_invalid: Option<u64>,
    /// Rows and first point of every reason.
    reasons: BTreeMap<String, (u64, u64)>,
}

impl<'a> Summary<'a> {
    /// An empty summary of a sweep of which `rows` rows will come; `front` collects the non-dominated ones where it has objectives.
    #[must_use]
    pub fn new(grid: &'a Grid, rows: u64, front: Front, with_front: bool) -> Self {
        Summary {
            kept: vec![Vec::new(); grid.chips.len()],
            grid,
            front,
            with_front,
            rows: 0,
            all: rows <= SHOWN,
            invalid: 0,
            last_invalid: None,
            reasons: BTreeMap::new(),
        }
    }

    /// Takes a row. Rows come in order of their points.
    pub fn add(&mut self, row: &Row) {
        self.rows += 1;
        match &row.outcome {
            Ok(timing) => {
                if self.with_front {
                    self.front.add(row, &self.grid.space);
                }
                let kept = &mut self.kept[row.chip];
                if self.all {
                    kept.push(row.clone());
                } else {
                    let at = kept.partition_point(|other| time(other) <= timing.time_us);
                    if at < BEST {
                        kept.insert(at, row.clone());
                        kept.truncate(BEST);
                    }
                }
            }
            Err(reason) => {
                if self.last_invalid != Some(row.point) {
                    self.last_invalid = Some(row.point);
                    self.invalid += 1;
                }
                self.reasons.entry(reason.to_string()).or_insert((0, row.point)).0 += 1;
                if self.all {
                    self.kept[row.chip].push(row.clone());
                }
            }
        }
    }

    /// Points that could not be timed on every chip in every plan.
    #[must_use]
    pub fn invalid(&self) -> u64 {
        self.invalid
    }

    /// The non-dominated rows.
    #[must_use]
    pub fn front(&self) -> Vec<&Row> {
        self.front.rows()
    }

    /// Which of some rows are non-dominated.
    #[must_use]
    pub fn marks(&self, rows: &[Row]) -> Vec<bool> {
        let front: std::collections::BTreeSet<_> = self
            .front()
            .into_iter()
            .map(|row| (row.point, row.chip, row.plan))
            .collect();
        let key = |row: &Row| (row.point, row.chip, row.plan);
        rows.iter().map(|row| front.contains(&key(row))).collect()
    }

    /// Writes the answer for people.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let grid = self.grid;
        let points = self.rows / grid.rows_per_point().max(1);
        let fields: Vec<&str> = grid.space.axes().iter().map(Axis::field).collect();
        writeln!(
            out,
            "{}: {points} point{} of {} on {} in {}; {}",
            grid.name,
            if points == 1 { "" } else { "s" },
            if fields.is_empty() {
                "no field".to_owned()
            } else {
                fields.join(", ")
            },
            grid.chips.join(", "),
            grid.plans.join(", "),
            match self.invalid {
                0 => "all timed".to_owned(),
                n => format!("{n} of them not timed, or not on every chip"),
            }
        )?;
        writeln!(out, "{}\n", grid.layer)?;
        if self.all {
            self.table(&self.shown(), self.with_front).write_text(out)?;
        } else if self.with_front {
            writeln!(
                out,
                "rows that no other row of the chip beats in everything asked for:"
            )?;
            let rows: Vec<Row> = self.front().into_iter().cloned().collect();
            self.table(&rows, false).write_text(out)?;
        } else {
            writeln!(out, "the {BEST} fastest rows of every chip:")?;
            self.table(&self.shown(), false).write_text(out)?;
        }
        if self.invalid > 0 {
            writeln!(out, "\nnot timed:")?;
            for (reason, (rows, first)) in self.reasons.iter().take(REASONS) {
                let point = grid.space.assignments(*first);
                writeln!(
                    out,
                    "  {reason}\n    {rows} rows, the first at {}",
                    point.join(", ")
                )?;
            }
            if self.reasons.len() > REASONS {
                writeln!(out, "  and {} more reasons", self.reasons.len() - REASONS)?;
            }
        }
        Ok(())
    }

    /// The rows to be shown, in order: by point where all are, else by chip and time.
    fn shown(&self) -> Vec<Row> {
        let mut rows: Vec<Row> = self.kept.iter().flatten().cloned().collect();
        if self.all {
            rows.sort_by_key(|row| (row.point, row.chip, row.plan));
        }
        rows
    }

    fn table(&self, rows: &[Row], marked: bool) -> Table {
        let grid = self.grid;
        let axes = grid.space.axes();
        let mut columns: Vec<Column> = axes
            .iter()
            .map(|axis| Column::number(axis.field().trim_start_matches("layer."), axis.field()))
            .collect();
        columns.extend([
            Column::text("chip", "chip"),
            Column::text("plan", "plan"),
            Column::number("time (us)", "time_us"),
            Column::number("80 % interval", "interval"),
            Column::text("bound", "bound"),
            Column::number("MXU (us)", "mxu_us"),
            Column::number("VPU (us)", "vpu_us"),
            Column::number("HBM (us)", "hbm_us"),
            Column::number("HBM (MB)", "hbm_bytes"),
            Column::number("state (MiB)", "state_bytes"),
            Column::number("GFLOP", "flops_count"),
        ]);
        if marked {
            columns.push(Column::text("best", "pareto"));
        }
        let mut table = Table::new(columns);
        for (row, mark) in rows.iter().zip(self.marks(rows)) {
            let digits = grid.space.digits(row.point);
            let mut cells: Vec<Cell> = axes
                .iter()
                .zip(digits)
                .map(|(axis, digit)| Cell::from(&axis.values()[digit]))
                .collect();
            cells.push(Cell::from(&grid.chips[row.chip]));
            cells.push(Cell::from(&grid.plans[row.plan]));
            if let Ok(timing) = &row.outcome {
                cells.extend(numbers(timing));
            } else {
                cells.extend([Cell::none(), Cell::none(), Cell::from("not timed")]);
                cells.extend((0..6).map(|_| Cell::none()));
            }
            if marked {
                cells.push(Cell::from(if mark { "*" } else { "" }));
            }
            table.row(cells);
        }
        table
    }
}

fn time(row: &Row) -> f64 {
    row.outcome
        .as_ref()
        .map_or(f64::INFINITY, |timing| timing.time_us)
}

fn numbers(timing: &Timing) -> [Cell; 9] {
    // Three digits, as the interval says no more.
    let us = |value: f64| {
        Cell::number(
            value,
            if value < 10.0 {
                2
            } else {
                usize::from(value < 100.0)
            },
        )
    };
    let interval = timing.interval_us.map_or_else(Cell::none, |(low, high)| {
        Cell::from(format!("{low:.0} to {high:.0}"))
    });
    [
        us(timing.time_us),
        interval,
        Cell::from(timing.bound),
        us(timing.mxu_us),
        us(timing.vpu_us),
        us(timing.hbm_us),
        Cell::number(timing.hbm_bytes as f64 / 1e6, 1),
        Cell::number(timing.state_bytes as f64 / f64::from(1 << 20), 2),
        Cell::number(timing.flops as f64 / 1e9, 1),
    ]
}
