//! Fitted values: the file that `tpusim fit` writes, and how a chip takes them over.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::ScheduleConstants;
use super::chip::{Architecture, Chip, Kind, Provenance};
use crate::coefficients::Coefficient;
use crate::units::Seconds;

/// Word of the files' `schema` field.
pub const SCHEMA: &str = "tpusim.calibration/1";

/// A quantity of a chip that a fit sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChipQuantity {
    /// Time of a launch, in microseconds.
    LaunchUs,
    /// Sustained share of the published clock of the state that runs by default: chips throttle under load.
    SustainedClock,
    /// Achievable share of the published device memory bandwidth.
    HbmAchievable,
    /// Host time around a call that was timed by the wall clock, in microseconds.
    DispatchUs,
}

impl ChipQuantity {
    /// All of them.
    pub const ALL: [ChipQuantity; 4] = [
        ChipQuantity::LaunchUs,
        ChipQuantity::SustainedClock,
        ChipQuantity::HbmAchievable,
        ChipQuantity::DispatchUs,
    ];

    /// Name in files and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ChipQuantity::LaunchUs => "launch_us",
            ChipQuantity::SustainedClock => "sustained_clock",
            ChipQuantity::HbmAchievable => "hbm_achievable",
            ChipQuantity::DispatchUs => "dispatch_us",
        }
    }

    /// Unit in tables.
    #[must_use]
    pub const fn unit(self) -> &'static str {
        match self {
            ChipQuantity::LaunchUs | ChipQuantity::DispatchUs => "us",
            ChipQuantity::SustainedClock => "share of the published clock",
            ChipQuantity::HbmAchievable => "share of the published bandwidth",
        }
    }

    /// Range in which it means something. A launch of a GPU that follows another takes 1 to 4 us, replayed or queued; what lies beyond is work of a
    /// wrapper that is not described.
    #[must_use]
    pub const fn range(self, architecture: Architecture) -> (f64, f64) {
        match self {
            ChipQuantity::LaunchUs if matches!(architecture, Architecture::Gpu) => (0.5, 4.0),
            ChipQuantity::LaunchUs => (0.1, 20.0),
            ChipQuantity::SustainedClock => (0.7, 1.0),
            ChipQuantity::HbmAchievable => (0.4, 1.0),
            ChipQuantity::DispatchUs => (0.0, 500.0),
        }
    }

    /// The value a chip has before a fit.
    #[must_use]
    pub fn of(self, chip: &Chip) -> f64 {
        match self {
            ChipQuantity::LaunchUs => chip.launch.micros(),
            ChipQuantity::SustainedClock => chip.sustained_clock,
            ChipQuantity::HbmAchievable => chip.hbm.achievable,
            ChipQuantity::DispatchUs => chip.dispatch.micros(),
        }
    }

    /// Sets it on a chip.
    pub fn set(self, chip: &mut Chip, value: f64) {
        match self {
            ChipQuantity::LaunchUs => chip.launch = Seconds(value * 1e-6),
            ChipQuantity::SustainedClock => chip.sustained_clock = value,
            ChipQuantity::HbmAchievable => chip.hbm.achievable = value,
            ChipQuantity::DispatchUs => chip.dispatch = Seconds(value * 1e-6),
        }
    }

    /// The field of a hardware file that holds it, if one does.
    const fn field(self) -> Option<&'static str> {
        match self {
            ChipQuantity::LaunchUs => Some("launch"),
            ChipQuantity::SustainedClock => Some("clock"),
            ChipQuantity::HbmAchievable => Some("hbm.achievable"),
            ChipQuantity::DispatchUs => None,
        }
    }
}

/// A fitted value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fitted {
    /// Value, in `unit`.
    pub value: f64,
    /// Unit.
    pub unit: String,
    /// Standard error, in `unit`; none where the rows say nothing about it.
    pub standard_error: Option<f64>,
    /// Smallest value allowed.
    pub low: f64,
    /// Largest value allowed.
    pub high: f64,
    /// Value before the fit.
    pub prior: f64,
    /// Rows whose time depends on it.
    pub rows: usize,
    /// `zero`, `at bound`, `collinear with ..`; empty where nothing is to be said.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub warning: String,
}

