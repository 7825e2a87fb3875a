//! What an HLO module computes and moves: kernels in the order in which they run, loops with their trip counts.
//!
//! Optimised text names its kernels: every instruction of a scheduled computation that is not bookkeeping is one,
//! and a fusion says what it holds. Text before optimisation does not, so that elementwise operations and
//! reductions join the one kernel that uses them, as XLA fuses producers into consumers; a value that several
//! kernels use is written. Asynchronous copies run beside the kernels, of which the next is charged with them.
//!
//! Operations are counted as follows: a product 2 per multiply-add; an elementwise operation one per element of
//! its result, transcendental ones apart; a reduction one application of its computation per element that goes
//! in. Bytes are those of the arrays in device memory that cross kernels, of which a slice reads what it takes and an update in
//! place moves what it writes.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::dtype::Dtype;
use crate::dump::hlo::{Array, Computation, Instruction, Module, arrays};
use crate::kernels::library::{Fused, FusedProduct};

/// Deepest nesting of computations that is followed.
const DEEPEST: usize = 64;
/// Deepest nesting of fusions that is followed.
const DEEPEST_FUSION: usize = 3;
/// Most computations that are followed; no program has a hundredth of it.
const MOST_COMPUTATIONS: usize = 100_000;

/// A kernel of a module.
#[derive(Debug, Clone, PartialEq)]
pub struct HloKernel {
    /// Name of its instruction; of several that were joined, of the last.
    pub name: String,
    /// Operation of that instruction.
    pub opcode: String,
    /// How often it runs.
    pub count: f64,
    /// Whether what it computes is unknown, as that of a custom call: its bytes are all that is counted.
    pub opaque: bool,
    /// One run of it.
    pub fused: Fused,
}

impl HloKernel {
    /// Products, counted as two operations per multiply-add, of one run.
    #[must_use]
    pub fn matrix_flops(&self) -> f64 {
        let products = self.fused.product.iter().chain(&self.fused.more_products);
        products
            .map(|p| 2.0 * p.batch as f64 * p.m as f64 * p.k as f64 * p.n as f64)
            .sum()
    }

    /// Products and vector operations of one run, without transcendental ones: what XLA calls flops.
    #[must_use]
    pub fn flops(&self) -> f64 {
        self.matrix_flops() + self.fused.vector_ops
    }

    /// Bytes of one run.
    #[must_use]
    pub fn bytes(&self) -> f64 {
        self.fused.bytes.iter().sum()
    }
}

/// The kernels of a module and what could not be counted.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HloProgram {
    /// Kernels in the order in which they first run.
    pub kernels: Vec<HloKernel>,
    /// Whether the text is optimised, so that its instructions are kernels.
    pub optimised: bool,
    /// What was assumed, each once.
    pub warnings: Vec<String>,
}

/// Takes a module apart.
#[must_use]
pub fn program(module: &Module) -> HloProgram {
    let mut walk = Walk {
        module,
        found: HloProgram {
            optimised: module.scheduled,
            ..HloProgram::default()
        },
        places: HashMap::new(),
        prefetched: 0.0,
        followed: 0,
        warned: BTreeSet::new(),
    };
    if let Some(entry) = module.computations.get(module.entry) {
        walk.computation(entry, 1.0, 0);
    }
    walk.found
}

struct Walk<'a> {
    module: &'a Module,
    found: HloProgram,
    places: HashMap<(&'a str, &'a str), usize>,
    /// Bytes of asynchronous copies that the next kernel is charged with.
    prefetched: f64,
    /// Computations that were followed.
    followed: usize,
    warned: BTreeSet<String>,
}

/// Operations that move nothing and compute nothing.
fn is_bookkeeping(opcode: &str) -> bool {
    matches!(
        opcode,
        "parameter"
            | "constant"
            | "bitcast"
            | "get-tuple-element"
            | "tuple"
            | "after-all"
            | "partition-id"
            | "replica-id"
            | "opt-barrier"
            | "add-dependency"
            | "get-dimension-size"
    )
}

