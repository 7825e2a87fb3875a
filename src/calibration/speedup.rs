//! The leave-one-out table of the Systolic Linear Attention paper: KDA and SLA-R4 on every TPU generation, each predicted without any row of that generation.

use serde::Serialize;

use super::data::Data;
use super::fit::with_setting;
use super::validate::{self, Validation};
use crate::config::ConfigError;
use crate::dtype::Dtype;
use crate::hardware::{self, Calibration, Chip};
use crate::report::result::PlanResult;
use crate::study::RunError;
use crate::study::run::plan_times;
use crate::workload::{self, Workload};

/// Generations of the table.
pub const DEVICES: [&str; 4] = ["tpu-v4", "tpu-v5p", "tpu-v6e", "tpu-v7x"];

/// A time somebody else gives.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Reference {
    /// Microseconds.
    pub us: f64,
    /// `measured`, `published` or `compiled`.
    pub kind: &'static str,
    /// Where it stands.
    pub source: String,
}

/// A layer on a device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerTime {
    /// Predicted without any row of the device, in microseconds.
    pub predicted_us: f64,
    /// Lower end of the 80 % interval, from errors on other devices, each left out.
    pub low_us: Option<f64>,
    /// Upper end.
    pub high_us: Option<f64>,
    /// A reference, where one exists.
    pub reference: Option<Reference>,
    /// Error against it, in percent.
    pub error_pct: Option<f64>,
}

/// A line of the table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// Device.
    pub device: String,
    /// Cores behind it.
    pub cores: u32,
    /// Plan of both layers.
    pub plan: String,
    /// Rows and columns of a matrix array.
    pub array: (u32, u32),
    /// Peak bf16 matrix FLOP/s over peak f32 vector FLOP/s.
    pub mxu_to_vpu: Option<f64>,
    /// KDA.
    pub kda: LayerTime,
    /// SLA with four value heads per key head.
    pub sla_r4: LayerTime,
    /// KDA over SLA-R4, predicted.
    pub speedup: f64,
    /// The same of the references, where both exist.
    pub reference_speedup: Option<f64>,
    /// Error of the speedup, in percent.
    pub speedup_error_pct: Option<f64>,
}

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
pub enum SpeedupError {
    /// A shipped file.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A run.
    #[error(transparent)]
    Run(#[from] RunError),
}

/// The table, from fits that left each device out.
///
/// # Errors
/// Where a shipped file or a run is at fault.
pub fn table(data: &Data, validation: &Validation) -> Result<Vec<Line>, SpeedupError> {
    let (kda, _) = workload::load::<&str>("kda", &[])?;
    let (sla, _) = workload::load::<&str>("sla_r4", &[])?;
    let mut lines = Vec::new();
    for device in DEVICES {
        let Some(setting) = validation.without_device.get(device) else {
            continue;
        };
        let chip = with_setting(&hardware::load_uncalibrated(device)?, setting);
        let others = Calibration {
            residuals: validate::interval_residuals_of(&data.used, &validation.residuals, |o| {
                o.row.device != device
            }),
            ..Calibration::empty()
        };
        let of_kda = plan_times(&kda, &chip, &others)?;
        for of_sla in plan_times(&sla, &chip, &others)? {
            if let Some(of_kda) = of_kda.iter().find(|plan| plan.name == of_sla.name) {
                lines.push(line(
                    &chip,
                    layer_time(of_kda, &kda),
                    layer_time(&of_sla, &sla),
                    &of_sla.name,
                ));
            }
        }
    }
    Ok(lines)
}

fn layer_time(plan: &PlanResult, workload: &Workload) -> LayerTime {
    let source = workload
        .published
        .as_ref()
        .map(|published| published.source.clone());
    let reference = plan.published_us.zip(source).map(|(us, source)| Reference {
        us,
        kind: "published",
        source,
    });
    LayerTime {
        predicted_us: plan.total_us,
        low_us: plan.low_us,
        high_us: plan.high_us,
        error_pct: reference
            .as_ref()
            .map(|reference| 100.0 * (plan.total_us / reference.us - 1.0)),
        reference,
    }
}

fn line(chip: &Chip, kda: LayerTime, sla_r4: LayerTime, plan: &str) -> Line {
    let speedup = kda.predicted_us / sla_r4.predicted_us;
    let both = kda.reference.as_ref().zip(sla_r4.reference.as_ref());
    let reference_speedup = both.map(|(kda, sla)| kda.us / sla.us);
    let vector = chip.vector_flops_per_second().get();
    Line {
        device: chip.name.clone(),
        cores: chip.cores_per_device,
        plan: plan.to_owned(),
        array: (chip.matrix_unit.rows, chip.matrix_unit.columns),
        mxu_to_vpu: chip
            .matrix_flops_per_second(Dtype::Bf16)
            .map(|matrix| matrix.get() / vector),
        kda,
        sla_r4,
        speedup,
        reference_speedup,
        speedup_error_pct: reference_speedup.map(|reference| 100.0 * (speedup / reference - 1.0)),
    }
}
