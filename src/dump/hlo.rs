//! Reader of optimised HLO text: the program between the kernels.
//!
//! Only what the timing needs is kept of an instruction: its arrays, operands, called computations, trip
//! count, integer constants and the compiler's own estimate. Attributes and metadata are read over.

use std::collections::HashMap;
use std::io::BufRead;

use super::error::DumpError;
use super::lines::Lines;

/// Longest text of one instruction, in bytes. Kernels are embedded in theirs.
const LONGEST_INSTRUCTION: usize = 64 << 20;
/// Most elements of a constant, or of a broadcast of one, that are kept.
const MOST_ELEMENTS: usize = 1 << 20;

/// An array: one leaf of the shape of an instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Array {
    /// Name of the element type, such as `bf16`.
    pub dtype: String,
    /// Size in each dimension.
    pub dimensions: Vec<u64>,
    /// Number of the memory space in its layout: 0 is the device memory.
    pub memory_space: u32,
}

impl Array {
    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> f64 {
        self.dimensions.iter().map(|&size| size as f64).product()
    }

    /// Size without padding, in bytes; 0 for what is no array of numbers.
    #[must_use]
    pub fn bytes(&self) -> f64 {
        self.elements() * dtype_bits(&self.dtype) / 8.0
    }
}

/// Bits of one element.
fn dtype_bits(name: &str) -> f64 {
    match name {
        "pred" => 8.0,
        "token" | "opaque" => 0.0,
        _ => {
            let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
            let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
            digits[..end].parse().unwrap_or(0.0)
        }
    }
}

/// Takes a shape apart, a tuple into its leaves.
#[must_use]
pub fn arrays(shape: &str) -> Vec<Array> {
    let mut found = Vec::new();
    let mut rest = shape;
    while let Some(open) = rest.find('[') {
        let start = rest[..open]
            .rfind(|c: char| !c.is_ascii_alphanumeric())
            .map_or(0, |at| at + 1);
        let dtype = rest[start..open].to_owned();
        let Some(length) = rest[open..].find(']') else {
            break;
        };
        let inside = &rest[open + 1..open + length];
        rest = &rest[open + length + 1..];
        let dimensions: Option<Vec<u64>> = inside
            .split(',')
            .map(|word| word.trim().trim_start_matches("<="))
            .filter(|word| !word.is_empty())
            .map(|word| word.parse().ok())
            .collect();
        let layout = match rest.strip_prefix('{') {
            Some(text) => &text[..text.find('}').unwrap_or(text.len())],
            None => "",
        };
        let memory_space = layout
            .find("S(")
            .and_then(|at| layout[at + 2..].split(')').next()?.parse().ok())
            .unwrap_or(0);
        if let (Some(dimensions), true) = (dimensions, dtype.starts_with(|c: char| c.is_ascii_lowercase())) {
            found.push(Array {
                dtype,
                dimensions,
                memory_space,
            });
        }
    }
    found
}

/// An instruction.
#[derive(Debug, Clone, Default)]
pub struct Instruction {
    /// Name, without the percent sign.
    pub name: String,
    /// Shape as it is written, layout included.
    pub shape: String,
    /// Operation.
    pub opcode: String,
    /// Names of the operands.
    pub operands: Vec<String>,
    /// Computations that it runs: bodies, called ones, branches.
    pub called: Vec<String>,
    /// Computation that decides whether a loop goes on.
    pub condition: Option<String>,
    /// Direction of a comparison, such as `LT`.
    pub direction: Option<String>,
    /// Iterations of a loop, where the compiler says them.
    pub trip_count: Option<u64>,
    /// Cycles that the compiler estimates.
    pub estimated_cycles: Option<i64>,
    /// Bytes of vector memory that its kernel takes, where the compiler says them: windows of its blocks, twice
    /// where they are buffered, and scratch.
    pub vmem_bytes: Option<u64>,
    /// Whether it runs on the `SparseCore`.
    pub sparse_core: bool,
    /// Target of a custom call.
    pub target: Option<String>,
    /// Number of an element of a tuple, of a parameter.
    pub index: Option<usize>,
    /// Elements of an integer constant.
    pub values: Option<Vec<i64>>,
    /// Whether it is a copy that the end of the program before can already start.
    pub prefetched: bool,
    /// Line it starts at.
    pub line: usize,
    /// Contracted dimensions of either operand of a product.
    pub contracting: [Vec<usize>; 2],
    /// Batch dimensions of either operand of a product.
    pub batch: [Vec<usize>; 2],
    /// Sizes of a window: the taps of a convolution, what a windowed reduction takes together.
    pub window: Vec<u64>,
    /// Roles of the dimensions of a convolution, such as `b01f_01io->b01f`.
    pub dim_labels: Option<String>,
    /// Groups of features of a convolution; 0 where the text does not say any.
    pub feature_groups: u64,
    /// Precision of the operands of a product, where it is not the default.
    pub precision: Option<String>,
}

