//! From a graph and a plan to kernels.

use std::collections::{BTreeMap, BTreeSet};

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
    let downstream = descendants(graph, value.node);
    let recomputed: BTreeSet<Stage> = plan.groups.iter().filter_map(|group| group.also).collect();
    plan.groups
        .iter()
        .filter_map(|group| {
            let part = Part {
                recomputed: recomputed.clone(),
                ..Part::whole(members(graph, plan, group))
            };
            kernel(graph, group, &part, &downstream, padding)
        })
        .collect()
}

/// As [`lower`], the way XLA compiles a layer for a TPU: kernels of the core are written by hand and stay whole, a group of stages around it becomes as many
/// kernels as XLA's fusions, which keep the label of the group. The core returns f32, rounded by its readers.
///
/// Source of the fusions: measured norms, which read their operand once for every statistic and once more; measured gated linear units, whose intermediate is
/// written in f32 and read back; see `kernels::fusions`. Source of the f32 output: the second kernel of Tokamax KDA; and in the stage table of the SLA paper
/// the output norm takes the same time after a fused kernel as after separate ones.
#[must_use]
pub fn lower_compiled(graph: &Graph, plan: &Plan, value: Value, padding: f64) -> Vec<Kernel> {
    let downstream = descendants(graph, value.node);
    let late = last_roundings(graph);
    let mut kernels = Vec::new();
    for group in &plan.groups {
        let mut members = nodes_of(graph, |stage| group.holds(stage));
        if group.holds(Stage::Output) {
            members.retain(|id| !late.contains(id));
        } else if group.holds(Stage::OutputNorm) {
            members.extend(&late);
        }
        let in_core = [
            Stage::Gates,
            Stage::StateScan,
            Stage::Output,
            Stage::Attention,
            Stage::Whitening,
        ];
        let whole = in_core.into_iter().any(|stage| group.holds(stage));
        // Products of one input are one product of their concatenated weights.
        let parts = if whole || group.holds(Stage::Projections) {
            vec![Part::whole(members)]
        } else {
            fusions::split(graph, &members, &late)
        };
        let first = kernels.len();
        kernels.extend(
            parts
                .iter()
                .filter_map(|part| kernel(graph, group, part, &downstream, padding)),
        );
        // Fusions of a group that is called by its only stage are called alike.
        let stages: BTreeSet<Stage> = kernels[first..]
            .iter()
            .flat_map(|kernel: &Kernel| kernel.ops.iter().map(|op| op.stage))
            .filter(|stage| group.holds(*stage))
            .collect();
        let (label, title) = names(group, &stages);
        let heads = whole.then(|| heads(graph, &parts[0].members)).flatten();
        for kernel in &mut kernels[first..] {
            kernel.implementation.most_units = heads;
            kernel.label.clone_from(&label);
            kernel.title.clone_from(&title);
        }
    }
    kernels
}

/// Roundings that nothing in the output stage reads.
fn last_roundings(graph: &Graph) -> BTreeSet<NodeId> {
    let output = nodes_of(graph, |stage| stage == Stage::Output);
    let mut last: BTreeSet<NodeId> = output
        .iter()
        .copied()
        .filter(|&id| matches!(graph.node(id).op, Op::Cast))
        .collect();
    for &id in &output {
        if !is_free(graph.node(id)) {
            for operand in graph.operands(id) {
                for source in base(graph, operand) {
                    last.remove(&source.node);
                }
            }
        }
    }
    last
}

/// The nodes of the stages that `holds` picks, inputs excepted.
fn nodes_of(graph: &Graph, holds: impl Fn(Stage) -> bool) -> BTreeSet<NodeId> {
    graph
        .nodes()
        .filter(|(_, node)| holds(node.stage) && !matches!(node.op, Op::Input { .. }))
        .map(|(id, _)| id)
        .collect()
}

/// The nodes of one kernel.
#[derive(Debug, Clone)]
pub(super) struct Part {
    /// All it executes.
    pub(super) members: BTreeSet<NodeId>,
    /// Those that no other kernel of the group counts as its own; the rest is done again for what reads it.
    pub(super) own: BTreeSet<NodeId>,
    /// What it writes for others; `None` where no other kernel shares its members, so that every use outside shows.
    pub(super) exports: Option<BTreeSet<Value>>,
    /// Stages that some launch computes again where it needs them, all of what it needs.
    pub(super) recomputed: BTreeSet<Stage>,
}

