//! JSON schemas of the YAML files, for editors that complete and check them while they are written.
//!
//! A schema is made from the very structs that read a file, with the doc comments of their fields as descriptions, and from the tables that their values are
//! checked against: units, mechanisms with the fields they read, plans, chips. There is no second description. `schemas/` holds them as files.
//!
//! A schema accepts every file that can be read. It cannot tell everything that a reader can: how fields relate to each other, and what another file holds.

use std::fmt;

use clap::ValueEnum;
use schemars::generate::SchemaSettings;
use serde_json::Value;

use crate::study::whatif;
use crate::{hardware, model, workload};

/// A kind of YAML file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// One layer, how it is fused, the chips it runs on
    Workload,
    /// Layers of several kinds, each a workload of its own
    Stack,
    /// A question about a workload, and the points that answer it
    Study,
    /// A model: blocks of layers between an embedding and a head
    Model,
    /// An accelerator
    Hardware,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 5] = [
        Kind::Workload,
        Kind::Stack,
        Kind::Study,
        Kind::Model,
        Kind::Hardware,
    ];

    /// Name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Workload => "workload",
            Kind::Stack => "stack",
            Kind::Study => "study",
            Kind::Model => "model",
            Kind::Hardware => "hardware",
        }
    }

    /// Name of its file in `schemas/`.
    #[must_use]
    pub fn file_name(self) -> String {
        format!("{}.schema.json", self.name())
    }

    /// The schema, of draft 7, which editors know best.
    #[must_use]
    pub fn schema(self) -> Value {
        let generator = SchemaSettings::draft07()
            .with(|settings| settings.inline_subschemas = true)
            .for_deserialize()
            .into_generator();
        let schema = match self {
            Kind::Workload => workload::schema(generator),
            Kind::Stack => workload::stack_schema(generator),
            Kind::Study => whatif::file::schema(generator),
            Kind::Model => model::schema(generator),
            Kind::Hardware => hardware::schema(generator),
        };
        let mut value = schema.to_value();
        value["title"] = Value::from(format!("tpusim {}", self.name()));
        value
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Whether a reader and its schema agree, for the tests of the readers.
#[cfg(test)]
pub(crate) mod agreement {
    use std::collections::BTreeSet;

    use serde_json::{Map, Value, json};

    use super::Kind;
    use crate::config::{ConfigError, Document};

    /// What a reader makes of a file: whether its structs read it, and whether its values are accepted.
    pub(crate) struct Reader {
        pub(crate) kind: Kind,
        pub(crate) well_formed: fn(&Document) -> Result<(), ConfigError>,
        pub(crate) accepts: fn(&Document) -> bool,
    }

    /// JSON pointers of everything in a file.
    fn pointers(value: &Value, at: &str, out: &mut Vec<String>) {
        let children: Vec<(String, &Value)> = match value {
            Value::Object(map) => map.iter().map(|(key, child)| (key.clone(), child)).collect(),
            Value::Array(items) => (0..).map(|i: usize| i.to_string()).zip(items).collect(),
            _ => Vec::new(),
        };
        for (key, child) in children {
            let at = format!("{at}/{key}");
            pointers(child, &at, out);
            out.push(at);
        }
    }

    /// Every file that lacks one key, has one misspelt, has one more, or has one value replaced by one of another kind; with what was done.
    fn changes(file: &Value) -> Vec<(String, Value)> {
        let mut all = Vec::new();
        pointers(file, "", &mut all);
        let mut out = Vec::new();
        for at in &all {
            let (parent, key) = at.rsplit_once('/').unwrap_or(("", at));
            let mut entries = |what: &str, edit: &dyn Fn(&mut Map<String, Value>)| {
                let mut changed = file.clone();
                if let Some(map) = changed.pointer_mut(parent).and_then(Value::as_object_mut) {
                    edit(map);
                    out.push((format!("{at} {what}"), changed));
                }
            };
            entries("is missing", &|map| {
                map.remove(key);
            });
            entries("is misspelt", &|map| {
                let value = map.remove(key).unwrap_or_default();
                map.insert(format!("{key}x"), value);
            });
            entries("has a neighbour", &|map| {
                map.insert("neighbour".to_owned(), json!(1));
            });
            for value in [
                json!(null),
                json!(true),
                json!(1.5),
                json!(-1),
                json!(0),
                json!("zzz"),
                json!([]),
                json!({}),
            ] {
                let mut changed = file.clone();
                if let Some(old) = changed.pointer_mut(at) {
                    *old = value.clone();
                }
                out.push((format!("{at} is {value}"), changed));
            }
        }
        out
    }

    type Failure = Box<dyn std::error::Error>;

    /// The good file, and every file one change away from it: the schema accepts what is accepted, and refuses what the structs cannot read. Complaints, and
    /// how many files were tried.
    pub(crate) fn disagreements(reader: &Reader, text: &str) -> Result<(Vec<String>, usize), Failure> {
        let validator = jsonschema::validator_for(&reader.kind.schema())?;
        let file = Value::from(&Document::parse("good.yaml", text)?.root().value);
        let mut out = Vec::new();
        let files = [("as it is".to_owned(), file.clone())]
            .into_iter()
            .chain(changes(&file));
        let mut tried = 0;
        for (what, changed) in files {
            let document = Document::parse("changed.yaml", &changed.to_string())?;
            let valid = validator.is_valid(&changed);
            if valid && let Err(error) = (reader.well_formed)(&document) {
                out.push(format!("{what}: the schema accepts what cannot be read: {error}"));
            }
            if !valid && (reader.accepts)(&document) {
                out.push(format!("{what}: the schema refuses what is accepted"));
            }
            tried += 1;
        }
        Ok((out, tried))
    }

    /// The schema of the value at a pointer, `null` beside it left out.
    fn part<'s>(schema: &'s Value, file: &Value, at: &str) -> Option<&'s Value> {
        let mut here = schema;
        let mut walked = String::new();
        for key in at.split('/').skip(1) {
            let of = file.pointer(&walked)?;
            here = match of {
                Value::Array(_) => here.get("items")?,
                _ => here
                    .get("properties")
                    .and_then(|properties| properties.get(key))
                    .or_else(|| here.get("additionalProperties"))?,
            };
            if let Some(choices) = here.get("anyOf").and_then(Value::as_array) {
                here = choices.first()?;
            }
            walked = format!("{walked}/{key}");
        }
        Some(here)
    }

    /// Names in backticks after a heading of a message.
    fn named(message: &str, heading: &str) -> Option<BTreeSet<String>> {
        let (_, list) = message.split_once(heading)?;
        let list = list.lines().next()?;
        Some(list.split('`').skip(1).step_by(2).map(str::to_owned).collect())
    }

    /// Maps whose keys, and fields whose names, are others in the schema than in the message of the reader about an unknown one. With how many were compared.
    pub(crate) fn other_names(reader: &Reader, text: &str) -> Result<(Vec<String>, usize), Failure> {
        let schema = reader.kind.schema();
        let file = Value::from(&Document::parse("good.yaml", text)?.root().value);
        let mut all = vec![String::new()];
        pointers(&file, "", &mut all);
        let (mut out, mut compared) = (Vec::new(), 0);
        for at in &all {
            let Some(schema) = part(&schema, &file, at) else {
                out.push(format!("{at} is not in the schema"));
                continue;
            };
            let mut changed = file.clone();
            let Some(value) = changed.pointer_mut(at) else {
                continue;
            };
            let (heading, in_schema): (&str, BTreeSet<String>) = match value {
                Value::Object(map) => {
                    let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
                        continue;
                    };
                    map.insert("zzz".to_owned(), json!(1));
                    // A key of a map is either a field or the name of a variant.
                    ("valid ", properties.keys().cloned().collect())
                }
                Value::String(_) => {
                    let listed = ["oneOf", "enum"]
                        .iter()
                        .find_map(|key| schema.get(key))
                        .and_then(Value::as_array);
                    let Some(listed) = listed else { continue };
                    *value = json!("zzz");
                    let names = listed
                        .iter()
                        .filter_map(|entry| entry.get("const").unwrap_or(entry).as_str());
                    ("zzz`; ", names.map(str::to_owned).collect())
                }
                _ => continue,
            };
            let document = Document::parse("changed.yaml", &changed.to_string())?;
            let Err(error) = (reader.well_formed)(&document) else {
                // A name that is only checked later, such as that of a plan.
                continue;
            };
            let known = named(&error.to_string(), heading).unwrap_or_default();
            // A name that the structs read may still be refused where it stands.
            let accepted = known.difference(&in_schema).any(|name| {
                let mut changed = file.clone();
                if let Some(value @ Value::String(_)) = changed.pointer_mut(at) {
                    *value = json!(name);
                }
                Document::parse("changed.yaml", &changed.to_string())
                    .is_ok_and(|document| (reader.accepts)(&document))
            });
            if accepted || !in_schema.is_subset(&known) {
                out.push(format!(
                    "{at}: the reader knows {known:?}, the schema {in_schema:?}"
                ));
            }
            compared += 1;
        }
        Ok((out, compared))
    }
}