/// A computation: instructions in the order in which they run.
#[derive(Debug, Clone, Default)]
pub struct Computation {
    /// Name, without the percent sign.
    pub name: String,
    /// Instructions.
    pub instructions: Vec<Instruction>,
    /// Place of the instruction whose value it gives back.
    root: usize,
    places: HashMap<String, usize>,
}

impl Computation {
    /// The element of the computation's only parameter that an instruction takes.
    fn element(&self, name: &str) -> Option<usize> {
        let instruction = self.instruction(name)?;
        let from = self.instruction(instruction.operands.first()?)?;
        (instruction.opcode == "get-tuple-element" && from.opcode == "parameter")
            .then_some(instruction.index?)
    }

    /// The only integer that an instruction stands for.
    fn integer(&self, name: &str) -> Option<i64> {
        match self.integers(name)?.as_slice() {
            [only] => Some(*only),
            _ => None,
        }
    }

    /// Place of the instruction whose value it gives back.
    #[must_use]
    pub fn root(&self) -> usize {
        self.root
    }

    /// Place of the instruction of a name.
    #[must_use]
    pub fn place(&self, name: &str) -> Option<usize> {
        self.places.get(name).copied()
    }

    /// The instruction of a name.
    #[must_use]
    pub fn instruction(&self, name: &str) -> Option<&Instruction> {
        self.places.get(name).and_then(|&at| self.instructions.get(at))
    }

    /// The integers that an instruction stands for, where the text says them.
    #[must_use]
    pub fn integers(&self, name: &str) -> Option<Vec<i64>> {
        let mut name = name.to_owned();
        // The depth is bounded so that a text that defines a name by itself ends.
        let mut copies = None;
        for _ in 0..16 {
            let instruction = self.instruction(&name)?;
            match instruction.opcode.as_str() {
                "constant" => {
                    let values = instruction.values.clone()?;
                    return match (copies, values.as_slice()) {
                        (Some(count), [only]) => Some(vec![*only; count]),
                        _ => Some(values),
                    };
                }
                "broadcast" => {
                    let elements = arrays(&instruction.shape).first()?.elements();
                    if elements > MOST_ELEMENTS as f64 {
                        return None;
                    }
                    copies.get_or_insert(elements as usize);
                    name = instruction.operands.first()?.clone();
                }
                "copy" | "copy-start" | "copy-done" | "bitcast" | "reshape" | "convert" => {
                    name = instruction.operands.first()?.clone();
                }
                _ => return None,
            }
        }
        None
    }
}

/// A program.
#[derive(Debug, Clone, Default)]
pub struct Module {
    /// Name of the module.
    pub name: String,
    /// Computations in the order of the text.
    pub computations: Vec<Computation>,
    /// Number of the one that is run.
    pub entry: usize,
    /// Whether the instructions are in the order in which they run: text after optimisation.
    pub scheduled: bool,
    places: HashMap<String, usize>,
}

