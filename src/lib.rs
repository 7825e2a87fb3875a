//! tpusim: how long the stages of a linear-attention layer take on a TPU or GPU, and which unit binds them.

pub mod dtype;
pub mod graph;
pub mod numerics;
