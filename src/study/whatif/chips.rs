//! The chips of a sweep: every combination of the varied fields of the hardware, on every chip.
//!
//! A field that is one number of a [`Chip`] is patched in place. Other fields change what a file means, so their combinations are resolved from the file, once.

use std::sync::Arc;

use rayon::prelude::*;

use super::axis::Axis;
use super::space::digits;
use crate::config::{ConfigError, Document};
use crate::hardware::{self, Architecture, Chip, Field};

/// Most combinations of fields that are not single numbers.
const MOST_RESOLVED: u64 = 10_000;

/// Why a point cannot be timed, in one line.
pub(super) type Reason = Arc<str>;

/// What is wrong, without the places: a sweep names the field itself.
pub(super) fn reason(error: &ConfigError) -> Reason {
    let messages: Vec<String> = error
        .problems()
        .iter()
        .map(|problem| problem.message.replace(char::is_control, " "))
        .collect();
    messages.join("; ").into()
}

/// A varied field that is one number of the chip.
#[derive(Debug)]
struct Patch {
    /// Which of the axes of the hardware.
    axis: usize,
    field: Field,
    /// The number of every value, or why the chip cannot have it.
    numbers: Vec<Result<f64, Reason>>,
}

/// A chip with the fields that the sweep varies.
#[derive(Debug)]
pub(super) struct SweptChip {
    pub(super) name: String,
    /// The chip as its file has it.
    pub(super) base: Chip,
    patches: Vec<Patch>,
    /// Axes that are resolved from the file.
    resolved_axes: Vec<usize>,
    /// The chip in every combination of those, the last axis fastest.
    resolved: Vec<Result<Chip, Reason>>,
    /// Places of the axes of the hardware that the schedule of a program depends on, with their number of values.
    core_axes: Vec<(usize, u64)>,
    values: Vec<u64>,
}

impl SweptChip {
    /// Looks at every value of every axis on the chip that `name_or_path` and `document` describe.
    fn new(name_or_path: &str, document: &Document, axes: &[Axis]) -> Result<Self, ConfigError> {
        let base = hardware::from_document(name_or_path, document)?;
        let varied = |path: &str| axes.iter().any(|axis| axis.hardware_path() == Some(path));
        let (mut patches, mut resolved_axes) = (Vec::new(), Vec::new());
        for (index, axis) in axes.iter().enumerate() {
            let path = axis.hardware_path().unwrap_or_default();
            let alone = match Field::named(path, &base) {
                // These have a limit, or a meaning, that another field gives them.
                Some(Field::CoresPerDevice) => !varied("cores.per_chip"),
                Some(Field::Clock) => !varied("clock.default"),
                _ => true,
            };
            match Field::named(path, &base).filter(|_| alone) {
                Some(field) => {
                    let numbers = axis
                        .changes()
                        .par_iter()
                        .map(|changes| {
                            let changed = document.with(changes)?;
                            Ok(field.get(&hardware::from_document(name_or_path, &changed)?))
                        })
                        .map(|number: Result<f64, ConfigError>| number.map_err(|error| reason(&error)))
                        .collect();
                    patches.push(Patch {
                        axis: index,
                        field,
                        numbers,
                    });
                }
                None => resolved_axes.push(index),
            }
        }
        let of_axes: Vec<Axis> = resolved_axes.iter().map(|&i| axes[i].clone()).collect();
        let combinations: u64 = of_axes
            .iter()
            .fold(1, |n, axis| n.saturating_mul(axis.values().len() as u64));
        if combinations > MOST_RESOLVED {
            let fields: Vec<&str> = of_axes.iter().map(Axis::field).collect();
            return Err(ConfigError::argument(format!(
                "{combinations} combinations of {}; expected at most {MOST_RESOLVED} of these fields",
                crate::config::listed(fields)
            )));
        }
        // A fitted value gives way to a field that is set, so one value of every patched field is set from the start.
        let mut patched = document.clone();
        for patch in &patches {
            if let Some(valid) = patch.numbers.iter().position(Result::is_ok) {
                patched = patched.with(&axes[patch.axis].changes()[valid])?;
            }
        }
        let resolved = (0..combinations)
            .into_par_iter()
            .map(|combination| {
                let mut changed = patched.clone();
                for (axis, i) in of_axes.iter().zip(digits(&of_axes, combination)) {
                    changed = changed.with(&axis.changes()[i])?;
                }
                hardware::from_document(name_or_path, &changed)
            })
            .map(|chip| chip.map_err(|error| reason(&error)))
            .collect();
        let values: Vec<u64> = axes.iter().map(|axis| axis.values().len() as u64).collect();
        let core = |axis: &usize| {
            let patch = patches.iter().find(|patch| patch.axis == *axis);
            patch.is_none_or(|patch| patch.field.of_core())
        };
        Ok(SweptChip {
            name: base.name.clone(),
            core_axes: (0..axes.len())
                .filter(core)
                .map(|axis| (axis, values[axis]))
                .collect(),
            base,
            patches,
            resolved_axes,
            resolved,
            values,
        })
    }

