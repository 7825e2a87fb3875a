//! One statement of a bundle, taken apart into words.
//!
//! ```text
//! %110 = dma.hbm_to_vmem [thread:$0]  (%p4_p3), /*hbm=*/%s5_s24, /*size_in_granules=*/512, ...
//! ```
//!
//! The reader of bundles has already replaced `/*hbm=*/` by `@hbm=` and dropped the other comments.

/// An operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word<'a> {
    /// `%name`: a value of the program.
    Name(&'a str),
    /// A decimal number.
    Number(i64),
    /// `[...]`: an address, without its brackets.
    Bracket(&'a str),
    /// `$name`: a place in the program.
    Place(&'a str),
    /// Anything else.
    Other(&'a str),
}

/// The condition in front of the operands: `(!%p1)`, or `(%p1, %s2)` with the value that stands otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Guard<'a> {
    pub(super) negated: bool,
    pub(super) name: &'a str,
    pub(super) otherwise: Option<Word<'a>>,
}

/// A statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Statement<'a> {
    /// What it defines.
    pub(super) target: &'a str,
    /// The operation, with its suffixes.
    pub(super) operation: &'a str,
    pub(super) guard: Option<Guard<'a>>,
    /// Operands in order, each with its key where it has one.
    pub(super) operands: Vec<(Option<&'a str>, Word<'a>)>,
}

impl<'a> Statement<'a> {
    /// Takes a statement apart; `None` if it is none.
    pub(super) fn parse(text: &'a str) -> Option<Self> {
        let (left, right) = text.split_once(" = ")?;
        let target = left.trim().split(',').next()?.trim();
        let right = right.trim();
        let end = right
            .find(|c: char| c.is_ascii_whitespace())
            .unwrap_or(right.len());
        let operation = &right[..end];
        let mut words = Words { rest: &right[end..] };
        let mut statement = Self {
            target,
            operation,
            guard: None,
            operands: Vec::new(),
        };
        let mut key = None;
        while let Some(item) = words.next_item() {
            match item {
                Item::Key(name) => key = Some(name),
                Item::Guard(guard) => statement.guard = Some(guard),
                Item::Word(word) => statement.operands.push((key.take(), word)),
            }
        }
        Some(statement)
    }

    /// The operand with a key.
    pub(super) fn keyed(&self, key: &str) -> Option<Word<'a>> {
        self.operands
            .iter()
            .find(|(name, _)| *name == Some(key))
            .map(|(_, word)| *word)
    }

    /// The operand at a place.
    pub(super) fn operand(&self, index: usize) -> Option<Word<'a>> {
        self.operands.get(index).map(|(_, word)| *word)
    }

    /// The operation up to its first point.
    pub(super) fn base(&self) -> &'a str {
        self.operation.split('.').next().unwrap_or_default()
    }

    /// Whether the operation has a suffix.
    pub(super) fn has_suffix(&self, suffix: &str) -> bool {
        self.operation.split('.').skip(1).any(|part| part == suffix)
    }
}

enum Item<'a> {
    Key(&'a str),
    Guard(Guard<'a>),
    Word(Word<'a>),
}

struct Words<'a> {
    rest: &'a str,
}

impl<'a> Words<'a> {
    fn next_item(&mut self) -> Option<Item<'a>> {
        loop {
            self.rest = self
                .rest
                .trim_start_matches(|c: char| c.is_ascii_whitespace() || c == ',');
            let first = self.rest.chars().next()?;
            match first {
                '@' => {
                    let end = self.rest.find('=').unwrap_or(self.rest.len() - 1);
                    let key = &self.rest[1..end];
                    self.rest = &self.rest[end + 1..];
                    return Some(Item::Key(key));
                }
                '[' => {
                    let inside = self.group(b'[', b']');
                    if !is_note(inside) {
                        return Some(Item::Word(Word::Bracket(inside)));
                    }
                }
                '(' => {
                    let inside = self.group(b'(', b')');
                    if let Some(guard) = guard(inside) {
                        return Some(Item::Guard(guard));
                    }
                }
                _ => {
                    let end = self
                        .rest
                        .char_indices()
                        .skip(1)
                        .find(|(_, c)| c.is_ascii_whitespace() || matches!(c, ',' | '[' | '(' | '@'))
                        .map_or(self.rest.len(), |(at, _)| at);
                    let (text, rest) = self.rest.split_at(end);
                    self.rest = rest;
                    return Some(Item::Word(word(text)));
                }
            }
        }
    }

    /// What stands between a bracket and its partner; everything where the partner is missing.
    fn group(&mut self, open: u8, close: u8) -> &'a str {
        let mut depth = 0_usize;
        for (at, byte) in self.rest.bytes().enumerate() {
            if byte == open {
                depth += 1;
            } else if byte == close {
                depth -= 1;
                if depth == 0 {
                    let inside = &self.rest[1..at];
                    self.rest = &self.rest[at + 1..];
                    return inside;
                }
            }
        }
        let inside = &self.rest[1..];
        self.rest = "";
        inside
    }
}

/// Brackets that say how an operation is issued, not on what it works.
fn is_note(inside: &str) -> bool {
    let kind = inside.split(':').next().unwrap_or_default();
    ["resolvable", "thread", "cost", "sync", "flow", "dma"]
        .iter()
        .any(|note| kind.starts_with(note))
}

fn guard(inside: &str) -> Option<Guard<'_>> {
    let (condition, otherwise) = match inside.split_once(',') {
        Some((condition, value)) => (condition, Some(word(value.trim()))),
        None => (inside, None),
    };
    let condition = condition.trim();
    let name = condition.strip_prefix('!').unwrap_or(condition);
    name.starts_with("%p").then_some(Guard {
        negated: condition.starts_with('!'),
        name,
        otherwise,
    })
}

/// One word of an operand list.
pub(super) fn word(text: &str) -> Word<'_> {
    if text.starts_with('%') {
        Word::Name(text)
    } else if let Some(inside) = text.strip_prefix('[') {
        Word::Bracket(inside.trim_end_matches(']'))
    } else if let Some(place) = text.strip_prefix('$') {
        Word::Place(place)
    } else if let Ok(number) = text.parse() {
        Word::Number(number)
    } else {
        match text {
            "true" => Word::Number(1),
            "false" => Word::Number(0),
            _ => Word::Other(text),
        }
    }
}
