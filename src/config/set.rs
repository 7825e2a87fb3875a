//! `--set a.b=c`: overrides of single fields from the command line.

use super::error::{ConfigError, Location};
use super::tree::{Key, Node, Value, parse_override};

/// Changes one field of the tree. Missing maps on the way are created: whether the schema knows them is
/// decided when the tree is read, so an override never silently does nothing.
///
/// # Errors
/// Where `assignment` has no `=` or an empty key, where the value is not YAML, and where the path leads
/// through a scalar or past the end of a list.
pub(super) fn apply(root: &mut Node, assignment: &str, label: &str) -> Result<(), ConfigError> {
    let location = Location::Override { text: label.into() };
    let fail = |message: String| ConfigError::new(location.clone(), message, None);
    let Some((path, text)) = assignment.split_once('=') else {
        return Err(fail(
            "expected `FIELD=VALUE`, such as `layer.chunk=128` or `hw.hbm.bandwidth=1 TB/s`".to_owned(),
        ));
    };
    let segments: Vec<&str> = path.split('.').map(str::trim).collect();
    if segments.iter().any(|segment| segment.is_empty()) {
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
    let mut node = root;
    let mut walked = String::new();
    for segment in segments {
        node = step(node, segment, &location).map_err(|found| {
            let here = if walked.is_empty() {
                "the file".to_owned()
            } else {
                format!("`{walked}`")
            };
            fail(format!("{here} has no field `{segment}`: {found}"))
        })?;
        if !walked.is_empty() {
            walked.push('.');
        }
        walked.push_str(segment);
    }
    *node = value;
    Ok(())
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
