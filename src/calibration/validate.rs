//! How wrong predictions are, in sample and out of it.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;
use serde::Serialize;
use statrs::statistics::{Data as StatisticsOf, OrderStatistics, RankTieBreaker, Statistics};

use super::data::{Data, Observation};
use super::fit::{self, Fit, Touches};
use super::parameters::Setting;
use crate::hardware::{Architecture, Residuals, UNSEEN};
use crate::study::calls;
use crate::study::predict::{self, ChipFiles};

/// Folds of the split by shape.
const FOLDS: usize = 5;
/// Fewest residuals of a group that an interval of its own is taken from.
const FEWEST_RESIDUALS: usize = 10;
/// Most pairs of rows compared for ratios and winners, per group.
const MOST_PAIRS: usize = 4000;
/// Ratio of measured times below which there is no winner to be picked.
const SAME_TIME: f64 = 1.02;

/// Which rows a fit did not see when it predicted them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// None: the fit saw everything.
    InSample,
    /// A fifth of the shapes, on all devices.
    ByShape,
    /// A device.
    LeaveDeviceOut,
    /// A family of kernels.
    LeaveFamilyOut,
    /// A mechanism of linear attention; other operations have none.
    LeaveMechanismOut,
    /// Nothing was fitted; no model either, a roofline of the same launches.
    Roofline,
}

impl Split {
    /// The word of tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Split::InSample => "in_sample",
            Split::ByShape => "by_shape",
            Split::LeaveDeviceOut => "leave_device_out",
            Split::LeaveFamilyOut => "leave_family_out",
            Split::LeaveMechanismOut => "leave_mechanism_out",
            Split::Roofline => "roofline",
        }
    }
}

/// Errors of a family on a device; `all` stands for every family or device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Score {
    /// Family.
    pub family: String,
    /// Device.
    pub device: String,
    /// Split.
    pub split: Split,
    /// Rows.
    pub n: usize,
    /// Median absolute error, in percent.
    pub median_abs_pct: f64,
    /// Absolute error that a tenth of the rows exceed, in percent.
    pub p90_abs_pct: f64,
    /// Median signed error, in percent: positive where predictions are too slow.
    pub bias_pct: f64,
    /// Rank correlation of predicted and measured times; none for fewer than three rows.
    pub spearman: Option<f64>,
    /// Median error of the ratio of two rows on one device, in percent.
    pub ratio_median_pct: Option<f64>,
    /// Share of pairs whose faster row was picked, in percent.
    pub winner_pct: Option<f64>,
    /// Share of rows inside an 80 % interval made without them, in percent.
    pub coverage80_pct: Option<f64>,
}

/// Residuals (logarithm of predicted over measured) of every observation, by split.
#[derive(Debug, Clone)]
pub struct Validation {
    /// By split, one residual per observation; none where the split leaves it out.
    pub residuals: BTreeMap<Split, Vec<Option<f64>>>,
    /// The fit that saw everything.
    pub fit: Fit,
    /// Values of the fits without a device, by device; empty where no device was left out.
    pub without_device: BTreeMap<String, Setting>,
}

/// What fits say of the rows that they did not see.
pub(super) struct LeftOut {
    /// Logarithms of predicted over measured times; none for rows that were never left out.
    pub(super) residuals: Vec<Option<f64>>,
    /// Values of the fit without a group, by the label of the group.
    pub(super) settings: BTreeMap<String, Setting>,
}

/// The fold of a shape: the same on every machine and for every order of the rows.
pub(super) fn fold_of(shape: &str) -> usize {
    crate::config::digest(shape.as_bytes())
        .bytes()
        .fold(0_usize, |sum, byte| (sum * 31 + byte as usize) % 1_000_003)
        % FOLDS
}