/// Operations that join the kernel that uses them.
fn is_fusible(opcode: &str) -> bool {
    elementwise(opcode).is_some()
        || matches!(
            opcode,
            "broadcast"
                | "iota"
                | "reshape"
                | "transpose"
                | "slice"
                | "dynamic-slice"
                | "pad"
                | "concatenate"
                | "reverse"
                | "reduce"
                | "reduce-precision"
                | "rng-bit-generator"
        )
}

/// Vector and transcendental operations per element of an elementwise operation.
fn elementwise(opcode: &str) -> Option<(f64, f64)> {
    Some(match opcode {
        "add"
        | "subtract"
        | "multiply"
        | "maximum"
        | "minimum"
        | "and"
        | "or"
        | "xor"
        | "not"
        | "compare"
        | "select"
        | "negate"
        | "abs"
        | "sign"
        | "floor"
        | "ceil"
        | "round-nearest-afz"
        | "round-nearest-even"
        | "shift-left"
        | "shift-right-logical"
        | "shift-right-arithmetic"
        | "is-finite"
        | "convert"
        | "popcnt"
        | "clz"
        | "stochastic-convert"
        | "real"
        | "imag"
        | "complex" => (1.0, 0.0),
        "clamp" => (2.0, 0.0),
        "copy" | "bitcast-convert" => (0.0, 0.0),
        // A reciprocal and a product.
        "divide" | "remainder" => (1.0, 1.0),
        "exponential"
        | "exponential-minus-one"
        | "log"
        | "log-plus-one"
        | "tanh"
        | "rsqrt"
        | "sqrt"
        | "cbrt"
        | "sine"
        | "cosine"
        | "tan"
        | "erf" => (0.0, 1.0),
        "logistic" => (2.0, 2.0),
        "power" | "atan2" => (1.0, 2.0),
        _ => return None,
    })
}

/// Collective operations, whose time the links between chips set.
fn is_collective(opcode: &str) -> bool {
    let name = opcode.strip_suffix("-start").unwrap_or(opcode);
    matches!(
        name,
        "all-reduce"
            | "all-gather"
            | "all-to-all"
            | "ragged-all-to-all"
            | "reduce-scatter"
            | "collective-permute"
            | "collective-broadcast"
            | "send"
            | "recv"
    )
}

/// Bytes of a shape that lie in device memory, tuples with all their leaves.
fn bytes(shape: &str) -> f64 {
    let arrays = arrays(shape);
    let outside = arrays.iter().filter(|array| array.memory_space == 0);
    outside.map(Array::bytes).sum()
}

fn elements(shape: &str) -> f64 {
    arrays(shape).iter().map(Array::elements).sum()
}

fn first(shape: &str) -> Option<Array> {
    arrays(shape).into_iter().next()
}

/// Format of a product with operands of these types; what no matrix unit has is multiplied as f32.
fn dtype(name: &str) -> Dtype {
    match name {
        "bf16" => Dtype::Bf16,
        "f16" => Dtype::F16,
        "f8e4m3fn" | "f8e4m3" | "f8e4m3b11fnuz" => Dtype::Fp8E4m3,
        "f8e5m2" => Dtype::Fp8E5m2,
        "s8" | "u8" | "s4" | "u4" => Dtype::Int8,
        _ => Dtype::F32,
    }
}

impl<'a> Walk<'a> {
    fn warn(&mut self, text: String) {
        if self.warned.insert(text.clone()) {
            self.found.warnings.push(text);
        }
    }

