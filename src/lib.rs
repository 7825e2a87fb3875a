//! x
pub mod config;
pub mod dtype;
pub mod hardware;
pub mod units;
/// Command-line functions.
pub mod cli {
    pub mod hw;
}
/// Output.
pub mod report {
    pub mod table;
}
