//! Calls of a case by name: those of the kernel library, and those of the mechanisms, whose kernels come from their graphs.

use std::sync::OnceLock;

use super::delta_log::{self, Replay, Step};
use super::pallas;
use super::run::lower_with;
use crate::coefficients::Coefficient;
use crate::dtype::Dtype;
use crate::graph::Precision;
use crate::hardware::{Architecture, Chip};
use crate::kernels::library::{self, Case, CaseError, Formats, Launch, Params, Recurrent};
use crate::kernels::{Group, Implementation, Kernel, OpKind, Plan, Program, Transfer};
use crate::layer::{
    DecayGate, DeltaLog, GramVariant, InitialState, InverseVariant, Layer, Merge, Pass, Readout, StateFormat,
    StateProducts,
};
use crate::mechanisms::{self, Granularity, Mechanism, gram_variants};
use crate::workload::{self, Workload};
use crate::{
    config::suggestion,
    graph::{Role, Stage},
};

/// Chunk of the kernels of flash-linear-attention and of Tokamax KDA.
const CHUNK: u64 = 64;
/// Small kernels around the fused kernel of convolution and GDN: metadata, slices, layout. Source: profile of a call on v7x.
const FUSED_WRAPPER_KERNELS: u64 = 36;
/// Largest chunk of the fused kernel, and the largest where it has at least 64 value heads. Source: its code.
const FUSED_CHUNKS: [u64; 2] = [128, 64];
/// Heads of a chunk that interleave in the fused kernel, at most; more follow in further groups. Source: measured prefills of 2048 tokens take 98, 144, 296 and 664 us
/// for 8, 16, 32 and 64 value heads, so that the chain of the inverse is paid again from 16 heads on.
const FUSED_HEADS: u64 = 16;
/// Rows of a block of the substitution of the fused kernel; blocks past the end of a sequence are skipped. Source: measured prefills of 64 tokens in tiles of 128.
const FUSED_BLOCK: u64 = 16;
/// Largest extent of a layer that a case may ask for.
const LARGEST_EXTENT: u64 = 1 << 24;
/// Longest log that a case may ask for: every step of an interval is a graph of its own.
const LONGEST_LOG: u64 = 256;

/// The launches of one call of `op` on `chip`.
///
/// Besides the operations of the library: `MECHANISM_chunk` (the forward pass of a prefill, split as Tokamax does on a TPU and as flash-linear-attention does on
/// a GPU), `MECHANISM_decode` (one token per sequence), `MECHANISM_decode_eager` and `MECHANISM_decode_deltalog`, `.._append`, `.._append_merge`, `.._merge` (the same
/// without and with a log of updates beside the state, as the kernels of tools/gpu/deltalog do it), `gdn_fused` (convolution and GDN in one kernel), `MECHANISM_pallas` (the kernels of tools/tpu/kernels), `WORKLOAD_layer_stage` (a row of the stage table of a
/// shipped workload) and `WORKLOAD_core` (the kernel of its core).
///
/// # Errors
/// [`CaseError`]: what the case asks for is not known, or does not fit.
pub fn launches(op: &str, params: &Params, formats: Formats, chip: &Chip) -> Result<Vec<Launch>, CaseError> {
    if library::knows(op) {
        return library::launches(op, params, formats, chip);
    }
    let case = Case::new(op, params, formats, chip);
    let launches = if op == "gdn_fused" {
        fused(&case)?
    } else if let Some((name, step)) = log_step(op) {
        decode_with_log(&case, mechanism(op, name)?, step)?
    } else if let Some(name) = op.strip_suffix("_decode") {
        decode(&case, mechanism(op, name)?)?
    } else if let Some(name) = op.strip_suffix("_chunk_safe") {
        chunk(&case, mechanism(op, name)?, Some(DecayGate::Bounded))?
    } else if let Some(name) = op.strip_suffix("_chunk") {
        chunk(&case, mechanism(op, name)?, None)?
    } else if let Some(name) = op.strip_suffix("_layer_stage") {
        layer_stage(&case, name)?
    } else if let Some(name) = op.strip_suffix("_pallas") {
        pallas::launches(&case, usual_layer(mechanism(op, name)?)?)?
    } else if let Some(name) = op.strip_suffix("_core") {
        core_kernel(&case, name)?
    } else if op.ends_with("_chunk_bwd") {
        return Err(CaseError::Unsupported(format!(
            "`{op}`: the backward pass of the mechanisms is not built"
        )));
    } else {
        // The library says what there is.
        return library::launches(op, params, formats, chip);
    };
    case.finish()?;
    Ok(launches)
}

/// The mechanism whose prefill or decoding an operation is; none for operations of the library.
#[must_use]
pub fn mechanism_of(op: &str) -> Option<&'static Mechanism> {
    if library::knows(op) {
        return None;
    }
    let name = log_step(op).map(|(name, _)| name).or_else(|| {
        ["_decode", "_chunk_safe", "_chunk"]
            .iter()
            .find_map(|tail| op.strip_suffix(tail))
    })?;
    mechanism(op, name).ok()
}

