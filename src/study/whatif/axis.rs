//! `--vary field=values`: the values of one field, listed or as ranges.

use std::collections::BTreeSet;

use crate::config::{Assignment, ConfigError, Location, Value, listed, suggestion};

/// Most values of a field.
const MOST_VALUES: usize = 1_000_000;
/// Keys of a workload that a sweep cannot vary: they say what a row is, or nothing about time.
const FIXED_KEYS: [&str; 8] = [
    "name",
    "plans",
    "hardware",
    "baseline",
    "numeric",
    "published",
    "inferred",
    "stack",
];
/// Keys of a workload under which fields are varied.
const VARIED_KEYS: [&str; 3] = ["layer", "program", "pass"];

/// A field with the values it takes.
#[derive(Debug, Clone)]
pub struct Axis {
    field: String,
    values: Vec<String>,
    /// The changes that make each value: one, or those of a step.
    changes: Vec<Vec<Assignment>>,
    /// Whether the values are names of steps.
    steps: bool,
}

/// Name of an axis of steps, in the place of a field.
const STEP: &str = "step";

impl Axis {
    /// Parses `field=values`. A bare name is a field of the layer.
    ///
    /// Values are separated by commas. `64..512:*2` stands for 64, 128, 256 and 512, `1..9:+2` for 1, 3, 5, 7 and 9; quantities of the hardware
    /// have their unit behind each value, and behind one of the numbers of a range: `400..1600:*2 GB/s`.
    ///
    /// # Errors
    /// At the option, where it has no field or no values, where a range is malformed or empty, or where a value stands twice.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let fail = |message: String| {
            let location = Location::Override {
                text: format!("--vary {text}").into(),
            };
            ConfigError::new(location, message, None)
        };
        let Some((field, list)) = text.split_once('=') else {
            return Err(fail(
                "expected `FIELD=VALUES`, such as `chunk=64,128` or `hw.hbm.bandwidth=400..1600:*2 GB/s`"
                    .to_owned(),
            ));
        };
        let field = canonical(field.trim()).map_err(fail)?;
        let values = values(list).map_err(fail)?;
        let mut seen = BTreeSet::new();
        if let Some(twice) = values.iter().find(|value| !seen.insert(value.as_str())) {
            return Err(fail(format!("value `{twice}` stands twice")));
        }
        Axis::new(field, values)
    }

    /// A field, as `--set` takes it, with its values.
    ///
    /// # Errors
    /// Where a value is not YAML.
    pub fn new(field: String, values: Vec<String>) -> Result<Self, ConfigError> {
        let path = field.strip_prefix("hw.").unwrap_or(&field);
        let changes = values
            .iter()
            .map(|value| {
                let label = format!("--vary {field}={value}");
                Ok(vec![Assignment::parse(&format!("{path}={value}"), &label)?])
            })
            .collect::<Result<_, ConfigError>>()?;
        Ok(Axis {
            field,
            values,
            changes,
            steps: false,
        })
    }

    /// An axis of steps: each has a name and the changes of the workload that lead to it from the file, as `--set` takes them.
    ///
    /// # Errors
    /// Where a change is malformed.
    pub fn steps(steps: &[(String, Vec<String>)]) -> Result<Self, ConfigError> {
        let changes = |(name, set): &(String, Vec<String>)| {
            let parse = |text: &String| Assignment::parse(text, &format!("step `{name}`, {text}"));
            set.iter().map(parse).collect()
        };
        Ok(Axis {
            field: STEP.to_owned(),
            values: steps.iter().map(|(name, _)| name.clone()).collect(),
            changes: steps.iter().map(changes).collect::<Result<_, _>>()?,
            steps: true,
        })
    }

    /// Whether the values are names of steps.
    #[must_use]
    pub fn is_steps(&self) -> bool {
        self.steps
    }

    /// Dotted path of the field, `layer.chunk` or `hw.hbm.bandwidth`: what `--set` takes.
    #[must_use]
    pub fn field(&self) -> &str {
        &self.field
    }

    /// Dotted path in the file of the chip, for a field of the hardware.
    #[must_use]
    pub fn hardware_path(&self) -> Option<&str> {
        self.field.strip_prefix("hw.")
    }

    /// The values as they are written.
    #[must_use]
    pub fn values(&self) -> &[String] {
        &self.values
    }

    /// The changes that make each of the values, in the same order; one for a field.
    #[must_use]
    pub fn changes(&self) -> &[Vec<Assignment>] {
        &self.changes
    }

    /// A value as it is read; none for a step.
    #[must_use]
    pub fn value(&self, index: usize) -> Option<&Value> {
        match &self.changes[index][..] {
            [change] if !self.steps => Some(change.value()),
            _ => None,
        }
    }

    /// A value that is a bare number.
    #[must_use]
    pub fn number(&self, index: usize) -> Option<f64> {
        match self.value(index)? {
            Value::Int(value) => Some(*value as f64),
            Value::Float(value) => Some(*value),
            _ => None,
        }
    }
}

