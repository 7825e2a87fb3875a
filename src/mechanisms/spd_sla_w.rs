//! SPD-SLA-W: SLA whose write keys are whitened by the covariance of past keys.
//!
//! The SLA paper names it, calls its Gram oblique and its step size clamped, and lists solvers; it prints no formula. All of this is our reading:
//!
//! ```text
//! C_0 = I,  C_{c+1} = rho C_c + K_c^T K_c      per key head, K_c the keys of chunk c
//! x = k P_c                                    P_c from C_c alone, so from past chunks
//! beta' = min(beta, LIMIT / (x . k))           so that the eigenvalue 1 - beta' x . k stays above -1
//! S~ = D S,  u = beta' (v - k S~),  S = S~ + x^T u,  o = q S
//! ```
//!
//! `I - beta x^T k` is an oblique projector for `beta x . k = 1`: it removes what `k` reads along another direction `x`. Chunks depend
//! on each other through the covariance only, a scan with one `dk x C x dk` product per chunk; the solvers of all chunks are independent.
//! Every `whitening_refresh` chunks of a sequence share the whitening of their first.
//!
//! A decode step whitens its key with the matrix `P` that the last complete chunk left, which is stored as a state, and leaves its key for the covariance of
//! the chunk that it belongs to. When that chunk is complete, covariance and `P` are made anew in a launch that is no part of the step (`tpusim whitening`
//! has its cost).

use std::sync::Arc;

use super::decode::{Key, products};
use super::whitening::append_whitened;
use super::{Core, Mechanism, fields, sla};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Init, Precision, Role, RowRun, Stage, Value};
use crate::layer::{Layer, Pass, StateProducts, WhiteningSolver};

pub(super) const MECHANISM: Mechanism = Mechanism {
    name: "spd_sla_w",
    title: "SPD-SLA-W",
    source: "Systolic Linear Attention paper, 2026: the name; formulas are our reading",
    packed: true,
    granularity: sla::granularity,
    fields: &[
        fields::COMMON,
        fields::PACKED,
        fields::DECODE,
        fields::GRAM,
        fields::DECAY,
        fields::TILES,
        fields::DELTA,
        fields::WHITENING,
    ],
    defaults: sla::MECHANISM.defaults,
    append,
};

/// Share of the covariance that a chunk leaves of the one before.
const RHO: f64 = 0.9;
/// Largest `beta (x . k)`: the bf16 number below 2.
const STEP_LIMIT: f64 = 2.0 - 1.0 / 128.0;
/// Smallest `x . k` that clamps: below it (a padded row, an indefinite whitening) the step size is in no danger.
const OVERLAP_FLOOR: f64 = 1e-6;

fn append(b: &mut Builder, layer: &Layer) -> Core {
    sla::append_with(b, layer, write_keys)
}

/// Whitened keys in the format of activations, and clamped step sizes.
fn write_keys(b: &mut Builder, layer: &Layer, key: Value, step: Value) -> (Value, Value) {
    b.stage(Stage::Whitening);
    let write = match (layer.pass, layer.whitening) {
        (_, WhiteningSolver::None) => key,
        (Pass::Forward | Pass::Verify, _) => whitened(b, layer, key),
        (Pass::Decode, _) => whitened_token(b, layer, key),
    };
    let write = b.cast("X_rounded", write, layer.activations);

    b.stage(Stage::Gates);
    let x = b.cast("X_f32", write, Dtype::F32);
    let k = b.cast("K_f32", key, Dtype::F32);
    let overlap = b.multiply("x k", x, k);
    let overlap = b.sum_minor("x.k", overlap);
    let overlap = b.map("x.k_floor", Function::MaximumConstant(OVERLAP_FLOOR), overlap);
    let limit = b.map("1/x.k", Function::Reciprocal, overlap);
    let limit = b.scale("beta_limit", limit, STEP_LIMIT);
    let step = b.zip("beta_clamped", Function::Minimum, step, limit);
    (write, step)
}

/// The key of a token `[B, Hk, 1, 1, 1, dk]` times the stored whitening `[B, Hk, 1, dk, dk]`. The output `chunk_key` is what the chunk keeps of the token.
fn whitened_token(b: &mut Builder, layer: &Layer, key: Value) -> Value {
    let n = layer.key_dim;
    b.output("chunk_key", key);
    let whitening = b.input(
        "whitening",
        [layer.batch, layer.key_heads, 1, n, n],
        Dtype::F32,
        Role::State,
        Init::Normal {
            std: (n as f64).sqrt().recip(),
        },
    );
    let vectors = layer.state_products == StateProducts::Vector;
    let row = Key::new(b, "k_whitened", key, vectors);
    let write = products(b, layer, "k P", &[row], whitening)[0];
    let dims = b.dims(key);
    b.reshape("k P_core", write, dims)
}

fn whitened(b: &mut Builder, layer: &Layer, key: Value) -> Value {
    let (heads, n) = ([layer.batch, layer.key_heads, 1], layer.key_dim);
    let shape = |rest: &[usize]| -> Vec<usize> { heads.iter().chain(rest).copied().collect() };
    let states = [layer.states(), layer.key_heads, 1, n, n];
    let zero = b.fill("zeros", states, Dtype::F32, 0.0);
    let identity = b.identity("I", n, Dtype::F32);
    let initial = b.add("C_0", zero, identity);
    let first_chunks = layer.first_chunks();
    let step = |b: &mut Builder, carry: &[Value], slice: &[Value], _: &[Value]| {
        // Products of bf16 keys are exact in f32, so one pass is.
        let gram = b.matmul_at("K^T K", slice[0], slice[0], Precision::Default);
        let kept = b.scale("rho C", carry[0], RHO);
        (vec![b.add("C'", kept, gram)], vec![carry[0]])
    };
    let (_, stacks) = b.segmented_scan("C", 3, &first_chunks, &[initial], &[key], &[], step);

    // Blocks of chunks that share a whitening, the last one of every sequence padded.
    let (chunks, every) = (layer.chunks(), layer.whitening_refresh.min(layer.chunks()));
    let (mut padding, mut back, mut blocks) = (Vec::new(), Vec::new(), 0);
    let ends = first_chunks.iter().skip(1).chain([&chunks]);
    for (&first, &end) in first_chunks.iter().zip(ends) {
        let (rows, of_sequence) = (end - first, (end - first).div_ceil(every));
        let run = |from: Option<usize>, rows: usize| RowRun { from, rows };
        padding.push(run(Some(first), rows));
        padding.push(run(None, of_sequence * every - rows));
        back.push(run(Some(blocks * every), rows));
        blocks += of_sequence;
    }
    padding.retain(|run| run.rows > 0);
    let (padding, back): (Arc<[RowRun]>, Arc<[RowRun]>) = (padding.into(), back.into());
    let grouped = |b: &mut Builder, name: &str, value: Value, rows: usize| {
        let padded = b.gather_rows(&format!("{name}_padded"), value, 3, &padding);
        b.reshape(
            &format!("{name}_blocks"),
            padded,
            shape(&[blocks, every * rows, n]),
        )
    };
    let covariance = grouped(b, "C", stacks[0], n);
    let covariance = b.slice("C_first", covariance, 4, 0, n);
    let keys = grouped(b, "K", key, layer.chunk);
    let write = append_whitened(b, layer.whitening, layer.whitening_precision, covariance, keys);
    let write = b.reshape("X_chunks", write, shape(&[blocks * every, layer.chunk, n]));
    b.gather_rows("X", write, 3, &back)
}
