//! What a run found, and the formats it is written in.
//!
//! [`result`] holds the data; every other file turns that data into one format and computes nothing of its own.
//!
//! | file | what it makes |
//! |---|---|
//! | [`text`] | the report in a terminal |
//! | [`csv`], [`json`] | data, described in `docs/formats.md` |
//! | [`plot`] | the roofline picture and the stage bars |
//! | [`html`] | the one-file page |
//! | [`folder`] | the report folder, written whole or not at all |

pub mod csv;
#[cfg(test)]
mod fixture;
pub mod folder;
mod format;
pub mod html;
pub mod json;
pub mod plot;
pub mod text;

pub mod result;
pub mod table;
pub mod whitening;
