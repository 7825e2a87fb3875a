//! x
pub mod config;
pub mod dtype;
pub mod units;
