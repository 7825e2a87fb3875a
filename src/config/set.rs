//! `--set a.b=c`: overrides of single fields from the command line.

use super::error::{ConfigError, Location};
use super::tree::{Key, Node, Value, parse_override};

/// An override that has been parsed, to be applied to any number of files.
#[derive(Debug, Clone)]
pub struct Assignment {
    text: String,
    location: Location,
    segments: Vec<String>,
    value: Node,
}

impl Assignment {
    /// Parses `a.b=c`; `label` stands for it in messages, for instance `--set a.b=c`.
    ///
    /// # Errors
    /// Where `assignment` has no `=` or an empty key, and where the value is not YAML.
    pub fn parse(assignment: &str, label: &str) -> Result<Self, ConfigError> {
        let location = Location::Override { text: label.into() };
        let fail = |message: String| ConfigError::new(location.clone(), message, None);
        let Some((path, text)) = assignment.split_once('=') else {
            return Err(fail(
                "expected `FIELD=VALUE`, such as `layer.chunk=128` or `hw.hbm.bandwidth=1 TB/s`".to_owned(),
            ));
        };
        let segments: Vec<String> = path.split('.').map(|name| name.trim().to_owned()).collect();
        if segments.iter().any(String::is_empty) {
            return Err(fail(format!(
                "empty name in the path `{path}`; write names separated by single dots"
            )));
        }
        // As deep as the parser lets a file be, so that a path cannot exhaust the stack of a recursive reader.
        if segments.len() > 64 {
            let depth = segments.len();
            let message = format!("path of {depth} names; expected at most 64");
            return Err(fail(message));
        }
        let value = parse_override(&location, text)?;
        Ok(Assignment {
            text: assignment.to_owned(),
            location,
            segments,
            value,
        })
    }

    /// The override as it was written, without its label.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The value.
    #[must_use]
    pub fn value(&self) -> &Value {
        &self.value.value
    }

    /// Changes one field of the tree. Missing maps on the way are created: whether the schema knows them is
    /// decided when the tree is read, so an override never silently does nothing.
    ///
    /// # Errors
    /// Where the path leads through a scalar or past the end of a list.
    pub(super) fn apply(&self, root: &mut Node) -> Result<(), ConfigError> {
        let mut node = root;
        for (depth, segment) in self.segments.iter().enumerate() {
            node = step(node, segment, &self.location).map_err(|found| {
                let here = match depth {
                    0 => "the file".to_owned(),
                    _ => format!("`{}`", self.segments[..depth].join(".")),
                };
                let message = format!("{here} has no field `{segment}`: {found}");
                ConfigError::new(self.location.clone(), message, None)
            })?;
        }
        *node = self.value.clone();
        Ok(())
    }
}

/// The child called `segment`, created where a map lacks it.
fn step<'a>(node: &'a mut Node, segment: &str, location: &Location) -> Result<&'a mut Node, String> {
    if node.value == Value::Null {
        *node = Node {
            value: Value::Map(Vec::new()),
            location: location.clone(),
        };
    }
    match &mut node.value {
        Value::Map(entries) => {
            let index = if let Some(index) = entries.iter().position(|(key, _)| key.name == segment) {
                index
            } else {
                let key = Key {
                    name: segment.to_owned(),
                    location: location.clone(),
                };
                entries.push((
                    key,
                    Node {
                        value: Value::Null,
                        location: location.clone(),
                    },
                ));
                entries.len() - 1
            };
            entries
                .get_mut(index)
                .map(|(_, child)| child)
                .ok_or_else(|| "it is empty".to_owned())
        }
        Value::Seq(items) => {
            let length = items.len();
            let index: Option<usize> = segment.parse().ok();
            index.and_then(|index| items.get_mut(index)).ok_or_else(|| {
                format!(
                    "it is a list of {length}; write a position from 0 to {}",
                    length.max(1) - 1
                )
            })
        }
        other => Err(format!("it is {}", other.describe())),
    }
}
