//! Located errors, rendered as the line at fault with a caret under the spot.

use std::fmt;
use std::sync::Arc;

/// Where a key or value was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// A character of a file. Lines and columns count from one.
    File {
        /// The file as it was named.
        name: Arc<str>,
        /// Line.
        line: usize,
        /// Column, in characters.
        column: usize,
    },
    /// A file as a whole: one that cannot be read.
    WholeFile {
        /// The file as it was named.
        name: Arc<str>,
    },
    /// An override of the command line.
    Override {
        /// The override as it was written, `--set a.b=c`.
        text: Arc<str>,
    },
    /// An argument of the command line that names no file.
    Argument,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::File { name, line, column } => write!(f, "{name}:{line}:{column}"),
            Location::WholeFile { name } => f.write_str(name),
            Location::Override { text } => f.write_str(text),
            Location::Argument => Ok(()),
        }
    }
}

/// One complaint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The spot it is about.
    pub location: Location,
    /// What is wrong, what was expected and what to do: a lowercase fragment without a full stop.
    pub message: String,
    /// The line at fault, where the location is in a file.
    pub source_line: Option<String>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.location {
            Location::Argument => f.write_str(&self.message)?,
            _ => write!(f, "{}: {}", self.location, self.message)?,
        }
        let (Some(source), Location::File { line, column, .. }) = (&self.source_line, &self.location) else {
            return Ok(());
        };
        let number = line.to_string();
        // A long line is cut around the spot so that the caret stays on a screen.
        let start = if *column > 80 { column - 40 } else { 0 };
        // A tab is shown as one blank: otherwise the caret would stand elsewhere on every terminal.
        let shown: String =
            source.chars().skip(start).take(110).map(|c| if c.is_control() { ' ' } else { c }).collect();
        let shown = shown.trim_end();
        let margin = number.len();
        write!(f, "\n{:margin$} |\n{number} | {shown}", "")?;
        write!(f, "\n{:margin$} | {:>width$}", "", "^", width = (column - start).max(1))
    }
}

/// Everything that is wrong with a file, an override or a name.
///
/// `Display` gives `FILE:LINE:COLUMN: message` with the source line below; further problems follow after
/// `error: `, so that a caller who prints `error: {e}` gets a well-formed list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\nerror: "))]
pub struct ConfigError {
    problems: Vec<Problem>,
}

impl ConfigError {
    /// One problem with its source line, if it has one.
    #[must_use]
    pub fn new(location: Location, message: impl Into<String>, source_line: Option<String>) -> Self {
        Self { problems: vec![Problem { location, message: message.into(), source_line }] }
    }

    /// A problem with an argument that is no file, such as an unknown name.
    #[must_use]
    pub fn argument(message: impl Into<String>) -> Self {
        Self::new(Location::Argument, message, None)
    }

    /// The problems of several errors as one, in order; `Ok` where there are none.
    ///
    /// # Errors
    /// The merged error, if `errors` is not empty.
    pub fn collect(errors: impl IntoIterator<Item = ConfigError>) -> Result<(), ConfigError> {
        let problems: Vec<Problem> = errors.into_iter().flat_map(|error| error.problems).collect();
        if problems.is_empty() { Ok(()) } else { Err(Self { problems }) }
    }

    /// Every problem.
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// As it stands on a terminal: each problem after `error: `.
    #[must_use]
    pub fn render(&self) -> String {
        format!("error: {self}")
    }
}
