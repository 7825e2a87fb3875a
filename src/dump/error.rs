//! What can be wrong with the files of a dump, and where.

use std::fmt;

/// A place in a text file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// Path of the file, inside its archive where it comes from one.
    pub file: String,
    /// Line, from 1.
    pub line: usize,
    /// Column in bytes, from 1.
    pub column: usize,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// Why a dump cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// The operating system or the archive refused.
    #[error("{path} cannot be read")]
    Read {
        /// Path of the folder, archive or file.
        path: String,
        /// The reason.
        source: std::io::Error,
    },
    /// A text is not what it should be.
    #[error("{at}: {message}")]
    Syntax {
        /// Where.
        at: Location,
        /// What was expected and what was found.
        message: String,
    },
    /// The dump as a whole lacks something, or something given beside it is wrong.
    #[error("{path}: {message}")]
    Incomplete {
        /// Path of the folder or archive.
        path: String,
        /// What is missing and how to get it.
        message: String,
    },
}

impl DumpError {
    /// An error at a place of a text.
    pub(super) fn syntax(file: &str, line: usize, column: usize, message: impl Into<String>) -> Self {
        Self::Syntax {
            at: Location {
                file: file.to_owned(),
                line,
                column,
            },
            message: message.into(),
        }
    }

    /// An error about a whole dump.
    pub(super) fn incomplete(path: &str, message: impl Into<String>) -> Self {
        Self::Incomplete {
            path: path.to_owned(),
            message: message.into(),
        }
    }

    /// An error of the operating system.
    pub(super) fn read(path: &str, source: std::io::Error) -> Self {
        Self::Read {
            path: path.to_owned(),
            source,
        }
    }
}
