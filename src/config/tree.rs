//! YAML as a tree in which every key and value knows where it was written.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_yaml::Spanned;

use super::error::{ConfigError, Location};

/// A value and where it was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// The value.
    pub value: Value,
    /// Its first character.
    pub location: Location,
}

/// A key and where it was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Key {
    /// The key.
    pub name: String,
    /// Its first character.
    pub location: Location,
}

/// What YAML can hold, as far as the project's files use it.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// `null`, `~` or nothing.
    Null,
    /// `true` or `false`; `yes`, `no`, `y` and `n` are text.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Any other number.
    Float(f64),
    /// Text.
    String(String),
    /// A list.
    Seq(Vec<Node>),
    /// A map, in the order of the file.
    Map(Vec<(Key, Node)>),
}

impl From<&Value> for serde_json::Value {
    /// The value without its places.
    fn from(value: &Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(value) => Self::from(*value),
            Value::Int(value) => serde_json::json!(value),
            Value::Float(value) => Self::from(*value),
            Value::String(value) => Self::from(value.as_str()),
            Value::Seq(items) => items.iter().map(|item| Self::from(&item.value)).collect(),
            Value::Map(entries) => entries
                .iter()
                .map(|(key, node)| (key.name.clone(), Self::from(&node.value)))
                .collect::<serde_json::Map<_, _>>()
                .into(),
        }
    }
}

impl Value {
    /// The value in words, for messages.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Value::Null => "nothing".to_owned(),
            Value::Bool(value) => format!("`{value}`"),
            Value::Int(value) => format!("the number `{value}`"),
            Value::Float(value) => format!("the number `{value:?}`"),
            Value::String(value) => format!("the text `{}`", shorten(value)),
            Value::Seq(_) => "a list".to_owned(),
            Value::Map(_) => "a map".to_owned(),
        }
    }

    /// The value on one line, numbers and text as a file has them: what two files are compared by.
    pub(super) fn line(&self) -> String {
        match self {
            Value::Null => "null".to_owned(),
            Value::Bool(value) => value.to_string(),
            Value::Int(value) => value.to_string(),
            // `5` and `5.0` are the same number.
            Value::Float(value) => value.to_string(),
            Value::String(value) => value.clone(),
            Value::Seq(items) => {
                let items: Vec<String> = items.iter().map(|item| item.value.line()).collect();
                format!("[{}]", items.join(", "))
            }
            Value::Map(entries) => {
                let entries: Vec<String> = entries
                    .iter()
                    .map(|(key, node)| format!("{}: {}", key.name, node.value.line()))
                    .collect();
                format!("{{ {} }}", entries.join(", "))
            }
        }
    }

    /// Appends a text that is the same for the same contents, however a file is laid out.
    pub(super) fn canonical(&self, out: &mut String) {
        match self {
            Value::Null => out.push_str("null"),
            Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Value::Int(value) => out.push_str(&value.to_string()),
            Value::Float(value) => append(out, value),
            Value::String(value) => append(out, value),
            Value::Seq(items) => {
                out.push('[');
                for item in items {
                    item.value.canonical(out);
                    out.push(',');
                }
                out.push(']');
            }
            Value::Map(entries) => {
                let mut sorted: Vec<_> = entries.iter().collect();
                sorted.sort_by(|left, right| left.0.name.cmp(&right.0.name));
                out.push('{');
                for (key, node) in sorted {
                    append(out, &key.name);
                    out.push(':');
                    node.value.canonical(out);
                    out.push(',');
                }
                out.push('}');
            }
        }
    }
}

/// Appends the quoted form, which tells a number from a text that looks like it.
fn append(out: &mut String, value: &impl fmt::Debug) {
    // Writing into a string cannot fail.
    let _ = write!(out, "{value:?}");
}

/// The double next to a whole number.
fn approximate(value: &impl ToString) -> f64 {
    value.to_string().parse().unwrap_or(f64::INFINITY)
}

/// The first forty characters of a text on one line.
pub(super) fn shorten(text: &str) -> String {
    let line: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(40)
        .collect();
    if text.chars().count() > 40 {
        format!("{line}...")
    } else {
        line
    }
}

/// The tree as the parser hands it over, before file names are put in.
struct Parsed(Spanned<Contents>);

enum Contents {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    String(String),
    Seq(Vec<Parsed>),
    Map(Vec<(Spanned<String>, Parsed)>),
}

impl<'de> Deserialize<'de> for Parsed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Spanned::<Contents>::deserialize(deserializer).map(Parsed)
    }
}

impl<'de> Deserialize<'de> for Contents {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Anything;

        impl<'de> Visitor<'de> for Anything {
            type Value = Contents;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a YAML value")
            }

            fn visit_unit<E>(self) -> Result<Contents, E> {
                Ok(Contents::Null)
            }

