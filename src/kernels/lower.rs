//! From a graph and a plan to kernels.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::{
    ColumnReads, Grid, Group, Implementation, Kernel, KernelOp, OpKind, Plan, Transfer, VectorCost, fusions,
};
use crate::graph::{Graph, Node, NodeId, Op, Role, Scan, Shape, Stage, Value, Work, work};

/// Lowers the nodes of every group of the plan to one kernel; a group without arithmetic gives none.
///
/// `value` is the graph's value input: operations downstream of it have value columns. `padding` is the share of rows that
/// only pad the last chunk.
#[must_use]
pub fn lower(graph: &Graph, plan: &Plan, value: Value, padding: f64) -> Vec<Kernel> {
    Lowerer::new(graph, value, padding).lower(plan)
}

/// As [`lower`], the way XLA compiles a layer for a TPU: kernels of the core are written by hand and stay whole, a group of stages around it becomes as many
/// kernels as XLA's fusions, which keep the label of the group. The core returns f32, rounded by its readers.
///
/// Source of the fusions: measured norms, which read their operand once for every statistic and once more; measured gated linear units, whose intermediate is
/// written in f32 and read back; see `kernels::fusions`. Source of the f32 output: the second kernel of Tokamax KDA; and in the stage table of the SLA paper
/// the output norm takes the same time after a fused kernel as after separate ones.
#[must_use]
pub fn lower_compiled(graph: &Graph, plan: &Plan, value: Value, padding: f64) -> Vec<Kernel> {
    Lowerer::new(graph, value, padding).lower_compiled(plan)
}

/// Lowers several plans of one graph, which share what does not depend on the plan.
#[derive(Debug)]
pub struct Lowerer<'a> {
    index: Index<'a>,
    /// Whether a node comes after the values.
    downstream: Vec<bool>,
    /// Arithmetic of every node.
    work: Vec<Work>,
    padding: f64,
}

impl<'a> Lowerer<'a> {
    /// Looks at a graph. `value` and `padding` are those of [`lower`].
    #[must_use]
    pub fn new(graph: &'a Graph, value: Value, padding: f64) -> Self {
        let index = Index::of(graph);
        Lowerer {
            downstream: descendants(&index, value.node),
            work: graph.nodes().map(|(id, _)| work::node_work(graph, id)).collect(),
            index,
            padding,
        }
    }

    /// Lets what is computed from `value` have value columns too: a state that was given.
    #[must_use]
    pub fn with_value_columns_of(mut self, value: Value) -> Self {
        let more = descendants(&self.index, value.node);
        for (held, more) in self.downstream.iter_mut().zip(more) {
            *held |= more;
        }
        self
    }

    /// [`lower`] of one more plan.
    #[must_use]
    pub fn lower(&self, plan: &Plan) -> Vec<Kernel> {
        let recomputed: BTreeSet<Stage> = plan.groups.iter().filter_map(|group| group.also).collect();
        plan.groups
            .iter()
            .filter_map(|group| {
                let part = Part {
                    recomputed: recomputed.clone(),
                    ..Part::whole(members(&self.index, plan, group))
                };
                self.kernel(group, &part)
            })
            .collect()
    }

    /// [`lower_compiled`] of one more plan.
    #[must_use]
    pub fn lower_compiled(&self, plan: &Plan) -> Vec<Kernel> {
        let index = &self.index;
        let late = last_roundings(index);
        let mut kernels = Vec::new();
        for group in &plan.groups {
            let members = if group.holds(Stage::Output) {
                Members::of(index.graph, |id, node| {
                    executes(group, node) && !late.contains(id)
                })
            } else {
                let roundings = group.holds(Stage::OutputNorm);
                Members::of(index.graph, |id, node| {
                    executes(group, node) || (roundings && late.contains(id))
                })
            };
            let in_core = [
                Stage::Gates,
                Stage::Gram,
                Stage::StateScan,
                Stage::Output,
                Stage::Attention,
                Stage::Whitening,
                Stage::Commit,
            ];
            let whole = in_core.into_iter().any(|stage| group.holds(stage));
            let heads = whole.then(|| heads(index.graph, &members)).flatten();
            // Products of one input are one product of their concatenated weights.
            let parts = if whole || group.holds(Stage::Projections) {
                vec![Part::whole(members)]
            } else {
                fusions::split(index, &members, &late)
            };
            let first = kernels.len();
            kernels.extend(parts.iter().filter_map(|part| self.kernel(group, part)));
            // Fusions of a group that is called by its only stage are called alike.
            let stages: BTreeSet<Stage> = kernels[first..]
                .iter()
                .flat_map(|kernel: &Kernel| kernel.ops.iter().map(|op| op.stage))
                .filter(|stage| group.holds(*stage))
                .collect();
            let (label, title) = names(group, &stages);
            for kernel in &mut kernels[first..] {
                kernel.implementation.most_units = heads;
                kernel.label.clone_from(&label);
                kernel.title.clone_from(&title);
            }
        }
        kernels
    }

