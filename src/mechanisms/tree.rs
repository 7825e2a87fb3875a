//! Verification of a tree of speculated tokens: a chunk of the delta rule in which "earlier" means "on the path from the root".
//!
//! Tokens stand parents first, so what a token depends on stands before it and the matrix to invert stays lower triangular. In the chunk form of
//! `delta_rule`
//!
//! ```text
//! G_i    the sum of the log decays on the path to i, in place of the sum of all before it
//! A, P   kept where j is a proper ancestor of i (A), an ancestor or i itself (P), in place of j < i and j <= i
//! U = T Y - T (R . e^Gr) S          O = (Q . e^G) S + P U
//! ```
//!
//! Sums over paths take `log2 depth` steps: `G <- G + G of the ancestor 2^k above`, and likewise rows of the identity become rows of ancestors. The state is
//! read and not written, since nobody knows yet which path will be taken. Afterwards a launch of its own commits the accepted path `p` that ends in `a`:
//! `S' = e^G_a S + (X_p . e^(G_a - G_p))^T U_p`, and moves the convolution state to the end of it.

use std::sync::Arc;

use super::decode::stored_state;
use super::delta_rule::{Factors, decayed};
use super::gram::{self, Columns, Decays, Operands, Rows, expand};
use super::state::{decode_state, encode_state, state_operand};
use super::{Core, DeltaRuleInputs, GramExponent, Granularity, Recurrence, append_inverse};
use crate::dtype::Dtype;
use crate::graph::{Builder, Function, Precision, RowRun, Stage, Value};
use crate::layer::{DecayGate, GramVariant, Layer, ReadConvention};
use crate::tree::Tree;

/// Exponent where a token is no ancestor: `exp` of it is zero in every format, and it is finite.
const UNRELATED: f64 = 1e30;

/// Gram variants of a verification, the usual one first: those whose exponents a path bounds.
#[must_use]
pub fn gram_variants(granularity: Granularity) -> &'static [GramVariant] {
    match granularity {
        Granularity::None | Granularity::Scalar => &[GramVariant::ScalarMask],
        Granularity::Tiles(_) => &[
            GramVariant::Folded,
            GramVariant::TileMasks,
            GramVariant::Broadcast,
        ],
        Granularity::Channel => &[GramVariant::Broadcast, GramVariant::Folded],
    }
}

/// Appends stages op3 (decay along the paths) to op7a and the commit, and declares the outputs `o`, `state` and `state_scale`.
pub(super) fn append(b: &mut Builder, layer: &Layer, tree: &Tree, inputs: DeltaRuleInputs) -> Core {
    let act = layer.activations;

    b.stage(Stage::Gates);
    let decays = inputs.log_decay.map(|log_decay| {
        let cumulative = along_paths(b, "G", log_decay, 4, tree);
        let read_cumulative = match inputs.read {
            ReadConvention::Decayed => cumulative,
            ReadConvention::Undecayed => b.subtract("Gx", cumulative, log_decay),
        };
        Decays {
            cumulative,
            read_cumulative,
            query_cumulative: cumulative,
        }
    });

    b.stage(Stage::Gram);
    let (a, p) = grams(b, layer, tree, &inputs, decays);
    let p = b.cast("P_operand", p, act);

    b.stage(Stage::Inverse);
    let t = append_inverse(b, layer.inverse, layer.inverse_precision, layer.neumann_steps, a);

    b.stage(Stage::WyFactors);
    let factors = Factors::append(b, layer, &inputs, (decays, None), t);

    b.stage(Stage::StateScan);
    let value = b.dims(inputs.value);
    let shared = inputs.log_decay.map_or(1, |decay| b.dims(decay)[2]);
    let shared = inputs.step.map_or(shared, |step| shared.max(b.dims(step)[2]));
    let dims = [value[0], value[1], value[2].max(shared), layer.key_dim, value[5]];
    let stored = stored_state(b, layer, &dims);
    let given = decode_state(b, layer.state, &stored);
    let operand = state_operand(b, layer, given, &stored);
    let mut in_core = dims.to_vec();
    in_core.insert(3, 1);
    let operand = b.reshape("S_core", operand, in_core.clone());
    let u = factors.update(b, layer, operand);

    b.stage(Stage::Output);
    let q = decayed(b, "Q", inputs.query, "e^G", decays.map(|d| d.query_cumulative));
    let q = b.cast("Q_operand", q, act);
    let inter = b.matmul("Q S", q, operand, layer.state_precision);
    let intra = b.matmul("P U", p, u, Precision::Default);
    let o = b.add("O", inter, intra);
    let o = b.cast("O_rounded", o, act);
    b.output("o", o);

    b.stage(Stage::Commit);
    let path = runs(tree.path(tree.accepted()).into_iter().map(Some));
    let on_path = |b: &mut Builder, name: &str, value: Value| b.gather_rows(name, value, 4, &path);
    let (x, u) = (on_path(b, "X_path", inputs.write_key), on_path(b, "U_path", u));
    let end = decays.map(|d| b.slice("G_accepted", d.cumulative, 4, tree.accepted(), 1));
    let tail = decays.zip(end).map(|(d, end)| {
        let path = on_path(b, "G_path", d.cumulative);
        b.subtract("G_accepted - G", end, path)
    });
    let x = decayed(b, "X", x, "e^(G_accepted - G)", tail);
    let x = b.cast("X_operand", x, act);
    let update = b.matmul_at("X^T U", x, u, Precision::Default);
    // Read again, in the format it is stored in.
    let s = decode_state(b, layer.state, &stored);
    let s = b.cast("S_f32", s, Dtype::F32);
    let s = b.reshape("S_f32_core", s, in_core);
    let s = match end {
        Some(end) => {
            let decay = b.exp("e^G_accepted", end);
            let decay = expand(b, "e^G_accepted", decay, layer.key_dim);
            let decay = if b.shape(decay).from_end(0) == 1 {
                decay
            } else {
                b.transpose_minor("e^G_accepted_rows", decay)
            };
            b.multiply("D S", s, decay)
        }
        None => s,
    };
    let next = b.add("S'", s, update);
    let next = b.reshape("S'_state", next, dims);
    let encoded = encode_state(b, layer.state, next);
    for (name, &part) in super::decode::STATE.iter().zip(&encoded) {
        b.output(name, part);
    }

    Core {
        recurrence: Recurrence::DeltaRule(inputs),
        value: inputs.value,
        log_decay: inputs.log_decay,
        initial_state: Some(given),
        output: o,
        final_state: Some(encoded[0]),
        gram_exponent: (decays.is_some() && layer.gram == GramVariant::Folded).then(|| GramExponent {
            // From the pivot, a token of the tree, up to the root and down another path.
            rows: tree.depth(),
            largest_decay: match layer.decay_gate {
                DecayGate::Bounded => -layer.decay_bound,
                DecayGate::Softplus => f64::INFINITY,
            },
        }),
    }
}