impl Module {
    /// Reads a text. `name` is the path that errors show.
    ///
    /// # Errors
    /// The stream fails, is no HLO text, or ends within a computation.
    pub fn read(name: &str, stream: impl BufRead) -> Result<Self, DumpError> {
        let mut lines = Lines::new(name, stream);
        let mut module = Self::default();
        let mut open: Option<Computation> = None;
        let mut entry = None;
        let mut is_entry = false;
        let mut text = String::new();
        let mut start = 0;
        let mut balance = Balance::default();
        loop {
            let number = lines.number() + 1;
            let Some(line) = lines.next()? else { break };
            if !text.is_empty() {
                if text.len() + line.len() > LONGEST_INSTRUCTION {
                    return Err(DumpError::syntax(
                        name,
                        start,
                        1,
                        "expected the end of this instruction",
                    ));
                }
                text.push('\n');
                text.push_str(line);
                balance.add(line);
            } else if let Some(rest) = line.strip_prefix("HloModule ") {
                module.scheduled = rest.contains("is_scheduled=true");
                rest.split([',', ' '])
                    .next()
                    .unwrap_or_default()
                    .clone_into(&mut module.name);
                continue;
            } else if let Some(computation) = open.as_mut() {
                if line.starts_with('}') {
                    module
                        .places
                        .insert(computation.name.clone(), module.computations.len());
                    if is_entry {
                        entry = Some(module.computations.len());
                    }
                    module.computations.push(std::mem::take(computation));
                    open = None;
                    continue;
                }
                if line.trim().is_empty() {
                    continue;
                }
                text.push_str(line);
                start = number;
                balance = Balance::default();
                balance.add(line);
            } else {
                if let Some(header) = computation_header(line) {
                    is_entry = line.starts_with("ENTRY");
                    open = Some(Computation {
                        name: header.to_owned(),
                        ..Computation::default()
                    });
                }
                continue;
            }
            if balance.is_even() {
                let instruction = instruction(name, start, &text)?;
                if let Some(computation) = open.as_mut() {
                    // Without a mark the last one is it.
                    let marked = text.trim_start().starts_with("ROOT ");
                    if marked || computation.root + 1 == computation.instructions.len() {
                        computation.root = computation.instructions.len();
                    }
                    computation
                        .places
                        .insert(instruction.name.clone(), computation.instructions.len());
                    computation.instructions.push(instruction);
                }
                text.clear();
            }
        }
        let end = lines.number().max(1);
        if !text.is_empty() {
            let message = "expected the brackets of this instruction to close, found the end of the file";
            return Err(DumpError::syntax(name, start, 1, message));
        }
        if open.is_some() {
            let message = "expected `}` at the end of the computation, found the end of the file";
            return Err(DumpError::syntax(name, end, 1, message));
        }
        module.entry = entry.ok_or_else(|| {
            DumpError::syntax(
                name,
                end,
                1,
                "expected an entry computation, `ENTRY %name (...) -> ... {`, found none",
            )
        })?;
        Ok(module)
    }

    /// Iterations of a loop of `caller`: those the compiler says, or those of a counter that starts at a
    /// constant, grows by a constant, and is compared with one.
    #[must_use]
    pub fn trips(&self, caller: &Computation, instruction: &Instruction) -> Option<u64> {
        if instruction.trip_count.is_some() {
            return instruction.trip_count;
        }
        let condition = self.computation(instruction.condition.as_deref()?)?;
        let body = instruction
            .called
            .iter()
            .find_map(|name| self.computation(name))?;
        let start = caller.instruction(instruction.operands.first()?)?;
        let test = condition.instructions.get(condition.root)?;
        let next = body.instructions.get(body.root)?;
        let inclusive = match (test.opcode.as_str(), test.direction.as_deref()) {
            ("compare", Some("LT")) => 0,
            ("compare", Some("LE")) => 1,
            _ => return None,
        };
        let [counter, bound] = test.operands.as_slice() else {
            return None;
        };
        let counter = condition.element(counter)?;
        let initial = |element: usize| caller.integer(start.operands.get(element)?);
        let bound = condition.integer(bound).or_else(|| {
            let element = condition.element(bound)?;
            // The bound is handed from iteration to iteration unchanged.
            (body.element(next.operands.get(element)?)? == element).then(|| initial(element))?
        })?;
        let increment = body.instruction(next.operands.get(counter)?)?;
        let [left, right] = increment.operands.as_slice() else {
            return None;
        };
        let step = match (increment.opcode.as_str(), body.element(left), body.element(right)) {
            ("add", Some(element), _) if element == counter => body.integer(right)?,
            ("add", _, Some(element)) if element == counter => body.integer(left)?,
            _ => return None,
        };
        let span = bound.checked_add(inclusive)?.checked_sub(initial(counter)?)?;
        (step > 0 && next.opcode == "tuple" && start.opcode == "tuple")
            .then_some(u64::try_from(span).unwrap_or(0).div_ceil(step as u64))
    }

    /// The computation of a name.
    #[must_use]
    pub fn computation(&self, name: &str) -> Option<&Computation> {
        self.places.get(name).and_then(|&at| self.computations.get(at))
    }
}