    fn computation(&mut self, computation: &'a Computation, times: f64, depth: usize) {
        if depth > DEEPEST {
            self.warn(format!(
                "computations nested more than {DEEPEST} deep are left out"
            ));
            return;
        }
        self.followed += 1;
        if self.followed > MOST_COMPUTATIONS {
            self.warn(format!(
                "more than {MOST_COMPUTATIONS} computations are called; the rest is left out"
            ));
            return;
        }
        let groups = self.groups(computation);
        for (at, instruction) in computation.instructions.iter().enumerate() {
            if is_bookkeeping(&instruction.opcode) {
                continue;
            }
            let called = |name: &String| self.module.computation(name);
            match instruction.opcode.as_str() {
                "while" => {
                    let trips = self.module.trips(computation, instruction);
                    if trips.is_none() {
                        self.warn(format!(
                            "{}: the trip count of this loop is not in the text; it counts once",
                            instruction.name
                        ));
                    }
                    if let Some(body) = instruction.called.iter().find_map(called) {
                        self.computation(body, times * trips.unwrap_or(1) as f64, depth + 1);
                    }
                }
                "conditional" => {
                    self.warn(format!(
                        "{}: which side of this branch runs is not in the text; all count",
                        instruction.name
                    ));
                    let sides: Vec<&Computation> = instruction.called.iter().filter_map(called).collect();
                    for side in sides {
                        self.computation(side, times, depth + 1);
                    }
                }
                "call" | "async-start" => {
                    if let Some(body) = instruction.called.iter().find_map(called) {
                        self.computation(body, times, depth + 1);
                    }
                }
                // They run beside the kernels; the next one is charged with what they move.
                "copy-start" | "slice-start" | "dynamic-slice-start" => {
                    let source = instruction
                        .operands
                        .first()
                        .and_then(|name| computation.instruction(name));
                    let whole = source.map_or(0.0, |source| bytes(&source.shape));
                    let leaves = arrays(&instruction.shape);
                    let moved = leaves.first().map_or(0.0, Array::bytes);
                    let stored = leaves.first().is_some_and(|array| array.memory_space == 0);
                    self.prefetched += whole.min(moved) + if stored { moved } else { 0.0 };
                }
                "async-update"
                | "slice-done"
                | "dynamic-slice-done"
                | "async-done"
                | "copy-done"
                | "all-reduce-done"
                | "all-gather-done"
                | "collective-permute-done"
                | "send-done"
                | "recv-done" => {}
                _ if groups[at] == at => {
                    let members: Vec<usize> = (0..=at).filter(|&other| groups[other] == at).collect();
                    self.kernel(computation, &members, times);
                }
                _ => {}
            }
        }
    }

