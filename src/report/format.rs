//! How numbers are put into words, so that every format of a report says them alike.

use super::result::{ChipResult, NumericResult, PlanResult, StageResult};

/// Unit of the times of one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimeUnit {
    /// Microseconds, with so many decimals.
    Micro(usize),
    /// Milliseconds, with three decimals.
    Milli,
}

impl TimeUnit {
    /// Unit in which the largest of `times_us` keeps four to six digits, so that columns stay narrow and rows
    /// comparable.
    pub(crate) fn for_times(times_us: impl IntoIterator<Item = f64>) -> Self {
        let largest = times_us
            .into_iter()
            .filter(|time| time.is_finite())
            .fold(0.0, f64::max);
        match largest {
            us if us >= 10_000.0 => TimeUnit::Milli,
            us if us >= 1_000.0 => TimeUnit::Micro(0),
            us if us >= 100.0 => TimeUnit::Micro(1),
            us if us >= 10.0 => TimeUnit::Micro(2),
            _ => TimeUnit::Micro(3),
        }
    }

    /// Unit for all plans of a chip.
    pub(crate) fn for_chip(chip: &ChipResult) -> Self {
        Self::for_times(chip.plans.iter().map(|plan| plan.total_us))
    }

    /// Name in plain ASCII, for terminals and data.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            TimeUnit::Micro(_) => "us",
            TimeUnit::Milli => "ms",
        }
    }

    /// Name as a person writes it, for pages and pictures.
    pub(crate) const fn symbol(self) -> &'static str {
        match self {
            TimeUnit::Micro(_) => "µs",
            TimeUnit::Milli => "ms",
        }
    }

    /// A time in this unit, without it.
    pub(crate) fn format(self, us: f64) -> String {
        match self {
            TimeUnit::Micro(decimals) => format!("{us:.decimals$}"),
            TimeUnit::Milli => format!("{:.3}", us / 1000.0),
        }
    }

    /// An interval in this unit, without it; empty where there is none.
    pub(crate) fn interval(self, low_us: Option<f64>, high_us: Option<f64>) -> String {
        match (low_us, high_us) {
            (Some(low), Some(high)) => format!("{} to {}", self.format(low), self.format(high)),
            _ => String::new(),
        }
    }
}

/// A share as whole percents; a share that is small and not zero does not become one.
pub(crate) fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    if percent > 0.0 && percent < 0.5 {
        "<1".to_owned()
    } else {
        format!("{percent:.0}")
    }
}

/// A signed error in percent, with one decimal.
pub(crate) fn signed(percent: f64) -> String {
    format!("{percent:+.1}")
}

/// A relative error with two digits: floating kernels may differ in the last bits between machines.
pub(crate) fn relative_error(error: f64) -> String {
    if error == 0.0 {
        "0".to_owned()
    } else if !error.is_finite() {
        "not finite".to_owned()
    } else {
        format!("{error:.1e}")
    }
}

/// A number with three significant digits, without an exponent where it is of everyday size.
pub(crate) fn three_digits(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if !(1e-3..1e6).contains(&size) {
        format!("{value:.2e}")
    } else {
        let decimals = (2 - size.log10().floor() as i32).max(0) as usize;
        let text = format!("{value:.decimals$}");
        // Trailing zeros after the point carry nothing here.
        if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text
        }
    }
}

/// Bytes in thousands, without the unit.
pub(crate) fn kilobytes(bytes: f64) -> String {
    three_digits(bytes / 1e3)
}

/// A clock with its unit and state.
pub(crate) fn clock(chip: &ChipResult) -> String {
    // Clocks are told apart by their last digits, so none is rounded away.
    let clock = format!("{} GHz", chip.clock_ghz);
    if chip.clock_state.is_empty() {
        clock
    } else {
        format!("{clock} ({})", chip.clock_state)
    }
}

