//! Op graphs of what stands around the mixers of a model: residual addition with its norm, gated feed-forward network, mixture of experts, scores of the vocabulary.
//!
//! Like a mechanism, each is written once; numerics and timing read the same graph. Rows are the tokens of all sequences together.

use std::sync::Arc;

use super::{Experts, Scores};
use crate::dtype::Dtype;
use crate::graph::{
    BuildError, Builder, Function, Graph, Init, Precision, ReduceFunction, Role, RowRun, Stage, Value,
};

/// Epsilon of the RMS norms (1e-6 in Qwen3-Next, 1e-5 in Kimi Linear).
const EPSILON: f64 = 1e-6;
/// Product with the difference of a score to the largest that leaves 0 for the largest itself and less than -1 for any other f32 score.
const STEEP: f64 = 1e30;
/// What is taken from a score that has been chosen: more than any score and bias.
const CHOSEN: f64 = 1e3;

/// Formats of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockFormats {
    /// Activations.
    pub activations: Dtype,
    /// Weight matrices, those of the router apart, which has the format of the activations.
    pub weights: Dtype,
}

/// Which rows go to which expert, as runs of rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// Experts that have rows, or all of them.
    pub groups: usize,
    /// Rows of every expert in the graph: those of the fullest one, zeros where another has fewer.
    pub rows: usize,
    /// Rows of the experts one after the other, by token.
    dispatch: Arc<[RowRun]>,
    /// Row of every token and choice, by padded row of the experts.
    combine: Arc<[RowRun]>,
    /// Score of every token and choice, by `token * experts + expert`.
    scores: Arc<[RowRun]>,
}

impl Routing {
    /// The choices of every token, each the number of an expert below `experts`; every token has as many.
    #[must_use]
    pub fn of(choices: &[Vec<usize>], experts: usize) -> Self {
        let mut of_expert: Vec<Vec<usize>> = vec![Vec::new(); experts];
        let mut places = Vec::new();
        for (token, chosen) in choices.iter().enumerate() {
            for &expert in chosen {
                if let Some(rows) = of_expert.get_mut(expert) {
                    places.push((expert, rows.len()));
                    rows.push(token);
                }
            }
        }
        let rows = of_expert.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let one = |from: usize| RowRun {
            from: Some(from),
            rows: 1,
        };
        let mut dispatch = Vec::new();
        for tokens in &of_expert {
            dispatch.extend(tokens.iter().copied().map(one));
            if tokens.len() < rows {
                dispatch.push(RowRun {
                    from: None,
                    rows: rows - tokens.len(),
                });
            }
        }
        let scores = choices
            .iter()
            .enumerate()
            .flat_map(|(token, chosen)| chosen.iter().map(move |expert| one(token * experts + expert)));
        Routing {
            groups: experts,
            rows,
            dispatch: dispatch.into(),
            combine: places
                .iter()
                .map(|(expert, row)| one(expert * rows + row))
                .collect(),
            scores: scores.collect(),
        }
    }

    /// `tokens` times `active` rows split evenly over `groups` experts: the sizes of a routing in which it does not matter which token goes where.
    #[must_use]
    pub fn even(tokens: usize, active: usize, groups: usize) -> Self {
        let groups = groups.max(1);
        let rows = (tokens * active).div_ceil(groups).max(1);
        let mut dispatch = Vec::new();
        let mut left = groups * rows;
        while left > 0 {
            let rows = left.min(tokens.max(1));
            dispatch.push(RowRun { from: Some(0), rows });
            left -= rows;
        }
        let first: Arc<[RowRun]> = Arc::from([RowRun {
            from: Some(0),
            rows: tokens * active,
        }]);
        Routing {
            groups,
            rows,
            dispatch: dispatch.into(),
            combine: first.clone(),
            scores: first,
        }
    }
}

fn weight(b: &mut Builder, name: &str, dims: &[usize], depth: usize, dtype: Dtype) -> Value {
    let std = (depth.max(1) as f64).sqrt().recip();
    b.input(name, dims, dtype, Role::Weight, Init::Normal { std })
}

fn activation(b: &mut Builder, name: &str, dims: &[usize], dtype: Dtype) -> Value {
    b.input(name, dims, dtype, Role::Activation, Init::Normal { std: 1.0 })
}

/// RMS norm of `x [rows, width]`, f32, with a weight per channel.
fn rms_norm(b: &mut Builder, x: Value) -> Value {
    let width = b.shape(x).from_end(0);
    let squared = b.multiply("squared", x, x);
    let sum = b.sum_minor("sum", squared);
    let mean = b.scale("mean", sum, (width as f64).recip());
    let mean = b.map("mean_eps", Function::AddConstant(EPSILON), mean);
    let inverse = b.map("inverse_rms", Function::ReciprocalSqrt, mean);
    let normalised = b.multiply("normalised", x, inverse);
    let gain = b.input("norm_weight", [width], Dtype::F32, Role::Weight, Init::Ones);
    b.multiply("weighted", normalised, gain)
}