    fn kernel(&self, group: &Group, part: &Part) -> Option<Kernel> {
        let (index, members) = (&self.index, &part.members);
        let graph = index.graph;
        let mut lowering = Lowering {
            graph,
            index,
            members,
            downstream: &self.downstream,
            ops: Vec::with_capacity(members.list.len()),
            pool: Vec::with_capacity(2 * members.list.len()),
            produced_by: vec![0..0; graph.len()],
            waits: Vec::new(),
        };
        for &id in &members.list {
            lowering.node(id);
        }
        let ops = lowering.ops;
        if ops.is_empty() {
            return None;
        }
        let (reads, writes) = transfers(index, part);
        let grid = grid(graph, members);
        let streams = grid.is_none();
        let grid = grid.unwrap_or(Grid {
            parallel: 1,
            sequential: 1,
        });
        let carried_bytes = carried_bytes(graph, members) / grid.parallel.max(1);
        let live_bytes = live_bytes(index, members) / grid.steps().max(1) + pair_live_bytes(graph, members);
        let in_core = group.first >= Stage::Gates || carried_bytes > 0;
        let (label, title) = names(group, &ops.iter().map(|op| op.stage).collect());
        Some(Kernel {
            label,
            title,
            ops,
            reads,
            writes,
            grid,
            streams,
            carried_bytes,
            live_bytes,
            units_per_program: group.program.map(|program| program.heads),
            steps_per_program: group
                .program
                .map_or(1, |program| program.chunks.min(grid.sequential)),
            share: 1.0,
            work: part
                .own()
                .list
                .iter()
                .map(|id| self.work[id.index()])
                .sum::<Work>(),
            padding: if in_core { self.padding } else { 0.0 },
            implementation: Implementation {
                value_tile: group.value_tile,
                ..Implementation::default()
            },
        })
    }
}

/// Whether a node is one that the stages of a group execute.
fn executes(group: &Group, node: &Node) -> bool {
    group.holds(node.stage) && !matches!(node.op, Op::Input { .. })
}

/// Roundings that nothing in the output stage reads.
fn last_roundings(index: &Index<'_>) -> Members {
    let graph = index.graph;
    let output = |node: &Node| node.stage == Stage::Output;
    let mut last = Members::of(graph, |_, node| output(node) && matches!(node.op, Op::Cast));
    for (id, node) in graph.nodes() {
        if output(node) && !index.is_free(id) {
            for source in index.sources(id) {
                last.held[source.node.index()] = false;
            }
        }
    }
    last.list.retain(|id| last.held[id.index()]);
    last
}

/// The nodes of one kernel.
#[derive(Debug, Clone)]
pub(super) struct Part {
    /// All it executes.
    pub(super) members: Members,
    /// Those that no other kernel of the group counts as its own, where not all are; the rest is done again for what reads it.
    pub(super) own: Option<Members>,
    /// What it writes for others; `None` where no other kernel shares its members, so that every use outside shows.
    pub(super) exports: Option<Vec<Value>>,
    /// Stages that some launch computes again where it needs them, all of what it needs.
    pub(super) recomputed: BTreeSet<Stage>,
}

impl Part {
    /// Nodes of a group that is one kernel.
    fn whole(members: Members) -> Self {
        Part {
            own: None,
            members,
            exports: None,
            recomputed: BTreeSet::new(),
        }
    }

    /// What no other kernel of the group counts as its own.
    pub(super) fn own(&self) -> &Members {
        self.own.as_ref().unwrap_or(&self.members)
    }
}

/// The nodes that a launch executes. Of a stage that another launch computes again where it is used, a launch keeps what others than that one need, and of a
/// stage that it computes again itself what its own need.
fn members(index: &Index<'_>, plan: &Plan, group: &Group) -> Members {
    let graph = index.graph;
    let input = |node: &Node| matches!(node.op, Op::Input { .. });
    let own = |group: &Group, stage: Stage| group.holds(stage) && group.also != Some(stage);
    let mut members = Members::of(graph, |_, node| !input(node) && own(group, node.stage));
    for stage in plan.groups.iter().filter_map(|other| other.also) {
        if own(group, stage) {
            let users = Members::of(graph, |_, node| {
                !input(node)
                    && node.stage != stage
                    && !plan
                        .groups
                        .iter()
                        .any(|other| other.also == Some(stage) && own(other, node.stage))
            });
            let needed = ancestors(index, &users);
            members = Members::of(graph, |id, node| {
                members.contains(id) && (node.stage != stage || needed[id.index()])
            });
        }
    }
    if let Some(stage) = group.also {
        let needed = ancestors(index, &members);
        members = Members::of(graph, |id, node| {
            members.contains(id) || (!input(node) && node.stage == stage && needed[id.index()])
        });
    }
    members
}

/// Whether some of the nodes `of` depend on a node; on themselves they do.
fn ancestors(index: &Index<'_>, of: &Members) -> Vec<bool> {
    let mut seen = of.held.clone();
    // Nodes are stored in topological order, so one pass backward finds all of them.
    for at in (0..seen.len()).rev() {
        if seen[at] {
            for operand in index.operands(NodeId::new(at)) {
                seen[operand.node.index()] = true;
            }
        }
    }
    seen
}

