//! HLO text timed by the fast model: every kernel that [`crate::hlo`] finds on one chip.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::hardware::{Calibration, Chip};
use crate::hlo::{HloKernel, HloProgram};
use crate::kernels::library::{CaseError, fusion};
use crate::report::result::Bound;
use crate::timing::kernel::time_kernel;

/// Word of the `schema` field of results.
pub const SCHEMA: &str = "tpusim.hlo/1";

/// Operations and bytes of a program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Counts {
    /// Products, two operations per multiply-add.
    pub matrix_flops: f64,
    /// Vector operations.
    pub vector_ops: f64,
    /// Transcendental operations.
    pub transcendentals: f64,
    /// Bytes of the arrays between kernels.
    pub bytes: f64,
}

impl Counts {
    /// Counts of one run of a kernel.
    #[must_use]
    pub fn of(kernel: &HloKernel) -> Self {
        Counts {
            matrix_flops: kernel.matrix_flops(),
            vector_ops: kernel.fused.vector_ops,
            transcendentals: kernel.fused.transcendentals,
            bytes: kernel.bytes(),
        }
    }

    /// Products and vector operations: what XLA's cost analysis calls flops.
    #[must_use]
    pub fn flops(&self) -> f64 {
        self.matrix_flops + self.vector_ops
    }

    fn add(&mut self, other: Counts, times: f64) {
        self.matrix_flops += other.matrix_flops * times;
        self.vector_ops += other.vector_ops * times;
        self.transcendentals += other.transcendentals * times;
        self.bytes += other.bytes * times;
    }
}

/// Counts of a program: every kernel as often as it runs, and once.
#[must_use]
pub fn counts(program: &HloProgram) -> (Counts, Counts) {
    let (mut executed, mut once) = (Counts::default(), Counts::default());
    for kernel in &program.kernels {
        executed.add(Counts::of(kernel), kernel.count);
        once.add(Counts::of(kernel), 1.0);
    }
    (executed, once)
}

/// One kernel on a chip.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HloRow {
    /// Name of its instruction.
    pub name: String,
    /// Operation of that instruction.
    pub opcode: String,
    /// How often it runs.
    pub count: f64,
    /// Whether what it computes is unknown and only its bytes count.
    pub opaque: bool,
    /// Time of all runs, in microseconds.
    pub time_us: f64,
    /// Share of the time of the program.
    pub share: f64,
    /// What binds it.
    pub bound: Bound,
    /// Operations and bytes of one run.
    #[serde(flatten)]
    pub counts: Counts,
}

/// What XLA's own cost analysis says of the program.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct XlaCost {
    /// Its flops.
    pub flops: Option<f64>,
    /// Its bytes accessed.
    pub bytes: Option<f64>,
}

/// A module on a chip.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HloResult {
    /// Always [`SCHEMA`].
    pub schema: &'static str,
    /// Path of the text.
    pub file: String,
    /// Name of the module.
    pub module: String,
    /// Whether the text is optimised.
    pub optimised: bool,
    /// Chip.
    pub chip: String,
    /// Cores of the device.
    pub cores: u32,
    /// Clock, in GHz.
    pub clock_ghz: f64,
    /// Predicted time, in microseconds.
    pub time_us: f64,
    /// Lower end of the 80 % interval, in microseconds; none where nothing comparable was measured.
    pub low_us: Option<f64>,
    /// Upper end, in microseconds.
    pub high_us: Option<f64>,
    /// Time by bound, in microseconds.
    pub by_bound_us: BTreeMap<Bound, f64>,
    /// Operations and bytes, every kernel as often as it runs.
    pub executed: Counts,
    /// The same with bodies of loops counted once, as XLA's cost analysis counts them.
    pub once: Counts,
    /// What XLA said, where it was given.
    pub xla: Option<XlaCost>,
    /// Kernels in the order in which they first run.
    pub kernels: Vec<HloRow>,
    /// What was assumed.
    pub warnings: Vec<String>,
    /// Version of tpusim.
    pub version: &'static str,
    /// Digest of the calibration.
    pub calibration_digest: String,
}

/// Times a program on a chip. `file` and `module` name it.
///
/// # Errors
/// Counts that are too large to time.
pub fn time(
    (file, module): (&str, &str),
    program: &HloProgram,
    chip: &Chip,
    calibration: &Calibration,
    xla: Option<XlaCost>,
) -> Result<HloResult, CaseError> {
    let mut rows = Vec::new();
    let mut by_bound: BTreeMap<Bound, f64> = BTreeMap::new();
    let mut warnings = program.warnings.clone();
    // Errors of the rows of a family go together, those of families do not.
    let mut by_family: BTreeMap<String, f64> = BTreeMap::new();
    for kernel in &program.kernels {
        let time = time_kernel(&fusion(&kernel.fused, chip)?, chip);
        let time_us = time.total_us * kernel.count;
        *by_bound.entry(time.bound).or_default() += time_us;
        let op = if kernel.fused.product.is_some() {
            "matmul"
        } else if kernel.fused.reduced_rows > 0.0 {
            "normalization"
        } else {
            "elementwise"
        };
        *by_family.entry(family(op, chip)).or_default() += time_us;
        rows.push(HloRow {
            name: kernel.name.clone(),
            opcode: kernel.opcode.clone(),
            count: kernel.count,
            opaque: kernel.opaque,
            time_us,
            share: 0.0,
            bound: time.bound,
            counts: Counts::of(kernel),
        });
    }
    let time_us: f64 = rows.iter().map(|row| row.time_us).sum();
    for row in &mut rows {
        row.share = row.time_us / time_us.max(f64::MIN_POSITIVE);
    }
    let opaque: f64 = rows.iter().filter(|row| row.opaque).map(|row| row.share).sum();
    if opaque > 0.0 {
        warnings.push(format!(
            "{:.0} % of the time are kernels whose operations are unknown: the time is what their bytes take, and can be too short by any factor",
            100.0 * opaque
        ));
    }
    if !program.optimised {
        warnings.push("the text is not optimised: which kernels XLA makes of it is a guess".to_owned());
    }
    let ends = by_family
        .iter()
        .map(|(family, &us)| {
            calibration
                .interval(family, chip, us)
                .map(|i| (i.low_us - us, i.high_us - us))
        })
        .collect::<Option<Vec<(f64, f64)>>>();
    let (executed, once) = counts(program);
    let interval = ends.map(|ends| {
        let low: f64 = ends.iter().map(|end| end.0.powi(2)).sum();
        let high: f64 = ends.iter().map(|end| end.1.powi(2)).sum();
        ((time_us - low.sqrt()).max(0.0), time_us + high.sqrt())
    });
    Ok(HloResult {
        schema: SCHEMA,
        file: file.to_owned(),
        module: module.to_owned(),
        optimised: program.optimised,
        chip: chip.name.clone(),
        cores: chip.cores_per_device,
        clock_ghz: chip.clock().get() / 1e9,
        time_us,
        low_us: interval.map(|interval| interval.0),
        high_us: interval.map(|interval| interval.1),
        by_bound_us: by_bound,
        executed,
        once,
        xla,
        kernels: rows,
        warnings,
        version: env!("CARGO_PKG_VERSION"),
        calibration_digest: calibration.digest(),
    })
}

/// Family of measured kernels whose errors a kernel is taken to have.
fn family(op: &str, chip: &Chip) -> String {
    match chip.architecture {
        crate::hardware::Architecture::Tpu => op.to_owned(),
        crate::hardware::Architecture::Gpu => format!("{op}, GPU"),
    }
}