/// The mechanism that measurement files call `name`.
fn mechanism(op: &str, name: &str) -> Result<&'static Mechanism, CaseError> {
    let usual = match name {
        "linear_attn" => "linear_attention",
        "mamba2_ssd" => "mamba2",
        "deltaproduct2" => "deltaproduct",
        "gdn_gva" => "gdn",
        "mesanet_cg30" => "mesanet",
        other => other,
    };
    Mechanism::named(usual).ok_or_else(|| {
        let names: Vec<&str> = mechanisms::ALL.iter().map(|m| m.name).collect();
        CaseError::Op {
            op: op.to_owned(),
            hint: format!(
                "no mechanism `{usual}`; {}",
                suggestion(usual, &names, "mechanisms")
            ),
        }
    })
}

/// The layer of the shipped workload with a mechanism: every variant decided.
fn usual_layer(mechanism: &'static Mechanism) -> Result<&'static Layer, CaseError> {
    static LAYERS: OnceLock<Vec<Layer>> = OnceLock::new();
    LAYERS
        .get_or_init(|| {
            workload::shipped()
                .into_iter()
                .filter_map(|name| workload::load::<&str>(name, &[]).ok())
                .map(|(workload, _)| workload.layer)
                .collect()
        })
        .iter()
        .find(|layer| layer.mechanism == mechanism)
        .ok_or_else(|| {
            CaseError::Unsupported(format!(
                "no shipped workload has the mechanism `{}`",
                mechanism.name
            ))
        })
}

/// Sizes of a core.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    batch: u64,
    tokens: u64,
    key_heads: u64,
    value_heads: u64,
    key_dim: u64,
    value_dim: u64,
    chunk: u64,
}

impl Sizes {
    /// `B`, `T`, `H`, `Hv`, `K`, `V`.
    pub(super) fn of(case: &Case<'_>) -> Result<Self, CaseError> {
        let key_heads = case.size("H")?;
        let key_dim = case.size("K")?;
        Ok(Sizes {
            batch: case.size("B")?,
            tokens: case.size("T")?,
            key_heads,
            value_heads: case.optional("Hv")?.unwrap_or(key_heads),
            key_dim,
            value_dim: case.optional("V")?.unwrap_or(key_dim),
            chunk: case.optional("chunk")?.unwrap_or(CHUNK),
        })
    }

    fn check(&self) -> Result<(), CaseError> {
        let extents = [
            ("B", self.batch),
            ("T", self.tokens),
            ("H", self.key_heads),
            ("Hv", self.value_heads),
            ("K", self.key_dim),
            ("V", self.value_dim),
            ("chunk", self.chunk),
        ];
        for (name, extent) in extents {
            if extent > LARGEST_EXTENT {
                return Err(CaseError::TooLarge(format!("{name} = {extent}")));
            }
        }
        let elements = [
            self.batch,
            self.tokens,
            self.value_heads,
            self.key_dim.max(self.value_dim),
        ]
        .iter()
        .map(|&extent| u128::from(extent))
        .product::<u128>();
        if elements > 1 << 42 {
            return Err(CaseError::TooLarge(format!("{elements} elements")));
        }
        if !self.value_heads.is_multiple_of(self.key_heads) {
            return Err(CaseError::Value {
                parameter: "Hv".to_owned(),
                expected: format!("a multiple of the {} key heads", self.key_heads),
                found: self.value_heads.to_string(),
            });
        }
        Ok(())
    }

    /// The usual layer of a mechanism at these sizes, with an f32 state.
    pub(super) fn layer(&self, usual: &Layer, activations: Dtype) -> Result<Layer, CaseError> {
        self.check()?;
        let layer = Layer {
            batch: self.batch as usize,
            tokens: self.tokens as usize,
            // Projections are no part of the calls.
            model_width: 1,
            key_heads: self.key_heads as usize,
            value_heads: self.value_heads as usize,
            key_dim: self.key_dim as usize,
            value_dim: self.value_dim as usize,
            chunk: self.chunk as usize,
            activations,
            weights: activations,
            state: StateFormat::F32,
            ..usual.clone()
        };
        if !layer.key_dim.is_multiple_of(layer.decay_tiles) {
            return Err(CaseError::Value {
                parameter: "K".to_owned(),
                expected: format!("a multiple of the {} decay tiles", layer.decay_tiles),
                found: layer.key_dim.to_string(),
            });
        }
        Ok(layer)
    }
}

/// Kernels of the groups of a plan that `keep` picks.
fn kernels(
    chip: &Chip,
    layer: &Layer,
    plan: &str,
    program: Program,
    keep: impl Fn(&Group) -> bool,
) -> Result<Vec<Kernel>, CaseError> {
    let mut plan =
        Plan::named(plan, program).ok_or_else(|| CaseError::Unsupported(format!("no plan `{plan}`")))?;
    plan.groups.retain(keep);
    // The fused convolution and GDN kernel rounds its own output.
    lowered(
        layer,
        &plan,
        chip.architecture == Architecture::Tpu && plan.name != "fused",
    )
}