/// Label and title of a group of which a layer has these stages: that of the only stage, where there is one.
fn names(group: &Group, stages: &BTreeSet<Stage>) -> (String, String) {
    match stages.first() {
        Some(only) if stages.len() == 1 && group.first != group.last => {
            (only.name().to_owned(), only.title().to_owned())
        }
        _ => (group.label(), group.title()),
    }
}

/// Operands and what stands behind their views, looked up once for all kernels of a graph.
#[derive(Debug)]
pub(super) struct Index<'a> {
    pub(super) graph: &'a Graph,
    /// Whether a node is only an address computation.
    free: Vec<bool>,
    /// [`sources`] of every operand of every node, one operand after the other.
    sources: Vec<(Value, u64)>,
    /// Where those of every operand end.
    source_ends: Vec<usize>,
    /// The first operand of every node among all operands, and how many there are.
    first_operand: Vec<usize>,
    /// Nodes that compute something from a result of a node, views left out, in their order, one node after the other.
    readers: Vec<(Value, NodeId)>,
    /// Where those of every node begin, and their number.
    first_reader: Vec<usize>,
    /// Sources of the outputs of the graph, in their order.
    outputs: Vec<(Value, Vec<Value>)>,
    /// Next values of states, caches and logs, with the role of those.
    next_roles: Vec<(Value, Role)>,
}

impl<'a> Index<'a> {
    fn of(graph: &'a Graph) -> Self {
        let free: Vec<bool> = graph.nodes().map(|(_, node)| is_free(node)).collect();
        let mut pending = Vec::new();
        let mut sources = Vec::with_capacity(4 * graph.len());
        let mut source_ends = Vec::with_capacity(3 * graph.len());
        let mut first_operand = Vec::with_capacity(graph.len() + 1);
        // How often every node is read, then where its readers begin.
        let mut first_reader = vec![0; graph.len() + 1];
        for (id, _) in graph.nodes() {
            first_operand.push(source_ends.len());
            for &operand in graph.operands(id) {
                let from = sources.len();
                push_sources(graph, operand, &mut pending, &mut sources);
                source_ends.push(sources.len());
                if !free[id.index()] {
                    for (source, _) in &sources[from..] {
                        first_reader[source.node.index() + 1] += 1;
                    }
                }
            }
        }
        first_operand.push(source_ends.len());
        for at in 1..first_reader.len() {
            first_reader[at] += first_reader[at - 1];
        }
        let nowhere = Value {
            node: NodeId::new(0),
            port: 0,
        };
        let mut readers = vec![(nowhere, NodeId::new(0)); first_reader[graph.len()]];
        let mut next = first_reader.clone();
        let mut index = Index {
            graph,
            free,
            sources,
            source_ends,
            first_operand,
            readers: Vec::new(),
            first_reader,
            outputs: Vec::new(),
            next_roles: Vec::new(),
        };
        for (id, _) in graph.nodes().filter(|(id, _)| !index.is_free(*id)) {
            for source in index.sources(id) {
                let at = &mut next[source.node.index()];
                readers[*at] = (source, id);
                *at += 1;
            }
        }
        index.readers = readers;
        let behind = |value: Value| {
            let mut found = Vec::new();
            push_sources(graph, value, &mut pending, &mut found);
            (value, found.into_iter().map(|(source, _)| source).collect())
        };
        index.outputs = graph
            .outputs()
            .iter()
            .map(|(_, value)| *value)
            .map(behind)
            .collect();
        index.next_roles = next_values(graph, &index.outputs);
        index
    }

    /// Role of a value that no input brings: of the state, cache or log that it is the next value of, else of an activation.
    fn next_role(&self, value: Value) -> Role {
        let next = self.next_roles.iter().find(|(next, _)| *next == value);
        next.map_or(Role::Activation, |(_, role)| *role)
    }

    /// Operands of a node.
    pub(super) fn operands(&self, id: NodeId) -> &'a [Value] {
        self.graph.operands(id)
    }

    /// Whether a node is only an address computation.
    pub(super) fn is_free(&self, id: NodeId) -> bool {
        self.free[id.index()]
    }

    /// Where the sources of an operand begin, counted over all nodes.
    fn source_start(&self, operand: usize) -> usize {
        operand
            .checked_sub(1)
            .map_or(0, |before| self.source_ends[before])
    }

    /// The operands of a node, each with the values behind it.
    fn behind(&self, id: NodeId) -> impl Iterator<Item = (Value, &[(Value, u64)])> {
        let operands = self.operands(id).iter().copied();
        operands
            .zip(self.first_operand[id.index()]..)
            .map(|(value, operand)| {
                let range = self.source_start(operand)..self.source_ends[operand];
                (value, &self.sources[range])
            })
    }

    /// The values behind the operands of a node.
    pub(super) fn sources(&self, id: NodeId) -> impl Iterator<Item = Value> {
        let [start, end] = [id.index(), id.index() + 1].map(|at| self.source_start(self.first_operand[at]));
        self.sources[start..end].iter().map(|(source, _)| *source)
    }

    /// Whether a value is a view of one of `others`, through views of one operand each.
    fn within(&self, value: Value, others: &[((Value, Value), u64)]) -> bool {
        let mut value = value;
        while self.is_free(value.node)
            && let [operand] = self.operands(value.node)
        {
            if others.iter().any(|((_, view), _)| view == operand) {
                return true;
            }
            value = *operand;
        }
        false
    }

    /// Results of a node with the nodes that compute something from them, in the order of those.
    pub(super) fn readers(&self, id: NodeId) -> &[(Value, NodeId)] {
        &self.readers[self.first_reader[id.index()]..self.first_reader[id.index() + 1]]
    }

    /// The outputs of the graph, each with the values behind its views.
    pub(super) fn outputs(&self) -> impl Iterator<Item = (Value, &[Value])> {
        self.outputs
            .iter()
            .map(|(value, bases)| (*value, bases.as_slice()))
    }
}

