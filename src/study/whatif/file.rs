//! A study: a workload with the fields to vary, or the steps from one design to another, kept as a file.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde_json::Value as Json;

use super::axis::Axis;
use crate::config::{ConfigError, Document, listed, suggestion};
use crate::kernels::Plan;
use crate::{hardware, workload};

/// A study of tpusim: a question about one workload, and the points that answer it.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(transform = vary_or_steps)]
struct StudyFile {
    /// The question.
    title: String,
    /// Workload of one layer: a file beside this one, or a shipped name.
    workload: String,
    #[serde(default)]
    /// Changes of all points, `FIELD=VALUE`; fields of the hardware begin with `hw.`.
    set: Vec<String>,
    #[serde(default)]
    /// Fields with the values they take, `FIELD=VALUES`: listed (`layer.chunk=64,128`) or as a range (`hw.hbm.bandwidth=400..1600:*2 GB/s`).
    #[schemars(inner(regex(pattern = "=")))]
    vary: Vec<String>,
    #[serde(default)]
    /// Steps from one design to another, instead of `vary`.
    steps: Vec<StepFile>,
    #[serde(default)]
    /// Chips instead of those of the workload: shipped names, or paths.
    #[schemars(schema_with = "chip_names")]
    hardware: Vec<String>,
    #[serde(default)]
    /// Quantities whose best trade-offs are marked: columns of the rows, or varied fields whose values are numbers.
    pareto: Vec<String>,
    #[serde(default)]
    /// Whether every layer is executed as well.
    numerics: bool,
    /// How to read the picture.
    reading: String,
}

/// A step: what it changes beyond the steps before it, and the plan it is timed in from here on.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StepFile {
    /// Name of the step.
    name: String,
    #[serde(default)]
    /// Changes of the workload, `FIELD=VALUE`.
    #[schemars(inner(regex(pattern = "=")))]
    set: Vec<String>,
    /// Fusion plan it is timed in; that of the step before where left out.
    #[schemars(schema_with = "plan_name")]
    #[serde(default)]
    plan: Option<String>,
}

/// One of both lists, with an entry.
fn vary_or_steps(schema: &mut Schema) {
    let entries =
        |list: &str| serde_json::json!({ "required": [list], "properties": { list: { "minItems": 1 } } });
    schema.insert(
        "oneOf".to_owned(),
        Json::Array(["vary", "steps"].map(entries).to_vec()),
    );
}

/// Any text, shipped names first.
fn chip_names(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": { "anyOf": [{ "enum": hardware::shipped() }, { "type": "string" }] },
    })
}

fn plan_name(_: &mut SchemaGenerator) -> Schema {
    let names = Plan::NAMES.map(Json::from);
    json_schema!({ "enum": names.into_iter().chain([Json::Null]).collect::<Vec<_>>() })
}

/// JSON schema of studies, from the structs that read them.
#[must_use]
pub fn schema(generator: SchemaGenerator) -> Schema {
    generator.into_root_schema_for::<StudyFile>()
}

/// A study.
#[derive(Debug)]
pub struct Study {
    /// What is asked.
    pub title: String,
    /// The workload: a path, or the name of a shipped one.
    pub workload: String,
    /// Changes of all points.
    pub set: Vec<String>,
    /// What varies.
    pub axes: Vec<Axis>,
    /// Of a study of steps, the plan of each.
    pub step_plans: Vec<String>,
    /// Chips instead of those of the workload.
    pub hardware: Vec<String>,
    /// Quantities whose best trade-offs are marked.
    pub pareto: Vec<String>,
    /// Whether its layers are executed as well.
    pub numerics: bool,
    /// How to read the picture.
    pub reading: String,
}