/// Kernels of a plan of a layer, cut and rounded the way XLA compiles them for a TPU where `compiled`.
fn lowered(layer: &Layer, plan: &Plan, compiled: bool) -> Result<Vec<Kernel>, CaseError> {
    lower_with(layer, |lowerer| {
        if compiled {
            lowerer.lower_compiled(plan)
        } else {
            lowerer.lower(plan)
        }
    })
    .map_err(|error| CaseError::Unsupported(format!("cannot build the graph: {error}")))
}

/// Whether a group lies between the gates and the output: what a call of the core does.
fn in_core(group: &Group) -> bool {
    group.first >= Stage::Gates && group.last <= Stage::Output
}

/// Part of a kernel name of flash-linear-attention, and the row of the plan it is.
const FLA_KERNELS: [(&str, &[&str]); 9] = [
    ("l2norm", &["l2norm"]),
    ("cumsum", &["op3"]),
    ("Fill", &["fill"]),
    ("kkt_solve", &["op4-5a"]),
    ("intra", &["op4"]),
    ("inter_solve", &["op5a"]),
    ("recompute_w_u", &["op5b"]),
    ("kernel_h", &["op6"]),
    ("kernel_o", &["op7a"]),
];

/// `MECHANISM_chunk`: the core without projections, convolution and output norm.
fn chunk(
    case: &Case<'_>,
    mechanism: &'static Mechanism,
    gate: Option<DecayGate>,
) -> Result<Vec<Launch>, CaseError> {
    let sizes = Sizes::of(case)?;
    let mut layer = sizes.layer(usual_layer(mechanism)?, case.formats.a)?;
    layer.initial_state = InitialState::Zero;
    if let Some(gate) = gate {
        layer.decay_gate = gate;
        layer.decay_bound = mechanism.defaults.decay_bound;
    }
    let one = Program { heads: 1, chunks: 1 };
    let delta = mechanism.uses("inverse");
    let wanted = case.text("kernel");
    // How often the profiler saw the kernel in one call; its time is that of all of them.
    let _ = case.optional("calls")?;
    if case.chip.architecture == Architecture::Tpu {
        return on_tpu(case, sizes, layer, delta);
    }
    // Products of bf16 operands, the state among them, summed in f32. A program works on one value head and fetches its keys itself; the level-2 cache serves
    // the repeats of value heads that share keys, at about the rate of device memory.
    layer.state_precision = Precision::Default;
    layer.key_heads = layer.value_heads;
    let granularity = (mechanism.granularity)(&layer);
    let by_channel = granularity == Granularity::Channel;
    if by_channel && gram_variants(granularity).contains(&GramVariant::PivotCausal) && mechanism.uses("gram")
    {
        // Diagonal blocks pair by pair, pivots below them.
        layer.gram = GramVariant::PivotCausal;
    }
    let plan = match (by_channel, delta) {
        (true, _) => "fla_intra",
        (false, true) => "fla",
        (false, false) => "fla_output",
    };
    let mut launches: Vec<Launch> = Vec::new();
    if delta {
        launches.extend(around(case, sizes, by_channel)?);
    }
    let core = kernels(case.chip, &layer, plan, one, in_core)?;
    launches.extend(
        core.into_iter()
            .map(|kernel| in_tiles(kernel, sizes, granularity, case.formats.a).into()),
    );
    if by_channel && delta {
        decayed_keys(sizes, case.formats.a, &mut launches);
    }
    if by_channel {
        below_the_diagonal(sizes, case.formats.a, &mut launches)?;
    } else if !delta {
        // Values come with their step size; of the gates only the sum is left.
        let logs = (sizes.batch * sizes.tokens * sizes.value_heads * 4) as f64;
        for launch in launches
            .iter_mut()
            .filter(|launch| launch.kernel.label == Stage::Gates.name())
        {
            launch.kernel =
                library::stream(Stage::Gates.name(), "cumulative decay", [logs, logs], Dtype::F32)?;
        }
    }
    if let Some(name) = wanted {
        let rows = FLA_KERNELS
            .iter()
            .find(|(part, _)| name.contains(part))
            .map(|(_, rows)| *rows)
            .ok_or_else(|| {
                CaseError::Unsupported(format!("no row of the plan `{plan}` is the kernel `{name}`"))
            })?;
        launches.retain(|launch| rows.contains(&launch.kernel.label.as_str()));
        if launches.is_empty() {
            return Err(CaseError::Unsupported(format!(
                "the plan `{plan}` has no row {} for the kernel `{name}`",
                crate::config::listed(rows.iter().copied())
            )));
        }
    }
    Ok(launches)
}

/// Heads that a program of Tokamax KDA works on side by side, at most. Source: its code, which takes as many as fit into its VMEM budget.
const TOKAMAX_HEADS: u64 = 16;