/// The dotted path that `--set` takes for a field; a bare name belongs to the layer.
fn canonical(field: &str) -> Result<String, String> {
    let head = field.split('.').next().unwrap_or_default();
    if field.is_empty() {
        return Err("expected the name of a field in front of `=`".to_owned());
    }
    if FIXED_KEYS.contains(&head) {
        return Err(format!(
            "`{head}` is the same in all points, only fields of {} and of the hardware (`hw.`) are varied; change it with `--set`",
            listed(&VARIED_KEYS)
        ));
    }
    if head == "hw" {
        return match field.split_once('.') {
            Some((_, path)) if !path.is_empty() => Ok(field.to_owned()),
            _ => Err("expected a field of the hardware, such as `hw.hbm.bandwidth`".to_owned()),
        };
    }
    if VARIED_KEYS.contains(&head) {
        return Ok(field.to_owned());
    }
    if field.contains('.') {
        let tail = suggestion(head, &["layer", "program", "hw"], "a path begins with");
        return Err(format!("unknown field `{field}`; {tail}"));
    }
    Ok(format!("layer.{field}"))
}

/// The values of a list with ranges.
fn values(list: &str) -> Result<Vec<String>, String> {
    let mut values = Vec::new();
    for item in items(list) {
        if item.is_empty() {
            return Err("an empty value; write values separated by single commas".to_owned());
        }
        if item.contains("..") {
            values.extend(range(item)?);
        } else {
            values.push(item.to_owned());
        }
        if values.len() > MOST_VALUES {
            return Err(format!("expected at most {MOST_VALUES} values"));
        }
    }
    Ok(values)
}