impl Part {
    /// Nodes of a group that is one kernel.
    fn whole(members: BTreeSet<NodeId>) -> Self {
        Part {
            own: members.clone(),
            members,
            exports: None,
            recomputed: BTreeSet::new(),
        }
    }
}

/// The nodes that a launch executes. Of a stage that another launch computes again where it is used, a launch keeps what others than that one need, and of a
/// stage that it computes again itself what its own need.
fn members(graph: &Graph, plan: &Plan, group: &Group) -> BTreeSet<NodeId> {
    let nodes = || {
        graph
            .nodes()
            .filter(|(_, node)| !matches!(node.op, Op::Input { .. }))
    };
    let own = |group: &Group, stage: Stage| group.holds(stage) && group.also != Some(stage);
    let mut members: BTreeSet<NodeId> = nodes()
        .filter(|(_, node)| own(group, node.stage))
        .map(|(id, _)| id)
        .collect();
    for stage in plan.groups.iter().filter_map(|other| other.also) {
        if own(group, stage) {
            let users = nodes()
                .filter(|(_, node)| {
                    node.stage != stage
                        && !plan
                            .groups
                            .iter()
                            .any(|other| other.also == Some(stage) && own(other, node.stage))
                })
                .map(|(id, _)| id)
                .collect();
            let needed = ancestors(graph, users);
            members.retain(|id| graph.node(*id).stage != stage || needed.contains(id));
        }
    }
    if let Some(stage) = group.also {
        let needed = ancestors(graph, members.clone());
        members.extend(
            nodes()
                .filter(|(id, node)| node.stage == stage && needed.contains(id))
                .map(|(id, _)| id),
        );
    }
    members
}

/// Nodes that `of` depend on, themselves included.
fn ancestors(graph: &Graph, of: BTreeSet<NodeId>) -> BTreeSet<NodeId> {
    let mut seen = of;
    // Nodes are stored in topological order, so one pass backward finds all of them.
    let ids: Vec<NodeId> = graph.nodes().map(|(id, _)| id).collect();
    for &id in ids.iter().rev() {
        if seen.contains(&id) {
            seen.extend(graph.operands(id).iter().map(|operand| operand.node));
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

fn kernel(
    graph: &Graph,
    group: &Group,
    part: &Part,
    downstream: &BTreeSet<NodeId>,
    padding: f64,
) -> Option<Kernel> {
    let members = &part.members;
    let mut lowering = Lowering {
        graph,
        members,
        downstream,
        ops: Vec::new(),
        produced_by: BTreeMap::new(),
    };
    for &id in members {
        lowering.node(id);
    }
    let ops = lowering.ops;
    if ops.is_empty() {
        return None;
    }
    let (reads, writes) = transfers(graph, part);
    let grid = grid(graph, members);
    let streams = grid.is_none();
    let grid = grid.unwrap_or(Grid {
        parallel: 1,
        sequential: 1,
    });
    let carried_bytes = carried_bytes(graph, members) / grid.parallel.max(1);
    let live_bytes = live_bytes(graph, members) / grid.steps().max(1) + pair_live_bytes(graph, members);
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
        work: part
            .own
            .iter()
            .map(|&id| work::node_work(graph, id))
            .sum::<Work>(),
        padding: if in_core { padding } else { 0.0 },
        implementation: Implementation {
            value_tile: group.value_tile,
            ..Implementation::default()
        },
    })
}

/// Nodes reachable from `from`, itself included.
fn descendants(graph: &Graph, from: NodeId) -> BTreeSet<NodeId> {
    let mut seen = BTreeSet::from([from]);
    // Nodes are stored in topological order, so one pass forward finds all of them.
    for (id, _) in graph.nodes() {
        if graph
            .operands(id)
            .iter()
            .any(|operand| seen.contains(&operand.node))
        {
            seen.insert(id);
        }
    }
    seen
}

/// The values behind a chain of views.
pub(super) fn base(graph: &Graph, value: Value) -> Vec<Value> {
    sources(graph, value)
        .into_iter()
        .map(|(source, _)| source)
        .collect()
}

/// The values behind a chain of views, each with the bytes of the narrowest view it is seen through.
fn sources(graph: &Graph, value: Value) -> Vec<(Value, u64)> {
    let mut pending = vec![(value, u64::MAX)];
    let mut sources = vec![];
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
            pending.extend(
                graph
                    .operands(value.node)
                    .into_iter()
                    .map(|operand| (operand, seen)),
            );
        } else {
            sources.push((value, seen));
        }
    }
    sources
}

