//! Storage of freed tensors, kept for the results that follow: a fresh page costs several times what computing on it does.

use std::collections::BTreeMap;

use ndarray::{ArrayD, IxDyn};

use super::real::{Real, Tensor};

/// Elements below which the system allocator is as good.
const SMALL: usize = 1 << 12;

/// Elements that are kept at most.
pub(super) const KEPT: usize = 1 << 27;

/// Freed storage by capacity.
#[derive(Debug)]
pub(super) struct Pool<R> {
    free: BTreeMap<usize, Vec<Vec<R>>>,
    elements: usize,
}

impl<R: Real> Pool<R> {
    pub(super) fn new() -> Self {
        Pool {
            free: BTreeMap::new(),
            elements: 0,
        }
    }

    /// A tensor whose elements are whatever was there before; every one is to be written.
    pub(super) fn scratch(&mut self, dims: &[usize]) -> ArrayD<R> {
        let length = dims.iter().product();
        let storage = if length < SMALL { None } else { self.take(length) };
        let storage = storage.unwrap_or_else(|| vec![R::zero(); length]);
        ArrayD::from_shape_vec(IxDyn(dims), storage).expect("as long as the shape says")
    }

    fn take(&mut self, length: usize) -> Option<Vec<R>> {
        let (&capacity, same) = self.free.range_mut(length..=2 * length).next()?;
        let storage = same.pop();
        if same.is_empty() {
            self.free.remove(&capacity);
        }
        let mut storage = storage?;
        self.elements -= capacity;
        storage.resize(length, R::zero());
        Some(storage)
    }

    /// Takes back the storage of a tensor, if nobody else reads it.
    pub(super) fn give(&mut self, tensor: Tensor<R>) {
        if let Ok(array) = tensor.try_into_owned_nocopy() {
            let (storage, _) = array.into_raw_vec_and_offset();
            let capacity = storage.capacity();
            if capacity >= SMALL && self.elements + capacity <= KEPT {
                self.elements += capacity;
                self.free.entry(capacity).or_default().push(storage);
            }
        }
    }
}
