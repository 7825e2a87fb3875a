//! Appending nodes and inferring their types.

use std::sync::Arc;

use super::op::{Function, Init, Mask, Op, PairLoop, Precision, ReduceFunction, Role, RowRun, Scan};
use super::{BlockPairs, Visibility};
use super::{Graph, Node, Operand, Shape, Stage, TensorType, Value};
use crate::dtype::Dtype;

/// A graph that does not type-check: a mechanism asked for an operation its operands do not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` ({op}, {stage}): {problem}")]
pub struct BuildError {
    /// Name of the node that was to be appended.
    pub name: String,
    /// Kind of the operation.
    pub op: &'static str,
    /// Its stage.
    pub stage: Stage,
    /// What does not fit.
    pub problem: String,
}

/// Appends nodes to a [`Graph`] in the notation of the mechanism.
///
/// Every method returns the [`Value`] it appended. An operation whose operands do not fit is remembered, and
/// [`Builder::finish`] returns the first such [`BuildError`]; that keeps the text of a mechanism as plain as its sheet.
#[derive(Debug)]
pub struct Builder {
    graph: Graph,
    stage: Stage,
    error: Option<BuildError>,
}

impl Builder {
    /// An empty graph whose next nodes belong to `stage`.
    #[must_use]
    pub fn new(stage: Stage) -> Self {
        Builder {
            graph: Graph::default(),
            stage,
            error: None,
        }
    }

    /// Lets the next nodes belong to `stage`.
    pub fn stage(&mut self, stage: Stage) {
        self.stage = stage;
    }

    /// Type of a value appended before.
    #[must_use]
    pub fn ty(&self, value: Value) -> &TensorType {
        self.graph.ty(value)
    }

    /// Shape of a value appended before.
    #[must_use]
    pub fn shape(&self, value: Value) -> &Shape {
        &self.graph.ty(value).shape
    }

    /// Extents of a value appended before.
    #[must_use]
    pub fn dims(&self, value: Value) -> Vec<usize> {
        self.graph.ty(value).shape.dims().to_vec()
    }

    /// Declares a named result of the graph.
    pub fn output(&mut self, name: &str, value: Value) {
        self.graph.outputs.push((name.to_owned(), value));
    }

