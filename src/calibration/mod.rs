//! Calibration: a few coefficients with units, fitted to measured times, and how wrong the result is on what was not fitted.
//!
//! [`data`] takes the measured rows that a fit can trust and says why it leaves out the others. [`parameters`] names what is free. [`solver`] is the robust,
//! bounded least squares behind it. [`fit`] puts them together, [`own_chip`] fits one chip alone, and
//! [`validate`] repeats a fit without a device, a family or a fold of shapes. [`schedules`] fits the constants of compiled schedules. [`decode`] looks at decode steps alone, [`blocks`] compares the winners of autotuning with the choice
//! of the model, [`delta_log`] measured decode steps with a log of updates with their predictions.

pub mod blocks;
pub mod data;
pub mod decode;
pub mod delta_log;
pub mod fit;
pub mod kernels;
pub mod never_fitted;
pub mod own_chip;
pub mod parameters;
pub mod schedules;
pub mod solver;
pub mod speedup;
pub mod validate;