/// `1 core`, `2 cores`.
pub(crate) fn cores(chip: &ChipResult) -> String {
    format!(
        "{} {}",
        chip.cores,
        if chip.cores == 1 { "core" } else { "cores" }
    )
}

/// A stage in a few lines, for a person who points at it.
pub(crate) fn stage_words(chip: &ChipResult, plan: &PlanResult, row: &StageResult) -> String {
    let unit = TimeUnit::for_chip(chip);
    let interval = match unit.interval(row.low_us, row.high_us) {
        interval if interval.is_empty() => String::new(),
        interval => format!(" (80 % interval {interval})"),
    };
    format!(
        "{} {} on {}: {}\n{} {}{interval}, {} % of the plan\nbound by {}, next by {}\nbusy: MXU {} %, VPU {} %, HBM {} %",
        plan.name,
        row.stage,
        chip.name,
        row.title,
        unit.format(row.time_us),
        unit.symbol(),
        percent(row.time_us / plan.total_us),
        row.bound,
        row.next_bound,
        percent(row.mxu_busy),
        percent(row.vpu_busy),
        percent(row.hbm_busy),
    )
}

/// A speedup and what it is over.
pub(crate) fn speedup(factor: f64, baseline: Option<&str>, plan: &str) -> String {
    format!("{factor:.2}x over {} {plan}", baseline.unwrap_or("baseline"))
}

/// What was executed by the numeric check.
pub(crate) fn numeric_scope(numeric: &NumericResult) -> String {
    format!(
        "{} tokens, {} key head{}, seed {}{}",
        numeric.tokens,
        numeric.heads,
        if numeric.heads == 1 { "" } else { "s" },
        numeric.seed,
        if numeric.sampled {
            "; a sample of the layer"
        } else {
            "; the whole layer"
        },
    )
}

/// The exponent of the Gram operands beside its limit.
pub(crate) fn overflow_margin(numeric: &NumericResult) -> Option<String> {
    match (numeric.overflow_exponent, numeric.overflow_limit) {
        (Some(exponent), Some(limit)) => Some(format!(
            "largest exponent {} nats of {} (ln of the largest finite f32)",
            three_digits(exponent),
            three_digits(limit)
        )),
        _ => None,
    }
}

/// What the columns of a stage table mean: term and definition.
pub(crate) const DEFINITIONS: [(&str, &str); 6] = [
    (
        "bound",
        "the resource whose removal would shorten the stage first.",
    ),
    (
        "busy",
        "share of the time in which a unit is occupied, padding included: the matrix units (MXU), the busiest \
         class of vector slots (VPU), the HBM interface at the achievable bandwidth.",
    ),
    (
        "lane",
        "useful part of the matrix tiles that are occupied: FLOPs done over FLOPs the occupied \
         arrays could have done.",
    ),
    (
        "achieved/peak",
        "matrix FLOP/s reached over the datasheet peak of the operand format.",
    ),
    (
        "interval",
        "80 % interval of the prediction, from errors on measured kernels that no fit had seen.",
    ),
    (
        "speedup",
        "time of the same plan of the baseline over the time of this plan.",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_share_is_not_shown_as_none() {
        assert_eq!(percent(0.004), "<1");
        assert_eq!(percent(0.0), "0");
        assert_eq!(percent(0.996), "100");
    }

    #[test]
    fn the_unit_follows_the_largest_time() {
        assert_eq!(TimeUnit::for_times([3.0, 12_000.0]).format(3719.0), "3.719");
        assert_eq!(TimeUnit::for_times([1525.0, f64::NAN]).format(167.6), "168");
        assert_eq!(TimeUnit::for_times([]).name(), "us");
    }

    #[test]
    fn three_digits_are_kept_and_zeros_dropped() {
        assert_eq!(three_digits(1153.0), "1153");
        assert_eq!(three_digits(1.90), "1.9");
        assert_eq!(three_digits(0.561_8), "0.562");
        assert_eq!(three_digits(4.0e12), "4.00e12");
    }
}