/// Groups that are left out one at a time: those with the same label; those without one are never left out.
pub(super) fn leave_out(
    observations: &[Observation],
    touches: &Touches,
    whole: &Fit,
    label: impl Fn(&Observation) -> Option<String>,
) -> LeftOut {
    let labels: Vec<Option<String>> = observations.iter().map(label).collect();
    let groups: BTreeSet<&String> = labels.iter().flatten().collect();
    let mut out = LeftOut {
        residuals: vec![None; observations.len()],
        settings: BTreeMap::new(),
    };
    if groups.len() < 2 {
        return out;
    }
    for group in groups {
        let keep: Vec<bool> = labels.iter().map(|l| l.as_ref() != Some(group)).collect();
        let fit = fit::fit(observations, touches, &keep, Some(whole));
        let left: Vec<usize> = (0..observations.len()).filter(|&i| !keep[i]).collect();
        let subset: Vec<Observation> = left.iter().map(|&i| observations[i].clone()).collect();
        for (&i, residual) in left.iter().zip(fit::residuals(&subset, &fit.setting)) {
            out.residuals[i] = Some(residual);
        }
        out.settings.insert(group.clone(), fit.setting);
    }
    out
}

/// Fits with everything, and once without each device, family and fold of shapes.
#[must_use]
pub fn validate(data: &Data, splits: &[Split]) -> Validation {
    let observations = &data.used;
    let touches = fit::touches(observations);
    let whole = fit::fit(observations, &touches, &vec![true; observations.len()], None);
    let without =
        |label: &dyn Fn(&Observation) -> Option<String>| leave_out(observations, &touches, &whole, label);
    let mut residuals: BTreeMap<Split, Vec<Option<f64>>> = BTreeMap::new();
    let mut without_device = BTreeMap::new();
    for &split in splits {
        let of_split = match split {
            Split::InSample => fit::residuals(observations, &whole.setting)
                .into_iter()
                .map(Some)
                .collect(),
            Split::ByShape => without(&|o| Some(fold_of(&o.shape).to_string())).residuals,
            Split::LeaveDeviceOut => {
                let left_out = without(&|o| Some(o.row.device.clone()));
                without_device = left_out.settings;
                // The host of a device that is left out is not known either, so its rows by the wall clock are no question to ask.
                left_out
                    .residuals
                    .into_iter()
                    .zip(observations)
                    .map(|(residual, o)| residual.filter(|_| o.row.timing != "wall"))
                    .collect()
            }
            Split::LeaveFamilyOut => without(&|o| Some(o.family.clone())).residuals,
            Split::LeaveMechanismOut => {
                without(&|o| calls::mechanism_of(&o.row.op).map(|mechanism| mechanism.name.to_owned()))
                    .residuals
            }
            Split::Roofline => roofline(observations),
        };
        residuals.insert(split, of_split);
    }
    Validation {
        residuals,
        fit: whole,
        without_device,
    }
}

/// Quantile of some numbers, nearly unbiased for any distribution (the eighth of the definitions of Hyndman and Fan); not a number where there are none.
#[must_use]
pub fn quantile(values: &[f64], share: f64) -> f64 {
    StatisticsOf::new(values.to_vec()).quantile(share)
}

/// Median absolute error in percent of some residuals; not a number where there are none.
#[must_use]
pub fn median_abs_percent(residuals: &[f64]) -> f64 {
    let errors: Vec<f64> = residuals
        .iter()
        .map(|r| (100.0 * (r.exp() - 1.0)).abs())
        .collect();
    quantile(&errors, 0.5)
}

/// Rank correlation; equal values share their mean rank.
fn spearman(a: &[f64], b: &[f64]) -> Option<f64> {
    if a.len() < 3 {
        return None;
    }
    let ranks = |values: &[f64]| StatisticsOf::new(values.to_vec()).ranks(RankTieBreaker::Average);
    let (a, b) = (ranks(a), ranks(b));
    let size = a.as_slice().std_dev() * b.as_slice().std_dev();
    (size > 0.0).then(|| a.as_slice().covariance(b.as_slice()) / size)
}