    /// Whether the chip has an architecture in any combination.
    pub(super) fn has(&self, architecture: Architecture) -> bool {
        let resolved = self.resolved.iter().flatten();
        self.base.architecture == architecture
            || resolved.into_iter().any(|chip| chip.architecture == architecture)
    }

    /// Whether the chip was resolved with a value of an axis.
    fn has_value(&self, axis: usize, value: usize) -> bool {
        let patch = self.patches.iter().find(|patch| patch.axis == axis);
        patch.is_some_and(|patch| patch.numbers[value].is_ok())
    }

    /// A view of the chip that goes from point to point.
    pub(super) fn cursor(&self) -> Cursor<'_> {
        Cursor {
            of: self,
            digits: vec![0; self.values.len()],
            chip: None,
        }
    }
}

/// The chip at one combination after another.
pub(super) struct Cursor<'a> {
    of: &'a SweptChip,
    digits: Vec<usize>,
    /// The resolved combination at hand, patched for the last point.
    chip: Option<(usize, Chip)>,
}

impl Cursor<'_> {
    /// The chip at combination `index` of the fields of the hardware, and a number that chips with equal cores share.
    pub(super) fn at(&mut self, index: u64) -> Result<(&Chip, u64), Reason> {
        let SweptChip {
            patches,
            resolved_axes,
            resolved,
            core_axes,
            values,
            ..
        } = self.of;
        let mut rest = index;
        for (digit, count) in self.digits.iter_mut().zip(values).rev() {
            *digit = (rest % count) as usize;
            rest /= count;
        }
        let digits = &self.digits;
        let combination = resolved_axes
            .iter()
            .fold(0, |at, &axis| at * values[axis] as usize + digits[axis]);
        if self.chip.as_ref().is_none_or(|(at, _)| *at != combination) {
            let chip = resolved[combination].as_ref().map_err(Arc::clone)?;
            self.chip = Some((combination, chip.clone()));
        }
        let Some((_, chip)) = &mut self.chip else {
            return Err("no chip".into());
        };
        for patch in patches {
            let number = patch.numbers[digits[patch.axis]].as_ref().map_err(Arc::clone)?;
            patch.field.set(chip, *number);
        }
        let core = core_axes
            .iter()
            .fold(0, |at, &(axis, count)| at * count + digits[axis] as u64);
        Ok((chip, core))
    }
}

/// The chips of a sweep by name or path, with the files they were read from and the axes of the hardware.
///
/// # Errors
/// Where a value is none of its field on any chip: an unknown field, a missing unit. A value that only does not fit is a reason of its points.
pub(super) fn swept(chips: &[(String, Document)], axes: &[Axis]) -> Result<Vec<SweptChip>, ConfigError> {
    let found: Vec<Result<SweptChip, ConfigError>> = chips
        .iter()
        .map(|(name_or_path, document)| SweptChip::new(name_or_path, document, axes))
        .collect();
    for (index, axis) in axes.iter().enumerate() {
        // A value that some chip has is one of its field.
        let had = |value: usize| found.iter().flatten().any(|chip| chip.has_value(index, value));
        let refused = axis
            .changes()
            .par_iter()
            .enumerate()
            .find_map_first(|(value, changes)| {
                if had(value) {
                    return None;
                }
                let mut first = None;
                for (_, document) in chips {
                    let changed = document.with(changes);
                    match changed.and_then(|changed| hardware::check_schema(&changed)) {
                        Ok(()) => return None,
                        Err(error) => first = first.or(Some(error)),
                    }
                }
                first
            });
        if let Some(error) = refused {
            return Err(error);
        }
    }
    found.into_iter().collect()
}