impl Study {
    /// The study that a file holds, or none where the file is no study. `name_or_path` is what it was read from.
    ///
    /// # Errors
    /// For every value that does not fit.
    pub fn read(name_or_path: &str, document: &Document) -> Result<Option<Self>, ConfigError> {
        if document.node("workload").is_none() {
            return Ok(None);
        }
        let file: StudyFile = document.deserialize()?;
        let Some(workload) = workload::beside(&file.workload, name_or_path) else {
            let message = format!(
                "cannot find the workload `{}`; expected a file beside this one or a shipped name",
                file.workload
            );
            return Err(document.error_at("workload", message));
        };
        if file.vary.is_empty() == file.steps.is_empty() {
            return Err(document.error_at("", "expected either `vary` or `steps`"));
        }
        let mut errors = Vec::new();
        let mut at = |path: String, error: &ConfigError| {
            let messages: Vec<&str> = error.problems().iter().map(|p| p.message.as_str()).collect();
            errors.push(document.error_at(&path, messages.join("; ")));
        };
        let mut axes = Vec::new();
        for (i, text) in file.vary.iter().enumerate() {
            match Axis::parse(text) {
                Ok(axis) => axes.push(axis),
                Err(error) => at(format!("vary.{i}"), &error),
            }
        }
        let mut step_plans = Vec::new();
        if !file.steps.is_empty() {
            let (mut steps, mut set, mut plan) = (Vec::new(), Vec::new(), None);
            for (i, step) in file.steps.iter().enumerate() {
                for (j, text) in step.set.iter().enumerate() {
                    if text.starts_with("hw.") {
                        let message =
                            "a step changes the workload; vary the hardware, or change it for all steps";
                        at(format!("steps.{i}.set.{j}"), &ConfigError::argument(message));
                    }
                }
                set.extend(step.set.iter().cloned());
                plan = step.plan.clone().or(plan);
                let Some(plan) = &plan else {
                    let message = "expected the plan the first step is timed in, such as `plan: unfused`";
                    return Err(document.error_at(&format!("steps.{i}"), message));
                };
                steps.push((step.name.clone(), set.clone()));
                step_plans.push(plan.clone());
            }
            match Axis::steps(&steps) {
                Ok(axis) => axes.push(axis),
                Err(error) => at("steps".to_owned(), &error),
            }
        }
        ConfigError::collect(errors)?;
        Ok(Some(Study {
            title: file.title,
            workload,
            set: file.set,
            axes,
            step_plans,
            hardware: file.hardware,
            pareto: file.pareto,
            numerics: file.numerics,
            reading: file.reading.trim().to_owned(),
        }))
    }

    /// Checks that the plans of the steps are among `plans`.
    ///
    /// # Errors
    /// At the first that is not.
    pub fn check_plans(&self, document: &Document, plans: &[String]) -> Result<(), ConfigError> {
        match self.step_plans.iter().find(|plan| !plans.contains(plan)) {
            Some(unknown) => Err(document.error_at(
                "steps",
                format!(
                    "unknown plan `{unknown}`; {}",
                    suggestion(unknown, plans, "plans of the workload")
                ),
            )),
            None => Ok(()),
        }
    }

    /// What varies, in words.
    #[must_use]
    pub fn varied(&self) -> String {
        listed(self.axes.iter().map(Axis::field))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::Kind;
    use crate::schema::agreement::{Reader, disagreements, other_names};
    use crate::workload::{shipped_studies, shipped_text};

    const STUDIES: Reader = Reader {
        kind: Kind::Study,
        well_formed: |document| document.deserialize::<StudyFile>().map(drop),
        accepts: |document| {
            let study = Study::read("studies/study.yaml", document).ok().flatten();
            study.is_some_and(|study| {
                study
                    .check_plans(document, &Plan::NAMES.map(str::to_owned))
                    .is_ok()
            })
        },
    };

    /// What the shipped ones leave out.
    const EVERY_KEY: &str = r#"
title: What does a chip of mine gain?
workload: sla_r4
set: [layer.chunk=64, hw.launch.time=1 us]
vary: ["layer.state=f32,bf16"]
hardware: [tpu-v6e, mine.yaml]
pareto: [latency, state_bytes]
numerics: true
reading: Less is better.
"#;

    #[test]
    fn studies_and_their_schema_agree() -> Result<(), Box<dyn std::error::Error>> {
        let shipped = shipped_studies();
        let texts = shipped.iter().filter_map(|name| shipped_text(name));
        for text in texts.chain([EVERY_KEY]) {
            let (complaints, tried) = disagreements(&STUDIES, text)?;
            assert!(complaints.is_empty(), "{}", complaints.join("\n"));
            assert!(tried > 30, "only {tried}");
            let (complaints, compared) = other_names(&STUDIES, text)?;
            assert!(
                complaints.is_empty() && compared >= 1,
                "{}",
                complaints.join("\n")
            );
        }
        Ok(())
    }
}