/// `A = step . (read, write)` of proper ancestors and `P = (query, write)` of ancestors and the token itself, f32.
fn grams(
    b: &mut Builder,
    layer: &Layer,
    tree: &Tree,
    inputs: &DeltaRuleInputs,
    decays: Option<Decays>,
) -> (Value, Value) {
    let identity = b.identity("I_tree", tree.nodes(), Dtype::F32);
    let related = along_paths(b, "ancestors", identity, 0, tree);
    let (p, a) = match decays {
        None => {
            let read = b.cast("R_rounded", inputs.read_key, layer.activations);
            (
                b.matmul_bt("Q X^T", inputs.query, inputs.write_key, Precision::Default),
                b.matmul_bt("R X^T", read, inputs.write_key, Precision::Default),
            )
        }
        Some(decays) => {
            // 0 where related, far below every exponent where not.
            let bound = b.map("unrelated", Function::AddConstant(-1.0), related);
            let bound = b.scale("largest_exponent", bound, UNRELATED);
            let rows = [
                Rows {
                    name: "Q",
                    operand: inputs.query,
                    cumulative: decays.query_cumulative,
                },
                Rows {
                    name: "R",
                    operand: inputs.read_key,
                    cumulative: decays.read_cumulative,
                },
            ];
            let columns = [Columns {
                name: "X",
                operand: inputs.write_key,
            }];
            let operands = Operands {
                rows: &rows,
                columns: &columns,
                cumulative: decays.cumulative,
                bound: Some(bound),
            };
            let grams = gram::all(b, layer.gram, layer.pivot, layer.activations, operands);
            (grams[0], grams[1])
        }
    };
    let p = b.multiply("P_tree", p, related);
    let proper = b.subtract("proper_ancestors", related, identity);
    let a = b.multiply("A_tree", a, proper);
    let a = match inputs.step {
        Some(step) => b.multiply("A", a, step),
        None => a,
    };
    (a, p)
}

/// Sums of the rows of dimension `axis`, one per token, over the path that leads to each.
fn along_paths(b: &mut Builder, name: &str, rows: Value, axis: usize, tree: &Tree) -> Value {
    let mut sum = rows;
    let mut above = 1;
    while above < tree.depth() {
        // Sums over the last `above` tokens of a path, twice as many with those of the token that many before.
        let earlier = runs((0..tree.nodes()).map(|node| tree.before(node, above).ok()));
        let earlier = b.gather_rows(&format!("{name}_above_{above}"), sum, axis, &earlier);
        above *= 2;
        sum = b.add(&format!("{name}_last_{above}"), sum, earlier);
    }
    sum
}

/// Rows of a gather, one for each source, zeros where there is none.
pub(super) fn runs(sources: impl Iterator<Item = Option<usize>>) -> Arc<[RowRun]> {
    let mut runs: Vec<RowRun> = Vec::new();
    for source in sources {
        match (runs.last_mut(), source) {
            (
                Some(RowRun {
                    from: Some(from),
                    rows,
                }),
                Some(source),
            ) if *from + *rows == source => *rows += 1,
            (Some(RowRun { from: None, rows }), None) => *rows += 1,
            _ => runs.push(RowRun {
                from: source,
                rows: 1,
            }),
        }
    }
    runs.into()
}