/// The two kernels of Tokamax KDA for a delta rule: products of the scan in six passes, an inverse by block products of 8 rows at default precision. Its operands
/// stand by head, so queries, keys, values and decays are copied into that layout and the output out of it. Mechanisms without a solve have no such kernels; their stages run one by one.
fn on_tpu(case: &Case<'_>, sizes: Sizes, mut layer: Layer, delta: bool) -> Result<Vec<Launch>, CaseError> {
    let program = Program {
        heads: TOKAMAX_HEADS,
        chunks: 1,
    };
    if !delta {
        let launches = kernels(case.chip, &layer, "unfused", program, in_core)?;
        return Ok(launches.into_iter().map(Launch::from).collect());
    }
    layer.state_precision = Precision::Highest;
    layer.inverse = InverseVariant::TwoLevel;
    layer.inverse_precision = Precision::Default;
    let tokens = (sizes.batch * sizes.tokens) as f64 * case.bytes() as f64;
    let keys = tokens * (sizes.key_heads * sizes.key_dim) as f64;
    let values = tokens * (sizes.value_heads * sizes.value_dim) as f64;
    let copy = |title: &str, bytes: f64| {
        library::stream("copy", title, [bytes, bytes], case.formats.a).map(Launch::from)
    };
    let mut launches = vec![
        copy("queries by head", keys)?,
        copy("keys by head", keys)?,
        copy("values by head", values)?,
    ];
    if (layer.mechanism.granularity)(&layer) == Granularity::Channel {
        launches.push(copy("decays by head", keys)?);
    }
    let mut core = kernels(case.chip, &layer, "tokamax", program, in_core)?;
    for op in core.iter_mut().flat_map(|kernel| &mut kernel.ops) {
        // The update of the state takes f32 operands and six passes like the read in the scan; the output reads it at the default precision.
        if let OpKind::Product { dtype, passes, .. } = &mut op.kind {
            match op.stage {
                Stage::StateScan => (*dtype, *passes) = (Dtype::F32, Precision::Highest.passes()),
                Stage::Output => *passes = Precision::Default.passes(),
                _ => {}
            }
        }
    }
    launches.extend(core.into_iter().map(Launch::from));
    // The second kernel returns f32; the copy rounds.
    let sums = values / case.bytes() as f64 * Dtype::F32.bytes() as f64;
    launches.push(library::stream("copy", "output by token", [sums, values], case.formats.a)?.into());
    Ok(launches)
}

/// Rows of a block of the Gram matrices of flash-linear-attention.
const GRAM_BLOCK: u64 = 16;

/// With a decay per channel the blocks below the diagonal are computed by a launch of their own, which also solves where there is something to solve. Each pair of
/// 16-row blocks fetches its operands again; the level-2 cache serves the repeats, at about the rate of device memory.
fn below_the_diagonal(sizes: Sizes, activations: Dtype, launches: &mut Vec<Launch>) -> Result<(), CaseError> {
    let blocks = sizes.chunk / GRAM_BLOCK;
    let pairs = blocks * (blocks - 1) / 2;
    let chunks = sizes.batch * sizes.tokens.div_ceil(sizes.chunk) * sizes.value_heads;
    let row = GRAM_BLOCK * sizes.key_dim;
    let element = activations.bytes();
    // A pair takes keys and decays of its columns, a row of blocks queries, keys and decays.
    let bytes = chunks * row * (pairs * (element + 4) + blocks * (2 * element + 4));
    let solve = launches
        .iter_mut()
        .find(|launch| launch.kernel.label == Stage::Inverse.name());
    if let Some(launch) = solve {
        launch.kernel.reads.push(Transfer {
            name: "operands of pairs of blocks".into(),
            bytes,
            dtype: activations,
            role: Role::Activation,
            columns: None,
        });
        return Ok(());
    }
    let gram = (chunks * sizes.chunk * sizes.chunk * 4) as f64;
    let at = launches
        .iter()
        .position(|launch| launch.kernel.label == Stage::Gram.name())
        .map_or(launches.len(), |at| at + 1);
    let kernel = library::stream(
        "op4",
        "Gram blocks below the diagonal",
        [bytes as f64, gram],
        activations,
    )?;
    launches.insert(at, kernel.into());
    Ok(())
}

/// Channels of the tiles in which the kernels of flash-linear-attention move rows of tokens and of states.
const FLA_TILE: u64 = 64;
/// Names that the graphs of the mechanisms give the scans of their states.
const STATES: [&str; 3] = ["S", "H", "Z"];
/// Names that they give the cumulative decays per channel.
const DECAYS: [&str; 2] = ["G", "Gx"];

/// What the kernels of flash-linear-attention have in common: tiles of [`FLA_TILE`] channels, states of chunks in the format of the keys, and a loop over chunks
/// that fetches its operands ahead but not the decays at the end of a chunk, one load for every tile of key channels.
fn in_tiles(mut kernel: Kernel, sizes: Sizes, granularity: Granularity, activations: Dtype) -> Kernel {
    if kernel.label == Stage::Gates.name() {
        return kernel;
    }
    kernel.implementation.tile_columns = Some(FLA_TILE);
    let states = sizes.batch * sizes.value_heads * sizes.key_dim * sizes.value_dim;
    let of_chunks = sizes.tokens.div_ceil(sizes.chunk) * states * Dtype::F32.bytes();
    for transfer in kernel.reads.iter_mut().chain(&mut kernel.writes) {
        let states = STATES.contains(&transfer.name.as_str()) && transfer.bytes == of_chunks;
        if states && transfer.dtype == Dtype::F32 {
            transfer.bytes = of_chunks / Dtype::F32.bytes() * activations.bytes();
            transfer.dtype = activations;
        }
    }
    if kernel.label == Stage::StateScan.name() {
        kernel.implementation.exposed_loads = match granularity {
            Granularity::None => 0.0,
            Granularity::Scalar => 1.0,
            Granularity::Tiles(_) | Granularity::Channel => sizes.key_dim.div_ceil(FLA_TILE) as f64,
        };
    }
    kernel
}

