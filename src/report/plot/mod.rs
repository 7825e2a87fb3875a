//! Pictures: the roofline, the stage bars, the timeline.
//!
//! Every call of the drawing library stands in this folder. A picture is drawn by one function in logical
//! units, at twice the size, as SVG and as bitmap alike; the SVG is then shown at half its size, so both have
//! the same fine grid.

mod axis;
pub mod bars;
mod canvas;
pub mod errors;
pub mod kernels;
mod marks;
mod place;
pub mod probe;
pub mod roofline;
pub mod scatter;
pub mod state_formats;
pub mod sweep;
mod theme;
pub(crate) mod timeline;
pub mod traffic;
pub mod whitening;

pub use canvas::PlotError;
pub use theme::Theme;
pub(crate) use theme::{bound_css, dark_mode_css};