fn keeps_minor(permutation: &[usize]) -> bool {
    permutation.last().is_none_or(|&p| p + 1 == permutation.len())
}

/// Whether a node is only an address computation: views, except transposes that move the minor dimension.
pub(super) fn is_free(node: &Node) -> bool {
    match &node.op {
        Op::Transpose { permutation } => keeps_minor(permutation),
        op => op.is_view(),
    }
}

fn transfers(graph: &Graph, part: &Part) -> (Vec<Transfer>, Vec<Transfer>) {
    let members = &part.members;
    // Bytes of the views through which an outside value is read, capped by the value itself: a kernel that takes two
    // slices of a tensor reads their sum, one that takes a tensor and a slice of it reads the tensor once.
    let mut read: BTreeMap<Value, BTreeMap<Value, u64>> = BTreeMap::new();
    let mut written: BTreeSet<Value> = BTreeSet::new();
    let mut columns: BTreeMap<Value, ColumnReads> = BTreeMap::new();
    for (id, node) in graph.nodes() {
        let inside = members.contains(&id);
        if is_free(node) {
            continue;
        }
        for (position, operand) in graph.operands(id).into_iter().enumerate() {
            for (source, seen) in sources(graph, operand) {
                let source_inside = members.contains(&source.node);
                if let (true, false, Some((scan, heads))) =
                    (inside, source_inside, column_operand(graph, id, position))
                {
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
                let on_chip = matches!(graph.node(source.node).op, Op::Fill(_) | Op::Identity);
                if inside && !source_inside && !on_chip {
                    read.entry(source).or_default().insert(operand, seen);
                }
                // Who computes a stage again computes all of it that is needed there.
                let again =
                    graph.node(source.node).stage == node.stage && part.recomputed.contains(&node.stage);
                if !inside && source_inside && !on_chip && !again && part.exports.is_none() {
                    written.insert(source);
                }
            }
        }
    }
    written.extend(part.exports.iter().flatten());
    for (_, output) in graph.outputs() {
        let bases = base(graph, *output);
        let copies = part.own.contains(&output.node)
            && is_free(graph.node(output.node))
            && bases.iter().any(|source| {
                !members.contains(&source.node)
                    && !matches!(graph.node(source.node).op, Op::Fill(_) | Op::Identity)
            });
        if copies {
            // A view of something the kernel did not make has to be written by it: a convolution state moved on by a token.
            written.insert(*output);
            continue;
        }
        for source in bases {
            let own = part.own.contains(&source.node) && part.exports.is_none();
            if own && !matches!(graph.node(source.node).op, Op::Fill(_)) {
                written.insert(source);
            }
        }
    }
    let transfer = |value: Value, bytes: u64| Transfer {
        name: graph.node(value.node).name.clone(),
        bytes,
        dtype: graph.ty(value).dtype,
        columns: None,
    };
    let reads = read
        .iter()
        .map(|(&source, views)| Transfer {
            columns: columns.get(&source).copied(),
            ..transfer(source, views.values().sum::<u64>().min(graph.ty(source).bytes()))
        })
        .collect();
    let writes = written
        .iter()
        .map(|&value| transfer(value, graph.ty(value).bytes()))
        .collect();
    (reads, writes)
}

/// The loop over pairs of blocks behind node `id`, if operand `position` is sliced by its column block and a block may be read more than once, and the
/// heads of its carries.
fn column_operand(graph: &Graph, id: NodeId, position: usize) -> Option<(&Scan, u64)> {
    let node = graph.node(id);
    let Op::Scan(scan) = &node.op else { return None };
    let pairs = scan.pairs.as_ref()?;
    let heads = leading(&node.results[0].shape, scan.axis);
    // One block of queries per head of the keys meets every key block once: a stream like any other.
    let own_heads = leading(&graph.ty(*graph.operands(id).get(position)?).shape, scan.axis);
    let once = node.results[0].shape.dims()[scan.axis] == 1 && own_heads == heads;
    (position >= scan.carries + pairs.rows && !once).then_some((&**scan, heads))
}

/// Product of the extents before `axis`.
fn leading(shape: &Shape, axis: usize) -> u64 {
    shape.dims()[..axis].iter().map(|&d| d as u64).product()
}

/// Loops over pairs of blocks among the members, with the heads and row blocks of their carries.
fn pair_loops<'a>(
    graph: &'a Graph,
    members: &'a BTreeSet<NodeId>,
) -> impl Iterator<Item = (&'a Node, &'a Scan)> {
    members.iter().filter_map(|&id| {
        let node = graph.node(id);
        match &node.op {
            Op::Scan(scan) if scan.pairs.is_some() => Some((node, &**scan)),
            _ => None,
        }
    })
}