/// With a decay per channel the launch of the WY factors does what the state scan would do before its loop, and writes the keys as the scan takes them, decayed to the end of
/// their chunk. Of the decays the scan reads those at the end of every chunk.
fn decayed_keys(sizes: Sizes, activations: Dtype, launches: &mut [Launch]) {
    let Some(scan) = launches
        .iter_mut()
        .find(|launch| launch.kernel.label == Stage::StateScan.name())
    else {
        return;
    };
    let decays = sizes.batch * sizes.tokens * sizes.value_heads * sizes.key_dim * Dtype::F32.bytes();
    for read in &mut scan.kernel.reads {
        if DECAYS.contains(&read.name.as_str()) && read.bytes == decays {
            read.bytes = decays / sizes.chunk;
        }
    }
    let prepared = scan.kernel.split_preparation();
    let written = Transfer {
        name: "keys decayed to the end of the chunk".into(),
        bytes: sizes.batch * sizes.tokens * sizes.value_heads * sizes.key_dim * activations.bytes(),
        dtype: activations,
        role: Role::Activation,
        columns: None,
    };
    launches
        .iter_mut()
        .filter(|launch| launch.kernel.label == Stage::WyFactors.name())
        .for_each(|launch| {
            launch.kernel.append(prepared.clone());
            launch.kernel.writes.push(written.clone());
        });
}

/// What flash-linear-attention does around a delta rule: queries and keys to unit length, the chunk matrices set to zero. With a decay per channel there are two of those,
/// one of them in f32.
fn around(case: &Case<'_>, sizes: Sizes, by_channel: bool) -> Result<Vec<Launch>, CaseError> {
    let rows = sizes.batch as f64 * sizes.tokens as f64 * sizes.key_heads as f64;
    let keys = rows * sizes.key_dim as f64 * case.bytes() as f64;
    let matrix = sizes.batch as f64 * (sizes.tokens * sizes.value_heads * sizes.chunk) as f64;
    let mut launches = vec![Launch {
        kernel: library::stream("l2norm", "unit length", [keys, keys], case.formats.a)?,
        times: 2,
    }];
    let fill = |dtype: Dtype| {
        let bytes = matrix * dtype.bytes() as f64;
        library::stream("fill", "chunk matrix to zero", [0.0, bytes], dtype).map(Launch::from)
    };
    launches.push(fill(case.formats.a)?);
    if by_channel {
        launches.push(fill(Dtype::F32)?);
    }
    Ok(launches)
}

/// The shipped workload that an operation is named after.
fn shipped_workload(case: &Case<'_>, name: &str) -> Result<Workload, CaseError> {
    if !workload::shipped().contains(&name) {
        return Err(CaseError::Op {
            op: case.op.to_owned(),
            hint: format!(
                "no shipped workload `{name}`; {}",
                suggestion(name, &workload::shipped(), "workloads")
            ),
        });
    }
    workload::load::<&str>(name, &[])
        .map(|(workload, _)| workload)
        .map_err(|error| CaseError::Unsupported(error.to_string()))
}

/// The launches of some groups of a plan of a workload.
fn launches_of(chip: &Chip, workload: &Workload, plan: &Plan) -> Result<Vec<Launch>, CaseError> {
    let kernels = lowered(&workload.layer, plan, chip.architecture == Architecture::Tpu)?;
    Ok(kernels.into_iter().map(Launch::from).collect())
}

/// The plan of a workload that a case names.
fn plan_of(workload: &Workload, name: &str) -> Result<Plan, CaseError> {
    let plan = workload.plans.iter().find(|plan| plan.name == name);
    plan.cloned().ok_or_else(|| CaseError::Value {
        parameter: "plan".to_owned(),
        expected: crate::config::listed(workload.plans.iter().map(|plan| plan.name.as_str())),
        found: name.to_owned(),
    })
}

/// `WORKLOAD_layer_stage`: the row `stage` of the plan `plan`.
fn layer_stage(case: &Case<'_>, name: &str) -> Result<Vec<Launch>, CaseError> {
    let workload = shipped_workload(case, name)?;
    let stage = case.text("stage").unwrap_or_default();
    let plan = plan_of(&workload, case.text("plan").unwrap_or("unfused"))?;
    let mut launches = launches_of(case.chip, &workload, &plan)?;
    let labels = crate::config::listed(launches.iter().map(|launch| launch.kernel.label.as_str()));
    launches.retain(|launch| launch.kernel.label == stage);
    if launches.is_empty() {
        return Err(CaseError::Value {
            parameter: "stage".to_owned(),
            expected: labels,
            found: stage.to_owned(),
        });
    }
    Ok(launches)
}