/// Some nodes of a graph.
#[derive(Debug, Clone)]
pub(super) struct Members {
    /// In the order of the graph.
    pub(super) list: Vec<NodeId>,
    /// By index of the node.
    held: Vec<bool>,
}

impl Members {
    /// The nodes that `holds` picks.
    pub(super) fn of(graph: &Graph, mut holds: impl FnMut(NodeId, &Node) -> bool) -> Self {
        Self::held(graph.nodes().map(|(id, node)| holds(id, node)).collect())
    }

    /// The nodes that are held, by their index.
    pub(super) fn held(held: Vec<bool>) -> Self {
        let mut list = Vec::with_capacity(held.iter().filter(|held| **held).count());
        list.extend((0..held.len()).filter(|&at| held[at]).map(NodeId::new));
        Members { list, held }
    }

    /// Whether a node is one of them.
    pub(super) fn contains(&self, id: NodeId) -> bool {
        self.held[id.index()]
    }
}

/// Whether every node can be reached from `from`, itself included.
fn descendants(index: &Index<'_>, from: NodeId) -> Vec<bool> {
    let mut seen = vec![false; index.graph.len()];
    seen[from.index()] = true;
    // Nodes are stored in topological order, so one pass forward finds all of them.
    for (id, _) in index.graph.nodes() {
        if index
            .operands(id)
            .iter()
            .any(|operand| seen[operand.node.index()])
        {
            seen[id.index()] = true;
        }
    }
    seen
}

/// Appends the values behind a chain of views, each with the bytes of the narrowest view it is seen through. `pending` is empty before and after.
fn push_sources(
    graph: &Graph,
    value: Value,
    pending: &mut Vec<(Value, u64)>,
    sources: &mut Vec<(Value, u64)>,
) {
    pending.push((value, u64::MAX));
    while let Some((value, seen)) = pending.pop() {
        let node = graph.node(value.node);
        let seen = seen.min(graph.ty(value).bytes());
        let view = match node.op {
            Op::Reshape
            | Op::Slice { .. }
            | Op::Pad { .. }
            | Op::GatherRows { .. }
            | Op::Concatenate { .. } => true,
            Op::Transpose { ref permutation } => keeps_minor(permutation),
            _ => false,
        };
        if view {
            pending.extend(graph.operands(value.node).iter().map(|&operand| (operand, seen)));
        } else {
            sources.push((value, seen));
        }
    }
}

fn keeps_minor(permutation: &[usize]) -> bool {
    permutation.last().is_none_or(|&p| p + 1 == permutation.len())
}

/// Whether a node is only an address computation: views, except transposes that move the minor dimension.
fn is_free(node: &Node) -> bool {
    match &node.op {
        Op::Transpose { permutation } => keeps_minor(permutation),
        op => op.is_view(),
    }
}

