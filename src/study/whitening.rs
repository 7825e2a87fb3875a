//! The solvers of second-order linear attention side by side: operation class, work, definiteness, error, time of the layer.
//!
//! The rows are those of the SLA paper's solver table, with keys that are not whitened for reference. Work is that of the graphs of
//! [`crate::mechanisms`], definiteness and error come from executing them on seeded spectra, time from the timing model.

use std::collections::BTreeMap;

use ndarray::Array2;

use super::run::{Chips, RunError, RunRequest, run};
use crate::config::{ConfigError, Document};
use crate::dtype::Dtype;
use crate::graph::work::graph_work;
use crate::graph::{BuildError, Builder, Graph, Init, Op, Precision, Role, Stage, Value, Work};
use crate::layer::{Layer, WhiteningSolver};
use crate::mechanisms::{MesaOperator, RIDGE, append_mesa_solve, append_polar, append_whitened};
use crate::numerics::spectrum::{extreme_eigenvalues, geometric, with_eigenvalues};
use crate::numerics::{Arithmetic, ExecuteError, execute, to_f32};
use crate::report::whitening::{ChipTime, SCHEMA, WhiteningRow, WhiteningTable};
use crate::workload::{self, Workload};

/// Smallest eigenvalue of both spectra.
const SMALLEST: f64 = 1e-3;
/// Largest eigenvalue of the spectrum that every iteration converges on, and of one with eigenvalues above 3.
const LARGEST: [f64; 2] = [1.0, 8.0];
/// Regularisation of `MesaNet` on the spectra: that of an untrained channel, softplus(0) + 0.25.
const LAMBDA: f64 = std::f64::consts::LN_2 + 0.25;

/// What is asked for.
#[derive(Debug)]
pub struct WhiteningRequest<'a> {
    /// Name or path of the base workload, an SPD-SLA-W layer.
    pub workload: &'a str,
    /// Overrides of its fields.
    pub overrides: &'a [String],
    /// Chips, in the order of the columns.
    pub chips: &'a Chips,
    /// Fusion plan whose time is reported.
    pub plan: &'a str,
}

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
pub enum WhiteningError {
    /// A workload that does not load.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A layer that does not run.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A solver that does not build: a fault of the solver.
    #[error("cannot build the graph of a solver: {0}")]
    Build(#[from] BuildError),
    /// A solver that does not execute: a fault of the solver.
    #[error("cannot execute a solver: {0}")]
    Execute(#[from] ExecuteError),
    /// The plan is not one of the workload's.
    #[error("the workload has no plan `{name}`; it has {has}")]
    NoPlan {
        /// What was asked for.
        name: String,
        /// The plans of the workload.
        has: String,
    },
}

/// A row's solver.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Solver {
    Mesa,
    Whitening(WhiteningSolver),
}

/// The rows, in the order of the paper's table.
const ROWS: [Solver; 7] = [
    Solver::Whitening(WhiteningSolver::None),
    Solver::Mesa,
    Solver::Whitening(WhiteningSolver::Cg30),
    Solver::Whitening(WhiteningSolver::Cholesky16),
    Solver::Whitening(WhiteningSolver::NewtonSchulz5),
    Solver::Whitening(WhiteningSolver::Polar2),
    Solver::Whitening(WhiteningSolver::Polar2Plus),
];

impl Solver {
    const fn name(self) -> &'static str {
        match self {
            Solver::Mesa => "mesanet",
            Solver::Whitening(solver) => solver.name(),
        }
    }