/// `ENTRY %main.7 (x: f32[2]) -> f32[2] {`
fn computation_header(line: &str) -> Option<&str> {
    if line.starts_with([' ', '\t']) || !line.trim_end().ends_with('{') {
        return None;
    }
    let rest = line.strip_prefix("ENTRY ").unwrap_or(line).trim_start();
    let name = rest.split([' ', '(']).next()?;
    let name = name.strip_prefix('%').unwrap_or(name);
    (!name.is_empty() && rest.contains(['(', '{'])).then_some(name)
}

/// Whether brackets and quotes have closed.
#[derive(Debug, Default)]
struct Balance {
    depth: i64,
    quoted: bool,
}

impl Balance {
    fn add(&mut self, line: &str) {
        let mut escaped = false;
        for byte in line.bytes() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' if self.quoted => escaped = true,
                b'"' => self.quoted = !self.quoted,
                _ if self.quoted => {}
                b'(' | b'[' | b'{' => self.depth += 1,
                b')' | b']' | b'}' => self.depth -= 1,
                _ => {}
            }
        }
    }

    fn is_even(&self) -> bool {
        self.depth <= 0 && !self.quoted
    }
}

/// Length of what stands before the first byte at depth zero that `ends` accepts.
fn up_to(text: &str, ends: impl Fn(u8) -> bool) -> usize {
    let (mut depth, mut quoted, mut escaped) = (0_i64, false, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            _ if quoted => {}
            _ if depth == 0 && ends(byte) => return at,
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth -= 1,
            _ => {}
        }
    }
    text.len()
}

/// `  ROOT %name = shape opcode(operands), attributes`
fn instruction(file: &str, line: usize, text: &str) -> Result<Instruction, DumpError> {
    let wrong = |at: usize, message: &str| {
        let before = &text[..at.min(text.len())];
        let line = line + before.matches('\n').count();
        let column = at - before.rfind('\n').map_or(0, |end| end + 1) + 1;
        DumpError::syntax(file, line, column, message)
    };
    let indent = text.len() - text.trim_start().len();
    let body = text.trim_start();
    let body = body.strip_prefix("ROOT ").unwrap_or(body);
    let offset = |rest: &str| text.len() - rest.len();
    let Some((name, rest)) = body.split_once(" = ") else {
        return Err(wrong(
            indent,
            "expected an instruction, `%name = shape operation(operands)`",
        ));
    };
    let name = name.strip_prefix('%').unwrap_or(name).to_owned();
    let length = up_to(rest, |byte| byte == b' ');
    let shape = rest[..length].to_owned();
    let rest = rest[length..].trim_start();
    let Some(open) = rest.find('(') else {
        return Err(wrong(
            offset(rest),
            "expected an operation and its operands in parentheses",
        ));
    };
    let opcode = &rest[..open];
    if opcode.is_empty()
        || !opcode
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
    {
        return Err(wrong(offset(rest), "expected the name of an operation"));
    }
    let inside = &rest[open + 1..];
    let length = up_to(inside, |byte| byte == b')');
    let operands = &inside[..length];
    let attributes = inside.get(length + 1..).unwrap_or_default();
    let mut found = Instruction {
        name,
        shape,
        opcode: opcode.to_owned(),
        line,
        ..Instruction::default()
    };
    match opcode {
        "constant" => found.values = integers(&found.shape, operands),
        "parameter" => found.index = operands.trim().parse().ok(),
        _ => found.operands = names(operands),
    }
    for key in [
        "calls=",
        "to_apply=",
        "body=",
        "true_computation=",
        "false_computation=",
    ] {
        if let Some(value) = attribute(attributes, key) {
            let value = value.trim_start_matches('%');
            let end = value.find([',', ' ', '}']).unwrap_or(value.len());
            found.called.push(value[..end].to_owned());
        }
    }
    if let Some(value) = attribute(attributes, "branch_computations={") {
        found
            .called
            .extend(names(value.split('}').next().unwrap_or_default()));
    }
    found.trip_count =
        number_after(attributes, "\"known_trip_count\":{\"n\":\"").and_then(|n| u64::try_from(n).ok());
    found.estimated_cycles = number_after(attributes, "\"estimated_cycles\":\"");
    found.vmem_bytes = vmem_bytes(attributes);
    let word = |value: &str| {
        value
            .split([',', ' '])
            .next()
            .map(|word| word.trim_start_matches('%').to_owned())
    };
    found.condition = attribute(attributes, "condition=").and_then(word);
    found.direction = attribute(attributes, "direction=").and_then(word);
    found.prefetched = attribute(attributes, "cross_program_prefetch_index=").is_some();
    found.sparse_core = attributes.contains("sparsecore");
    found.target = attribute(attributes, "custom_call_target=\"")
        .and_then(|value| value.split('"').next())
        .map(str::to_owned);
    let numbers = |key: &str| -> Vec<usize> {
        let inside = attribute(attributes, key).and_then(|value| value.split('}').next());
        let words = inside.unwrap_or_default().split(',');
        words.filter_map(|word| word.trim().parse().ok()).collect()
    };
    if opcode == "dot" {
        found.contracting = ["lhs_contracting_dims={", "rhs_contracting_dims={"].map(numbers);
        found.batch = ["lhs_batch_dims={", "rhs_batch_dims={"].map(numbers);
    }
    if matches!(opcode, "dot" | "convolution") {
        let precision = attribute(attributes, "operand_precision={").and_then(word);
        found.precision = precision.filter(|name| name != "default");
        found.dim_labels = attribute(attributes, "dim_labels=").and_then(word);
        let groups = attribute(attributes, "feature_group_count=").and_then(word);
        found.feature_groups = groups.and_then(|count| count.parse().ok()).unwrap_or(0);
    }
    if let Some(window) = attribute(attributes, "window={size=") {
        let sizes = window.split([' ', '}']).next().unwrap_or_default();
        found.window = sizes.split('x').filter_map(|size| size.parse().ok()).collect();
    }
    if opcode == "get-tuple-element" {
        found.index = attribute(attributes, "index=").and_then(|value| {
            value[..value.find(|c: char| !c.is_ascii_digit()).unwrap_or(value.len())]
                .parse()
                .ok()
        });
    }
    Ok(found)
}