            fn visit_none<E>(self) -> Result<Contents, E> {
                Ok(Contents::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Contents, E> {
                Ok(Contents::Bool(value))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Contents, E> {
                Ok(Contents::Int(value))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Contents, E> {
                // Beyond 2^63 a count is a mistake anyway; keep it so that the message can show it.
                Ok(i64::try_from(value).map_or(Contents::Float(approximate(&value)), Contents::Int))
            }

            fn visit_i128<E>(self, value: i128) -> Result<Contents, E> {
                Ok(Contents::Float(approximate(&value)))
            }

            fn visit_u128<E>(self, value: u128) -> Result<Contents, E> {
                Ok(Contents::Float(approximate(&value)))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Contents, E> {
                Ok(Contents::Float(value))
            }

            fn visit_str<E>(self, value: &str) -> Result<Contents, E> {
                Ok(Contents::String(value.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Contents, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = access.next_element()? {
                    items.push(item);
                }
                Ok(Contents::Seq(items))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Contents, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = access.next_entry()? {
                    entries.push(entry);
                }
                Ok(Contents::Map(entries))
            }
        }

        deserializer.deserialize_any(Anything)
    }
}

impl Parsed {
    fn located(self, place: &impl Fn(serde_yaml::Location) -> Location) -> Node {
        let location = place(self.0.referenced);
        let value = match self.0.value {
            Contents::Null => Value::Null,
            Contents::Bool(value) => Value::Bool(value),
            Contents::Int(value) => Value::Int(value),
            Contents::Float(value) => Value::Float(value),
            Contents::String(value) => Value::String(value),
            Contents::Seq(items) => Value::Seq(items.into_iter().map(|item| item.located(place)).collect()),
            Contents::Map(entries) => Value::Map(
                entries
                    .into_iter()
                    .map(|(key, node)| {
                        let key = Key {
                            location: place(key.referenced),
                            name: key.value,
                        };
                        (key, node.located(place))
                    })
                    .collect(),
            ),
        };
        Node { value, location }
    }
}

fn parse_text(text: &str) -> Result<Parsed, serde_yaml::Error> {
    let options = serde_yaml::options! {
        // Otherwise the keys `n` and `y` of a matmul would be booleans.
        strict_booleans: true,
        // Refused later, where the field can be named.
        non_finite_float_policy: serde_yaml::NonFiniteFloatPolicy::PassThrough,
        // The source line is drawn by our own error type.
        with_snippet: false,
    };
    serde_yaml::from_str_with_options(text, options)
}

fn number(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX).max(1)
}

/// Parses a file's text.
///
/// # Errors
/// A located [`ConfigError`] where the text is not YAML.
pub(super) fn parse_file(name: &Arc<str>, text: &str) -> Result<Node, ConfigError> {
    let place = |at: serde_yaml::Location| Location::File {
        name: Arc::clone(name),
        line: number(at.line()),
        column: number(at.column()),
    };
    if let Some(error) = unreadable(name, text) {
        return Err(error);
    }
    match parse_text(text) {
        Ok(parsed) => Ok(parsed.located(&place)),
        Err(error) => {
            let location = error.location().map_or(
                Location::File {
                    name: Arc::clone(name),
                    line: 1,
                    column: 1,
                },
                place,
            );
            let source = source_line(text, &location);
            Err(ConfigError::new(location, parser_message(&error), source))
        }
    }
}

/// Parses the right-hand side of an override: a scalar or a flow collection.
///
/// # Errors
/// A [`ConfigError`] at the override where the text is not YAML.
pub(super) fn parse_override(location: &Location, text: &str) -> Result<Node, ConfigError> {
    if text.trim().is_empty() {
        return Ok(Node {
            value: Value::Null,
            location: location.clone(),
        });
    }
    match parse_text(text) {
        Ok(parsed) => Ok(parsed.located(&|_| location.clone())),
        Err(error) => Err(ConfigError::new(location.clone(), parser_message(&error), None)),
    }
}

/// Troubles that the parser reports in a way that helps nobody: binary contents and tabs.
fn unreadable(name: &Arc<str>, text: &str) -> Option<ConfigError> {
    for (index, line) in text.lines().enumerate() {
        let at = |column: usize| Location::File {
            name: Arc::clone(name),
            line: index + 1,
            column,
        };
        if let Some(position) = line.chars().position(|c| c == '\0') {
            return Some(ConfigError::new(
                at(position + 1),
                "not a text file: found a zero byte",
                None,
            ));
        }
        let indentation = line
            .chars()
            .take_while(|c| c.is_whitespace())
            .position(|c| c == '\t');
        let blank = line.trim().is_empty() || line.trim_start().starts_with('#');
        if let Some(position) = indentation
            && !blank
        {
            let message = "tab in the indentation; YAML allows only blanks there";
            return Some(ConfigError::new(at(position + 1), message, Some(line.to_owned())));
        }
    }
    None
}

fn parser_message(error: &serde_yaml::Error) -> String {
    match error {
        serde_yaml::Error::DuplicateMappingKey { key: Some(key), .. } => {
            format!("duplicate key `{key}`; keep one of them")
        }
        serde_yaml::Error::DuplicateMappingKey { .. } => "duplicate key; keep one of them".to_owned(),
        serde_yaml::Error::MultipleDocuments { .. } => {
            "a second document starts here; keep one per file".to_owned()
        }
        _ => {
            let full = error.to_string();
            let line = full
                .lines()
                .next()
                .unwrap_or("unreadable")
                .trim_start_matches("error: ");
            // The location stands in front of our message already.
            let message = line.split(" at line ").next().unwrap_or(line);
            let advice = if message.contains("illegal placement of ':'") {
                "; a bracket, brace or quote above may be left open"
            } else if message.contains("mapping values are not allowed") {
                "; check the indentation, and put text that holds `: ` in quotes"
            } else {
                ""
            };
            format!("not valid YAML: {message}{advice}")
        }
    }
}

/// The line of `text` that `location` points into.
pub(super) fn source_line(text: &str, location: &Location) -> Option<String> {
    match location {
        Location::File { line, .. } => text.lines().nth(line.checked_sub(1)?).map(str::to_owned),
        _ => None,
    }
}