    const fn title(self) -> &'static str {
        match self {
            Solver::Mesa => "MesaNet, gated, CG-30",
            Solver::Whitening(WhiteningSolver::None) => "SLA, no whitening",
            Solver::Whitening(WhiteningSolver::Cg30) => "CG-30 on the covariance",
            Solver::Whitening(WhiteningSolver::Cholesky16) => "panel-16 Cholesky",
            Solver::Whitening(WhiteningSolver::NewtonSchulz5) => "coupled Newton-Schulz NS-5",
            Solver::Whitening(WhiteningSolver::Polar2) => "Polar-2, unscaled",
            Solver::Whitening(WhiteningSolver::Polar2Plus) => "Polar-2+, safe",
        }
    }

    /// The paper's words where it has some.
    const fn operations(self) -> &'static str {
        match self {
            Solver::Whitening(WhiteningSolver::None) => "none",
            Solver::Mesa | Solver::Whitening(WhiteningSolver::Cg30) => "VPU + MXU",
            Solver::Whitening(WhiteningSolver::Cholesky16) => "VPU triangular solve + MXU",
            Solver::Whitening(_) => "MXU products",
        }
    }

    const fn target(self) -> &'static str {
        match self {
            Solver::Whitening(WhiteningSolver::None) => "I",
            Solver::Mesa => "(H + Lam)^-1",
            Solver::Whitening(WhiteningSolver::Cg30 | WhiteningSolver::Cholesky16) => "Cn^-1",
            Solver::Whitening(_) => "Cn^-1/2",
        }
    }

    /// Whether it approximates an inverse square root instead of an inverse.
    const fn is_root(self) -> bool {
        matches!(
            self,
            Solver::Whitening(
                WhiteningSolver::NewtonSchulz5 | WhiteningSolver::Polar2 | WhiteningSolver::Polar2Plus
            )
        )
    }

    /// The matrix it gets from a covariance: normalised and with a ridge, or with the regularisation of `MesaNet`.
    fn matrix(self, covariance: &Array2<f64>) -> Array2<f64> {
        let scale = match self {
            Solver::Mesa | Solver::Whitening(WhiteningSolver::Polar2) => 1.0,
            Solver::Whitening(_) => covariance
                .rows()
                .into_iter()
                .map(|row| row.iter().map(|x| x.abs()).sum::<f64>())
                .fold(0.0, f64::max),
        };
        let ridge = if self == Solver::Mesa { LAMBDA } else { RIDGE };
        covariance / scale + Array2::<f64>::eye(covariance.nrows()) * ridge
    }
}

/// A graph that applies a solver to the rows of a key matrix, with its inputs.
struct SolverGraph {
    graph: Graph,
    covariance: Value,
    keys: Value,
    result: Value,
}

/// `rows` keys or queries against a covariance of order `n`. Rows are those of a chunk for its work, and of the identity for the operator.
fn solver_graph(
    solver: Solver,
    precision: Precision,
    n: usize,
    rows: usize,
    layer: &Layer,
) -> Result<SolverGraph, BuildError> {
    let mut b = Builder::new(Stage::Whitening);
    let input = |b: &mut Builder, name: &str, rows: usize, columns: usize| {
        b.input(name, [rows, columns], Dtype::F32, Role::Activation, Init::Zeros)
    };
    let covariance = input(&mut b, "C", n, n);
    let keys = input(&mut b, "K", rows, n);
    let result = match solver {
        Solver::Whitening(solver) => append_whitened(&mut b, solver, precision, covariance, keys),
        Solver::Mesa => {
            // The keys of the chunk itself are zero where the operator alone is looked at; they cost the same.
            let own = b.fill("K_own", [rows, n], Dtype::F32, 0.0);
            let operator = MesaOperator {
                key: own,
                mask: b.fill("M", [rows, rows], Dtype::F32, 0.0),
                head_decay: Some(b.fill("e^G", [rows, 1], Dtype::F32, 1.0)),
                entry: covariance,
                lambda: b.fill("Lam", [1, n], Dtype::F32, LAMBDA),
                precision,
            };
            append_mesa_solve(&mut b, keys, operator, layer.cg_steps)
        }
    };
    b.output("result", result);
    Ok(SolverGraph {
        graph: b.finish()?,
        covariance,
        keys,
        result,
    })
}

/// Work of the solver per head and chunk and its square products, without the product of the keys for solvers that form a matrix.
fn solver_work(solver: Solver, layer: &Layer) -> Result<(Work, u64), BuildError> {
    let n = layer.key_dim;
    if let Solver::Whitening(whitening) = solver {
        let mut b = Builder::new(Stage::Whitening);
        let covariance = b.input("C", [n, n], Dtype::F32, Role::Activation, Init::Zeros);
        if append_polar(&mut b, whitening, layer.whitening_precision, covariance).is_some() {
            let graph = b.finish()?;
            let products = graph
                .nodes()
                .filter(|(_, node)| matches!(node.op, Op::MatMul { .. }))
                .count();
            return Ok((graph_work(&graph), products as u64));
        }
    }
    let graph = solver_graph(solver, layer.whitening_precision, n, layer.chunk, layer)?.graph;
    Ok((graph_work(&graph), 0))
}

/// Arithmetic a solver is executed in.
#[derive(Clone, Copy)]
enum Format {
    F64,
    F32,
    Bf16,
}

