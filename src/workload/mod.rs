//! Workloads: which layer runs, how it is fused, on which chips, and what it is compared with.

mod layer;

pub use layer::{
    DecayGate, GramVariant, InitialState, InverseVariant, Layer, MechanismName, OutputGate, PivotRow,
    ReadConvention, StateFormat,
};