/// Out-of-fold residuals of a family on a device: the ratio of measured to predicted time, between the ends of an 80 % interval.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residuals {
    /// Family of kernels; `all TPU` and `all GPU` for every family of an architecture.
    pub family: String,
    /// Device; [`UNSEEN`] for a device that gave no row, from leaving each device out in turn.
    pub device: String,
    /// Rows.
    pub rows: usize,
    /// Ratio below which a tenth of the rows lie; for a device without rows, of the rows of a device that could be any of those measured.
    pub low: f64,
    /// Ratio above which a tenth of the rows lie.
    pub high: f64,
    /// Shortest measured time, in microseconds.
    pub shortest_us: f64,
    /// Longest measured time, in microseconds.
    pub longest_us: f64,
    /// Factor, above 1, that the predicted ratio of two times is off by at most in 80 % of the pairs of rows of one family on one device, out of fold as
    /// the rows themselves. What is off for the whole device or family is off on both sides and cancels. Calibrations of earlier versions lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speedup_error_ratio: Option<f64>,
}

impl Residuals {
    /// [`Residuals::speedup_error_ratio`]; where a calibration lacks it, that of two independent errors with the interval of one, whose logarithms add in
    /// squares. For a device without rows that leaves in what is off for the device as a whole.
    fn speedup_error(&self) -> f64 {
        self.speedup_error_ratio
            .unwrap_or_else(|| (self.high / self.low).sqrt().powf(std::f64::consts::SQRT_2))
    }

    /// Whether a time is about as long as those measured.
    fn reaches(&self, us: f64) -> bool {
        (self.shortest_us / OTHER_SIZE..=self.longest_us * OTHER_SIZE).contains(&us)
    }
}

/// What a fit found out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// [`SCHEMA`].
    pub schema: String,
    /// Version of the product that made it.
    pub version: String,
    /// Digest of the rows it was fitted to.
    pub data_digest: String,
    /// Rows used.
    pub rows: usize,
    /// Coefficients by name.
    pub coefficients: BTreeMap<String, Fitted>,
    /// Quantities of chips, by chip and name.
    pub chips: BTreeMap<String, BTreeMap<ChipQuantity, Fitted>>,
    /// Out-of-fold residuals, for intervals.
    pub residuals: Vec<Residuals>,
    /// What compiled schedules do not say, fitted by `tpusim fit --dumps`. Calibrations of earlier versions lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedules: Option<ScheduleConstants>,
    /// Chips whose own hardware file was calibrated, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub own_chips: BTreeMap<String, OwnChip>,
}

/// What the values of a chip with a hardware file of its own were fitted to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnChip {
    /// Digest of the hardware file: fitted values hold for its text.
    pub hardware_digest: String,
    /// Digest of the rows.
    pub data_digest: String,
    /// Rows used.
    pub rows: usize,
}

/// Why a calibration cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CalibrationError {
    /// Not a calibration file.
    #[error("{name}: {problem}")]
    File {
        /// File.
        name: String,
        /// Problem.
        problem: String,
    },
}

const SHIPPED: &str = include_str!("../../hw/calibration.json");

static IN_USE: OnceLock<Calibration> = OnceLock::new();

/// The calibration in use: the shipped one, unless another was taken before anything asked for it.
#[must_use]
pub fn shipped() -> &'static Calibration {
    IN_USE.get_or_init(|| {
        Calibration::parse("hw/calibration.json", SHIPPED).unwrap_or_else(|_| Calibration::empty())
    })
}

/// Takes another calibration for this process. Whether it was in time: once a chip was loaded, the calibration is fixed.
#[must_use]
pub fn take(calibration: Calibration) -> bool {
    IN_USE.set(calibration).is_ok()
}