fn transfers(index: &Index<'_>, part: &Part) -> (Vec<Transfer>, Vec<Transfer>) {
    let (graph, members) = (index.graph, &part.members);
    // Bytes of the views through which an outside value is read, capped by the value itself: a kernel that takes two
    // slices of a tensor reads their sum, one that takes a tensor and a slice of it reads the tensor once.
    let mut read: Vec<((Value, Value), u64)> = Vec::new();
    let mut written: Vec<Value> = part.exports.iter().flatten().copied().collect();
    let mut columns: BTreeMap<Value, ColumnReads> = BTreeMap::new();
    let on_chip = |value: &Value| matches!(graph.node(value.node).op, Op::Fill(_) | Op::Identity);
    for &id in &members.list {
        if part.exports.is_none() {
            for &(source, reader) in index.readers(id) {
                // Who computes a stage again computes all of it that is needed there.
                let again = || {
                    let stage = graph.node(reader).stage;
                    graph.node(id).stage == stage && part.recomputed.contains(&stage)
                };
                if !members.contains(reader) && !on_chip(&source) && !again() {
                    written.push(source);
                }
            }
        }
        if index.is_free(id) {
            continue;
        }
        for (position, (operand, sources)) in index.behind(id).enumerate() {
            for &(source, seen) in sources {
                if members.contains(source.node) {
                    continue;
                }
                if let Some((scan, heads)) = column_operand(index, id, position) {
                    let ty = graph.ty(operand);
                    let block = ty.bytes() / ty.shape.dims()[scan.axis].max(1) as u64;
                    let own_heads: u64 = leading(&ty.shape, scan.axis);
                    let reads = columns.entry(source).or_insert(ColumnReads {
                        streamed: 0,
                        resident: 0,
                    });
                    reads.streamed += scan.trips as u64 * heads * (block / own_heads.max(1));
                    reads.resident = ty.bytes() / own_heads.max(1);
                }
                if !on_chip(&source) {
                    read.push(((source, operand), seen));
                }
            }
        }
    }
    for (output, bases) in index.outputs() {
        let own = part.own().contains(output.node);
        let copies = own
            && index.is_free(output.node)
            && bases
                .iter()
                .any(|source| !members.contains(source.node) && !on_chip(source));
        if copies {
            // A view of something the kernel did not make has to be written by it: a convolution state moved on by a token.
            written.push(output);
            continue;
        }
        for &source in bases {
            let own = part.own().contains(source.node) && part.exports.is_none();
            if own && !matches!(graph.node(source.node).op, Op::Fill(_)) {
                written.push(source);
            }
        }
    }
    let role = |value: Value| match graph.node(value.node).op {
        Op::Input { role, .. } => role,
        _ => index.next_role(value),
    };
    written.sort_unstable();
    written.dedup();
    // Of a value behind the same operand twice the view that came last counts.
    read.reverse();
    read.sort_by_key(|(key, _)| *key);
    read.dedup_by_key(|(key, _)| *key);
    let transfer = |value: Value, bytes: u64| Transfer {
        name: graph.node(value.node).name.clone(),
        bytes,
        dtype: graph.ty(value).dtype,
        role: role(value),
        columns: None,
    };
    let reads = read
        .chunk_by(|((a, _), _), ((b, _), _)| a == b)
        .map(|views| {
            let source = views[0].0.0;
            // What is seen through another view that is read as well comes with it.
            let apart = views.iter().filter(|((_, view), _)| !index.within(*view, views));
            let bytes: u64 = apart.map(|(_, seen)| seen).sum();
            Transfer {
                columns: columns.get(&source).copied(),
                ..transfer(source, bytes.min(graph.ty(source).bytes()))
            }
        })
        .collect();
    let writes = written
        .iter()
        .map(|&value| transfer(value, graph.ty(value).bytes()))
        .collect();
    (reads, writes)
}

/// Values that outputs of the name of a state, a cache or a log hand on, with its role; `outputs` are those of the graph with the values behind their views.
fn next_values(graph: &Graph, outputs: &[(Value, Vec<Value>)]) -> Vec<(Value, Role)> {
    let kept = |node: &Node| match node.op {
        Op::Input {
            role: role @ (Role::State | Role::Cache | Role::Log),
            ..
        } => Some(role),
        _ => None,
    };
    let inputs: Vec<(&str, Role)> = graph
        .inputs()
        .filter_map(|(_, node)| Some((&*node.name, kept(node)?)))
        .collect();
    let mut roles = Vec::new();
    for ((name, _), (output, bases)) in graph.outputs().iter().zip(outputs) {
        let Some(&(_, role)) = inputs.iter().find(|(input, _)| **input == **name) else {
            continue;
        };
        roles.push((*output, role));
        // What is the next value and more besides, such as the queries beside the keys of a cache, is handed on for another reason.
        if let [base] = bases[..]
            && graph.ty(base).bytes() == graph.ty(*output).bytes()
        {
            roles.push((base, role));
        }
    }
    roles
}

/// The loop over pairs of blocks behind node `id`, if operand `position` is sliced by its column block and a block may be read more than once, and the
/// heads of its carries.
fn column_operand<'a>(index: &Index<'a>, id: NodeId, position: usize) -> Option<(&'a Scan, u64)> {
    let graph = index.graph;
    let node = graph.node(id);
    let Op::Scan(scan) = &node.op else { return None };
    let pairs = scan.pairs.as_ref()?;
    let heads = leading(&node.results[0].shape, scan.axis);
    // One block of queries per head of the keys meets every key block once: a stream like any other.
    let own_heads = leading(&graph.ty(*index.operands(id).get(position)?).shape, scan.axis);
    let once = node.results[0].shape.dims()[scan.axis] == 1 && own_heads == heads;
    (position >= scan.carries + pairs.rows && !once).then_some((&**scan, heads))
}

/// Product of the extents before `axis`.
fn leading(shape: &Shape, axis: usize) -> u64 {
    shape.dims()[..axis].iter().map(|&d| d as u64).product()
}

