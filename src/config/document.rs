//! A file with its overrides.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::de;
use super::error::{ConfigError, Location};
use super::set::Assignment;
use super::tree::{Node, Value, parse_file, source_line};

/// One YAML file, parsed, with the overrides applied so far.
#[derive(Debug, Clone)]
pub struct Document {
    name: Arc<str>,
    text: Arc<str>,
    root: Node,
    overrides: Vec<String>,
}

/// The first 16 hexadecimal digits of a SHA-256.
#[must_use]
pub fn digest(bytes: &[u8]) -> String {
    let mut hex = String::new();
    for byte in Sha256::digest(bytes).iter().take(8) {
        // Writing into a string cannot fail.
        let _ = write!(hex, "{byte:02x}");
    }
    hex
}

impl Document {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// Where the file cannot be read, is not UTF-8 text, is not YAML, or holds no map.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let whole = |message: String| {
            Err(ConfigError::new(
                Location::WholeFile {
                    name: name.as_str().into(),
                },
                message,
                None,
            ))
        };
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) => {
                return whole(match error.kind() {
                    std::io::ErrorKind::NotFound => "no such file".to_owned(),
                    std::io::ErrorKind::IsADirectory => "a folder, not a file".to_owned(),
                    _ => format!("cannot be read: {error}"),
                });
            }
        };
        match String::from_utf8(bytes) {
            Ok(text) => Self::parse(&name, &text),
            Err(error) => {
                let position = error.utf8_error().valid_up_to();
                whole(format!(
                    "not a text file: byte {position} is not UTF-8; expected YAML"
                ))
            }
        }
    }

    /// Parses a text; `name` stands for the file in messages.
    ///
    /// # Errors
    /// Where the text is not YAML or holds no map.
    pub fn parse(name: &str, text: &str) -> Result<Self, ConfigError> {
        let name: Arc<str> = name.into();
        // Editors on some systems put a byte-order mark in front; it is no part of the first key.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let nothing = text
            .lines()
            .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'));
        if nothing {
            let location = Location::WholeFile { name };
            return Err(ConfigError::new(
                location,
                "empty file; expected a map of keys and values",
                None,
            ));
        }
        let root = parse_file(&name, text)?;
        let document = Self {
            name,
            text: text.into(),
            root,
            overrides: Vec::new(),
        };
        match &document.root.value {
            Value::Map(_) => Ok(document),
            other => {
                let message = format!("expected a map of keys and values, found {}", other.describe());
                Err(document.error(document.root.location.clone(), message))
            }
        }
    }

    /// Changes one field: `a.b=c`, where `c` is a YAML scalar or flow collection. A map that lacks the key
    /// gets it; whether the schema knows it shows when the document is read.
    ///
    /// # Errors
    /// Where the assignment is malformed or its path leads through a scalar or past the end of a list.
    pub fn set(&mut self, assignment: &str) -> Result<(), ConfigError> {
        self.set_as(assignment, &format!("--set {assignment}"))
    }

    /// As [`Document::set`], for an override that the user wrote differently: `label` stands in messages, for
    /// instance `--set hw.clock.default=boost` for the assignment `clock.default=boost`.
    ///
    /// # Errors
    /// As [`Document::set`].
    pub fn set_as(&mut self, assignment: &str, label: &str) -> Result<(), ConfigError> {
        self.assign(&Assignment::parse(assignment, label)?)
    }

    /// Changes one field as a parsed override says.
    ///
    /// # Errors
    /// Where its path leads through a scalar or past the end of a list.
    pub fn assign(&mut self, assignment: &Assignment) -> Result<(), ConfigError> {
        assignment.apply(&mut self.root)?;
        self.overrides.push(assignment.text().to_owned());
        Ok(())
    }

    /// Changes one field without listing it among the overrides: for values that take each other's place, one file after the other.
    ///
    /// # Errors
    /// As [`Document::assign`].
    pub fn put(&mut self, assignment: &Assignment) -> Result<(), ConfigError> {
        assignment.apply(&mut self.root)
    }

    /// A copy with some fields changed.
    ///
    /// # Errors
    /// As [`Document::assign`].
    pub fn with(&self, assignments: &[Assignment]) -> Result<Self, ConfigError> {
        let mut changed = self.clone();
        for assignment in assignments {
            changed.assign(assignment)?;
        }
        Ok(changed)
    }

    /// Reads a typed value from the tree.
    ///
    /// # Errors
    /// At the key or value that does not fit `T`: unknown, missing, of the wrong type, or refused by its own
    /// `Deserialize`.
    pub fn deserialize<'de, T: Deserialize<'de>>(&'de self) -> Result<T, ConfigError> {
        de::read(&self.root).map_err(|(location, message)| self.error(location, message))
    }

    /// The node at a dotted path; positions of a list are numbers from zero.
    #[must_use]
    pub fn node(&self, path: &str) -> Option<&Node> {
        self.find(path).2
    }

    /// Where the value at a dotted path was written; where there is none, its nearest existing parent.
    #[must_use]
    pub fn locate(&self, path: &str) -> Location {
        let (owner, parent, found) = self.find(path);
        match found {
            Some(node) if !matches!(node.value, Value::Map(_) | Value::Null) => node.location.clone(),
            // A map begins at its first key; the key that holds it says more.
            _ => owner.unwrap_or_else(|| parent.location.clone()),
        }
    }

    /// Whether the value at a dotted path, or one below it, comes from an override.
    #[must_use]
    pub fn overridden(&self, path: &str) -> Option<&str> {
        fn search(node: &Node) -> Option<&str> {
            if let Location::Override { text } = &node.location {
                return Some(text);
            }
            match &node.value {
                Value::Seq(items) => items.iter().find_map(search),
                Value::Map(entries) => entries.iter().find_map(|(_, child)| search(child)),
                _ => None,
            }
        }
        self.node(path).and_then(search)
    }

    /// An error about the value at a dotted path, for validation of what has been read.
    #[must_use]
    pub fn error_at(&self, path: &str, message: impl AsRef<str>) -> ConfigError {
        let text = if path.is_empty() {
            message.as_ref().to_owned()
        } else {
            format!("{path}: {}", message.as_ref())
        };
        self.error(self.locate(path), text)
    }

    /// An error about a key, for names that are keys of a map.
    #[must_use]
    pub fn error_at_key(&self, path: &str, message: impl AsRef<str>) -> ConfigError {
        let (owner, parent, _) = self.find(path);
        let location = owner.unwrap_or_else(|| parent.location.clone());
        self.error(location, format!("{path}: {}", message.as_ref()))
    }

    /// Every field that is no map with its dotted path and its value on one line, overrides included, in the order of the file. `skip` leaves out a path with
    /// all below it.
    #[must_use]
    pub fn fields(&self, skip: impl Fn(&str) -> bool) -> Vec<(String, String)> {
        fn walk(node: &Node, path: &str, skip: &dyn Fn(&str) -> bool, out: &mut Vec<(String, String)>) {
            let Value::Map(entries) = &node.value else {
                out.push((path.to_owned(), node.value.line()));
                return;
            };
            for (key, child) in entries {
                let path = if path.is_empty() {
                    key.name.clone()
                } else {
                    format!("{path}.{}", key.name)
                };
                if !skip(&path) {
                    walk(child, &path, skip, out);
                }
            }
        }
        let mut out = Vec::new();
        walk(&self.root, "", &skip, &mut out);
        out
    }

    /// Identifies the contents with their overrides: the first 16 hexadecimal digits of a SHA-256 over the
    /// tree, the same for any layout, order of keys or comments.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut canonical = String::new();
        self.root.value.canonical(&mut canonical);
        digest(canonical.as_bytes())
    }

    /// The file as it was named.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The text of the file, without overrides.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The overrides applied so far, in order.
    #[must_use]
    pub fn overrides(&self) -> &[String] {
        &self.overrides
    }

    /// Another tree of the same file, for instance one of its blocks completed by what stands elsewhere in it: messages still point into the file.
    #[must_use]
    pub(crate) fn with_root(&self, root: Node) -> Self {
        Self { root, ..self.clone() }
    }

    /// The tree.
    #[must_use]
    pub fn root(&self) -> &Node {
        &self.root
    }

    fn error(&self, location: Location, message: String) -> ConfigError {
        let source = source_line(&self.text, &location);
        ConfigError::new(location, message, source)
    }

    /// Follows a path as far as it goes: the key of the last step, the last node reached, and the node itself
    /// where the whole path exists.
    fn find(&self, path: &str) -> (Option<Location>, &Node, Option<&Node>) {
        let mut node = &self.root;
        let mut owner = None;
        let mut rest = path;
        while !rest.is_empty() {
            let next = match &node.value {
                // A key may contain dots itself, so the longest one that fits is taken.
                Value::Map(entries) => entries
                    .iter()
                    .filter_map(|(key, child)| {
                        let tail = rest.strip_prefix(key.name.as_str())?;
                        let tail = if tail.is_empty() {
                            tail
                        } else {
                            tail.strip_prefix('.')?
                        };
                        Some((key.location.clone(), child, tail))
                    })
                    .min_by_key(|(_, _, tail)| tail.len()),
                Value::Seq(items) => {
                    let (head, tail) = rest.split_once('.').unwrap_or((rest, ""));
                    let child = head.parse::<usize>().ok().and_then(|index| items.get(index));
                    child.map(|child| (child.location.clone(), child, tail))
                }
                _ => None,
            };
            let Some((location, child, tail)) = next else {
                return (owner, node, None);
            };
            owner = Some(location);
            node = child;
            rest = tail;
        }
        (owner, node, Some(node))
    }
}