    /// The finished graph.
    ///
    /// # Errors
    /// The first operation whose operands did not fit.
    pub fn finish(self) -> Result<Graph, BuildError> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(self.graph),
        }
    }

    /// A tensor from outside.
    pub fn input(
        &mut self,
        name: &str,
        shape: impl AsRef<[usize]>,
        dtype: Dtype,
        role: Role,
        init: Init,
    ) -> Value {
        let ty = TensorType {
            shape: Shape::new(shape),
            dtype,
        };
        self.append(name, Op::Input { role, init }, &[], vec![ty])
    }

    /// A tensor of equal values, made on chip.
    pub fn fill(&mut self, name: &str, shape: impl AsRef<[usize]>, dtype: Dtype, value: f64) -> Value {
        let ty = TensorType {
            shape: Shape::new(shape),
            dtype,
        };
        self.append(name, Op::Fill(value), &[], vec![ty])
    }

    /// The identity `[n, n]`, made on chip.
    pub fn identity(&mut self, name: &str, n: usize, dtype: Dtype) -> Value {
        let ty = TensorType {
            shape: Shape::new([n, n]),
            dtype,
        };
        self.append(name, Op::Identity, &[], vec![ty])
    }

    /// `a b` with f32 result: `[.., m, k] x [.., k, n] -> [.., m, n]`.
    pub fn matmul(&mut self, name: &str, a: Value, b: Value, precision: Precision) -> Value {
        self.product(name, a, b, (false, false), precision)
    }

    /// `a b^T` with f32 result: `[.., m, k] x [.., n, k] -> [.., m, n]`.
    pub fn matmul_bt(&mut self, name: &str, a: Value, b: Value, precision: Precision) -> Value {
        self.product(name, a, b, (false, true), precision)
    }

    /// `a^T b` with f32 result: `[.., k, m] x [.., k, n] -> [.., m, n]`.
    pub fn matmul_at(&mut self, name: &str, a: Value, b: Value, precision: Precision) -> Value {
        self.product(name, a, b, (true, false), precision)
    }

    fn product(
        &mut self,
        name: &str,
        a: Value,
        b: Value,
        (transpose_a, transpose_b): (bool, bool),
        precision: Precision,
    ) -> Value {
        let op = Op::MatMul {
            transpose_a,
            transpose_b,
            precision,
        };
        let (ta, tb) = (self.ty(a).clone(), self.ty(b).clone());
        if ta.shape.rank() < 2 || tb.shape.rank() < 2 {
            return self.fail(name, &op, a, format!("needs matrices, has {ta} and {tb}"));
        }
        let rows_columns = |s: &Shape, transposed: bool| {
            let (r, c) = (s.from_end(1), s.from_end(0));
            if transposed { (c, r) } else { (r, c) }
        };
        let (m, ka) = rows_columns(&ta.shape, transpose_a);
        let (kb, n) = rows_columns(&tb.shape, transpose_b);
        if ka != kb {
            return self.fail(name, &op, a, format!("contraction differs: {ta} and {tb}"));
        }
        let leading = |s: &Shape| Shape::new(&s.dims()[..s.rank() - 2]);
        let Some(batch) = leading(&ta.shape).broadcast(&leading(&tb.shape)) else {
            return self.fail(name, &op, a, format!("leading dimensions differ: {ta} and {tb}"));
        };
        let mut dims = batch.dims().to_vec();
        dims.extend([m, n]);
        let dtype = if ta.dtype == Dtype::F64 {
            Dtype::F64
        } else {
            Dtype::F32
        };
        self.append(
            name,
            op,
            &[a, b],
            vec![TensorType {
                shape: Shape::new(dims),
                dtype,
            }],
        )
    }

    /// A scalar function of one operand; the result keeps its format.
    pub fn map(&mut self, name: &str, function: Function, a: Value) -> Value {
        let op = Op::Elementwise(function);
        let ty = self.ty(a).clone();
        if function.arity() != 1 {
            return self.fail(name, &op, a, format!("`{function:?}` takes two operands"));
        }
        self.append(name, op, &[a], vec![ty])
    }

    /// A scalar function of two operands with broadcasting; the result has the wider format.
    pub fn zip(&mut self, name: &str, function: Function, a: Value, b: Value) -> Value {
        let op = Op::Elementwise(function);
        let (ta, tb) = (self.ty(a).clone(), self.ty(b).clone());
        if function.arity() != 2 {
            return self.fail(name, &op, a, format!("`{function:?}` takes one operand"));
        }
        let Some(shape) = ta.shape.broadcast(&tb.shape) else {
            return self.fail(name, &op, a, format!("shapes do not broadcast: {ta} and {tb}"));
        };
        let dtype = if ta.dtype.bytes() >= tb.dtype.bytes() {
            ta.dtype
        } else {
            tb.dtype
        };
        self.append(name, op, &[a, b], vec![TensorType { shape, dtype }])
    }

    /// `a + b`.
    pub fn add(&mut self, name: &str, a: Value, b: Value) -> Value {
        self.zip(name, Function::Add, a, b)
    }

    /// `a - b`.
    pub fn subtract(&mut self, name: &str, a: Value, b: Value) -> Value {
        self.zip(name, Function::Subtract, a, b)
    }

    /// `a * b`.
    pub fn multiply(&mut self, name: &str, a: Value, b: Value) -> Value {
        self.zip(name, Function::Multiply, a, b)
    }

    /// `exp(a)`.
    pub fn exp(&mut self, name: &str, a: Value) -> Value {
        self.map(name, Function::Exp, a)
    }

    /// `a * constant`.
    pub fn scale(&mut self, name: &str, a: Value, constant: f64) -> Value {
        self.map(name, Function::MultiplyConstant(constant), a)
    }

    /// Sum or maximum along `axis`, which is kept with extent 1.
    pub fn reduce(&mut self, name: &str, function: ReduceFunction, a: Value, axis: usize) -> Value {
        let op = Op::Reduce { function, axis };
        let ty = self.ty(a).clone();
        if axis >= ty.shape.rank() {
            return self.fail(name, &op, a, format!("{ty} has no dimension {axis}"));
        }
        self.append(
            name,
            op,
            &[a],
            vec![TensorType {
                shape: ty.shape.with(axis, 1),
                dtype: ty.dtype,
            }],
        )
    }

    /// Sum along the minor dimension.
    pub fn sum_minor(&mut self, name: &str, a: Value) -> Value {
        let axis = self.shape(a).rank().saturating_sub(1);
        self.reduce(name, ReduceFunction::Sum, a, axis)
    }

    /// Inclusive cumulative sum along `axis`.
    pub fn cumulative_sum(&mut self, name: &str, a: Value, axis: usize) -> Value {
        let op = Op::CumulativeSum { axis };
        let ty = self.ty(a).clone();
        if axis >= ty.shape.rank() {
            return self.fail(name, &op, a, format!("{ty} has no dimension {axis}"));
        }
        self.append(name, op, &[a], vec![ty])
    }

    /// Keeps what `mask` keeps and puts `fill` elsewhere.
    pub fn select(&mut self, name: &str, mask: Mask, a: Value, fill: f64) -> Value {
        let ty = self.ty(a).clone();
        self.append(name, Op::Select { mask, fill }, &[a], vec![ty])
    }

    /// Elements of `a` where `mask` keeps, of `b` elsewhere; both have one shape and format.
    pub fn choose(&mut self, name: &str, mask: Mask, a: Value, b: Value) -> Value {
        let op = Op::Choose { mask };
        let (ta, tb) = (self.ty(a).clone(), self.ty(b).clone());
        if ta != tb {
            return self.fail(name, &op, a, format!("{ta} and {tb} differ"));
        }
        self.append(name, op, &[a, b], vec![ta])
    }

    /// Keeps the scores `[.., m, n]` of the keys that a query sees and puts `fill` elsewhere; `origin [2]` is the position of the first
    /// query and the first key.
    pub fn select_visible(
        &mut self,
        name: &str,
        visibility: Visibility,
        scores: Value,
        origin: Value,
        fill: f64,
    ) -> Value {
        let op = Op::SelectVisible { visibility, fill };
        let (ty, at) = (self.ty(scores).clone(), self.ty(origin).clone());
        if ty.shape.rank() < 2 || at.shape.dims() != [2] {
            return self.fail(
                name,
                &op,
                scores,
                format!("needs a matrix and an origin, has {ty} and {at}"),
            );
        }
        self.append(name, op, &[scores, origin], vec![ty])
    }

    /// Rounds to `dtype`; nothing is appended where the value has that format already.
    pub fn cast(&mut self, name: &str, a: Value, dtype: Dtype) -> Value {
        let ty = self.ty(a).clone();
        if ty.dtype == dtype {
            return a;
        }
        self.append(
            name,
            Op::Cast,
            &[a],
            vec![TensorType {
                shape: ty.shape,
                dtype,
            }],
        )
    }

    /// The same elements in row-major order under another shape.
    pub fn reshape(&mut self, name: &str, a: Value, shape: impl AsRef<[usize]>) -> Value {
        let ty = self.ty(a).clone();
        let shape = Shape::new(shape);
        if shape == ty.shape {
            return a;
        }
        if shape.elements() != ty.shape.elements() {
            return self.fail(name, &Op::Reshape, a, format!("{ty} does not fill {shape}"));
        }
        self.append(
            name,
            Op::Reshape,
            &[a],
            vec![TensorType {
                shape,
                dtype: ty.dtype,
            }],
        )
    }

    /// Dimensions in another order: `permutation[i]` is the old position of new dimension `i`.
    pub fn transpose(&mut self, name: &str, a: Value, permutation: impl Into<Vec<usize>>) -> Value {
        let ty = self.ty(a).clone();
        let permutation = permutation.into();
        let mut sorted = permutation.clone();
        sorted.sort_unstable();
        if sorted != (0..ty.shape.rank()).collect::<Vec<_>>() {
            let problem = format!("{permutation:?} is no order of the dimensions of {ty}");
            return self.fail(name, &Op::Transpose { permutation }, a, problem);
        }
        let dims: Vec<usize> = permutation.iter().map(|&p| ty.shape.dims()[p]).collect();
        let result = TensorType {
            shape: Shape::new(dims),
            dtype: ty.dtype,
        };
        self.append(name, Op::Transpose { permutation }, &[a], vec![result])
    }

    /// The last two dimensions swapped.
    pub fn transpose_minor(&mut self, name: &str, a: Value) -> Value {
        let rank = self.shape(a).rank();
        let mut permutation: Vec<usize> = (0..rank).collect();
        if rank >= 2 {
            permutation.swap(rank - 1, rank - 2);
        }
        self.transpose(name, a, permutation)
    }

    /// `length` elements of dimension `axis` from `start` on.
    pub fn slice(&mut self, name: &str, a: Value, axis: usize, start: usize, length: usize) -> Value {
        let op = Op::Slice { axis, start };
        let ty = self.ty(a).clone();
        if axis >= ty.shape.rank() || start + length > ty.shape.dims()[axis] {
            return self.fail(
                name,
                &op,
                a,
                format!("{start}..{} is outside dimension {axis} of {ty}", start + length),
            );
        }
        if length == ty.shape.dims()[axis] {
            return a;
        }
        let result = TensorType {
            shape: ty.shape.with(axis, length),
            dtype: ty.dtype,
        };
        self.append(name, op, &[a], vec![result])
    }

    /// Operands one after the other along `axis`.
    pub fn concatenate(&mut self, name: &str, parts: &[Value], axis: usize) -> Value {
        let op = Op::Concatenate { axis };
        let first = parts[0];
        if parts.len() == 1 {
            return first;
        }
        let ty = self.ty(first).clone();
        let mut extent = 0;
        for &part in parts {
            let t = self.ty(part).clone();
            if axis >= t.shape.rank()
                || t.dtype != ty.dtype
                || t.shape.with(axis, 1) != ty.shape.with(axis, 1)
            {
                return self.fail(
                    name,
                    &op,
                    first,
                    format!("{ty} and {t} do not join along dimension {axis}"),
                );
            }
            extent += t.shape.dims()[axis];
        }
        let result = TensorType {
            shape: ty.shape.with(axis, extent),
            dtype: ty.dtype,
        };
        self.append(name, op, parts, vec![result])
    }

    /// Zeros after the end of `axis` up to `extent`; nothing is appended where it is that long already.
    pub fn pad(&mut self, name: &str, a: Value, axis: usize, extent: usize) -> Value {
        let op = Op::Pad { axis };
        let ty = self.ty(a).clone();
        if axis >= ty.shape.rank() || extent < ty.shape.dims()[axis] {
            return self.fail(
                name,
                &op,
                a,
                format!("{extent} is shorter than dimension {axis} of {ty}"),
            );
        }
        if extent == ty.shape.dims()[axis] {
            return a;
        }
        let result = TensorType {
            shape: ty.shape.with(axis, extent),
            dtype: ty.dtype,
        };
        self.append(name, op, &[a], vec![result])
    }

    /// Runs of rows of dimension `axis` one after the other, with zeros where a run has no source.
    pub fn gather_rows(&mut self, name: &str, a: Value, axis: usize, runs: &Arc<[RowRun]>) -> Value {
        let op = Op::GatherRows {
            axis,
            runs: Arc::clone(runs),
        };
        let ty = self.ty(a).clone();
        let Some(&extent) = ty.shape.dims().get(axis) else {
            return self.fail(name, &op, a, format!("{ty} has no dimension {axis}"));
        };
        if let Some(run) = runs
            .iter()
            .find(|run| run.from.is_some_and(|from| from + run.rows > extent))
        {
            return self.fail(
                name,
                &op,
                a,
                format!("{run:?} is outside dimension {axis} of {ty}"),
            );
        }
        let result = TensorType {
            shape: ty.shape.with(axis, runs.iter().map(|run| run.rows).sum()),
            dtype: ty.dtype,
        };
        self.append(name, op, &[a], vec![result])
    }

    /// Every element of the minor dimension repeated `times` times in place.
    pub fn repeat_minor(&mut self, name: &str, a: Value, times: usize) -> Value {
        let ty = self.ty(a).clone();
        if times == 1 {
            return a;
        }
        let axis = ty.shape.rank() - 1;
        let extent = ty.shape.from_end(0) * times;
        let result = TensorType {
            shape: ty.shape.with(axis, extent),
            dtype: ty.dtype,
        };
        self.append(name, Op::RepeatMinor { times }, &[a], vec![result])
    }

    /// Depthwise causal convolution of `x [.., T, E]` with `taps [width, E]`, rows before the first one zero.
    pub fn causal_convolution(&mut self, name: &str, x: Value, taps: Value) -> Value {
        self.convolution(name, x, taps, None, &[0])
    }

    /// Depthwise causal convolution of `x [.., T, E]` with `taps [width, E]`, sequence by sequence: `starts` are their first rows.
    pub fn causal_convolution_packed(
        &mut self,
        name: &str,
        x: Value,
        taps: Value,
        starts: &[usize],
    ) -> Value {
        self.convolution(name, x, taps, None, starts)
    }

    /// Depthwise causal convolution of `x [.., T, E]` with `taps [width, E]` that continues after `history [.., width - 1, E]`.
    pub fn causal_convolution_after(&mut self, name: &str, x: Value, taps: Value, history: Value) -> Value {
        self.convolution(name, x, taps, Some(history), &[0])
    }

    fn convolution(
        &mut self,
        name: &str,
        x: Value,
        taps: Value,
        history: Option<Value>,
        starts: &[usize],
    ) -> Value {
        let (tx, tt) = (self.ty(x).clone(), self.ty(taps).clone());
        let width = tt.shape.from_end(1);
        let op = Op::CausalConvolution {
            width,
            starts: starts.into(),
        };
        if tx.shape.rank() < 2 || tt.shape.rank() != 2 || tx.shape.from_end(0) != tt.shape.from_end(0) {
            return self.fail(name, &op, x, format!("taps {tt} do not fit {tx}"));
        }
        if !ascending_from_zero(starts, tx.shape.from_end(1)) {
            let problem = format!(
                "{} sequence starts do not ascend from 0 inside {tx}",
                starts.len()
            );
            return self.fail(name, &op, x, problem);
        }
        let mut operands = vec![x, taps];
        if let Some(history) = history {
            let th = self.ty(history).clone();
            if width < 2 || th.shape != tx.shape.with(tx.shape.rank() - 2, width - 1) {
                return self.fail(
                    name,
                    &op,
                    x,
                    format!("history {th} does not fit {tx} and {width} taps"),
                );
            }
            operands.push(history);
        }
        self.append(name, op, &operands, vec![tx])
    }

    /// `(I + l)^-1 b` by forward substitution, `l [.., n, n]` strictly lower, `b [.., n, w]`; or `s` systems side by side, `l [.., n, s n]`
    /// and `b [.., n, s w]`.
    pub fn forward_substitution(&mut self, name: &str, l: Value, b: Value) -> Value {
        self.substitution(name, Op::ForwardSubstitution, l, b)
    }

    /// `(I + l)^-T b` by backward substitution, operands as in [`Builder::forward_substitution`].
    pub fn backward_substitution(&mut self, name: &str, l: Value, b: Value) -> Value {
        self.substitution(name, Op::BackwardSubstitution, l, b)
    }

    fn substitution(&mut self, name: &str, op: Op, l: Value, b: Value) -> Value {
        let (tl, tb) = (self.ty(l).clone(), self.ty(b).clone());
        let (rows, columns) = (tl.shape.from_end(1), tl.shape.from_end(0));
        let systems = columns / rows.max(1);
        let square = systems > 0
            && columns == systems * rows
            && rows == tb.shape.from_end(1)
            && tb.shape.from_end(0).is_multiple_of(systems)
            && (systems == 1 || matches!(op, Op::ForwardSubstitution));
        let leading = |s: &Shape| Shape::new(&s.dims()[..s.rank().saturating_sub(2)]);
        let Some(batch) = leading(&tl.shape)
            .broadcast(&leading(&tb.shape))
            .filter(|_| square)
        else {
            return self.fail(name, &op, b, format!("{tl} does not solve for {tb}"));
        };
        let mut dims = batch.dims().to_vec();
        dims.extend([tb.shape.from_end(1), tb.shape.from_end(0)]);
        let result = TensorType {
            shape: Shape::new(dims),
            dtype: tb.dtype,
        };
        self.append(name, op, &[l, b], vec![result])
    }

    /// The lower Cholesky factor of `a [.., n, n]`, symmetric positive definite; zeros above the diagonal.
    pub fn cholesky(&mut self, name: &str, a: Value) -> Value {
        let ty = self.ty(a).clone();
        if ty.shape.rank() < 2 || ty.shape.from_end(0) != ty.shape.from_end(1) {
            return self.fail(name, &Op::Cholesky, a, format!("{ty} is not square"));
        }
        self.append(name, Op::Cholesky, &[a], vec![ty])
    }

    /// `trips` iterations of `body`, which receives the carried values and the invariants and returns the next carries. The
    /// results are the final carries.
    pub fn repeat<F>(
        &mut self,
        name: &str,
        trips: usize,
        carries: &[Value],
        invariants: &[Value],
        body: F,
    ) -> Vec<Value>
    where
        F: FnOnce(&mut Builder, &[Value], &[Value]) -> Vec<Value>,
    {
        let body = |b: &mut Builder, carry: &[Value], _: &[Value], invariant: &[Value]| {
            (body(b, carry, invariant), Vec::new())
        };
        self.looped(name, 0, (Some(trips), &[0]), (carries, &[], invariants), body)
            .0
    }

    /// A loop along dimension `axis` of the `scanned` operands.
    ///
    /// `body` receives a builder, the carried values, one slice of every scanned operand and the invariants, and returns the
    /// next carries and the values to stack. The results are the final carries and the stacks.
    pub fn scan<F>(
        &mut self,
        name: &str,
        axis: usize,
        carries: &[Value],
        scanned: &[Value],
        invariants: &[Value],
        body: F,
    ) -> (Vec<Value>, Vec<Value>)
    where
        F: FnOnce(&mut Builder, &[Value], &[Value], &[Value]) -> (Vec<Value>, Vec<Value>),
    {
        self.segmented_scan(name, axis, &[0], carries, scanned, invariants, body)
    }

    /// A [`Builder::scan`] over sequences one after the other: at every trip of `segments` the carries start anew.
    ///
    /// With several segments, carries have one entry per segment in dimension 0, here and in the results; the body sees one of them.
    #[expect(
        clippy::too_many_arguments,
        reason = "the operands of a loop, each of its own kind"
    )]
    pub fn segmented_scan<F>(
        &mut self,
        name: &str,
        axis: usize,
        segments: &[usize],
        carries: &[Value],
        scanned: &[Value],
        invariants: &[Value],
        body: F,
    ) -> (Vec<Value>, Vec<Value>)
    where
        F: FnOnce(&mut Builder, &[Value], &[Value], &[Value]) -> (Vec<Value>, Vec<Value>),
    {
        self.looped(name, axis, (None, segments), (carries, scanned, invariants), body)
    }

    /// A loop of `trips` iterations, or of as many as the scanned operands have slices.
    fn looped<F>(
        &mut self,
        name: &str,
        axis: usize,
        (mut trips, segments): (Option<usize>, &[usize]),
        (carries, scanned, invariants): (&[Value], &[Value], &[Value]),
        body: F,
    ) -> (Vec<Value>, Vec<Value>)
    where
        F: FnOnce(&mut Builder, &[Value], &[Value], &[Value]) -> (Vec<Value>, Vec<Value>),
    {
        let mut inner = Builder::new(self.stage);
        let mut declare =
            |inner: &mut Builder, outer: &Self, value: Value, sliced: bool, label: &str, i: usize| {
                let ty = outer.ty(value);
                let mut shape = ty.shape.clone();
                if sliced {
                    trips.get_or_insert(shape.dims().get(axis).copied().unwrap_or(0));
                    if axis >= shape.rank() || Some(shape.dims()[axis]) != trips {
                        inner.fail_scan(
                            name,
                            format!("scanned operand {ty} does not run along dimension {axis}"),
                        );
                    } else {
                        shape = shape.without(axis);
                    }
                }
                if label == "carry" && segments.len() > 1 {
                    if shape.dims().first() == Some(&segments.len()) {
                        shape = shape.with(0, 1);
                    } else {
                        let problem =
                            format!("carry {ty} has no entry for each of {} segments", segments.len());
                        inner.fail_scan(name, problem);
                    }
                }
                let dims = shape.dims().to_vec();
                inner.input(&format!("{label}{i}"), dims, ty.dtype, Role::Body, Init::Zeros)
            };
        let c = carries
            .iter()
            .enumerate()
            .map(|(i, &v)| declare(&mut inner, self, v, false, "carry", i))
            .collect::<Vec<_>>();
        let s = scanned
            .iter()
            .enumerate()
            .map(|(i, &v)| declare(&mut inner, self, v, true, "slice", i))
            .collect::<Vec<_>>();
        let v = invariants
            .iter()
            .enumerate()
            .map(|(i, &v)| declare(&mut inner, self, v, false, "invariant", i))
            .collect::<Vec<_>>();
        let (next, stacked) = body(&mut inner, &c, &s, &v);
        for (i, (&before, &after)) in c.iter().zip(&next).enumerate() {
            if inner.ty(before) != inner.ty(after) {
                let problem = format!(
                    "carry {i} changes from {} to {}",
                    inner.ty(before),
                    inner.ty(after)
                );
                inner.fail_scan(name, problem);
            }
        }
        if next.len() != carries.len() {
            inner.fail_scan(
                name,
                format!("{} carries go in, {} come out", carries.len(), next.len()),
            );
        }
        let trips = trips.unwrap_or(0);
        if !ascending_from_zero(segments, trips) {
            let problem = format!(
                "{} segments do not ascend from 0 below {trips} trips",
                segments.len()
            );
            inner.fail_scan(name, problem);
        }
        let mut results: Vec<TensorType> = carries.iter().map(|&value| self.ty(value).clone()).collect();
        for (i, &value) in next.iter().enumerate() {
            inner.output(&format!("carry{i}"), value);
        }
        for (i, &value) in stacked.iter().enumerate() {
            inner.output(&format!("stack{i}"), value);
            let ty = inner.ty(value);
            let mut dims = ty.shape.dims().to_vec();
            dims.insert(axis.min(dims.len()), trips);
            results.push(TensorType {
                shape: Shape::new(dims),
                dtype: ty.dtype,
            });
        }
        let stacks = stacked.len();
        match inner.finish() {
            Ok(graph) => {
                let scan = Scan {
                    trips,
                    axis,
                    carries: carries.len(),
                    scanned: scanned.len(),
                    segments: segments.into(),
                    pairs: None,
                    body: graph,
                };
                let operands: Vec<Value> = carries.iter().chain(scanned).chain(invariants).copied().collect();
                let first = self.append(name, Op::Scan(Box::new(scan)), &operands, results);
                let port = |p: usize| Value {
                    node: first.node,
                    port: p,
                };
                (
                    (0..carries.len()).map(port).collect(),
                    (0..stacks).map(|i| port(carries.len() + i)).collect(),
                )
            }
            Err(error) => {
                self.error.get_or_insert(error);
                let some = self.append("failed scan", Op::Fill(0.0), &[], results);
                let port = |p: usize| Value {
                    node: some.node,
                    port: p,
                };
                (
                    (0..carries.len()).map(port).collect(),
                    (0..stacks).map(|i| port(carries.len() + i)).collect(),
                )
            }
        }
    }

    /// A loop over pairs of a row block and a column block, which are indices along dimension `axis` of carries and `rows`, and of
    /// `columns`.
    ///
    /// `body` receives a builder, the carries of the row block, its slices of `rows`, the slices of `columns` and the origin `[2]` of the pair,
    /// and returns the next carries. The results are the final carries of all row blocks.
    pub fn pair_scan<F>(
        &mut self,
        name: &str,
        axis: usize,
        blocks: BlockPairs,
        carries: &[Value],
        (rows, columns): (&[Value], &[Value]),
        body: F,
    ) -> Vec<Value>
    where
        F: FnOnce(&mut Builder, &[Value], &[Value], &[Value], Value) -> Vec<Value>,
    {
        let mut inner = Builder::new(self.stage);
        let mut declare = |outer: &Self, values: &[Value], extent: usize, label: &str| -> Vec<Value> {
            let slices = values.iter().enumerate().map(|(i, &value)| {
                let ty = outer.ty(value);
                let mut shape = ty.shape.clone();
                if shape.dims().get(axis) == Some(&extent) {
                    shape = shape.without(axis);
                } else {
                    let problem =
                        format!("{label} {i}, {ty}, does not have {extent} blocks along dimension {axis}");
                    inner.fail_scan(name, problem);
                }
                let dims = shape.dims().to_vec();
                inner.input(&format!("{label}{i}"), dims, ty.dtype, Role::Body, Init::Zeros)
            });
            slices.collect()
        };
        let c = declare(self, carries, blocks.rows, "carry");
        let r = declare(self, rows, blocks.rows, "row");
        let k = declare(self, columns, blocks.columns, "column");
        let origin = inner.input("origin", [2], Dtype::F32, Role::Body, Init::Zeros);
        let next = body(&mut inner, &c, &r, &k, origin);
        let same = next.len() == c.len() && c.iter().zip(&next).all(|(&a, &b)| inner.ty(a) == inner.ty(b));
        if !same {
            inner.fail_scan(
                name,
                "the carries that come out differ from those that go in".to_owned(),
            );
        }
        for (i, &value) in next.iter().enumerate() {
            inner.output(&format!("carry{i}"), value);
        }
        let results: Vec<TensorType> = carries.iter().map(|&value| self.ty(value).clone()).collect();
        let op = match inner.finish() {
            Ok(body) => Op::Scan(Box::new(Scan {
                trips: blocks.count(),
                axis,
                carries: carries.len(),
                scanned: rows.len() + columns.len(),
                segments: Arc::from([0]),
                pairs: Some(PairLoop {
                    blocks,
                    rows: rows.len(),
                }),
                body,
            })),
            Err(error) => {
                self.error.get_or_insert(error);
                Op::Fill(0.0)
            }
        };
        let operands: Vec<Value> = carries.iter().chain(rows).chain(columns).copied().collect();
        let node = self.append(name, op, &operands, results).node;
        (0..carries.len()).map(|port| Value { node, port }).collect()
    }

    fn append(&mut self, name: &str, op: Op, operands: &[Value], results: Vec<TensorType>) -> Value {
        let node = self.graph.dag.add_node(Node {
            name: name.into(),
            stage: self.stage,
            op,
            results,
        });
        self.graph.operands.extend_from_slice(operands);
        self.graph.operand_ends.push(self.graph.operands.len());
        for (position, operand) in operands.iter().enumerate() {
            self.graph.dag.add_edge(
                operand.node,
                node,
                Operand {
                    position,
                    port: operand.port,
                },
            );
        }
        Value { node, port: 0 }
    }

    fn fail(&mut self, name: &str, op: &Op, stand_in: Value, problem: String) -> Value {
        self.error.get_or_insert(BuildError {
            name: name.to_owned(),
            op: op.name(),
            stage: self.stage,
            problem,
        });
        stand_in
    }

    fn fail_scan(&mut self, name: &str, problem: String) {
        self.error.get_or_insert(BuildError {
            name: name.to_owned(),
            op: "scan",
            stage: self.stage,
            problem,
        });
    }
}

/// Whether `starts` begin with 0, ascend, and stay below `end`; a single start of an empty range is fine.
fn ascending_from_zero(starts: &[usize], end: usize) -> bool {
    starts.first() == Some(&0)
        && starts.is_sorted_by(|a, b| a < b)
        && (starts.len() == 1 || starts.last().is_some_and(|&last| last < end))
}
