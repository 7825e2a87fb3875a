//! Recurrences token by token: decoding, and XLA's loop over the tokens of a prefill.

use super::body::{Body, Cost, copy};
use super::case::{Case, CaseError, size};
use super::{Family, Launch};
use crate::coefficients::Coefficient;
use crate::dtype::Dtype;
use crate::hardware::Chip;
use crate::kernels::{Implementation, Kernel};

pub(super) const FAMILY: Family = Family {
    ops: &["gdn_recurrent_xla"],
    build,
};

/// Kernels of one iteration of XLA's loop over tokens on a TPU: slices of the operands, the two products with the state, its update, the update of the output. Source: 5 us a token of one sequence on v6e, before the traffic of its states, at 0.5 us per kernel.
const KERNELS_PER_TOKEN: u64 = 10;
/// Kernels that an iteration has beside them where there are several sequences: whose token it is, and at the first and last of a sequence its states from all states and back.
/// Source: calls of v6e that take 10 us a token instead of 5, before the traffic of their states.
const KERNELS_PER_SEARCH: u64 = 9;

/// The same on a GPU, where more of it is one fusion. Source: 14 to 15 us per token of a long sequence on H100 whatever the number of heads.
const GPU_KERNELS_PER_TOKEN: u64 = 5;
/// Copies that XLA on a GPU makes of the state of a sequence where its tokens begin and end, and the states of all slots in a call. Source: H100 decodes
/// with 8, 32 and 64 heads, and calls with far more slots than sequences.
const GPU_STATE_COPIES: [u64; 2] = [3, 4];

/// Sizes of a recurrent state and of the tokens that update it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recurrent {
    /// Tokens, one per sequence.
    pub tokens: u64,
    /// Key heads.
    pub key_heads: u64,
    /// Value heads, one state each.
    pub value_heads: u64,
    /// Channels of a key.
    pub key_dim: u64,
    /// Channels of a value.
    pub value_dim: u64,
    /// Channels of the decay of a head.
    pub decays: u64,
    /// Format of the state in device memory.
    pub state: Dtype,
    /// States a program works on side by side.
    pub states_per_program: u64,
}

/// One token for every sequence: each state is read, decayed, corrected, read out and written back. Bound by device memory wherever the vector unit keeps up.
///
/// # Errors
/// Where the counts are too large.
pub fn decode(
    chip: &Chip,
    r: Recurrent,
    activations: Dtype,
    implementation: Implementation,
) -> Result<Kernel, CaseError> {
    let state_ops = chip.coefficient(Coefficient::StateOps);
    let states = size(&[r.tokens, r.value_heads])?;
    let state_bytes = size(&[states, r.key_dim, r.value_dim, r.state.bytes()])? as f64;
    let operands = size(&[
        r.tokens,
        2 * r.key_heads * r.key_dim + r.value_heads * r.value_dim,
    ])? as f64
        * activations.bytes() as f64;
    let gates = size(&[r.tokens, r.value_heads, r.decays + 1])? as f64 * 4.0;
    let mut body = Body::new("decode", "one token per sequence", states, 1)
        .units(r.states_per_program)
        .row_reduction(
            "S~, k S~, S, q S",
            &[r.key_dim, r.value_dim],
            Cost::alu(state_ops),
            r.key_dim,
            states,
        )
        .read("states", state_bytes, r.state)
        .read("queries, keys, values", operands, activations)
        .read("gates", gates, Dtype::F32)
        .write("states", state_bytes, r.state)
        .write(
            "output",
            size(&[states, r.value_dim, activations.bytes()])? as f64,
            activations,
        );
    body.implementation = implementation;
    body.finish()
}

fn build(case: &Case<'_>) -> Result<Vec<Launch>, CaseError> {
    let (tokens, slots) = (case.size("tokens")?, case.size("seqs")?);
    let (key_heads, value_heads) = (case.size("Hk")?, case.size("Hv")?);
    let (key_dim, value_dim) = (case.size("dk")?, case.size("dv")?);
    case.size("conv")?;
    let state = size(&[value_heads, key_dim, value_dim, Dtype::F32.bytes()])? as f64;
    let operands = (2 * key_heads * key_dim + value_heads * value_dim) * case.bytes();
    let part = |title: &str| {
        Body::streaming("token", title)
            .read("operands", operands as f64, case.formats.a)
            .write(
                "result",
                (value_heads * value_dim * case.bytes()) as f64,
                case.formats.a,
            )
    };
    let update = |body: Body, kernels: u64| {
        body.vector(
            "update",
            &[value_heads, key_dim, value_dim],
            Cost::alu(case.coefficient(Coefficient::StateOps) / kernels as f64),
            1,
        )
    };
    let launch = |kernel: Kernel, times: u64| -> Result<Launch, CaseError> {
        Ok(Launch {
            kernel,
            times: size(&[tokens, times])?,
        })
    };
    if !case.tpu() {
        // The states are too small to leave the chip between the kernels of an iteration; each kernel works on a part of the update.
        let kernel = update(part("a part of the update of one token"), GPU_KERNELS_PER_TOKEN).finish()?;
        let [of_sequence, of_call] = GPU_STATE_COPIES;
        return Ok(vec![
            launch(kernel, GPU_KERNELS_PER_TOKEN)?,
            Launch {
                kernel: copy(
                    "state of a sequence taken out and put back",
                    state * of_sequence as f64,
                    Dtype::F32,
                )?,
                times: slots.min(tokens),
            },
            Launch {
                kernel: copy("states of all slots", state * slots as f64, Dtype::F32)?,
                times: of_call,
            },
        ]);
    }
    // A loop hands its states from one iteration to the next through device memory.
    let cycles = case.coefficient(Coefficient::LoopKernel)
        * 1e-6
        * case.chip.clock().get()
        * f64::from(case.chip.cores_per_device.saturating_sub(1));
    let carried = |body: Body| {
        body.read("states", state, Dtype::F32)
            .write("states", state, Dtype::F32)
    };
    let looped = |mut kernel: Kernel| {
        kernel.streams = false;
        kernel.implementation.program_cycles = cycles;
        kernel
    };
    let first = carried(update(part("update of the states"), 1)).finish()?;
    let rest = part("another part of the update of one token").finish()?;
    let mut launches = vec![
        launch(looped(first), 1)?,
        launch(looped(rest.clone()), KERNELS_PER_TOKEN - 1)?,
    ];
    if slots > 1 {
        let gather = carried(Body::streaming(
            "token",
            "states of a sequence, taken and put back",
        ))
        .finish()?;
        launches.push(Launch {
            kernel: looped(gather),
            times: slots.min(tokens),
        });
        launches.push(launch(looped(rest), KERNELS_PER_SEARCH)?);
    }
    Ok(launches)
}
