//! `result.json`: the result as it stands, in the order of its fields.

use std::io::{self, Write};

use super::result::{RunResult, SCHEMA};

/// Why a result could not be written or read as JSON.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    /// The writer failed, or the text is not a result.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// JSON has no word for infinity or not-a-number, so a result that holds one could not be read back.
    #[error("the result holds a number that is not finite and cannot be written as JSON ({0})")]
    NotFinite(serde_json::Error),
    /// Another schema or another version of it.
    #[error("schema `{found}` is not `{SCHEMA}`; write the result again with this version of tpusim")]
    Schema {
        /// What the file says.
        found: String,
    },
    /// The writer failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The result as pretty JSON with a newline at the end.
///
/// # Errors
/// [`JsonError::NotFinite`] where a number of the result is infinite or not a number.
pub fn to_string(result: &RunResult) -> Result<String, JsonError> {
    let mut text = serde_json::to_string_pretty(result)?;
    // serde_json writes such numbers as null without a word; reading back is the check that nobody has to.
    serde_json::from_str::<RunResult>(&text).map_err(JsonError::NotFinite)?;
    text.push('\n');
    Ok(text)
}

/// Writes [`to_string`].
///
/// # Errors
/// As [`to_string`], and where the writer fails.
pub fn write(mut out: impl Write, result: &RunResult) -> Result<(), JsonError> {
    out.write_all(to_string(result)?.as_bytes())?;
    Ok(())
}

/// Reads a result.
///
/// # Errors
/// Where the text is not JSON, not a result, or of another schema.
pub fn from_str(text: &str) -> Result<RunResult, JsonError> {
    // The schema is looked at first: a result of another version would otherwise fail on some field that says
    // nothing.
    let value: serde_json::Value = serde_json::from_str(text)?;
    match value.get("schema").and_then(serde_json::Value::as_str) {
        Some(SCHEMA) => Ok(serde_json::from_str(text)?),
        other => Err(JsonError::Schema {
            found: other.unwrap_or("none").to_owned(),
        }),
    }
}

#[cfg(test)]
/// Every key of a value, in any depth.
pub(crate) fn keys(value: &serde_json::Value, found: &mut std::collections::BTreeSet<String>) {
    match value {
        serde_json::Value::Object(map) => {
            for (key, value) in map {
                found.insert(key.clone());
                keys(value, found);
            }
        }
        serde_json::Value::Array(values) => values.iter().for_each(|value| keys(value, found)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    #[test]
    fn a_result_comes_back_as_it_was() -> Result<(), JsonError> {
        let result = fixture::five_chips();
        let text = to_string(&result)?;
        assert!(text.starts_with("{\n  \"schema\": \"tpusim.result/1\",\n"));
        assert!(text.ends_with("}\n"));
        assert_eq!(from_str(&text)?, result);
        assert_eq!(to_string(&from_str(&text)?)?, text);
        Ok(())
    }

    #[test]
    fn a_number_that_is_not_finite_is_refused() {
        let mut result = fixture::five_chips();
        result.chips[0].plans[0].total_us = f64::NAN;
        assert!(matches!(to_string(&result), Err(JsonError::NotFinite(_))));
    }

    #[test]
    fn another_schema_is_named() {
        let error = from_str("{\"schema\": \"tpusim.result/0\"}")
            .map(|_| ())
            .map_err(|error| error.to_string());
        assert_eq!(
            error,
            Err("schema `tpusim.result/0` is not `tpusim.result/1`; \
                 write the result again with this version of tpusim"
                .to_owned())
        );
    }

    #[test]
    fn every_field_is_documented() -> Result<(), JsonError> {
        let docs = include_str!("../../docs/formats.md");
        let mut found = std::collections::BTreeSet::new();
        keys(
            &serde_json::from_str(&to_string(&fixture::five_chips())?)?,
            &mut found,
        );
        assert!(found.len() > 60, "the fixture fills every part of a result");
        let missing: Vec<_> = found
            .iter()
            .filter(|key| !docs.contains(&format!("`{key}`")))
            .collect();
        assert!(missing.is_empty(), "docs/formats.md does not mention {missing:?}");
        Ok(())
    }
}