/// Residual stream `x [rows, width]` plus the result `branch` of the block before, and the norm of the sum, which the next block reads; without `branch` the norm alone.
/// Results `residual` (with a branch) and `y`.
///
/// # Errors
/// Where an extent is zero.
pub fn block_norm(
    rows: usize,
    width: usize,
    formats: BlockFormats,
    branch: bool,
) -> Result<Graph, BuildError> {
    let dtype = formats.activations;
    let mut b = Builder::new(Stage::BlockNorm);
    let x = activation(&mut b, "x", &[rows, width], dtype);
    let mut x = b.cast("x_f32", x, Dtype::F32);
    if branch {
        let branch = activation(&mut b, "branch", &[rows, width], dtype);
        let branch = b.cast("branch_f32", branch, Dtype::F32);
        let sum = b.add("residual_f32", x, branch);
        let residual = b.cast("residual", sum, dtype);
        b.output("residual", residual);
        x = sum;
    }
    let y = rms_norm(&mut b, x);
    let y = b.cast("y", y, dtype);
    b.output("y", y);
    b.finish()
}

/// `silu(x W_gate) * (x W_up)`, rounded, in the stage `gate`: `both [.., 2 hidden]` holds the gate first.
fn gated(b: &mut Builder, both: Value, hidden: usize, dtype: Dtype) -> Value {
    let axis = b.shape(both).rank() - 1;
    let gate = b.slice("gate", both, axis, 0, hidden);
    let up = b.slice("up", both, axis, hidden, hidden);
    let gate = b.map("gate_activated", Function::Silu, gate);
    let product = b.multiply("gated", gate, up);
    b.cast("gated_rounded", product, dtype)
}

/// A gated feed-forward network: `(silu(x W_gate) * (x W_up)) W_down`, both first matrices side by side. Result `y`.
///
/// With `shared` it is the shared expert of a mixture: its result, times `sigmoid(x w)` where `shared` holds `true`, is added to `routed`, what the other experts return.
///
/// # Errors
/// Where an extent is zero.
pub fn feed_forward(
    [rows, width, hidden]: [usize; 3],
    formats: BlockFormats,
    shared: Option<bool>,
) -> Result<Graph, BuildError> {
    let BlockFormats { activations, weights } = formats;
    let mut b = Builder::new(Stage::FeedForwardUp);
    let x = activation(&mut b, "x", &[rows, width], activations);
    let w_up = weight(&mut b, "W_gate_up", &[width, 2 * hidden], width, weights);
    let both = b.matmul("gate_up", x, w_up, Precision::Default);
    b.stage(Stage::FeedForwardGate);
    let hidden_rows = gated(&mut b, both, hidden, activations);
    b.stage(Stage::FeedForwardDown);
    let w_down = weight(&mut b, "W_down", &[hidden, width], hidden, weights);
    let mut y = b.matmul("down", hidden_rows, w_down, Precision::Default);
    if let Some(gated) = shared {
        if gated {
            let w = weight(&mut b, "w_shared", &[width, 1], width, activations);
            let gate = b.matmul("shared_gate", x, w, Precision::Default);
            let gate = b.map("shared_gate_activated", Function::Sigmoid, gate);
            y = b.multiply("shared_gated", y, gate);
        }
        let routed = activation(&mut b, "routed", &[rows, width], activations);
        let routed = b.cast("routed_f32", routed, Dtype::F32);
        y = b.add("with_routed", y, routed);
    }
    let y = b.cast("y", y, activations);
    b.output("y", y);
    b.finish()
}

