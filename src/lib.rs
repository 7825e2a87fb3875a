//! x
pub mod config;
pub mod dtype;
pub mod hardware;
pub mod units;