/// Loops over pairs of blocks among the members, with the heads and row blocks of their carries.
fn pair_loops<'a>(graph: &'a Graph, members: &'a Members) -> impl Iterator<Item = (&'a Node, &'a Scan)> {
    members.list.iter().filter_map(|&id| {
        let node = graph.node(id);
        match &node.op {
            Op::Scan(scan) if scan.pairs.is_some() => Some((node, &**scan)),
            _ => None,
        }
    })
}

/// Trips of all loops over pairs: a grid step is one trip of one of them.
fn pair_trips(graph: &Graph, members: &Members) -> u64 {
    pair_loops(graph, members)
        .map(|(_, scan)| scan.trips as u64)
        .sum()
}

/// Intermediates of one trip of a loop over pairs, of one head.
fn pair_live_bytes(graph: &Graph, members: &Members) -> u64 {
    pair_loops(graph, members)
        .map(|(node, scan)| {
            let inside = Members::of(&scan.body, |_, node| !matches!(node.op, Op::Input { .. }));
            live_bytes(&Index::of(&scan.body), &inside) / leading(&node.results[0].shape, scan.axis).max(1)
        })
        .max()
        .unwrap_or(0)
}

fn grid(graph: &Graph, members: &Members) -> Option<Grid> {
    // Attention: a unit is a query block of a head, its steps are the key blocks it visits, on average where the mask is causal.
    if let Some((node, scan)) = pair_loops(graph, members).next() {
        let rows = node.results[0].shape.dims()[scan.axis] as u64;
        return Some(Grid {
            parallel: leading(&node.results[0].shape, scan.axis) * rows,
            sequential: pair_trips(graph, members).div_ceil(rows.max(1)).max(1),
        });
    }
    // Of several loops the one over the most heads: key heads may carry something of their own beside the states.
    let scans = members.list.iter().filter_map(|&id| match &graph.node(id).op {
        Op::Scan(scan) if scan.scanned > 0 => {
            let ty = graph.node(id).results.get(scan.carries)?;
            let parallel = ty.shape.dims()[..scan.axis].iter().map(|&d| d as u64).product();
            Some(Grid {
                parallel,
                sequential: scan.trips as u64,
            })
        }
        _ => None,
    });
    if let Some(grid) = scans.max_by_key(|grid| grid.parallel) {
        return Some(grid);
    }
    // A decode step runs over the states it reads, or the logs of their updates: (batch, key head, value head).
    let heads_of = |wanted: Role| {
        members
            .list
            .iter()
            .flat_map(|&id| graph.operands(id).iter().copied())
            .find_map(|operand| {
                let dims = graph.ty(operand).shape.dims();
                let found = matches!(graph.node(operand.node).op, Op::Input { role, .. } if role == wanted);
                (found && dims.len() == 5).then(|| dims[..3].iter().map(|&d| d as u64).product())
            })
    };
    let states = heads_of(Role::State).or_else(|| heads_of(Role::Log));
    if let Some(parallel) = states {
        return Some(Grid {
            parallel,
            sequential: 1,
        });
    }
    // Kernels of the core without a scan run over (batch, head, chunk).
    chunked_product(graph, members).map(|leading| Grid {
        parallel: leading.iter().map(|&d| d as u64).product(),
        sequential: 1,
    })
}

/// Leading dimensions of the products of the core: batch, key heads, value heads of one, chunks.
fn chunked_product<'a>(graph: &'a Graph, members: &Members) -> Option<&'a [usize]> {
    members
        .list
        .iter()
        .filter(|&&id| matches!(graph.node(id).op, Op::MatMul { .. }))
        .find_map(|&id| {
            let shape = &graph.node(id).results[0].shape;
            (shape.rank() >= 6).then(|| &shape.dims()[..4])
        })
}

/// Heads of a chunk of the core.
fn heads(graph: &Graph, members: &Members) -> Option<u64> {
    chunked_product(graph, members).map(|leading| (leading[1] * leading[2]) as u64)
}

fn carried_bytes(graph: &Graph, members: &Members) -> u64 {
    // Loops over pairs follow each other on the same carries.
    if let Some((node, _)) = pair_loops(graph, members).next() {
        return node.results.iter().map(|ty| 4 * ty.shape.elements()).sum();
    }
    members
        .list
        .iter()
        .map(|&id| match &graph.node(id).op {
            // The working copy of the state is f32 whatever format it is rounded to between chunks.
            // What a repeated body carries lives inside one step; sequences that follow each other use the same copy one after the other.
            Op::Scan(scan) if scan.scanned > 0 => {
                let carried = graph.node(id).results[..scan.carries].iter();
                carried.map(|ty| 4 * ty.shape.elements()).sum::<u64>() / scan.segments.len().max(1) as u64
            }
            _ => 0,
        })
        .sum()
}