    /// The instruction whose kernel each instruction is part of.
    fn groups(&self, computation: &Computation) -> Vec<usize> {
        let count = computation.instructions.len();
        let mut groups: Vec<usize> = (0..count).collect();
        if self.module.scheduled {
            return groups;
        }
        let mut users: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); count];
        for (at, instruction) in computation.instructions.iter().enumerate() {
            for operand in &instruction.operands {
                if let Some(place) = computation.place(operand) {
                    users[place].insert(at);
                }
            }
        }
        for at in (0..count).rev() {
            let instruction = &computation.instructions[at];
            if !is_fusible(&instruction.opcode) || at == computation.root() {
                continue;
            }
            let joins: BTreeSet<usize> = users[at].iter().map(|&user| groups[user]).collect();
            if let (1, Some(&group)) = (joins.len(), joins.first()) {
                // A reduction ends a kernel: what follows needs all of it.
                let follows = &computation.instructions[group].opcode;
                if is_fusible(follows) && instruction.opcode != "reduce" {
                    groups[at] = group;
                }
            }
        }
        groups
    }

    /// Notes a kernel made of some instructions, of which the last one names it.
    fn kernel(&mut self, computation: &'a Computation, members: &[usize], times: f64) {
        let Some(last) = members.last().map(|&at| &computation.instructions[at]) else {
            return;
        };
        // Values that only index or that never leave the scalar unit are no kernels.
        if elements(&last.shape) <= 1.0 && elementwise(&last.opcode).is_some() {
            return;
        }
        let moves = |&at: &usize| {
            let opcode = computation.instructions[at].opcode.as_str();
            !self.module.scheduled && opcode == "reshape"
        };
        if members.iter().all(moves) {
            return;
        }
        let key = (computation.name.as_str(), last.name.as_str());
        if let Some(&at) = self.places.get(&key) {
            self.found.kernels[at].count += times;
            return;
        }
        let mut fused = Fused {
            label: last.name.clone(),
            title: last.opcode.clone(),
            ..Fused::default()
        };
        let mut opaque = false;
        for &at in members {
            opaque |= self.count(computation, &computation.instructions[at], &mut fused, 0);
        }
        let names: BTreeSet<&str> = members
            .iter()
            .map(|&at| computation.instructions[at].name.as_str())
            .collect();
        fused.bytes = [
            self.read(computation, members, &names),
            self.written(computation, last),
        ];
        fused.bytes[0] += std::mem::take(&mut self.prefetched);
        largest_first(&mut fused);
        self.places.insert(key, self.found.kernels.len());
        self.found.kernels.push(HloKernel {
            name: last.name.clone(),
            opcode: last.opcode.clone(),
            count: times,
            opaque,
            fused,
        });
    }

    /// Adds what one instruction computes; whether that is unknown.
    fn count(
        &mut self,
        computation: &Computation,
        instruction: &Instruction,
        fused: &mut Fused,
        depth: usize,
    ) -> bool {
        let out = elements(&instruction.shape);
        let shape_of = |index: usize| -> Option<Array> {
            let name = instruction.operands.get(index)?;
            first(&computation.instruction(name)?.shape)
        };
        if let Some((alu, transcendental)) = elementwise(&instruction.opcode) {
            fused.vector_ops += alu * out;
            fused.transcendentals += transcendental * out;
            fused.elements = fused.elements.max(out);
            return false;
        }
        match instruction.opcode.as_str() {
            "dot" => {
                let (Some(a), Some(b)) = (shape_of(0), shape_of(1)) else {
                    return self.unknown(instruction, "its operands have no shape");
                };
                let product = dot(instruction, &a, &b);
                fused.more_products.extend(Some(product).filter(is_not_empty));
            }
            "convolution" => {
                let (Some(a), Some(b)) = (shape_of(0), shape_of(1)) else {
                    return self.unknown(instruction, "its operands have no shape");
                };
                match convolution(instruction, &a, &b, out) {
                    Some(product) => fused.more_products.extend(Some(product).filter(is_not_empty)),
                    None => return self.unknown(instruction, "its dimensions are not understood"),
                }
            }
            "reduce" | "reduce-window" | "select-and-scatter" => {
                let input = shape_of(0).map_or(out, |array| array.elements());
                let window: f64 = instruction.window.iter().map(|&size| size as f64).product();
                let applied = if instruction.opcode == "reduce" {
                    input - out.min(input)
                } else {
                    out * window.max(1.0)
                };
                let body = instruction
                    .called
                    .first()
                    .and_then(|name| self.module.computation(name));
                let (alu, transcendental) = body.map_or((1.0, 0.0), applied_once);
                fused.vector_ops += alu * applied;
                fused.transcendentals += transcendental * applied;
                fused.elements = fused.elements.max(input);
                fused.reduced_rows += out;
            }
            "sort" => {
                let array = shape_of(0);
                let input = array.as_ref().map_or(out, Array::elements);
                let longest = array
                    .and_then(|a| a.dimensions.iter().copied().max())
                    .unwrap_or(1);
                // A bitonic network compares every element log (log + 1) / 2 times.
                let steps = (longest.max(2) as f64).log2().ceil();
                fused.vector_ops += input * steps * (steps + 1.0) / 2.0;
                fused.elements = fused.elements.max(input);
            }
            "map" => {
                let body = instruction
                    .called
                    .first()
                    .and_then(|name| self.module.computation(name));
                let (alu, transcendental) = body.map_or((1.0, 0.0), applied_once);
                fused.vector_ops += alu * out;
                fused.transcendentals += transcendental * out;
                fused.elements = fused.elements.max(out);
            }
            "fusion" => {
                let body = instruction
                    .called
                    .first()
                    .and_then(|name| self.module.computation(name));
                let Some(body) = body else {
                    return self.unknown(instruction, "its computation is not in the text");
                };
                if depth > DEEPEST_FUSION {
                    return self.unknown(instruction, "its computations are nested too deep");
                }
                let mut opaque = false;
                for inner in &body.instructions {
                    if !is_bookkeeping(&inner.opcode) {
                        opaque |= self.count(body, inner, fused, depth + 1);
                    }
                }
                return opaque;
            }
            "cholesky" | "triangular-solve" => {
                let side = shape_of(0)
                    .and_then(|a| a.dimensions.last().copied())
                    .unwrap_or(1) as f64;
                let share = if instruction.opcode == "cholesky" {
                    3.0
                } else {
                    1.0
                };
                fused.vector_ops += out * side / share;
                fused.elements = fused.elements.max(out);
            }
            "custom-call" => {
                let target = instruction.target.as_deref().unwrap_or("without a target");
                return self.unknown(
                    instruction,
                    &format!("a custom call, `{target}`; `tpusim dump` reads its schedule"),
                );
            }
            opcode if is_collective(opcode) => {
                return self.unknown(instruction, "a collective, whose links are not modelled");
            }
            "fft" | "rng" | "infeed" | "outfeed" | "domain" => {
                let text = format!("`{}`, whose operations are not counted", instruction.opcode);
                return self.unknown(instruction, &text);
            }
            _ => {}
        }
        false
    }

    fn unknown(&mut self, instruction: &Instruction, why: &str) -> bool {
        self.warn(format!("{}: {why}; only its bytes count", instruction.name));
        true
    }

    /// Bytes that a kernel reads: of every value from outside what it takes of it.
    fn read(&self, computation: &Computation, members: &[usize], own: &BTreeSet<&str>) -> f64 {
        let mut taken: BTreeMap<&str, f64> = BTreeMap::new();
        for &at in members {
            let instruction = &computation.instructions[at];
            for (index, operand) in instruction.operands.iter().enumerate() {
                if own.contains(operand.as_str()) {
                    continue;
                }
                let Some(source) = computation.instruction(operand) else {
                    continue;
                };
                let whole = bytes(&source.shape);
                // Numbers are part of the program.
                if elements(&source.shape) <= 1.0 {
                    continue;
                }
                let part = self.part(instruction, index, whole, 0).min(whole);
                let known = taken.entry(operand.as_str()).or_default();
                *known = (*known + part).min(whole);
            }
        }
        taken.values().sum()
    }

    /// What an instruction takes of an operand of `whole` bytes.
    fn part(&self, instruction: &Instruction, index: usize, whole: f64, depth: usize) -> f64 {
        match instruction.opcode.as_str() {
            "slice" | "dynamic-slice" | "gather" if index == 0 => bytes(&instruction.shape),
            // The rest of the array stays where it is.
            "dynamic-update-slice" | "scatter" if index == 0 => 0.0,
            "fusion" if depth <= DEEPEST_FUSION => {
                let body = instruction
                    .called
                    .first()
                    .and_then(|name| self.module.computation(name));
                let parameter = body.and_then(|body| {
                    let inner = body
                        .instructions
                        .iter()
                        .find(|inner| inner.opcode == "parameter" && inner.index == Some(index))?;
                    Some((body, inner))
                });
                match parameter {
                    Some((body, parameter)) => {
                        let uses = body.instructions.iter().flat_map(|inner| {
                            let places = inner.operands.iter().enumerate();
                            places
                                .filter(|(_, name)| **name == parameter.name)
                                .map(move |(place, _)| self.part(inner, place, whole, depth + 1))
                        });
                        uses.sum::<f64>().min(whole)
                    }
                    None => whole,
                }
            }
            _ => whole,
        }
    }

    /// Bytes that an instruction writes.
    fn written(&self, computation: &Computation, instruction: &Instruction) -> f64 {
        let update = |computation: &Computation, instruction: &Instruction| {
            let place = match instruction.opcode.as_str() {
                "dynamic-update-slice" => 1,
                "scatter" => 2,
                _ => return None,
            };
            let name = instruction.operands.get(place)?;
            Some(bytes(&computation.instruction(name)?.shape))
        };
        if let Some(part) = update(computation, instruction) {
            return part;
        }
        if instruction.opcode == "fusion"
            && let Some(body) = instruction
                .called
                .first()
                .and_then(|name| self.module.computation(name))
            && let Some(root) = body.instructions.get(body.root())
            && let Some(part) = update(body, root)
        {
            return part;
        }
        bytes(&instruction.shape)
    }
}

