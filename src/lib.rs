//! tpusim: how long the stages of a linear-attention layer take on a TPU or GPU, and which unit binds them.

pub mod calibration;
pub mod cli;
pub mod coefficients;
pub mod config;
pub mod dtype;
pub mod dump;
pub mod graph;
pub mod hardware;
pub mod hlo;
pub mod kernels;
pub mod layer;
pub mod measurements;
pub mod mechanisms;
pub mod model;
pub mod numerics;
pub mod report;
pub mod schema;
pub mod study;
pub mod timing;
pub mod tree;
pub mod units;
pub mod workload;
