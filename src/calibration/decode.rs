//! How wrong the times of decode steps are: the rows of one token per sequence, operation by operation.

use std::collections::BTreeMap;

use serde::Serialize;

use super::data::Observation;
use super::validate::{Split, quantile};
use crate::kernels::library::Params;

/// Errors of a split, in percent of the measured time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Errors {
    /// Rows.
    pub n: usize,
    /// Median absolute error.
    pub median_abs_pct: f64,
    /// Absolute error that a tenth of the rows exceed.
    pub p90_abs_pct: f64,
    /// Median signed error: positive where predictions are too slow.
    pub bias_pct: f64,
}

/// Errors of an operation on a device; `all` stands for every operation and device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DecodeScore {
    /// Operation.
    pub op: String,
    /// Device.
    pub device: String,
    /// Smallest and largest number of sequences.
    pub sequences: (u64, u64),
    /// Errors by split; a split that leaves out none of the rows has none.
    pub errors: BTreeMap<Split, Errors>,
}

/// Sequences of a row that decodes one token of each; none of another row.
#[must_use]
pub fn sequences(op: &str, params: &str) -> Option<u64> {
    let mut params = Params::parse(params).ok()?;
    let mut count = |name: &str| params.take(name)?.parse::<u64>().ok();
    if op.ends_with("_decode") {
        return count("B");
    }
    // The fused kernel of TPUs takes prefill and decoding alike: a step has as many tokens as sequences.
    let (tokens, sequences) = (count("tokens")?, count("seqs")?);
    (op == "gdn_fused" && tokens == sequences).then_some(sequences)
}

/// Errors of the decode steps among some observations, from the logarithms of predicted over measured time of [`super::validate::validate`]; all of them last.
#[must_use]
pub fn scores(
    observations: &[Observation],
    residuals: &BTreeMap<Split, Vec<Option<f64>>>,
) -> Vec<DecodeScore> {
    let mut groups: BTreeMap<(&str, &str), Vec<(usize, u64)>> = BTreeMap::new();
    for (i, observation) in observations.iter().enumerate() {
        let row = &observation.row;
        if let Some(count) = sequences(&row.op, &row.params) {
            groups.entry((&row.op, &row.device)).or_default().push((i, count));
        }
    }
    let every: Vec<(usize, u64)> = groups.values().flatten().copied().collect();
    groups
        .into_iter()
        .chain([(("all", "all"), every)])
        .filter_map(|((op, device), members)| {
            let counts = || members.iter().map(|(_, count)| *count);
            let of = |(&split, all): (&Split, &Vec<Option<f64>>)| {
                let own: Vec<f64> = members
                    .iter()
                    .filter_map(|&(i, _)| all.get(i).copied().flatten())
                    .collect();
                errors(&own).map(|errors| (split, errors))
            };
            Some(DecodeScore {
                op: op.to_owned(),
                device: device.to_owned(),
                sequences: (counts().min()?, counts().max()?),
                errors: residuals.iter().filter_map(of).collect(),
            })
        })
        .collect()
}

fn errors(residuals: &[f64]) -> Option<Errors> {
    let percent = |r: f64| 100.0 * (r.exp() - 1.0);
    let absolute: Vec<f64> = residuals.iter().map(|&r| percent(r).abs()).collect();
    (!residuals.is_empty()).then(|| Errors {
        n: residuals.len(),
        median_abs_pct: quantile(&absolute, 0.5),
        p90_abs_pct: quantile(&absolute, 0.9),
        bias_pct: percent(quantile(residuals, 0.5)),
    })
}

#[cfg(test)]
mod tests {
    use approx::assert_relative_eq;

    use super::*;
    use crate::calibration::data;
    use crate::study::predict::ChipFiles;

    #[test]
    fn decode_steps_are_told_from_prefill() {
        assert_eq!(sequences("kda_decode", "B=64;T=1;H=32;K=128;V=128"), Some(64));
        assert_eq!(sequences("gdn_fused", "tokens=64;seqs=64;Hk=2;Hv=8"), Some(64));
        assert_eq!(sequences("gdn_fused", "tokens=2048;seqs=32;Hk=2;Hv=8"), None);
        assert_eq!(sequences("gdn_chunk", "B=1;T=8192;H=32"), None);
    }

    #[test]
    fn every_measured_decode_step_is_scored() -> Result<(), Box<dyn std::error::Error>> {
        let data = data::screen(&data::shipped()?, &ChipFiles::default());
        // One error for all rows: +25 %, so median, tail and bias are that.
        let residuals = BTreeMap::from([(Split::ByShape, vec![Some(1.25_f64.ln()); data.used.len()])]);
        let scores = scores(&data.used, &residuals);
        let of = |op: &str| scores.iter().find(|score| score.op == op);
        for (op, rows, least) in [("gdn_decode", 7, 1), ("kda_decode", 7, 1), ("rwkv6_decode", 5, 4)] {
            let score = of(op).ok_or(op)?;
            assert_eq!((score.device.as_str(), score.sequences.0), ("h200-sxm", least));
            assert_eq!(score.errors[&Split::ByShape].n, rows, "{op}");
        }
        let all = of("all").ok_or("all")?;
        let errors = all.errors[&Split::ByShape];
        assert_relative_eq!(errors.median_abs_pct, 25.0, max_relative = 1e-9);
        assert_relative_eq!(errors.p90_abs_pct, 25.0, max_relative = 1e-9);
        assert_relative_eq!(errors.bias_pct, 25.0, max_relative = 1e-9);
        let parts: usize = scores
            .iter()
            .filter(|score| score.op != "all")
            .map(|score| score.errors[&Split::ByShape].n)
            .sum();
        assert_eq!(errors.n, parts);
        assert!(
            of("gdn_fused").is_some_and(|score| score.device == "tpu-v7x" && score.sequences == (8, 512))
        );
        Ok(())
    }
}
