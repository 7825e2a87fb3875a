//! Storage of freed tensors, kept for the results that follow: a fresh page costs several times what computing on it does.
//!
//! Nothing new is allocated before as much of what is kept was freed, so tensors and kept storage together never take more than the tensors
//! alone at their worst moment.

use std::collections::BTreeMap;

use ndarray::{ArrayD, IxDyn};

use super::real::{Real, Tensor};

/// Elements below which the system allocator is as good.
const SMALL: usize = 1 << 12;

/// Freed storage by capacity.
#[derive(Debug)]
pub(super) struct Pool<R> {
    free: BTreeMap<usize, Vec<Vec<R>>>,
}

impl<R: Real> Pool<R> {
    pub(super) fn new() -> Self {
        Pool {
            free: BTreeMap::new(),
        }
    }

    /// A tensor whose elements are whatever was there before; every one is to be written.
    pub(super) fn scratch(&mut self, dims: &[usize]) -> ArrayD<R> {
        let length = dims.iter().product();
        let storage = self.take(length).unwrap_or_else(|| {
            self.free(length);
            vec![R::zero(); length]
        });
        ArrayD::from_shape_vec(IxDyn(dims), storage).expect("as long as the shape says")
    }

    /// Kept storage that `length` elements fill to eight ninths at least.
    fn take(&mut self, length: usize) -> Option<Vec<R>> {
        if length < SMALL {
            return None;
        }
        let (&capacity, _) = self.free.range(length..=length + length / 8).next()?;
        let mut storage = self.pop(capacity)?;
        storage.resize(length, R::zero());
        Some(storage)
    }

    /// Frees kept storage of `length` elements or more, or all there is: the smallest that is enough, else the largest ones.
    fn free(&mut self, length: usize) {
        let mut left = if length < SMALL { 0 } else { length };
        while left > 0 {
            let enough = self.free.range(left..).next();
            let Some((&capacity, _)) = enough.or_else(|| self.free.last_key_value()) else {
                return;
            };
            drop(self.pop(capacity));
            left = left.saturating_sub(capacity);
        }
    }

    fn pop(&mut self, capacity: usize) -> Option<Vec<R>> {
        let same = self.free.get_mut(&capacity)?;
        let storage = same.pop();
        if same.is_empty() {
            self.free.remove(&capacity);
        }
        storage
    }

    /// Takes back the storage of a tensor, if nobody else reads it.
    pub(super) fn give(&mut self, tensor: Tensor<R>) {
        if let Ok(array) = tensor.try_into_owned_nocopy() {
            let (storage, _) = array.into_raw_vec_and_offset();
            let capacity = storage.capacity();
            if capacity >= SMALL {
                self.free.entry(capacity).or_default().push(storage);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(pool: &Pool<f32>) -> Vec<usize> {
        let all = pool.free.iter();
        all.flat_map(|(&capacity, same)| vec![capacity; same.len()])
            .collect()
    }

    fn give(pool: &mut Pool<f32>, lengths: &[usize]) {
        for &length in lengths {
            pool.give(ArrayD::from_elem(IxDyn(&[length]), 1.0).into_shared());
        }
    }

    #[test]
    fn storage_of_about_the_length_is_used_again() {
        let mut pool = Pool::new();
        give(&mut pool, &[9000, 20_000]);
        let again = pool.scratch(&[2, 4000]);
        assert_eq!((again.shape(), kept(&pool)), (&[2, 4000][..], vec![20_000]));
        pool.give(again.into_shared());
        assert_eq!(kept(&pool), [9000, 20_000]);
    }

    /// Kept and used elements together stay below what was used at the worst moment.
    #[test]
    fn new_storage_takes_the_place_of_kept_storage() {
        let mut pool = Pool::new();
        give(&mut pool, &[5000, 6000, 30_000]);
        let first = pool.scratch(&[8000]);
        assert_eq!((first.len(), kept(&pool)), (8000, vec![5000, 6000]));
        pool.scratch(&[10_500]);
        assert!(kept(&pool).is_empty());
    }

    #[test]
    fn shared_and_small_tensors_are_not_kept() {
        let mut pool = Pool::new();
        let tensor = ArrayD::from_elem(IxDyn(&[5000]), 1.0_f32).into_shared();
        let reader = tensor.clone();
        pool.give(tensor);
        give(&mut pool, &[100]);
        assert!(kept(&pool).is_empty());
        pool.give(reader);
        assert_eq!(kept(&pool), [5000]);
    }
}
