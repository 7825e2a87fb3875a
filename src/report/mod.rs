//! What a run found, and the formats it is written in.
//!
//! [`result`] holds the data; every other file turns that data into one format and computes nothing of its own.
//!
//! | file | what it makes |
//! |---|---|
//! | [`text`] | the report in a terminal |
//! | [`csv`], [`json`] | data, described in `docs/formats.md` |
//! | [`stack`] | text, CSV and JSON of a stack of layers |
//! | [`model`] | text, CSV and JSON of a whole model |
//! | [`comparison`] | text, CSV and JSON of two results beside each other |
//! | [`delta_log`], [`delta_log_page`] | decoding with a log of updates: tables, pictures, page |
//! | [`plot`] | the roofline picture and the stage bars |
//! | [`trace`] | schedules for Perfetto |
//! | [`timeline`], [`explain`] | one program, and one row of the table taken apart |
//! | [`html`] | the one-file page |
//! | [`whatif`] | rows of a sweep, their folder, the table of sensitivities |
//! | [`folder`] | the report folder, written whole or not at all |

pub mod comparison;
pub mod csv;
pub mod delta_log;
pub mod delta_log_page;
pub mod dump;
pub mod explain;
#[cfg(test)]
pub(crate) mod fixture;
pub mod folder;
mod format;
pub mod html;
pub mod json;
pub mod kernels;
pub mod kernels_page;
pub mod model;
pub mod plot;
pub mod text;
pub mod timeline;
pub mod trace;

pub mod probe;
pub mod result;
pub mod stack;
pub mod state_formats;
pub mod table;
pub mod validation;
pub mod whatif;
pub mod whitening;
