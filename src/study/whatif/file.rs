//! A study: a workload with the fields to vary, or the steps from one design to another, kept as a file.

use serde::Deserialize;

use super::axis::Axis;
use crate::config::{ConfigError, Document, listed, suggestion};
use crate::workload;

/// A study as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StudyFile {
    title: String,
    workload: String,
    #[serde(default)]
    set: Vec<String>,
    #[serde(default)]
    vary: Vec<String>,
    #[serde(default)]
    steps: Vec<StepFile>,
    #[serde(default)]
    hardware: Vec<String>,
    #[serde(default)]
    pareto: Vec<String>,
    #[serde(default)]
    numerics: bool,
    reading: String,
}

/// A step: what it changes beyond the steps before it, and the plan it is timed in from here on.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StepFile {
    name: String,
    #[serde(default)]
    set: Vec<String>,
    plan: Option<String>,
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
