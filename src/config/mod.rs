//! Reading the project's YAML files: one path for hardware, workloads and calibration.
//!
//! A file becomes a [`Document`]: a tree in which every key and value knows its line and column. `--set`
//! overrides change the tree, a serde deserializer reads typed structs from it, and every complaint, of the
//! parser, of serde or of later validation, points at the character it is about.
//!
//! ```
//! use serde::Deserialize;
//! use tpusim::config::Document;
//!
//! #[derive(Debug, Deserialize)]
//! #[serde(deny_unknown_fields)]
//! struct Memory {
//!     bandwidth: tpusim::units::BytesPerSecond,
//! }
//!
//! let mut document = Document::parse("chip.yaml", "bandwidth: 819 GB/s\n")?;
//! document.set("bandwidth=1 TB/s")?;
//! assert_eq!(document.deserialize::<Memory>()?.bandwidth.get(), 1e12);
//!
//! let bad = Document::parse("chip.yaml", "bandwidht: 819 GB/s\n")?;
//! let error = bad.deserialize::<Memory>().unwrap_err().to_string();
//! assert!(error.starts_with("chip.yaml:1:1: unknown key `bandwidht`; did you mean `bandwidth`?"));
//! # Ok::<(), tpusim::config::ConfigError>(())
//! ```

mod de;
mod document;
mod error;
mod nearest;
mod set;
#[cfg(test)]
mod tests;
mod tree;

pub use document::{Document, digest};
pub use error::{ConfigError, Location, Problem};
pub use nearest::{listed, nearest, suggestion};
pub use set::Assignment;
pub use tree::{Key, Node, Value};