/// What follows a key of an attribute list.
fn attribute<'a>(attributes: &'a str, key: &str) -> Option<&'a str> {
    let mut from = 0;
    while let Some(at) = attributes[from..].find(key) {
        let at = from + at;
        if attributes[..at].ends_with(", ") {
            return Some(&attributes[at + key.len()..]);
        }
        from = at + key.len();
    }
    None
}

fn number_after(attributes: &str, key: &str) -> Option<i64> {
    let text = &attributes[attributes.find(key)? + key.len()..];
    text[..text.find('"')?].parse().ok()
}

/// Bytes of the vector memory, which is memory space 1, that an instruction says it uses.
fn vmem_bytes(attributes: &str) -> Option<u64> {
    let key = "\"used_scoped_memory_configs\":[";
    let list = &attributes[attributes.find(key)? + key.len()..];
    let list = &list[..list.find(']')?];
    let parts = list
        .split('}')
        .filter(|part| number_after(part, "\"memory_space\":\"") == Some(1));
    let sizes = parts.filter_map(|part| u64::try_from(number_after(part, "\"size\":\"")?).ok());
    sizes.reduce(u64::saturating_add)
}

/// Names of a list of operands, which may be written with their shapes.
fn names(list: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = list;
    while !rest.is_empty() {
        let length = up_to(rest, |byte| byte == b',');
        let word = rest[..length]
            .split_ascii_whitespace()
            .next_back()
            .unwrap_or_default();
        let word = word.rsplit("*/").next().unwrap_or_default();
        let word = word.strip_prefix('%').unwrap_or(word);
        if !word.is_empty() {
            found.push(word.to_owned());
        }
        rest = rest.get(length + 1..).unwrap_or_default();
    }
    found
}

/// Elements of an integer constant; `None` where they are left out or are no integers.
fn integers(shape: &str, text: &str) -> Option<Vec<i64>> {
    let integer = shape.starts_with(['s', 'u']) && shape.as_bytes().get(1).is_some_and(u8::is_ascii_digit);
    if !integer || text.contains("...") || text.len() > 16 * MOST_ELEMENTS {
        return None;
    }
    text.split([',', '{', '}', ' ', '\n'])
        .filter(|word| !word.is_empty() && !word.starts_with("/*"))
        .map(|word| word.parse().ok())
        .collect()
}