/// Mean of a quantity, by chip, over the shipped chips of an architecture, whose names tell it; none where there is no such chip.
pub fn mean_of_architecture<'a>(
    architecture: Architecture,
    chips: impl Iterator<Item = (&'a str, f64)>,
) -> Option<f64> {
    let tpu = architecture == Architecture::Tpu;
    let shipped = super::load::shipped();
    let values: Vec<f64> = chips
        .filter(|(name, _)| shipped.contains(name) && name.starts_with("tpu") == tpu)
        .map(|(_, value)| value)
        .collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

impl Calibration {
    /// One that changes nothing.
    #[must_use]
    pub fn empty() -> Self {
        Calibration {
            schema: SCHEMA.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            data_digest: "none".to_owned(),
            rows: 0,
            coefficients: BTreeMap::new(),
            chips: BTreeMap::new(),
            residuals: Vec::new(),
            schedules: None,
            own_chips: BTreeMap::new(),
        }
    }

    /// Whether the values for a chip hold for a hardware file: those of a shipped chip for the shipped file, those of a file of one's own for the text they
    /// were fitted with.
    ///
    /// # Errors
    /// What to do where the text of the file has changed since.
    pub fn holds_for(
        &self,
        name: &str,
        path: bool,
        hardware_digest: impl FnOnce() -> String,
    ) -> Result<bool, String> {
        match self.own_chips.get(name) {
            None => Ok(!path),
            Some(own) if own.hardware_digest == hardware_digest() => Ok(true),
            Some(_) => Err(format!(
                "the calibration in use was fitted to another text of `{name}`; calibrate it again with `tpusim fit --chip`, or change fields with `--set`"
            )),
        }
    }

    /// Reads one; `name` stands for the file in messages.
    ///
    /// # Errors
    /// Text that is no calibration, or one with a name this version does not know.
    pub fn parse(name: &str, text: &str) -> Result<Self, CalibrationError> {
        let problem = |problem: String| CalibrationError::File {
            name: name.to_owned(),
            problem,
        };
        let calibration: Calibration =
            serde_json::from_str(text).map_err(|error| problem(error.to_string()))?;
        if calibration.schema != SCHEMA {
            return Err(problem(format!(
                "expected schema `{SCHEMA}`, found `{}`",
                calibration.schema
            )));
        }
        match calibration
            .coefficients
            .keys()
            .find(|name| Coefficient::named(name).is_none())
        {
            Some(unknown) => Err(problem(format!("unknown coefficient `{unknown}`"))),
            None => Ok(calibration),
        }
    }

    /// Digest for the provenance of results: `none` where nothing was fitted.
    #[must_use]
    pub fn digest(&self) -> String {
        if self.coefficients.is_empty() && self.chips.is_empty() {
            return "none".to_owned();
        }
        // No result that names this digest rests on the constants of schedules.
        let text = serde_json::to_string(&Calibration {
            schedules: None,
            ..self.clone()
        })
        .unwrap_or_default();
        crate::config::digest(text.as_bytes())
    }

    /// Gives a chip the fitted values: coefficients in any case, quantities of its own where they hold for its file ([`Calibration::holds_for`]) and
    /// `keep` does not name their field.
    pub fn apply(&self, chip: &mut Chip, holds: bool, keep: impl Fn(&str) -> bool) {
        for (name, fitted) in &self.coefficients {
            if let Some(coefficient) = Coefficient::named(name) {
                chip.coefficients.set(coefficient, fitted.value);
            }
        }
        if !holds {
            return;
        }
        for quantity in ChipQuantity::ALL {
            if quantity.field().is_some_and(&keep) {
                continue;
            }
            let own = self
                .chips
                .get(&chip.name)
                .and_then(|quantities| quantities.get(&quantity));
            let (value, source) = match own {
                Some(fitted) => (
                    fitted.value,
                    format!("calibration, {} measured rows", fitted.rows),
                ),
                None => match self.assumed(chip, quantity) {
                    Some(value) => (value, "mean of the fitted chips of its architecture".to_owned()),
                    None => continue,
                },
            };
            quantity.set(chip, value);
            let provenance = Provenance {
                kind: if own.is_some() {
                    Kind::Fitted
                } else {
                    Kind::Assumed
                },
                source,
                note: String::new(),
                except: BTreeMap::new(),
            };
            match quantity {
                ChipQuantity::LaunchUs => chip.launch_provenance = provenance,
                ChipQuantity::HbmAchievable => chip.hbm.achievable_provenance = provenance,
                ChipQuantity::SustainedClock | ChipQuantity::DispatchUs => {}
            }
        }
    }

    /// What to assume for a chip that gave no row: the mean of the fitted chips of its architecture, where its file only assumes a value as well.
    #[must_use]
    pub fn assumed(&self, chip: &Chip, quantity: ChipQuantity) -> Option<f64> {
        // Bandwidth, clock and host are a chip's own.
        if quantity != ChipQuantity::LaunchUs || chip.launch_provenance.kind != Kind::Assumed {
            return None;
        }
        mean_of_architecture(
            chip.architecture,
            self.chips.iter().filter_map(|(name, quantities)| {
                quantities
                    .get(&quantity)
                    .map(|fitted| (name.as_str(), fitted.value))
            }),
        )
    }

    /// Every fitted value with its name in tables: coefficients, then quantities of chips, each in the order of their names.
    pub fn parameters(&self) -> impl Iterator<Item = (String, &Fitted)> {
        let coefficients = self
            .coefficients
            .iter()
            .map(|(name, fitted)| (name.clone(), fitted));
        let chips = self.chips.iter().flat_map(|(chip, quantities)| {
            quantities
                .iter()
                .map(move |(quantity, fitted)| (format!("{chip} {}", quantity.name()), fitted))
        });
        coefficients.chain(chips)
    }

    /// The 80 % interval of a predicted time, and the rows that make it: residuals of the same family on the same device; else of the family on devices that
    /// were left out; else of all families on devices that were left out. A time far outside those of the rows of its device gets the wider of both.
    #[must_use]
    pub fn interval(&self, family: &str, chip: &Chip, predicted_us: f64) -> Option<Interval> {
        self.evidences(family, chip).interval(predicted_us)
    }

    /// The residuals that make the intervals of a family of kernels on a chip, whatever the time.
    #[must_use]
    pub fn evidences(&self, family: &str, chip: &Chip) -> Evidences<'_> {
        let find = |family: &str, device: &str| {
            self.residuals
                .iter()
                .find(|r| r.family == family && r.device == device)
        };
        let all = chip.architecture.all_families();
        let unseen = find(family, UNSEEN)
            .map(|r| (r, Evidence::OtherChips))
            .or_else(|| find(all, UNSEEN).map(|r| (r, Evidence::OtherKernels)));
        Evidences {
            own: find(family, &chip.name),
            unseen,
        }
    }
}

