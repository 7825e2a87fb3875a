//! Fitted values: the file that `tpusim fit` writes, and how a chip takes them over.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

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

/// Out-of-fold residuals of a family on a device: the ratio of measured to predicted time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residuals {
    /// Family of kernels; `all TPU` and `all GPU` for every family of an architecture.
    pub family: String,
    /// Device; `unseen` for a device that gave no row, from leaving each device out in turn.
    pub device: String,
    /// Rows.
    pub rows: usize,
    /// Ratio below which a tenth of the rows lie.
    pub low: f64,
    /// Ratio above which a tenth of the rows lie.
    pub high: f64,
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

/// Mean of a quantity, by chip, over the chips of an architecture; none where there is no such chip.
pub fn mean_of_architecture<'a>(
    architecture: Architecture,
    chips: impl Iterator<Item = (&'a str, f64)>,
) -> Option<f64> {
    let tpu = architecture == Architecture::Tpu;
    let values: Vec<f64> = chips
        .filter(|(name, _)| name.starts_with("tpu") == tpu)
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
        let text = serde_json::to_string(self).unwrap_or_default();
        crate::config::digest(text.as_bytes())
    }

    /// Gives a chip the fitted values: coefficients in any case, quantities of its own where the file of the chip is a shipped one and
    /// `keep` does not name their field.
    pub fn apply(&self, chip: &mut Chip, shipped: bool, keep: impl Fn(&str) -> bool) {
        for (name, fitted) in &self.coefficients {
            if let Some(coefficient) = Coefficient::named(name) {
                chip.coefficients.set(coefficient, fitted.value);
            }
        }
        if !shipped {
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

    /// The 80 % interval of a predicted time as factors of it, and whether it had to be taken from other devices or families.
    ///
    /// The residuals of the same family on the same device; else those of the family on devices left out, else those of all families.
    #[must_use]
    pub fn interval(&self, family: &str, chip: &Chip) -> Option<(f64, f64, bool)> {
        let device = chip.name.as_str();
        let all = match chip.architecture {
            Architecture::Tpu => "all TPU",
            Architecture::Gpu => "all GPU",
        };
        let find = |family: &str, device: &str| {
            self.residuals
                .iter()
                .find(|r| r.family == family && r.device == device)
                .map(|r| (r.low, r.high))
        };
        find(family, device)
            .map(|(low, high)| (low, high, false))
            .or_else(|| find(family, "unseen").map(|(low, high)| (low, high, true)))
            .or_else(|| find(all, "unseen").map(|(low, high)| (low, high, true)))
    }
}