/// `WORKLOAD_core`: gates to output of a shipped workload. `impl=tokamax` is the two kernels of Tokamax, anything else one kernel with the state on chip.
fn core_kernel(case: &Case<'_>, name: &str) -> Result<Vec<Launch>, CaseError> {
    let workload = shipped_workload(case, name)?;
    let layer = &workload.layer;
    if let Some(pass @ ("backward" | "forward_backward" | "forward_backward_second")) = case.text("pass") {
        return Err(CaseError::Unsupported(format!(
            "`{}` of the {pass} pass: the backward pass of the mechanisms is not built",
            case.op
        )));
    }
    if case.text("regime") == Some("iso_controls") {
        return Err(CaseError::Unsupported(format!(
            "`{}`: the sizes of the regime `iso_controls` are not printed",
            case.op
        )));
    }
    let state = case.text("state");
    if let Some(state) = state.filter(|state| *state != layer.state.name()) {
        return Err(CaseError::Value {
            parameter: "state".to_owned(),
            expected: format!("`{}`, the state of the workload `{name}`", layer.state.name()),
            found: state.to_owned(),
        });
    }
    if case.word("impl", &["one", "maxtext", "tokamax"])? == "tokamax" {
        let sizes = Sizes {
            batch: layer.batch as u64,
            tokens: layer.tokens as u64,
            key_heads: layer.key_heads as u64,
            value_heads: layer.value_heads as u64,
            key_dim: layer.key_dim as u64,
            value_dim: layer.value_dim as u64,
            chunk: layer.chunk as u64,
        };
        let of_call = sizes.layer(layer, case.formats.a)?;
        return on_tpu(case, sizes, of_call, layer.mechanism.uses("inverse"));
    }
    let mut plan = plan_of(&workload, "fused")?;
    plan.groups.retain(|group| group.holds(Stage::StateScan));
    for group in &mut plan.groups {
        group.first = Stage::Gates;
    }
    launches_of(case.chip, &workload, &plan)
}

/// `MECHANISM_decode`.
fn decode(case: &Case<'_>, mechanism: &'static Mechanism) -> Result<Vec<Launch>, CaseError> {
    let sizes = Sizes::of(case)?;
    let state = match case.word("state", &["f32", "bf16"])? {
        "bf16" => Dtype::Bf16,
        _ => Dtype::F32,
    };
    let layer = sizes.layer(usual_layer(mechanism)?, case.formats.a)?;
    let decays = match (mechanism.granularity)(&layer) {
        Granularity::None => 0,
        Granularity::Scalar => 1,
        Granularity::Tiles(tiles) => tiles as u64,
        Granularity::Channel => sizes.key_dim,
    };
    let form = (!case.tpu()).then(|| DecodeForm::of(mechanism, &layer));
    let implementation = Implementation {
        tile_columns: form.map(|form| form.columns),
        ..Implementation::default()
    };
    let mut kernel = library::decode(
        case.chip,
        Recurrent {
            tokens: sizes.batch * sizes.tokens,
            key_heads: sizes.key_heads,
            value_heads: sizes.value_heads,
            key_dim: sizes.key_dim,
            value_dim: sizes.value_dim,
            decays,
            state,
            states_per_program: if case.tpu() { sizes.value_heads } else { 1 },
        },
        case.formats.a,
        implementation,
    )?;
    let outputs = (sizes.batch * sizes.tokens * sizes.value_heads * sizes.value_dim) as f64;
    let output = outputs * case.bytes() as f64;
    let Some(form) = form else {
        return Ok(vec![kernel.into()]);
    };
    let mut launches = Vec::new();
    if form.zeroed_output {
        launches.push(library::stream("fill", "output to zero", [0.0, output], case.formats.a)?.into());
    }
    let Some(rows) = form.key_rows else {
        launches.push(kernel.into());
        return Ok(launches);
    };
    // Every tile of key channels has its own sum of the output, in f32; two small kernels add and round them.
    let sums = outputs * 4.0;
    let parts = sizes.key_dim.div_ceil(rows) as f64;
    kernel.writes.push(Transfer {
        name: "sums of the output".into(),
        bytes: (parts * sums) as u64,
        dtype: Dtype::F32,
        role: Role::Activation,
        columns: None,
    });
    launches.push(kernel.into());
    launches.push(
        library::stream(
            "sum",
            "output over the key tiles",
            [parts * sums, sums],
            Dtype::F32,
        )?
        .into(),
    );
    launches.push(library::stream("round", "output", [sums, output], case.formats.a)?.into());
    Ok(launches)
}

/// Which step of a decode with a log an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LogStep {
    Eager,
    Average,
    Append,
    AppendMerge,
    Merge,
}