/// The operator `P` of a solver on a covariance: its result for the rows of the identity.
fn operator(
    solver: Solver,
    covariance: &Array2<f64>,
    layer: &Layer,
    format: Format,
) -> Result<Array2<f64>, WhiteningError> {
    let n = covariance.nrows();
    let precision = match format {
        Format::F64 | Format::F32 => Precision::Highest,
        Format::Bf16 => Precision::Default,
    };
    let built = solver_graph(solver, precision, n, n, layer)?;
    let shared = |a: &Array2<f64>| a.clone().into_dyn().into_shared();
    let inputs = BTreeMap::from([
        (built.covariance.node, shared(covariance)),
        (built.keys.node, shared(&Array2::eye(n))),
    ]);
    let keep = [built.result];
    let elements: Vec<f64> = if let Format::F64 = format {
        let run = execute(&built.graph, &inputs, &keep, Arithmetic::Exact)?;
        run.values[&built.result].iter().copied().collect()
    } else {
        let run = execute(&built.graph, &to_f32(&inputs), &keep, Arithmetic::Declared)?;
        run.values[&built.result].iter().map(|&x| f64::from(x)).collect()
    };
    Ok(Array2::from_shape_fn((n, n), |(i, j)| elements[i * n + j]))
}

/// Largest element of `P A P - I` or `P A - I`.
fn residual(solver: Solver, p: &Array2<f64>, covariance: &Array2<f64>) -> Option<f64> {
    let a = solver.matrix(covariance);
    let mut product = p.dot(&a);
    if solver.is_root() {
        product = product.dot(p);
    }
    let difference = product - Array2::<f64>::eye(p.nrows());
    finite(difference.iter().fold(0.0_f64, |m, x| {
        // `max` alone drops a NaN.
        if m.is_nan() || x.is_nan() {
            f64::NAN
        } else {
            m.max(x.abs())
        }
    }))
}

fn finite(x: f64) -> Option<f64> {
    x.is_finite().then_some(x)
}

/// Makes the table.
///
/// # Errors
/// A workload that does not load, is no SPD-SLA-W layer or lacks the plan; a chip without a format; a violated invariant of the timing model.
pub fn whitening(request: &WhiteningRequest<'_>) -> Result<WhiteningTable, WhiteningError> {
    let base = workload::load(request.workload, request.overrides)?;
    let (workload, document) = &base;
    let layer = &workload.layer;
    if !layer.mechanism.uses("whitening") {
        let message = format!(
            "expected `spd_sla_w`, whose solvers are compared, found `{}`",
            layer.mechanism.name
        );
        return Err(document.error_at("layer.mechanism", message).into());
    }
    if !workload.plans.iter().any(|plan| plan.name == request.plan) {
        let has: Vec<String> = workload
            .plans
            .iter()
            .map(|plan| format!("`{}`", plan.name))
            .collect();
        return Err(WhiteningError::NoPlan {
            name: request.plan.to_owned(),
            has: has.join(", "),
        });
    }
    let seed = workload.numeric.seed;
    let spectra = LARGEST.map(|largest| with_eigenvalues(&geometric(SMALLEST, largest, layer.key_dim), seed));
    let mut rows = Vec::new();
    // Rows of a chip that its timing warns about, and the first of the warnings.
    let mut warned: BTreeMap<String, (usize, String)> = BTreeMap::new();
    for solver in ROWS {
        let variant = variant(solver, request, layer)?;
        let result = run(RunRequest {
            workload: &variant,
            baseline: None,
            chips: request.chips,
            overrides: Vec::new(),
            numeric: None,
        })?;
        for chip in &result.chips {
            let place = format!("{} {} ", chip.name, request.plan);
            if let Some(warning) = result.warnings.iter().find(|w| w.starts_with(&place)) {
                let seen = warned
                    .entry(chip.name.clone())
                    .or_insert_with(|| (0, warning.clone()));
                seen.0 += 1;
            }
        }
        let times = result.chips.iter().filter_map(|chip| {
            let plan = chip.plans.iter().find(|plan| plan.name == request.plan)?;
            let longest = plan
                .stages
                .iter()
                .max_by(|a, b| a.time_us.total_cmp(&b.time_us))?;
            Some(ChipTime {
                chip: chip.name.clone(),
                total_us: plan.total_us,
                low_us: plan.low_us,
                high_us: plan.high_us,
                bound: longest.bound,
            })
        });
        let mut row = WhiteningRow {
            name: solver.name().to_owned(),
            title: solver.title().to_owned(),
            operations: solver.operations().to_owned(),
            target: solver.target().to_owned(),
            products: 0,
            solver_flops: 0,
            solver_vector_ops: 0,
            solver_transcendentals: 0,
            definite: None,
            smallest_eigenvalue: None,
            smallest_eigenvalue_wide: None,
            residual_f64: None,
            residual_f32: None,
            residual_bf16: None,
            times: times.collect(),
        };
        if solver != Solver::Whitening(WhiteningSolver::None) {
            measure(&mut row, solver, &spectra, layer)?;
        }
        rows.push(row);
    }
    let mut notes = notes(layer);
    notes.extend(warned.into_values().map(|(count, warning)| {
        format!(
            "{count} of the {} rows carry a warning such as this: {warning}",
            ROWS.len()
        )
    }));
    Ok(WhiteningTable {
        schema: SCHEMA.to_owned(),
        layer: layer.describe(),
        plan: request.plan.to_owned(),
        key_dim: layer.key_dim as u64,
        chunk: layer.chunk as u64,
        seed,
        rows,
        notes,
    })
}