/// Trips of all loops over pairs: a grid step is one trip of one of them.
fn pair_trips(graph: &Graph, members: &BTreeSet<NodeId>) -> u64 {
    pair_loops(graph, members)
        .map(|(_, scan)| scan.trips as u64)
        .sum()
}

/// Intermediates of one trip of a loop over pairs, of one head.
fn pair_live_bytes(graph: &Graph, members: &BTreeSet<NodeId>) -> u64 {
    pair_loops(graph, members)
        .map(|(node, scan)| {
            let inside = scan
                .body
                .nodes()
                .filter(|(_, node)| !matches!(node.op, Op::Input { .. }))
                .map(|(id, _)| id)
                .collect();
            live_bytes(&scan.body, &inside) / leading(&node.results[0].shape, scan.axis).max(1)
        })
        .max()
        .unwrap_or(0)
}

fn grid(graph: &Graph, members: &BTreeSet<NodeId>) -> Option<Grid> {
    // Attention: a unit is a query block of a head, its steps are the key blocks it visits, on average where the mask is causal.
    if let Some((node, scan)) = pair_loops(graph, members).next() {
        let rows = node.results[0].shape.dims()[scan.axis] as u64;
        return Some(Grid {
            parallel: leading(&node.results[0].shape, scan.axis) * rows,
            sequential: pair_trips(graph, members).div_ceil(rows.max(1)).max(1),
        });
    }
    // Of several loops the one over the most heads: key heads may carry something of their own beside the states.
    let scans = members.iter().filter_map(|&id| match &graph.node(id).op {
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
    // A decode step runs over the states it reads: (batch, key head, value head).
    let states = members
        .iter()
        .flat_map(|&id| graph.operands(id))
        .find_map(|operand| {
            let dims = graph.ty(operand).shape.dims();
            let state = matches!(
                graph.node(operand.node).op,
                Op::Input {
                    role: Role::State,
                    ..
                }
            );
            (state && dims.len() == 5).then(|| dims[..3].iter().map(|&d| d as u64).product())
        });
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
fn chunked_product<'a>(graph: &'a Graph, members: &BTreeSet<NodeId>) -> Option<&'a [usize]> {
    members
        .iter()
        .filter(|&&id| matches!(graph.node(id).op, Op::MatMul { .. }))
        .find_map(|&id| {
            let shape = &graph.node(id).results[0].shape;
            (shape.rank() >= 6).then(|| &shape.dims()[..4])
        })
}

/// Heads of a chunk of the core.
fn heads(graph: &Graph, members: &BTreeSet<NodeId>) -> Option<u64> {
    chunked_product(graph, members).map(|leading| (leading[1] * leading[2]) as u64)
}

fn carried_bytes(graph: &Graph, members: &BTreeSet<NodeId>) -> u64 {
    // Loops over pairs follow each other on the same carries.
    if let Some((node, _)) = pair_loops(graph, members).next() {
        return node.results.iter().map(|ty| 4 * ty.shape.elements()).sum();
    }
    members
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
fn live_bytes(graph: &Graph, members: &BTreeSet<NodeId>) -> u64 {
    let mut last_use: BTreeMap<Value, NodeId> = BTreeMap::new();
    for &id in members {
        for operand in graph.operands(id) {
            for source in base(graph, operand) {
                if members.contains(&source.node) {
                    last_use.insert(source, id);
                }
            }
        }
    }
    let mut expires: BTreeMap<NodeId, u64> = BTreeMap::new();
    let (mut live, mut peak) = (0_u64, 0_u64);
    for &id in members {
        let node = graph.node(id);
        if !is_free(node) {
            // Stacked results of a scan are consumed chunk by chunk in the same kernel, or written out.
            let results = match &node.op {
                Op::Scan(scan) if scan.scanned > 0 => 0,
                _ => node.results.iter().map(crate::graph::TensorType::bytes).sum(),
            };
            live += results;
            peak = peak.max(live);
            match last_use.get(&Value { node: id, port: 0 }) {
                Some(&last) => *expires.entry(last).or_default() += results,
                None => live -= results,
            }
        }
        live -= expires.remove(&id).unwrap_or(0);
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
    members: &'a BTreeSet<NodeId>,
    downstream: &'a BTreeSet<NodeId>,
    ops: Vec<KernelOp>,
    /// The last operation behind every value of the kernel.
    produced_by: BTreeMap<NodeId, Vec<usize>>,
}

impl Lowering<'_> {
    fn node(&mut self, id: NodeId) {
        let node = self.graph.node(id);
        let mut after: Vec<usize> = self
            .graph
            .operands(id)
            .iter()
            .filter(|operand| self.members.contains(&operand.node))
            .flat_map(|operand| self.produced_by.get(&operand.node).cloned().unwrap_or_default())
            .collect();
        after.sort_unstable();
        after.dedup();
        if is_free(node) {
            self.produced_by.insert(id, after);
            return;
        }
        let value_columns = self.downstream.contains(&id);
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
            let produced = self.scan_body(&scan.body, around, &after, value_columns);
            self.produced_by.insert(id, produced);
            return;
        }
        let op = KernelOp {
            name: node.name.clone(),
            stage: node.stage,
            kind: kind(self.graph, id),
            count: instances(self.graph, id),
            serial: 1,
            after,
            value_columns,
            carried: false,
            share: 1.0,
        };
        self.ops.push(op);
        self.produced_by.insert(id, vec![self.ops.len() - 1]);
    }

    /// Appends the body once with the counts of all trips, loops inside it likewise; returns the operations behind its results.
    fn scan_body(&mut self, body: &Graph, around: Loop, after: &[usize], value_columns: bool) -> Vec<usize> {
        let mut produced: BTreeMap<NodeId, Vec<usize>> = BTreeMap::new();
        for (id, node) in body.nodes() {
            if matches!(node.op, Op::Input { role: Role::Body, .. }) {
                produced.insert(id, after.to_vec());
                continue;
            }
            let mut waits: Vec<usize> = body
                .operands(id)
                .iter()
                .flat_map(|operand| produced.get(&operand.node).cloned().unwrap_or_default())
                .collect();
            waits.sort_unstable();
            waits.dedup();
            if is_free(node) {
                produced.insert(id, waits);
                continue;
            }
            if let Op::Scan(scan) = &node.op {
                let inside = Loop {
                    count: around.count * scan.trips as u64,
                    serial: around.serial * scan.trips as u64,
                    ..around
                };
                let results = self.scan_body(&scan.body, inside, &waits, value_columns);
                produced.insert(id, results);
                continue;
            }
            let op = KernelOp {
                name: node.name.clone(),
                stage: node.stage,
                kind: kind(body, id),
                count: instances(body, id) * around.count,
                serial: around.serial,
                after: waits,
                value_columns,
                carried: around.carried,
                share: around.share,
            };
            self.ops.push(op);
            produced.insert(id, vec![self.ops.len() - 1]);
        }
        let mut results: Vec<usize> = body
            .outputs()
            .iter()
            .flat_map(|(_, value)| produced.get(&value.node).cloned().unwrap_or_default())
            .collect();
        results.sort_unstable();
        results.dedup();
        results
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
        dims: dims.dims().to_vec(),
        cost: VectorCost { alu, transcendental },
        cross_lane: None,
        cross_lane_ops: 0.0,
    };
    let with_lanes = |dims: &Shape, alu: f64, rows_columns: [usize; 2], ops: f64| OpKind::Vector {
        dims: dims.dims().to_vec(),
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
                dims: shape.dims().to_vec(),
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
        Op::Transpose { .. } | Op::RepeatMinor { .. } => {
            with_lanes(shape, 0.0, [rows(shape), shape.from_end(0)], 1.0)
        }
        Op::Cholesky => OpKind::Cholesky {
            rows: shape.from_end(1) as u64,
        },
        Op::ForwardSubstitution | Op::BackwardSubstitution => OpKind::Substitution {
            rows: shape.from_end(1) as u64,
            columns: shape.from_end(0) as u64,
        },
        Op::SelectVisible { visibility, .. } => vector(shape, visibility.conditions() as f64, 0.0),
        _ => vector(shape, 1.0, 0.0),
    }
}
