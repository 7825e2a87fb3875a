//! What a run found, and the formats it is written in.
//!
//! [`result`] holds the data; every other file turns that data into one format and computes nothing of its own.

pub mod result;
pub mod table;