/// Residuals that make the intervals of a family of kernels on a chip.
#[derive(Debug, Clone, Copy)]
pub struct Evidences<'a> {
    /// Of the same family on the same device.
    own: Option<&'a Residuals>,
    /// Of devices that were left out.
    unseen: Option<(&'a Residuals, Evidence)>,
}

impl Evidences<'_> {
    /// [`Calibration::interval`].
    #[must_use]
    pub fn interval(&self, predicted_us: f64) -> Option<Interval> {
        let interval = |r: &Residuals, evidence| Interval {
            low_us: r.low * predicted_us,
            high_us: r.high * predicted_us,
            speedup_error_ratio: r.speedup_error(),
            evidence,
        };
        match (self.own, self.unseen) {
            (Some(own), Some((wide, _))) if !own.reaches(predicted_us) => Some(Interval {
                low_us: own.low.min(wide.low) * predicted_us,
                high_us: own.high.max(wide.high) * predicted_us,
                speedup_error_ratio: own.speedup_error().max(wide.speedup_error()),
                evidence: Evidence::OtherSizes,
            }),
            (Some(own), _) => Some(interval(own, Evidence::SameChip)),
            (None, Some((wide, evidence))) => Some(interval(wide, evidence)),
            (None, None) => None,
        }
    }
}

/// Device of residuals that hold for a chip without rows.
pub const UNSEEN: &str = "unseen";
/// How many times shorter or longer than every row of its device a time may be before it counts as another size.
const OTHER_SIZE: f64 = 4.0;

/// An 80 % interval and what it rests on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// Lower end, in microseconds.
    pub low_us: f64,
    /// Upper end, in microseconds.
    pub high_us: f64,
    /// Factor, above 1, that the ratio of this time to that of another kernel of the family on the chip is off by at most, in 80 % of such pairs.
    pub speedup_error_ratio: f64,
    /// The rows that make it.
    pub evidence: Evidence,
}

/// Rows that an interval is made of: errors on what the fit had not seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// The same family of kernels on this chip, at other shapes.
    SameChip,
    /// As above, but much shorter or longer than any of them.
    OtherSizes,
    /// The same family on other chips, each left out.
    OtherChips,
    /// Other families on chips that were left out: nothing comparable was measured.
    OtherKernels,
}

impl Evidence {
    /// The word of data files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Evidence::SameChip => "same_chip",
            Evidence::OtherSizes => "other_sizes",
            Evidence::OtherChips => "other_chips",
            Evidence::OtherKernels => "other_kernels",
        }
    }

    /// The words of tables.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Evidence::SameChip => "such kernels measured on this chip",
            Evidence::OtherSizes => "such kernels of other sizes measured on this chip",
            Evidence::OtherChips => "such kernels measured on other chips",
            Evidence::OtherKernels => "other kernels measured on other chips",
        }
    }
}