/// Whether a product has anything to multiply.
fn is_not_empty(product: &FusedProduct) -> bool {
    product.batch > 0 && product.m > 0 && product.k > 0 && product.n > 0
}

/// The largest product decides how a kernel is tiled.
fn largest_first(fused: &mut Fused) {
    let size = |p: &FusedProduct| p.batch as f64 * p.m as f64 * p.k as f64 * p.n as f64;
    let largest = (0..fused.more_products.len())
        .max_by(|&a, &b| size(&fused.more_products[a]).total_cmp(&size(&fused.more_products[b])));
    if let Some(at) = largest {
        fused.product = Some(fused.more_products.remove(at));
    }
}

/// Operations of one application of a computation to single numbers.
fn applied_once(body: &Computation) -> (f64, f64) {
    body.instructions
        .iter()
        .filter_map(|instruction| elementwise(&instruction.opcode))
        .fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

fn product(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(1, u64::saturating_mul)
}

/// Passes that an f32 product takes at the precision its text asks for.
fn passes(instruction: &Instruction, dtype: Dtype) -> u32 {
    match (dtype, instruction.precision.as_deref()) {
        (Dtype::F32, Some("highest")) => 6,
        (Dtype::F32, Some("high")) => 3,
        _ => 1,
    }
}

fn dot(instruction: &Instruction, a: &Array, b: &Array) -> FusedProduct {
    let [contracting_a, _] = &instruction.contracting;
    let [batch_a, batch_b] = &instruction.batch;
    let of = |array: &Array, dims: &[usize]| {
        product(dims.iter().filter_map(|&d| array.dimensions.get(d).copied()))
    };
    let all = |array: &Array| product(array.dimensions.iter().copied());
    let batch = of(a, batch_a).max(1);
    let k = of(a, contracting_a).max(1);
    let format = crate::graph::matmul_dtype(dtype(&a.dtype), dtype(&b.dtype));
    FusedProduct {
        batch,
        m: all(a) / batch.saturating_mul(k).max(1),
        k,
        n: all(b) / of(b, batch_b).max(1).saturating_mul(k).max(1),
        dtype: format,
        passes: passes(instruction, format),
    }
}

/// A convolution as the product it is: positions and batch by taps and input features by output features.
fn convolution(instruction: &Instruction, a: &Array, b: &Array, out: f64) -> Option<FusedProduct> {
    let labels = instruction.dim_labels.as_deref()?;
    let (_, rest) = labels.split_once('_')?;
    let (kernel, _) = rest.split_once("->")?;
    let at = |label: char| kernel.find(label).and_then(|at| b.dimensions.get(at).copied());
    let outputs = at('o')?;
    let inputs = at('i')?;
    let taps = product(instruction.window.iter().copied()).max(1);
    let groups = instruction.feature_groups.max(1);
    let format = dtype(&a.dtype);
    Some(FusedProduct {
        batch: groups,
        m: (out / outputs.max(1) as f64).round() as u64,
        k: taps.saturating_mul(inputs),
        n: (outputs / groups).max(1),
        dtype: format,
        passes: passes(instruction, format),
    })
}