/// A mixture of experts without its shared one: scores `[rows, experts]`, the `active` best of every token, their products, and the sum weighted by the scores. Results
/// `y`, `scores` and `threshold`, the score of the last choice of every token: a token chooses the experts whose score, bias included, is at least that.
///
/// The choice itself is given as a routing, because a graph has no addresses that depend on values. It takes `active` passes of a maximum, as small choices of large sets do.
///
/// # Errors
/// Where an extent is zero, or the routing is one of other rows.
pub fn mixture(
    experts: &Experts,
    [rows, width]: [usize; 2],
    formats: BlockFormats,
    routing: &Routing,
) -> Result<Graph, BuildError> {
    let BlockFormats { activations, weights } = formats;
    let (count, active, hidden) = (experts.count, experts.active, experts.hidden);
    let mut b = Builder::new(Stage::Router);
    let x = activation(&mut b, "x", &[rows, width], activations);
    let w_router = weight(&mut b, "W_router", &[width, count], width, activations);
    let logits = b.matmul("logits", x, w_router, Precision::Default);
    let scores = match experts.scores {
        Scores::Sigmoid => b.map("scores", Function::Sigmoid, logits),
        Scores::Softmax => {
            let largest = b.reduce("largest_logit", ReduceFunction::Maximum, logits, 1);
            let shifted = b.subtract("logits_shifted", logits, largest);
            let exponentials = b.exp("exponentials", shifted);
            let sum = b.sum_minor("sum_of_exponentials", exponentials);
            let inverse = b.map("inverse_sum", Function::Reciprocal, sum);
            b.multiply("scores", exponentials, inverse)
        }
    };
    b.output("scores", scores);
    let ranked = if experts.bias {
        let bias = b.input(
            "router_bias",
            [count],
            Dtype::F32,
            Role::Weight,
            Init::Uniform { low: 0.0, high: 0.1 },
        );
        b.add("ranked", scores, bias)
    } else {
        scores
    };
    let start = b.fill("no_choice", [rows, 1], Dtype::F32, 0.0);
    let chosen = b.repeat("choices", active, &[ranked, start], &[], |body, carry, _| {
        let best = body.reduce("best", ReduceFunction::Maximum, carry[0], 1);
        let below = body.subtract("below", carry[0], best);
        let below = body.scale("far_below", below, STEEP);
        let below = body.map("at_most_one", Function::MaximumConstant(-1.0), below);
        let is_best = body.map("is_best", Function::AddConstant(1.0), below);
        let removed = body.scale("removed", is_best, CHOSEN);
        vec![body.subtract("left", carry[0], removed), best]
    });
    b.output("threshold", chosen[1]);
    let flat = b.reshape("scores_flat", scores, [rows * count, 1]);
    let mine = b.gather_rows("chosen_scores", flat, 0, &routing.scores);
    let mut mine = b.reshape("chosen_scores_by_token", mine, [rows, active]);
    if experts.normalised {
        let sum = b.sum_minor("sum_of_chosen", mine);
        let inverse = b.map("inverse_of_chosen", Function::Reciprocal, sum);
        mine = b.multiply("normalised_scores", mine, inverse);
    }
    let mine = b.scale("expert_weights", mine, experts.scale);

    b.stage(Stage::ExpertsUp);
    let (groups, each) = (routing.groups, routing.rows);
    let sorted = b.gather_rows("rows_by_expert", x, 0, &routing.dispatch);
    let sorted = b.reshape("expert_rows", sorted, [groups, each, width]);
    let w_up = weight(&mut b, "W_gate_up", &[groups, width, 2 * hidden], width, weights);
    let both = b.matmul("gate_up", sorted, w_up, Precision::Default);
    // Grouped products return the format of their operands.
    let both = b.cast("gate_up_rounded", both, activations);
    b.stage(Stage::ExpertsGate);
    let both = b.cast("gate_up_f32", both, Dtype::F32);
    let hidden_rows = gated(&mut b, both, hidden, activations);
    b.stage(Stage::ExpertsDown);
    let w_down = weight(&mut b, "W_down", &[groups, hidden, width], hidden, weights);
    let down = b.matmul("down", hidden_rows, w_down, Precision::Default);
    let down = b.cast("down_rounded", down, activations);
    b.stage(Stage::Combine);
    let down = b.reshape("down_rows", down, [groups * each, width]);
    let by_token = b.gather_rows("rows_by_token", down, 0, &routing.combine);
    let by_token = b.reshape("choices_by_token", by_token, [rows, active, width]);
    let by_token = b.cast("choices_f32", by_token, Dtype::F32);
    let mine = b.reshape("weights_by_token", mine, [rows, active, 1]);
    let weighted = b.multiply("weighted", by_token, mine);
    let sum = b.reduce("sum_over_choices", ReduceFunction::Sum, weighted, 1);
    let y = b.reshape("y_f32", sum, [rows, width]);
    let y = b.cast("y", y, activations);
    b.output("y", y);
    b.finish()
}

/// Scores of the vocabulary for the last token of every sequence, in f32. Result `logits`.
///
/// # Errors
/// Where an extent is zero.
pub fn head([rows, width, vocabulary]: [usize; 3], formats: BlockFormats) -> Result<Graph, BuildError> {
    let mut b = Builder::new(Stage::Head);
    let x = activation(&mut b, "x", &[rows, width], formats.activations);
    let w = weight(&mut b, "W_head", &[width, vocabulary], width, formats.weights);
    let logits = b.matmul("logits", x, w, Precision::Default);
    b.output("logits", logits);
    b.finish()
}

/// Elements and bytes of the weights of a graph; tables that only positions set are none.
#[must_use]
pub fn weights(graph: &Graph) -> (u64, u64) {
    graph
        .inputs()
        .filter(|(_, node)| match node.op {
            crate::graph::Op::Input {
                role: Role::Weight,
                init,
            } => !matches!(init, Init::Table(_)),
            _ => false,
        })
        .fold((0, 0), |(elements, bytes), (_, node)| {
            let of_node =
                |count: fn(&crate::graph::TensorType) -> u64| node.results.iter().map(count).sum::<u64>();
            (
                elements + of_node(|ty| ty.shape.elements()),
                bytes + of_node(crate::graph::TensorType::bytes),
            )
        })
}