/// Splits at the commas outside brackets and quotes.
fn items(list: &str) -> Vec<&str> {
    let mut items = Vec::new();
    let (mut depth, mut quote, mut from) = (0_i32, None, 0);
    for (at, c) in list.char_indices() {
        match (quote, c) {
            (None, '\'' | '"') => quote = Some(c),
            (Some(open), _) if open == c => quote = None,
            (None, '[' | '{') => depth += 1,
            (None, ']' | '}') => depth -= 1,
            (None, ',') if depth <= 0 => {
                items.push(list[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
    }
    items.push(list[from..].trim());
    items
}

/// A number and the unit behind it.
fn number(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let numeric = text
        .find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-' | 'e' | 'E')))
        .unwrap_or(text.len());
    // An `e` or `E` that no digit follows begins the unit.
    (1..=numeric).rev().find_map(|end| {
        let value: f64 = text.get(..end)?.parse().ok()?;
        value.is_finite().then(|| (value, text[end..].trim()))
    })
}

fn range(item: &str) -> Result<Vec<String>, String> {
    const FORM: &str = "write `64..512:*2` for 64, 128, 256, 512 or `1..9:+2` for 1, 3, 5, 7, 9";
    let (from, rest) = item.split_once("..").unwrap_or((item, ""));
    let Some((to, step)) = rest.split_once(':') else {
        return Err(format!("range `{item}` has no step; {FORM}"));
    };
    let step = step.trim();
    let geometric = step.starts_with('*');
    let by = step.strip_prefix(['*', '+']);
    let (Some((first, unit)), Some((last, last_unit)), Some((by, step_unit))) =
        (number(from), number(to), by.and_then(number))
    else {
        return Err(format!("`{item}` is not a range of numbers; {FORM}"));
    };
    let mut unit = unit;
    for other in [last_unit, step_unit] {
        if unit.is_empty() {
            unit = other;
        } else if !other.is_empty() && other != unit {
            return Err(format!(
                "range `{item}` has the units `{unit}` and `{other}`; write one"
            ));
        }
    }
    let grows = if geometric {
        first > 0.0 && by > 1.0
    } else {
        by > 0.0
    };
    if !grows {
        let expected = if geometric {
            "a start above 0 and a factor above 1"
        } else {
            "a step above 0"
        };
        return Err(format!("range `{item}` does not grow; expected {expected}"));
    }
    if first > last {
        return Err(format!("range `{item}` is empty: its start lies beyond its end"));
    }
    let mut values = Vec::new();
    for i in 0_u32.. {
        let exact = if geometric {
            first * by.powf(f64::from(i))
        } else {
            first + f64::from(i) * by
        };
        // Twelve digits leave the rounding of the sums and powers behind.
        let value: f64 = format!("{exact:.11e}").parse().unwrap_or(exact);
        if value > last {
            break;
        }
        if values.len() >= MOST_VALUES {
            return Err(format!("range `{item}` has more than {MOST_VALUES} values"));
        }
        values.push(if unit.is_empty() {
            value.to_string()
        } else {
            format!("{value} {unit}")
        });
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values_of(text: &str) -> Vec<String> {
        match Axis::parse(text) {
            Ok(axis) => axis.values().to_vec(),
            Err(error) => vec![error.to_string()],
        }
    }

    #[test]
    fn lists_and_ranges_are_spelt_out() {
        assert_eq!(values_of("chunk=64,128"), ["64", "128"]);
        assert_eq!(values_of("chunk=64..512:*2"), ["64", "128", "256", "512"]);
        assert_eq!(values_of("decay_tiles=1..9:+2"), ["1", "3", "5", "7", "9"]);
        assert_eq!(values_of("chunk=1, 4,16..64:*2"), ["1", "4", "16", "32", "64"]);
        assert_eq!(
            values_of("hw.hbm.achievable=0.1..0.7:+0.2"),
            ["0.1", "0.3", "0.5", "0.7"]
        );
        for text in ["400..1600:*2 GB/s", "400 GB/s..1600 GB/s:*2", "400 GB/s..1600:*2"] {
            assert_eq!(
                values_of(&format!("hw.hbm.bandwidth={text}")),
                ["400 GB/s", "800 GB/s", "1600 GB/s"]
            );
        }
        assert_eq!(values_of("layer.sequences=[64, 64],[128]"), ["[64, 64]", "[128]"]);
        assert_eq!(values_of("hw.launch.time=1e0..4:*2 us"), ["1 us", "2 us", "4 us"]);
    }

    #[test]
    fn a_bare_name_is_one_of_the_layer() {
        let field = |text: &str| Axis::parse(text).map(|axis| axis.field().to_owned());
        assert_eq!(field("chunk=64"), Ok("layer.chunk".to_owned()));
        assert_eq!(field("pass=decode"), Ok("pass".to_owned()));
        assert_eq!(field("program.heads=1"), Ok("program.heads".to_owned()));
        assert_eq!(
            field("hw.matrix_unit.rows=128"),
            Ok("hw.matrix_unit.rows".to_owned())
        );
    }

    #[test]
    fn malformed_lists_say_what_would_do() {
        for (text, part) in [
            ("chunk", "expected `FIELD=VALUES`"),
            ("=64", "name of a field"),
            ("chunk=", "an empty value"),
            ("chunk=64,,128", "an empty value"),
            ("chunk=64,64", "`64` stands twice"),
            ("chunk=64..512", "has no step"),
            ("chunk=64..512:2", "not a range of numbers"),
            ("chunk=512..64:*2", "is empty"),
            ("chunk=64..512:*1", "does not grow"),
            ("chunk=0..8:*2", "does not grow"),
            ("chunk=1..8:+0", "does not grow"),
            ("chunk=1..1e9:+1", "more than 1000000 values"),
            ("hw.hbm.bandwidth=400 GB/s..1 TB/s:*2", "units"),
            ("plans=fused", "`plans` is the same in all points"),
            ("layers.chunk=64", "did you mean `layer`?"),
            ("hw.=64", "a field of the hardware"),
        ] {
            let found = values_of(text).join(" ");
            assert!(
                found.starts_with(&format!("--vary {text}: ")) && found.contains(part),
                "{text}: {found}"
            );
        }
    }
}
