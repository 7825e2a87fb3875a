//! The points of a sweep: every combination of the values of its axes.

use std::ops::Range;

use super::axis::Axis;
use crate::config::ConfigError;

/// Most points of a sweep.
const MOST_POINTS: u64 = 1_000_000_000_000;

/// A contiguous part of a sweep: part `index` of `of`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// Which part, from 0.
    pub index: u64,
    /// Parts of the sweep.
    pub of: u64,
}

impl Shard {
    /// The whole sweep.
    pub const WHOLE: Shard = Shard { index: 0, of: 1 };
}

impl std::str::FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/');
        let parsed = parts.and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
        match parsed {
            Some((index, of)) if index < of => Ok(Shard { index, of }),
            Some((_, of)) if of > 0 => Err(format!("expected a part from 0 to {}", of - 1)),
            _ => Err("expected a part and the number of parts, such as `0/8` to `7/8`".to_owned()),
        }
    }
}

/// Every combination of the values of some fields, numbered.
///
/// Fields of the workload vary slowest, then those of the hardware, each in the order given; the last one varies fastest.
#[derive(Debug, Clone)]
pub struct Space {
    axes: Vec<Axis>,
    /// Of the axes, those of the workload, which come first.
    of_workload: usize,
    workload_points: u64,
    hardware_points: u64,
}

impl Space {
    /// Sorts the axes; without any there is one point.
    ///
    /// # Errors
    /// Where a field stands twice, or where there are too many points.
    pub fn new(axes: Vec<Axis>) -> Result<Self, ConfigError> {
        for (i, axis) in axes.iter().enumerate() {
            if axes[..i].iter().any(|earlier| earlier.field() == axis.field()) {
                return Err(ConfigError::argument(format!(
                    "--vary {}: the field stands twice; list its values in one `--vary`",
                    axis.field()
                )));
            }
        }
        let (workload, hardware): (Vec<Axis>, Vec<Axis>) =
            axes.into_iter().partition(|axis| axis.hardware_path().is_none());
        let points = |axes: &[Axis]| {
            axes.iter()
                .try_fold(1_u64, |points, axis| {
                    points.checked_mul(axis.values().len() as u64)
                })
                .filter(|&points| points <= MOST_POINTS)
        };
        let counts = (points(&workload), points(&hardware));
        let (Some(workload_points), Some(hardware_points)) = counts else {
            return Err(too_many());
        };
        if workload_points.saturating_mul(hardware_points) > MOST_POINTS {
            return Err(too_many());
        }
        Ok(Space {
            of_workload: workload.len(),
            axes: workload.into_iter().chain(hardware).collect(),
            workload_points,
            hardware_points,
        })
    }

    /// The axes, slowest first.
    #[must_use]
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// The axes of the workload.
    #[must_use]
    pub fn workload_axes(&self) -> &[Axis] {
        &self.axes[..self.of_workload]
    }

    /// The axes of the hardware.
    #[must_use]
    pub fn hardware_axes(&self) -> &[Axis] {
        &self.axes[self.of_workload..]
    }

    /// Points.
    #[must_use]
    pub fn points(&self) -> u64 {
        self.workload_points * self.hardware_points
    }

    /// Combinations of the fields of the workload. Point `p` belongs to combination `p / hardware_points`.
    #[must_use]
    pub fn workload_points(&self) -> u64 {
        self.workload_points
    }

    /// Combinations of the fields of the hardware.
    #[must_use]
    pub fn hardware_points(&self) -> u64 {
        self.hardware_points
    }

    /// The points of a shard.
    #[must_use]
    pub fn shard(&self, shard: Shard) -> Range<u64> {
        let bound = |index: u64| {
            let product = u128::from(self.points()) * u128::from(index) / u128::from(shard.of.max(1));
            // No more than the points.
            u64::try_from(product).unwrap_or(u64::MAX)
        };
        bound(shard.index)..bound(shard.index + 1)
    }