/// Largest sum of intermediates alive at once, over the whole kernel; views share the storage of their source.
fn live_bytes(index: &Index<'_>, members: &Members) -> u64 {
    let nodes = index.graph.len();
    // By node, for its first result.
    let mut last_use: Vec<Option<NodeId>> = vec![None; nodes];
    for &id in &members.list {
        for (_, sources) in index.behind(id) {
            for (source, _) in sources {
                if source.port == 0 && members.contains(source.node) {
                    last_use[source.node.index()] = Some(id);
                }
            }
        }
    }
    let mut expires = vec![0_u64; nodes];
    let (mut live, mut peak) = (0_u64, 0_u64);
    for &id in &members.list {
        if !index.is_free(id) {
            let node = index.graph.node(id);
            // Stacked results of a scan are consumed chunk by chunk in the same kernel, or written out.
            let results = match &node.op {
                Op::Scan(scan) if scan.scanned > 0 => 0,
                _ => node.results.iter().map(crate::graph::TensorType::bytes).sum(),
            };
            live += results;
            peak = peak.max(live);
            match last_use[id.index()] {
                Some(last) => expires[last.index()] += results,
                None => live -= results,
            }
        }
        live -= std::mem::take(&mut expires[id.index()]);
    }
    peak
}

/// What a loop does to the operations of its body.
#[derive(Clone, Copy)]
struct Loop {
    /// Executions in the whole kernel.
    count: u64,
    /// Dependent executions in one grid step.
    serial: u64,
    /// Whether it carries state from one grid step to the next.
    carried: bool,
    /// Share of the grid steps that execute it.
    share: f64,
}

struct Lowering<'a> {
    graph: &'a Graph,
    index: &'a Index<'a>,
    members: &'a Members,
    /// Whether a node comes after the values.
    downstream: &'a [bool],
    ops: Vec<KernelOp>,
    /// Lists of operations, one after the other.
    pool: Vec<usize>,
    /// In the pool the last operations behind every node of the kernel; none behind nodes of others.
    produced_by: Vec<Range<usize>>,
    /// The operations that a node waits for.
    waits: Vec<usize>,
}

impl Lowering<'_> {
    /// Finds what waits for results of `operands`, by the operations behind every node.
    fn find_waits(&mut self, operands: &[Value], produced_by: &[Range<usize>]) {
        self.waits.clear();
        for operand in operands {
            self.waits
                .extend_from_slice(&self.pool[produced_by[operand.node.index()].clone()]);
        }
        self.waits.sort_unstable();
        self.waits.dedup();
    }

    /// Keeps what was found last.
    fn keep_waits(&mut self) -> Range<usize> {
        let from = self.pool.len();
        self.pool.extend_from_slice(&self.waits);
        from..self.pool.len()
    }

    /// Appends an operation.
    fn push(&mut self, op: KernelOp) -> Range<usize> {
        self.pool.push(self.ops.len());
        self.ops.push(op);
        self.pool.len() - 1..self.pool.len()
    }

    fn node(&mut self, id: NodeId) {
        let node = self.graph.node(id);
        let produced_by = std::mem::take(&mut self.produced_by);
        self.find_waits(self.index.operands(id), &produced_by);
        self.produced_by = produced_by;
        if self.index.is_free(id) {
            self.produced_by[id.index()] = self.keep_waits();
            return;
        }
        let value_columns = self.downstream[id.index()];
        if let Op::Scan(scan) = &node.op {
            // Splitting the values of attention would repeat its scores, which no kernel does.
            let value_columns = value_columns && scan.pairs.is_none();
            let share = match &scan.pairs {
                Some(_) => scan.trips as f64 / pair_trips(self.graph, self.members).max(1) as f64,
                None => 1.0,
            };
            let trips = scan.trips as u64;
            // Chunks of a head follow each other from grid step to grid step; a repeated body stays within one.
            let carried = scan.scanned > 0;
            let around = Loop {
                count: trips,
                serial: if carried { 1 } else { trips },
                carried,
                share,
            };
            let after = self.keep_waits();
            self.produced_by[id.index()] = self.scan_body(&scan.body, around, &after, value_columns);
            return;
        }
        let op = KernelOp {
            name: node.name.clone(),
            stage: node.stage,
            kind: kind(self.graph, id),
            count: instances(self.graph, id),
            serial: 1,
            after: self.waits.clone(),
            value_columns,
            carried: false,
            share: 1.0,
        };
        self.produced_by[id.index()] = self.push(op);
    }

    /// Appends the body once with the counts of all trips, loops inside it likewise; returns the operations behind its results.
    fn scan_body(
        &mut self,
        body: &Graph,
        around: Loop,
        after: &Range<usize>,
        value_columns: bool,
    ) -> Range<usize> {
        let mut produced: Vec<Range<usize>> = vec![0..0; body.len()];
        for (id, node) in body.nodes() {
            if matches!(node.op, Op::Input { role: Role::Body, .. }) {
                produced[id.index()] = after.clone();
                continue;
            }
            self.find_waits(body.operands(id), &produced);
            produced[id.index()] = if is_free(node) {
                self.keep_waits()
            } else if let Op::Scan(scan) = &node.op {
                let inside = Loop {
                    count: around.count * scan.trips as u64,
                    serial: around.serial * scan.trips as u64,
                    ..around
                };
                let waits = self.keep_waits();
                self.scan_body(&scan.body, inside, &waits, value_columns)
            } else {
                self.push(KernelOp {
                    name: node.name.clone(),
                    stage: node.stage,
                    kind: kind(body, id),
                    count: instances(body, id) * around.count,
                    serial: around.serial,
                    after: self.waits.clone(),
                    value_columns,
                    carried: around.carried,
                    share: around.share,
                })
            };
        }
        self.waits.clear();
        for (_, value) in body.outputs() {
            self.waits
                .extend_from_slice(&self.pool[produced[value.node.index()].clone()]);
        }
        self.waits.sort_unstable();
        self.waits.dedup();
        self.keep_waits()
    }
}