fn measure(
    row: &mut WhiteningRow,
    solver: Solver,
    [safe, wide]: &[Array2<f64>; 2],
    layer: &Layer,
) -> Result<(), WhiteningError> {
    let (work, products) = solver_work(solver, layer)?;
    row.products = products;
    row.solver_flops = work.matrix_flops.total();
    row.solver_vector_ops = work.vector_ops.total();
    row.solver_transcendentals = work.transcendentals;
    let exact = operator(solver, safe, layer, Format::F64)?;
    let smallest = extreme_eigenvalues(&exact).0;
    let smallest_wide = extreme_eigenvalues(&operator(solver, wide, layer, Format::F64)?).0;
    row.definite = Some(smallest > 0.0 && smallest_wide > 0.0);
    row.smallest_eigenvalue = finite(smallest);
    row.smallest_eigenvalue_wide = finite(smallest_wide);
    row.residual_f64 = residual(solver, &exact, safe);
    row.residual_f32 = residual(solver, &operator(solver, safe, layer, Format::F32)?, safe);
    row.residual_bf16 = residual(solver, &operator(solver, safe, layer, Format::Bf16)?, safe);
    Ok(())
}

/// The layer of a row: the base with another solver, or a `MesaNet` layer of the same sizes.
fn variant(
    solver: Solver,
    request: &WhiteningRequest<'_>,
    layer: &Layer,
) -> Result<(Workload, Document), ConfigError> {
    match solver {
        Solver::Whitening(whitening) => {
            let mut overrides = request.overrides.to_vec();
            overrides.push(format!("layer.whitening={}", whitening.name()));
            workload::load(request.workload, &overrides)
        }
        Solver::Mesa => {
            let sizes = [
                ("layer.batch", layer.batch),
                ("layer.tokens", layer.tokens),
                ("layer.model_width", layer.model_width),
                ("layer.key_heads", layer.key_heads),
                ("layer.value_heads", layer.value_heads),
                ("layer.key_dim", layer.key_dim),
                ("layer.value_dim", layer.value_dim),
                ("layer.chunk", layer.chunk),
                ("layer.conv_width", layer.conv_width),
                ("numeric.tokens", 1),
                ("program.heads", 1),
            ];
            let mut overrides = sizes.map(|(field, size)| format!("{field}={size}")).to_vec();
            overrides.push(format!("layer.activations={}", layer.activations));
            workload::load("mesanet", &overrides)
        }
    }
}

fn notes(layer: &Layer) -> Vec<String> {
    vec![
        "the paper names the solvers, their operation classes and their definiteness; formulas, normalisation and placement are our reading (docs/model.md)".to_owned(),
        format!(
            "work is per head and chunk of {} rows at key width {}, without the Gram update of the covariance and the product of the keys with the result, {:.1} MFLOP each",
            layer.chunk,
            layer.key_dim,
            2e-6 * (layer.chunk * layer.key_dim * layer.key_dim) as f64
        ),
        format!(
            "smallest eigenvalues on covariances with spectra from {SMALLEST} to {} and to {}; residual: largest element of P A P - I or P A - I on the first, A the normalised covariance",
            LARGEST[0], LARGEST[1]
        ),
        "MesaNet: same heads and widths, its own gates and no decay tiles, f32 products in six passes".to_owned(),
    ]
}