    /// Which value of every axis a point has.
    #[must_use]
    pub fn digits(&self, point: u64) -> Vec<usize> {
        digits(&self.axes, point)
    }

    /// The point as it would be written with `--set`.
    #[must_use]
    pub fn assignments(&self, point: u64) -> Vec<String> {
        let digits = self.digits(point);
        let named = self.axes.iter().zip(digits);
        let written = named.flat_map(|(axis, i)| {
            let changes = axis.changes()[i].iter();
            let head = if axis.hardware_path().is_some() { "hw." } else { "" };
            changes.map(move |change| format!("{head}{}", change.text()))
        });
        written.collect()
    }
}

/// The rows of a sweep: every point on every chip in every plan.
#[derive(Debug, Clone)]
pub struct Grid {
    /// Name of the workload.
    pub name: String,
    /// What the layer is where nothing is varied.
    pub layer: String,
    /// The points.
    pub space: Space,
    /// Names of the chips.
    pub chips: Vec<String>,
    /// Names of the plans.
    pub plans: Vec<String>,
}

impl Grid {
    /// Rows of every point.
    #[must_use]
    pub fn rows_per_point(&self) -> u64 {
        (self.chips.len() * self.plans.len()) as u64
    }
}

fn too_many() -> ConfigError {
    ConfigError::argument(format!(
        "more than {MOST_POINTS} points; vary fewer fields or fewer values"
    ))
}

/// Which value of every one of `axes` combination `index` has, the last axis fastest.
pub(super) fn digits(axes: &[Axis], index: u64) -> Vec<usize> {
    let mut rest = index;
    let mut digits = vec![0; axes.len()];
    for (digit, axis) in digits.iter_mut().zip(axes).rev() {
        let count = axis.values().len() as u64;
        *digit = (rest % count) as usize;
        rest /= count;
    }
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(axes: &[&str]) -> Result<Space, ConfigError> {
        Space::new(
            axes.iter()
                .map(|text| Axis::parse(text))
                .collect::<Result<_, _>>()?,
        )
    }

    #[test]
    fn workload_fields_vary_slowest_and_the_last_fastest() -> Result<(), ConfigError> {
        let space = space(&["hw.matrix_unit.rows=128,256", "chunk=32,64,128"])?;
        let written: Vec<String> = (0..space.points())
            .map(|p| space.assignments(p).join(" "))
            .collect();
        assert_eq!(
            written,
            [
                "layer.chunk=32 hw.matrix_unit.rows=128",
                "layer.chunk=32 hw.matrix_unit.rows=256",
                "layer.chunk=64 hw.matrix_unit.rows=128",
                "layer.chunk=64 hw.matrix_unit.rows=256",
                "layer.chunk=128 hw.matrix_unit.rows=128",
                "layer.chunk=128 hw.matrix_unit.rows=256",
            ]
        );
        Ok(())
    }

    #[test]
    fn shards_cover_every_point_once() -> Result<(), ConfigError> {
        let space = space(&["chunk=1..7:+1", "hw.matrix_unit.rows=1..3:+1"])?;
        for of in 1..=25 {
            let mut next = 0;
            for index in 0..of {
                let range = space.shard(Shard { index, of });
                assert_eq!(range.start, next);
                next = range.end;
            }
            assert_eq!(next, 21);
        }
        Ok(())
    }

    #[test]
    fn bad_shards_and_spaces_are_refused() {
        for text in ["3/3", "0/0", "1", "a/b", "-1/3"] {
            assert!(text.parse::<Shard>().is_err(), "{text}");
        }
        assert_eq!("2/3".parse(), Ok(Shard { index: 2, of: 3 }));
        assert!(space(&["chunk=32", "layer.chunk=64"]).is_err());
        let many = ["batch", "tokens", "chunk", "value_heads", "key_heads"]
            .map(|field| format!("{field}=1..300:+1"));
        assert!(space(&many.each_ref().map(String::as_str)).is_err());
    }
}
