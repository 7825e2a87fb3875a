//! Shapes and tensor types.

use serde::{Serialize, Serializer};
use smallvec::SmallVec;

use crate::dtype::Dtype;

/// Dimensions that are stored in place: those of the core, and one more.
const IN_PLACE: usize = 7;

/// Extents of a tensor, major dimension first. The last two are the tile a vector register or a matrix array sees.
#[derive(Debug, PartialEq, Eq)]
pub struct Shape(SmallVec<[usize; IN_PLACE]>);

impl Clone for Shape {
    fn clone(&self) -> Self {
        Shape::new(&self.0)
    }
}

impl Serialize for Shape {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.dims().serialize(serializer)
    }
}

impl Shape {
    /// A shape from its extents.
    #[must_use]
    pub fn new(dims: impl AsRef<[usize]>) -> Self {
        Shape(SmallVec::from_slice(dims.as_ref()))
    }

    /// Extents, major first.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    /// Number of dimensions.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.0.iter().map(|&d| d as u64).product()
    }

    /// Extent of the `i`-th dimension from the end (`0` is the minor dimension); 1 where the rank is smaller.
    #[must_use]
    pub fn from_end(&self, i: usize) -> usize {
        if i < self.0.len() {
            self.0[self.0.len() - 1 - i]
        } else {
            1
        }
    }

    /// Product of all extents but the last two.
    #[must_use]
    pub fn batch(&self) -> u64 {
        let n = self.0.len().saturating_sub(2);
        self.0[..n].iter().map(|&d| d as u64).product()
    }

    /// The shape both operands take under broadcasting of extents of 1 and of missing major dimensions, or `None`.
    #[must_use]
    pub fn broadcast(&self, other: &Shape) -> Option<Shape> {
        let rank = self.rank().max(other.rank());
        let mut dims = SmallVec::from_elem(1, rank);
        for (i, dim) in dims.iter_mut().rev().enumerate() {
            let (a, b) = (self.from_end(i), other.from_end(i));
            *dim = match (a, b) {
                (a, b) if a == b => a,
                (1, b) => b,
                (a, 1) => a,
                _ => return None,
            };
        }
        Some(Shape(dims))
    }

    /// The same shape with dimension `axis` set to `extent`.
    #[must_use]
    pub fn with(&self, axis: usize, extent: usize) -> Shape {
        let mut shape = self.clone();
        shape.0[axis] = extent;
        shape
    }

    /// The same shape without dimension `axis`.
    #[must_use]
    pub fn without(&self, axis: usize) -> Shape {
        let mut shape = self.clone();
        shape.0.remove(axis);
        shape
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dims: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        write!(f, "[{}]", dims.join(","))
    }
}

/// Shape and number format of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TensorType {
    /// Extents.
    pub shape: Shape,
    /// Number format of an element.
    pub dtype: Dtype,
}

impl TensorType {
    /// Storage without padding, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shape.elements() * self.dtype.bytes()
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}