/// Mechanism and step of an operation such as `gdn_decode_deltalog_append`.
fn log_step(op: &str) -> Option<(&str, LogStep)> {
    [
        ("_decode_eager", LogStep::Eager),
        ("_decode_deltalog", LogStep::Average),
        ("_decode_deltalog_append", LogStep::Append),
        ("_decode_deltalog_append_merge", LogStep::AppendMerge),
        ("_decode_deltalog_merge", LogStep::Merge),
    ]
    .into_iter()
    .find_map(|(tail, step)| Some((op.strip_suffix(tail)?, step)))
}

/// `MECHANISM_decode_eager` and `MECHANISM_decode_deltalog..`: the core of a decode step from its graph.
fn decode_with_log(
    case: &Case<'_>,
    mechanism: &'static Mechanism,
    step: LogStep,
) -> Result<Vec<Launch>, CaseError> {
    let sizes = Sizes::of(case)?;
    if sizes.tokens != 1 {
        return Err(CaseError::Value {
            parameter: "T".to_owned(),
            expected: "`1`, a token of every sequence".to_owned(),
            found: sizes.tokens.to_string(),
        });
    }
    if !mechanism.uses("log_interval") {
        return Err(CaseError::Unsupported(format!(
            "`{}`: no log of updates for `{}`",
            case.op, mechanism.name
        )));
    }
    case.word("state", &["f32"])?;
    let layer = Layer {
        pass: Pass::Decode,
        tokens: 1,
        chunk: 1,
        initial_state: InitialState::Given,
        state_products: StateProducts::Vector,
        // The kernels read prediction and output in one pass.
        readout: Readout::BeforeUpdate,
        log: None,
        ..sizes.layer(usual_layer(mechanism)?, case.formats.a)?
    };
    let mut log = DeltaLog {
        interval: 1,
        keys: Dtype::F32,
        updates: Dtype::F32,
        merge: Merge::Fused,
        position: 0,
    };
    let steps = |name: &str, least: u64| -> Result<usize, CaseError> {
        let steps = match least {
            0 => case.count(name)?,
            _ => case.size(name)?,
        };
        if steps > LONGEST_LOG {
            return Err(CaseError::TooLarge(format!("{name} = {steps}")));
        }
        Ok(steps as usize)
    };
    let mut replay = Replay::Whole;
    if step != LogStep::Eager {
        if case.text("log").is_none() {
            return Err(CaseError::Missing {
                op: case.op.to_owned(),
                parameter: "log".to_owned(),
            });
        }
        [log.keys, log.updates] = match case.word("log", &["f32", "bf16", "bf16xf32"])? {
            "bf16" => [Dtype::Bf16; 2],
            "bf16xf32" => [Dtype::Bf16, Dtype::F32],
            _ => [Dtype::F32; 2],
        };
        log.interval = steps("M", 1)?;
        if let Some(programs) = case.optional("split")? {
            replay = Replay::Split(programs.min(sizes.value_dim));
        }
    }
    let launched = match step {
        LogStep::Average => {
            if case.word("merge", &["fused", "separate"])? == "separate" {
                log.merge = Merge::Separate;
            }
            delta_log::launches_of_interval(&layer, log, replay, case.chip.architecture)
        }
        LogStep::Eager => delta_log::launches_of_step(&layer, log, Step::Eager, replay, case.chip),
        LogStep::Append => {
            let step = Step::Append(steps("length", 0)?);
            delta_log::launches_of_step(&layer, log, step, replay, case.chip)
        }
        LogStep::AppendMerge => {
            let step = Step::AppendMerge(steps("length", 0)?);
            delta_log::launches_of_step(&layer, log, step, replay, case.chip)
        }
        LogStep::Merge => {
            let step = Step::Merge(steps("length", 1)?);
            delta_log::launches_of_step(&layer, log, step, replay, case.chip)
        }
    };
    let launches =
        launched.map_err(|error| CaseError::Unsupported(format!("cannot build the graph: {error}")))?;
    Ok(launches.into_iter().map(Launch::from).collect())
}

/// How a decode kernel of flash-linear-attention cuts a state into programs. Source: its code.
#[derive(Debug, Clone, Copy)]
struct DecodeForm {
    /// Value columns of a program.
    columns: u64,
    /// Key channels of a program where those are split too.
    key_rows: Option<u64>,
    /// Whether a launch sets the output to zero first.
    zeroed_output: bool,
}

impl DecodeForm {
    fn of(mechanism: &Mechanism, layer: &Layer) -> Self {
        let by_channel = (mechanism.granularity)(layer) == Granularity::Channel;
        let (columns, key_rows) = match (mechanism.uses("inverse"), by_channel) {
            (true, false) => (8, None),
            (true, true) => (32, None),
            (false, true) => (32, Some(32)),
            (false, false) => (64, Some(64)),
        };
        DecodeForm {
            columns: columns.min(layer.value_dim as u64),
            key_rows: key_rows.map(|rows: u64| rows.min(layer.key_dim as u64)),
            zeroed_output: mechanism.uses("inverse") && by_channel,
        }
    }
}