/// A predicted row: its group for intervals, its measured time and its residual.
struct Scored<'a> {
    observation: &'a Observation,
    residual: f64,
}

/// About `most` pairs of `n` rows, spread evenly over all of them; all where there are fewer.
fn pairs(n: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let stride = (n * n.saturating_sub(1) / 2 / most.max(1)).max(1);
    (0..n)
        .flat_map(|i| (0..i).map(move |j| (i, j)))
        .enumerate()
        .filter(move |(pair, _)| (pair + 1).is_multiple_of(stride))
        .map(|(_, pair)| pair)
}

/// Factor, above 1, that the predicted ratio of two times is off by at most in 80 % of the pairs of rows of one group: one family on one device. Groups with
/// many rows count no more than others that have enough of them. None where no group has two rows.
fn speedup_error(groups: &BTreeMap<(&str, &str), Vec<f64>>) -> Option<f64> {
    let errors: Vec<f64> = groups
        .values()
        .flat_map(|of| pairs(of.len(), MOST_PAIRS / groups.len()).map(|(i, j)| (of[i] - of[j]).abs()))
        .collect();
    (!errors.is_empty()).then(|| quantile(&errors, 0.8).exp())
}

fn score(family: &str, device: &str, split: Split, rows: &[Scored<'_>], coverage: Option<f64>) -> Score {
    let percent = |r: f64| 100.0 * (r.exp() - 1.0);
    let errors: Vec<f64> = rows.iter().map(|row| percent(row.residual).abs()).collect();
    let signed: Vec<f64> = rows.iter().map(|row| row.residual).collect();
    let measured: Vec<f64> = rows.iter().map(|row| row.observation.measured_us).collect();
    let predicted: Vec<f64> = rows
        .iter()
        .map(|row| row.observation.measured_us * row.residual.exp())
        .collect();
    let mut ratios = Vec::new();
    let (mut right, mut decided) = (0.0, 0.0);
    for (i, j) in pairs(rows.len(), MOST_PAIRS) {
        if rows[i].observation.row.device != rows[j].observation.row.device {
            continue;
        }
        ratios.push(percent(rows[i].residual - rows[j].residual).abs());
        let ratio = measured[i] / measured[j];
        if ratio.max(ratio.recip()) > SAME_TIME {
            decided += 1.0;
            if (ratio > 1.0) == (predicted[i] > predicted[j]) {
                right += 1.0;
            }
        }
    }
    Score {
        family: family.to_owned(),
        device: device.to_owned(),
        split,
        n: rows.len(),
        median_abs_pct: quantile(&errors, 0.5),
        p90_abs_pct: quantile(&errors, 0.9),
        bias_pct: percent(quantile(&signed, 0.5)),
        spearman: spearman(&measured, &predicted),
        ratio_median_pct: (!ratios.is_empty()).then(|| quantile(&ratios, 0.5)),
        winner_pct: (decided > 0.0).then(|| 100.0 * right / decided),
        coverage80_pct: coverage,
    }
}

/// Fewest rows of a family on a device whose median says something about the device.
const FEWEST_OF_A_DEVICE: usize = 3;
/// Standard deviations of a normal distribution beyond which a tenth lies.
const TENTH: f64 = 1.2816;

/// What to expect on a device that gave no row, from devices that were left out in turn.
///
/// A device as a whole is off by its median; how much, is taken from all families of the architecture, since a family has few devices. Rows scatter around
/// that median as those of the family do (or of all families, where it has few). Both are independent, so their tenths add in squares.
fn unseen(
    observations: &[Observation],
    residuals: &[Option<f64>],
    tpu: bool,
    family: Option<&str>,
    pick: impl Fn(&Observation) -> bool,
) -> Option<(f64, f64)> {
    let mut groups: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
    for (o, residual) in observations.iter().zip(residuals) {
        if let Some(residual) = residual.filter(|_| o.tpu() == tpu && pick(o)) {
            groups
                .entry((&o.family, &o.row.device))
                .or_default()
                .push(residual);
        }
    }
    groups.retain(|_, of| of.len() >= FEWEST_OF_A_DEVICE);
    let medians: Vec<f64> = groups.values().map(|of| quantile(of, 0.5)).collect();
    if medians.is_empty() {
        return None;
    }
    let between = (medians.iter().map(|m| m * m).sum::<f64>() / medians.len() as f64).sqrt();
    let scatter = |family: Option<&str>| -> Vec<f64> {
        groups
            .iter()
            .zip(&medians)
            .filter(|(((of, _), _), _)| family.is_none_or(|family| family == *of))
            .flat_map(|((_, of), median)| of.iter().map(move |r| r - median))
            .collect()
    };
    let within = Some(scatter(family))
        .filter(|own| own.len() >= FEWEST_RESIDUALS)
        .unwrap_or_else(|| scatter(None));
    let end = |share: f64| quantile(&within, share).hypot(TENTH * between);
    Some((-end(0.1), end(0.9)))
}

/// Whether each row lies in an 80 % interval made from the others. With its device left out, from other devices; else from its family on its device, where
/// there are enough rows.
fn covered(observations: &[Observation], residuals: &[Option<f64>], split: Split) -> Vec<Option<bool>> {
    let mut groups: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
    for (o, residual) in observations.iter().zip(residuals) {
        let of = groups.entry((&o.family, &o.row.device)).or_default();
        of.extend(residual);
    }
    let elsewhere: BTreeMap<(&str, &str), Option<(f64, f64)>> = groups
        .keys()
        .map(|&(family, device)| {
            let tpu = observations
                .iter()
                .any(|o| o.family == family && o.row.device == device && o.tpu());
            let interval = unseen(observations, residuals, tpu, Some(family), |o| {
                o.row.device != device
            });
            ((family, device), interval)
        })
        .collect();
    observations
        .iter()
        .zip(residuals)
        .map(|(o, residual)| {
            let residual = (*residual)?;
            let key = (o.family.as_str(), o.row.device.as_str());
            let own = groups.get(&key)?;
            let (low, high) = if split != Split::LeaveDeviceOut && own.len() > FEWEST_RESIDUALS {
                // The row itself does not help.
                let mut own = own.clone();
                if let Some(at) = own.iter().position(|r| r.total_cmp(&residual).is_eq()) {
                    own.remove(at);
                }
                (quantile(&own, 0.1), quantile(&own, 0.9))
            } else {
                (*elsewhere.get(&key)?)?
            };
            Some(low <= residual && residual <= high)
        })
        .collect()
}

/// Scores of every family and device, of every family on all devices, and of everything of an architecture.
#[must_use]
pub fn scores(observations: &[Observation], residuals: &BTreeMap<Split, Vec<Option<f64>>>) -> Vec<Score> {
    let mut out = Vec::new();
    for (&split, of_split) in residuals {
        let covered = covered(observations, of_split, split);
        let mut groups: BTreeMap<(String, String), Vec<usize>> = BTreeMap::new();
        for (i, o) in observations.iter().enumerate() {
            if of_split[i].is_none() {
                continue;
            }
            let all = o.chip.architecture.all_families();
            for (family, device) in [
                (o.family.as_str(), o.row.device.as_str()),
                (o.family.as_str(), "all"),
                (all, "all"),
            ] {
                groups
                    .entry((family.to_owned(), device.to_owned()))
                    .or_default()
                    .push(i);
            }
        }
        for ((family, device), members) in groups {
            let rows: Vec<Scored<'_>> = members
                .iter()
                .filter_map(|&i| {
                    of_split[i].map(|residual| Scored {
                        observation: &observations[i],
                        residual,
                    })
                })
                .collect();
            let known: Vec<bool> = members.iter().filter_map(|&i| covered[i]).collect();
            let coverage = (split != Split::Roofline && !known.is_empty())
                .then(|| 100.0 * known.iter().filter(|inside| **inside).count() as f64 / known.len() as f64);
            out.push(score(&family, &device, split, &rows, coverage));
        }
    }
    out.sort_by(|a, b| (&a.family, &a.device, a.split).cmp(&(&b.family, &b.device, b.split)));
    out
}

/// Ratios of measured to predicted time that intervals are made of: by family and device from the split by shape, and for devices without rows from the split
/// without each device.
#[must_use]
pub fn interval_residuals(
    observations: &[Observation],
    residuals: &BTreeMap<Split, Vec<Option<f64>>>,
) -> Vec<Residuals> {
    interval_residuals_of(observations, residuals, |_| true)
}

/// As [`interval_residuals`], from the observations that `pick` picks.
pub fn interval_residuals_of(
    observations: &[Observation],
    residuals: &BTreeMap<Split, Vec<Option<f64>>>,
    pick: impl Fn(&Observation) -> bool,
) -> Vec<Residuals> {
    let of_split = |split: Split, pick: &dyn Fn(&Observation) -> bool| -> Vec<(f64, f64)> {
        let all = residuals.get(&split).map_or(&[][..], Vec::as_slice);
        observations
            .iter()
            .zip(all)
            .filter(|(o, _)| pick(o))
            .filter_map(|(o, residual)| residual.map(|r| (r, o.measured_us)))
            .collect()
    };
    let made =
        |family: &str, device: &str, rows: &[(f64, f64)], ends: (f64, f64), speedup_error: Option<f64>| {
            let rounded = |value: f64| format!("{value:.4}").parse().unwrap_or(value);
            let times = rows.iter().map(|(_, us)| *us);
            Residuals {
                family: family.to_owned(),
                device: device.to_owned(),
                rows: rows.len(),
                // Residuals are predicted over measured, the interval is that of measured over predicted.
                low: rounded((-ends.1).exp()),
                high: rounded((-ends.0).exp()),
                shortest_us: times.clone().fold(f64::INFINITY, f64::min),
                longest_us: times.fold(0.0, f64::max),
                speedup_error_ratio: speedup_error.map(rounded),
            }
        };
    let of_pairs = |split: Split, pick: &dyn Fn(&Observation) -> bool| -> Option<f64> {
        let mut groups: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
        for (o, residual) in observations.iter().zip(residuals.get(&split)?) {
            if let Some(residual) = residual.filter(|_| pick(o)) {
                groups
                    .entry((&o.family, &o.row.device))
                    .or_default()
                    .push(residual);
            }
        }
        speedup_error(&groups)
    };
    let picked = || observations.iter().filter(|o| pick(o));
    let devices: BTreeSet<(&str, &str)> = picked()
        .map(|o| (o.family.as_str(), o.row.device.as_str()))
        .collect();
    let families: BTreeSet<(&str, bool)> = picked().map(|o| (o.family.as_str(), o.tpu())).collect();
    let mut out = Vec::new();
    for (family, device) in devices {
        let own = |o: &Observation| pick(o) && o.family == family && o.row.device == device;
        let rows = of_split(Split::ByShape, &own);
        if rows.len() >= FEWEST_RESIDUALS {
            let values: Vec<f64> = rows.iter().map(|(r, _)| *r).collect();
            out.push(made(
                family,
                device,
                &rows,
                (quantile(&values, 0.1), quantile(&values, 0.9)),
                of_pairs(Split::ByShape, &own),
            ));
        }
    }
    let left_out = residuals.get(&Split::LeaveDeviceOut);
    let of_family = families.into_iter().map(|(family, tpu)| (Some(family), tpu));
    let of_all = [(None, true), (None, false)];
    for (family, tpu) in of_family.chain(of_all) {
        let of_group =
            |o: &Observation| pick(o) && o.tpu() == tpu && family.is_none_or(|family| family == o.family);
        let rows = of_split(Split::LeaveDeviceOut, &of_group);
        let ends = left_out.and_then(|left_out| unseen(observations, left_out, tpu, family, &pick));
        if let (Some(ends), true) = (ends, rows.len() >= FEWEST_RESIDUALS) {
            let architecture = if tpu { Architecture::Tpu } else { Architecture::Gpu };
            out.push(made(
                family.unwrap_or(architecture.all_families()),
                UNSEEN,
                &rows,
                ends,
                of_pairs(Split::LeaveDeviceOut, &of_group),
            ));
        }
    }
    out.sort_by(|a, b| (&a.family, &a.device).cmp(&(&b.family, &b.device)));
    out
}

/// Residuals with the calibration in use, without fitting.
#[must_use]
pub fn unfitted(observations: &[Observation], files: &ChipFiles) -> Vec<Option<f64>> {
    let chips = predict::chips(observations.iter().map(|o| &o.row), files);
    observations
        .par_iter()
        .map(|o| {
            let chip = chips.get(&(o.row.device.clone(), o.row.cores))?.as_ref().ok()?;
            let prediction = predict::case(&o.row, chip).ok()?;
            Some((prediction.predicted_us / o.measured_us).ln())
        })
        .collect()
}

/// Residuals of a roofline of the same launches.
#[must_use]
pub fn roofline(observations: &[Observation]) -> Vec<Option<f64>> {
    observations
        .iter()
        .map(|o| Some((o.roofline_us / o.measured_us).ln()))
        .collect()
}

#[cfg(test)]
mod tests {
    use approx::assert_relative_eq;

    use super::*;

    fn error(groups: &[(&'static str, Vec<f64>)]) -> Option<f64> {
        let groups = groups
            .iter()
            .map(|(device, of)| (("family", *device), of.clone()));
        speedup_error(&groups.collect())
    }

    #[test]
    fn what_is_off_for_a_whole_device_cancels_in_ratios() {
        // All rows too slow by the same factor, on each device by another one.
        assert_eq!(
            error(&[("one", vec![0.3; 20]), ("two", vec![-0.2; 20])]),
            Some(1.0)
        );
        assert_eq!(error(&[("one", vec![0.3])]), None);
        assert_eq!(error(&[]), None);
    }

    #[test]
    fn independent_errors_add_in_squares() -> Result<(), Box<dyn std::error::Error>> {
        use statrs::distribution::{ContinuousCDF, Normal};
        // The quantiles of a normal distribution, few enough for all pairs.
        let (n, sigma) = (60, 0.1);
        let normal = Normal::new(0.0, sigma)?;
        let of = |shift: f64| -> Vec<f64> {
            (0..n)
                .map(|i| shift + normal.inverse_cdf((f64::from(i) + 0.5) / f64::from(n)))
                .collect()
        };
        // The difference of two has the square root of two times their deviation; 80 % lie within 1.2816 of those.
        let expected = 1.2816 * sigma * std::f64::consts::SQRT_2;
        let found = error(&[("one", of(0.0)), ("two", of(0.5))]).ok_or("no pairs")?;
        assert_relative_eq!(found.ln(), expected, max_relative = 2e-3);
        Ok(())
    }

    #[test]
    fn pairs_are_all_of_them_or_spread_over_all() {
        assert_eq!(pairs(4, 100).count(), 6);
        let some: Vec<(usize, usize)> = pairs(1000, 100).collect();
        assert!((100..=101).contains(&some.len()), "{}", some.len());
        assert!(some.iter().all(|(i, j)| j < i && *i < 1000));
        assert!(some.first().is_some_and(|(i, _)| *i < 200) && some.last().is_some_and(|(i, _)| *i > 900));
    }
}