/// Instances of an operation: the batch of a product or substitution whose second operand is batched too; 1 for others, whose whole
/// tensor is one instance.
fn instances(graph: &Graph, id: NodeId) -> u64 {
    match graph.node(id).op {
        Op::MatMul { .. } => {
            let operands = graph.operands(id);
            if graph.ty(operands[1]).shape.batch() == 1 {
                1
            } else {
                graph.node(id).results[0].shape.batch()
            }
        }
        Op::ForwardSubstitution | Op::BackwardSubstitution | Op::Cholesky => {
            graph.node(id).results[0].shape.batch()
        }
        _ => 1,
    }
}

fn kind(graph: &Graph, id: NodeId) -> OpKind {
    let node = graph.node(id);
    let operands = graph.operands(id);
    let shape = &node.results[0].shape;
    let operand_shape = |i: usize| &graph.ty(operands[i]).shape;
    let vector = |dims: &Shape, alu: f64, transcendental: f64| OpKind::Vector {
        dims: dims.clone(),
        cost: VectorCost { alu, transcendental },
        cross_lane: None,
        cross_lane_ops: 0.0,
    };
    let with_lanes = |dims: &Shape, alu: f64, rows_columns: [usize; 2], ops: f64| OpKind::Vector {
        dims: dims.clone(),
        cost: VectorCost {
            alu,
            transcendental: 0.0,
        },
        cross_lane: Some(rows_columns),
        cross_lane_ops: ops,
    };
    let rows = |shape: &Shape| (shape.batch() as usize) * shape.from_end(1);
    match &node.op {
        Op::MatMul {
            transpose_a,
            precision,
            ..
        } => {
            let (a, b) = (graph.ty(operands[0]), graph.ty(operands[1]));
            let dtype = crate::graph::matmul_dtype(a.dtype, b.dtype);
            let k = a.shape.from_end(usize::from(*transpose_a)) as u64;
            let shared = instances(graph, id) == 1;
            let m = shape.from_end(1) as u64 * if shared { shape.batch() } else { 1 };
            let passes = if dtype.bytes() > 2 { precision.passes() } else { 1 };
            OpKind::Product {
                m,
                k,
                n: shape.from_end(0) as u64,
                dtype,
                passes,
            }
        }
        Op::Elementwise(function) => {
            let (alu, transcendental) = (function.vector_ops() as f64, function.transcendentals() as f64);
            // A column operand is spread over the lanes once per register row.
            let column = (0..operands.len()).any(|i| {
                operand_shape(i).from_end(0) == 1 && operand_shape(i).from_end(1) > 1 && shape.from_end(0) > 1
            });
            OpKind::Vector {
                dims: shape.clone(),
                cost: VectorCost { alu, transcendental },
                cross_lane: column.then(|| [rows(shape), 1]),
                cross_lane_ops: 1.0,
            }
        }
        Op::Reduce { axis, .. } => {
            let input = operand_shape(0);
            if axis + 1 == input.rank() {
                with_lanes(input, 1.0, [rows(input), 1], 1.0)
            } else {
                vector(input, 1.0, 0.0)
            }
        }
        Op::CausalConvolution { width, .. } => {
            // Each earlier token is a shift of the rows, which the cross-lane unit does; a lone token finds its history beside it.
            let shifts = (width - 1).min(shape.from_end(1).saturating_sub(1)) as f64;
            with_lanes(
                shape,
                (2 * width - 1) as f64,
                [rows(shape), shape.from_end(0)],
                shifts,
            )
        }
        Op::Transpose { .. } => with_lanes(shape, 0.0, [rows(shape), shape.from_end(0)], 1.0),
        // Every number is spread over lanes of its own; registers that hold several of them are put together from as many.
        Op::RepeatMinor { times } => {
            let numbers = shape.from_end(0) / times.max(&1);
            with_lanes(shape, 0.0, [rows(shape) * numbers, *times], 1.0)
        }
        Op::Cholesky => OpKind::Cholesky {
            rows: shape.from_end(1) as u64,
        },
        Op::ForwardSubstitution | Op::BackwardSubstitution => OpKind::Substitution {
            rows: shape.from_end(1) as u64,
            columns: shape.from_end(0) as u64,
            systems: (operand_shape(0).from_end(0) / shape.from_end(1).max(1)) as u64,
        },
        Op::SelectVisible { visibility, .. } => vector(shape, visibility.conditions() as f64, 0.0),
        _ => vector(shape, 1.0, 0.0),
    }
}