/// `gdn_fused`: convolution and GDN in one TPU kernel; decoding where there are as many tokens as sequences, else chunks of every sequence. Around
/// it some small kernels.
fn fused(case: &Case<'_>) -> Result<Vec<Launch>, CaseError> {
    if !case.tpu() {
        return Err(CaseError::Unsupported("`gdn_fused` runs on TPUs only".to_owned()));
    }
    let (tokens, slots) = (case.size("tokens")?, case.size("seqs")?);
    let (key_heads, value_heads) = (case.size("Hk")?, case.size("Hv")?);
    let (key_dim, value_dim) = (case.size("dk")?, case.size("dv")?);
    let conv = case.size("conv")?;
    let decode_tile = case.optional("decode_tile_size")?.unwrap_or(16);
    let mixed_tile = case.optional("mixed_tile_size")?.unwrap_or(CHUNK);
    let mut launches = vec![Launch {
        kernel: library::stream(
            "around",
            "small kernels around the fused one",
            [4096.0, 4096.0],
            Dtype::F32,
        )?,
        times: FUSED_WRAPPER_KERNELS,
    }];
    // Implementations that only differ in what surrounds the kernel.
    case.word("impl", &["after", "before"])?;
    let lengths = lengths(case, tokens, slots)?;
    let decoded: u64 = lengths
        .iter()
        .filter(|(length, _)| *length == 1)
        .map(|(_, count)| count)
        .sum();
    if decoded > 0 {
        let tile = decode_tile.min(decoded);
        let (per_sequence, per_head) = (
            case.coefficient(Coefficient::DecodeSequence),
            case.coefficient(Coefficient::DecodeHead),
        );
        let kernel = library::decode(
            case.chip,
            Recurrent {
                tokens: decoded,
                key_heads,
                value_heads,
                key_dim,
                value_dim,
                decays: 1,
                state: Dtype::F32,
                states_per_program: tile.saturating_mul(value_heads),
            },
            case.formats.a,
            Implementation {
                program_cycles: tile as f64 * (per_sequence + per_head * value_heads as f64),
                // A tile of states is fetched, updated and stored before the next one is touched: measured times are the sum.
                serial_transfers: true,
                ..Implementation::default()
            },
        )?;
        launches.push(kernel.into());
    }
    let chunk = mixed_tile.min(FUSED_CHUNKS[usize::from(value_heads >= 64)]);
    for (length, count) in lengths.into_iter().filter(|(length, _)| *length > 1) {
        // Whole chunks, and what is left of the sequence in a chunk of as many blocks of rows as it needs.
        let whole = length / chunk * chunk;
        let rest = length - whole;
        let mut around = case.coefficient(Coefficient::PrefillSequence);
        for (tokens, chunk) in [(whole, chunk), (rest, rest.next_multiple_of(FUSED_BLOCK))] {
            if tokens == 0 {
                continue;
            }
            let sizes = Sizes {
                batch: count,
                tokens,
                key_heads,
                value_heads,
                key_dim,
                value_dim,
                chunk,
            };
            let mut layer = sizes.layer(usual_layer(mechanism(case.op, "gdn")?)?, case.formats.a)?;
            layer.initial_state = InitialState::Given;
            layer.conv_width = conv.min(length) as usize;
            let program = Program {
                heads: value_heads.min(FUSED_HEADS),
                chunks: 1,
            };
            let core = |group: &Group| group.holds(Stage::StateScan);
            let mut kernels = kernels(case.chip, &layer, "fused", program, core)?;
            for kernel in &mut kernels {
                // Nothing of a sequence is fetched before the one before it is done, and its states leave before the next begins.
                let programs = value_heads.div_ceil(program.heads) * kernel.grid.sequential;
                kernel.implementation.program_cycles = around / programs.max(1) as f64;
            }
            around = 0.0;
            launches.extend(kernels.into_iter().map(Launch::from));
        }
    }
    Ok(launches)
}

/// Lengths of the sequences of a call with how many there are of each: as `lengths=32x1+2x512` says, else equal as far as they can be.
fn lengths(case: &Case<'_>, tokens: u64, slots: u64) -> Result<Vec<(u64, u64)>, CaseError> {
    let Some(text) = case.text("lengths") else {
        let sequences = slots.min(tokens);
        return Ok(vec![(tokens.div_ceil(sequences), sequences)]);
    };
    let wrong = || CaseError::Value {
        parameter: "lengths".to_owned(),
        expected: format!(
            "counts and lengths such as `32x1+2x512` that add up to {tokens} tokens in {slots} sequences"
        ),
        found: text.to_owned(),
    };
    let parts: Option<Vec<(u64, u64)>> = text
        .split('+')
        .map(|part| {
            let (count, length) = part.split_once('x').unwrap_or(("1", part));
            let number = |text: &str| {
                text.parse::<u64>()
                    .ok()
                    .filter(|n| (1..=LARGEST_EXTENT).contains(n))
            };
            Some((number(length)?, number(count)?))
        })
        .collect();
    let parts = parts.ok_or_else(wrong)?;
    let sum: u64 = parts.iter().map(|(length, count)| length * count).sum();
    let count: u64 = parts.iter().map(|(_, count)| count).sum();
    if sum == tokens && count == slots {
        Ok(parts)
    } else {
        Err(wrong())
    }
}
