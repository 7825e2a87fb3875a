//! Results of a sweep: rows as CSV, JSON lines and Parquet, a table for people, the folder they are kept in, and the table of sensitivities.
//!
//! [`folder`] keeps rows that are complete, so that an interrupted sweep goes on where it stopped and shards come together as one.

pub mod folder;
pub mod numeric;
#[cfg(feature = "parquet")]
pub mod parquet;
pub mod picture;
pub mod rows;
pub mod sensitivity;
pub mod summary;
