//! What a person sees when a file is wrong.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde::Deserialize;

use super::*;
use crate::dtype::Dtype;
use crate::units::BytesPerSecond;

#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct Sample {
    name: String,
    memory: Memory,
    #[serde(default)]
    rates: BTreeMap<Dtype, f64>,
    #[serde(default)]
    steps: Vec<Step>,
    #[serde(default)]
    levels: BTreeMap<u32, bool>,
    note: Option<String>,
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct Memory {
    bandwidth: BytesPerSecond,
    banks: u32,
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Step {
    Load,
    Matmul { m: u64, n: u64 },
    Scale(f64),
}

const GOOD: &str = "\
# a comment
name: y
memory:
  bandwidth: 819 GB/s # beside a value
  banks: 16
rates: { bf16: 1, int8: 2.5 }
steps:
  - load
  - matmul: { m: 1, n: 2 }
  - scale: 0.5
levels: { 3: true }
";

fn read(text: &str) -> Result<Sample, ConfigError> {
    Document::parse("x.yaml", text)?.deserialize()
}

fn complaint(text: &str) -> String {
    match read(text) {
        Ok(sample) => format!("read as {sample:?}"),
        Err(error) => error.render(),
    }
}

/// The first line of the complaint about the good file with one text replaced.
fn after(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "{from}");
    complaint(&GOOD.replacen(from, to, 1))
        .lines()
        .next()
        .unwrap_or_default()
        .to_owned()
}

#[test]
fn a_good_file_is_read_with_short_names_as_text() {
    let sample = read(GOOD);
    let expected = Sample {
        name: "y".to_owned(),
        memory: Memory {
            bandwidth: BytesPerSecond(819e9),
            banks: 16,
        },
        rates: BTreeMap::from([(Dtype::Bf16, 1.0), (Dtype::Int8, 2.5)]),
        steps: vec![Step::Load, Step::Matmul { m: 1, n: 2 }, Step::Scale(0.5)],
        levels: BTreeMap::from([(3, true)]),
        note: None,
    };
    assert_eq!(sample, Ok(expected));
}

#[test]
fn the_line_at_fault_is_shown_with_a_caret() {
    assert_eq!(
        complaint(&GOOD.replace("banks: 16", "banks: many")),
        "error: x.yaml:5:10: memory.banks: expected a whole number from 0 to 4294967295, found the text \
        `many`\n  \
         |\n\
         5 |   banks: many\n  \
         |          ^"
    );
}

/// Text of the good file, what stands in its place, and the complaint.
const MISTAKES: &[(&str, &str, &str)] = &[
    (
        "  banks: 16",
        "  bansk: 16",
        "x.yaml:5:3: memory: unknown key `bansk`; did you mean `banks`? valid keys: `bandwidth`, `banks`",
    ),
    ("  banks: 16\n", "", "x.yaml:3:1: memory: missing key `banks`"),
    ("name: y\n", "", "x.yaml:2:1: missing key `name`"),
    (
        "banks: 16",
        "banks: -1",
        "x.yaml:5:10: memory.banks: expected a whole number from 0 to 4294967295, found the number `-1`",
    ),
    (
        "banks: 16",
        "banks: 1.5",
        "x.yaml:5:10: memory.banks: expected a whole number from 0 to 4294967295, found the number `1.5`",
    ),
    (
        "banks: 16",
        "banks:",
        "x.yaml:5:8: memory.banks: expected a whole number from 0 to 4294967295, found nothing",
    ),
    (
        "name: y",
        "name: 5",
        "x.yaml:2:7: name: expected text, found the number `5`; put it in quotes",
    ),
    (
        "name: y",
        "name: true",
        "x.yaml:2:7: name: expected text, found `true`; put it in quotes",
    ),
    (
        "819 GB/s",
        "819",
        "x.yaml:4:14: memory.bandwidth: bare number `819`; write it with a unit, such as `819 GB/s`",
    ),
    (
        "819 GB/s",
        "819.5",
        "x.yaml:4:14: memory.bandwidth: bare number `819.5`; write it with a unit, such as `819.5 GB/s`",
    ),
    (
        "819 GB/s",
        "819 GHz",
        "x.yaml:4:14: memory.bandwidth: unit `GHz` is not a unit of bandwidth; expected one such as `819 \
        GB/s`",
    ),
    (
        "819 GB/s",
        "[1, 2]",
        "x.yaml:4:14: memory.bandwidth: expected a bandwidth with a unit, such as `819 GB/s`, found a list",
    ),
    (
        "bf16: 1",
        "bf17: 1",
        "x.yaml:6:10: rates: unknown name `bf17`; did you mean `bf16`? valid names: `f64`, `f32`, `bf16`, \
        `f16`, `fp8_e4m3`, `fp8_e5m2`, `int8`",
    ),
    (
        "bf16: 1",
        "bf16: .inf",
        "x.yaml:6:16: rates.bf16: expected a finite number, found `inf`",
    ),
    (
        "- load",
        "- laod",
        "x.yaml:8:5: steps.0: unknown name `laod`; did you mean `load`? valid names: `load`, `matmul`, \
        `scale`",
    ),
    (
        "n: 2 }",
        "k: 2 }",
        "x.yaml:9:21: steps.1.matmul: unknown key `k`; valid keys: `m`, `n`",
    ),
    (
        "{ m: 1, n: 2 }",
        "{ m: 1 }",
        "x.yaml:9:5: steps.1.matmul: missing key `n`",
    ),
    (
        "- load",
        "- matmul",
        "x.yaml:8:5: steps.0: `matmul` needs its fields; write `matmul: { ... }`",
    ),
    (
        "- load",
        "- load: 3",
        "x.yaml:8:11: steps.0: `load` takes no fields, found the number `3`",
    ),
    (
        "memory:\n  bandwidth: 819 GB/s # beside a value\n  banks: 16\n",
        "memory: [819 GB/s, 16]\n",
        "x.yaml:3:9: memory: expected a map with the keys `bandwidth`, `banks`, found a list",
    ),
    (
        "  banks: 16",
        "\tbanks: 16",
        "x.yaml:5:1: tab in the indentation; YAML allows only blanks there",
    ),
    (
        "  banks: 16",
        "  bandwidth: 1 GB/s",
        "x.yaml:5:3: duplicate key `bandwidth`; keep one of them",
    ),
    (
        "rates: {",
        "rates: [",
        "x.yaml:6:8: not valid YAML: mismatched bracket '[' closed by '}'",
    ),
];

#[test]
fn every_kind_of_mistake_is_located_and_named() {
    for (from, to, expected) in MISTAKES {
        assert_eq!(after(from, to), format!("error: {expected}"), "{from} -> {to}");
    }
}

#[test]
fn files_that_hold_no_map_say_what_they_hold() {
    let first = |text: &str| complaint(text).lines().next().unwrap_or_default().to_owned();
    assert_eq!(
        first(""),
        "error: x.yaml: empty file; expected a map of keys and values"
    );
    assert_eq!(
        first("# nothing\n\n"),
        "error: x.yaml: empty file; expected a map of keys and values"
    );
    assert_eq!(
        first("- a\n- b\n"),
        "error: x.yaml:1:1: expected a map of keys and values, found a list"
    );
    assert_eq!(
        first("just text"),
        "error: x.yaml:1:1: expected a map of keys and values, found the text `just text`"
    );
    assert_eq!(
        first("a: 1\u{0}"),
        "error: x.yaml:1:5: not a text file: found a zero byte"
    );
    assert_eq!(
        first("a: 1\n---\nb: 1\n"),
        "error: x.yaml:3:1: a second document starts here; keep one per file"
    );
}

#[test]
fn files_that_cannot_be_read_are_named() -> std::io::Result<()> {
    let folder = tempfile::tempdir()?;
    let message =
        |path: &std::path::Path| Document::read(path).map_or_else(|e| e.to_string(), |_| "read".to_owned());
    let missing = folder.path().join("missing.yaml");
    assert_eq!(message(&missing), format!("{}: no such file", missing.display()));
    let binary = folder.path().join("binary.yaml");
    std::fs::write(&binary, [b'a', b':', 0xff, 0xfe])?;
    let expected = format!(
        "{}: not a text file: byte 2 is not UTF-8; expected YAML",
        binary.display()
    );
    assert_eq!(message(&binary), expected);
    assert!(message(folder.path()).ends_with(": a folder, not a file"));
    Ok(())
}

#[test]
fn overrides_change_create_and_fail_aloud() -> Result<(), ConfigError> {
    let mut document = Document::parse("x.yaml", GOOD)?;
    document.set("memory.bandwidth=1.6 TB/s")?;
    document.set("rates.f32=0.25")?;
    document.set("steps.1.matmul={m: 3, n: 4}")?;
    document.set("note=tried out")?;
    let sample: Sample = document.deserialize()?;
    assert_eq!(sample.memory.bandwidth, BytesPerSecond(1.6e12));
    assert_eq!(sample.rates.get(&Dtype::F32), Some(&0.25));
    assert_eq!(sample.steps.get(1), Some(&Step::Matmul { m: 3, n: 4 }));
    assert_eq!(sample.note.as_deref(), Some("tried out"));
    assert_eq!(
        document.overridden("memory"),
        Some("--set memory.bandwidth=1.6 TB/s")
    );
    assert_eq!(document.overridden("memory.banks"), None);
    assert_eq!(document.overrides().len(), 4);

    let complaint = |assignment: &str| {
        let mut document = document.clone();
        let result = document
            .set(assignment)
            .and_then(|()| document.deserialize::<Sample>());
        result.map_or_else(|error| error.to_string(), |_| "accepted".to_owned())
    };
    assert_eq!(
        complaint("memory.bandwith=1 TB/s"),
        "--set memory.bandwith=1 TB/s: memory: unknown key `bandwith`; did you mean `bandwidth`? \
         valid keys: `bandwidth`, `banks`"
    );
    assert_eq!(
        complaint("memory.bandwidth=5"),
        "--set memory.bandwidth=5: memory.bandwidth: bare number `5`; write it with a unit, such as `5 \
        GB/s`"
    );
    assert_eq!(
        complaint("memory.bandwidth"),
        "--set memory.bandwidth: expected `FIELD=VALUE`, such as `layer.chunk=128` or `hw.hbm.bandwidth=1 \
        TB/s`"
    );
    assert_eq!(
        complaint("memory..banks=1"),
        "--set memory..banks=1: empty name in the path `memory..banks`; write names separated by single \
        dots"
    );
    assert_eq!(
        complaint("name.first=1"),
        "--set name.first=1: `name` has no field `first`: it is the text `y`"
    );
    assert_eq!(
        complaint("steps.7=load"),
        "--set steps.7=load: `steps` has no field `7`: it is a list of 3; write a position from 0 to 2"
    );
    let deep = complaint(&format!("{}=1", vec!["a"; 70_000].join(".")));
    assert!(deep.ends_with(": path of 70000 names; expected at most 64"));
    assert!(complaint("rates=[1").starts_with("--set rates=[1: not valid YAML: "));
    assert_eq!(complaint("memory.banks="), {
        "--set memory.banks=: memory.banks: expected a whole number from 0 to 4294967295, found nothing"
    });
    Ok(())
}

#[test]
fn later_checks_point_at_the_value_or_its_nearest_parent() -> Result<(), ConfigError> {
    let document = Document::parse("x.yaml", GOOD)?;
    let at = |path: &str| document.locate(path).to_string();
    assert_eq!(at("memory.banks"), "x.yaml:5:10");
    assert_eq!(at("memory"), "x.yaml:3:1");
    assert_eq!(at("memory.missing"), "x.yaml:3:1");
    assert_eq!(at("memory.banks.deeper"), "x.yaml:5:3");
    assert_eq!(at("steps.1.matmul.n"), "x.yaml:9:24");
    assert_eq!(at("missing.altogether"), "x.yaml:2:1");
    let error = document.error_at("memory.banks", "expected a power of two, found `16`");
    assert_eq!(
        error.render(),
        "error: x.yaml:5:10: memory.banks: expected a power of two, found `16`\n  \
         |\n\
         5 |   banks: 16\n  \
         |          ^"
    );
    let both = ConfigError::collect([error.clone(), document.error_at("name", "too short")]);
    let rendered = both.map_or_else(|error| error.render(), |()| String::new());
    assert_eq!(rendered.matches("error: ").count(), 2);
    assert_eq!(ConfigError::collect([]), Ok(()));
    Ok(())
}

#[test]
fn the_digest_follows_contents_and_not_layout() -> Result<(), ConfigError> {
    let digest = |text: &str| Document::parse("x.yaml", text).map(|document| document.digest());
    let one = digest("a: 1\nb: { c: text, d: [1, 2] }\n")?;
    assert_eq!(one.len(), 16);
    assert_eq!(
        one,
        digest("# comment\nb:\n  d:\n    - 1\n    - 2\n  c: \"text\"\na: 1\n")?
    );
    assert_ne!(one, digest("a: 2\nb: { c: text, d: [1, 2] }\n")?);
    assert_ne!(one, digest("a: \"1\"\nb: { c: text, d: [1, 2] }\n")?);
    let mut changed = Document::parse("x.yaml", "a: 1\nb: { c: text, d: [1, 2] }\n")?;
    changed.set("a=2")?;
    assert_ne!(one, changed.digest());
    changed.set("a=1")?;
    assert_eq!(one, changed.digest());
    Ok(())
}

#[test]
fn fields_are_those_of_the_file_with_its_overrides() -> Result<(), ConfigError> {
    let text = "a: 5.0\nb: { c: text, d: [1, 2], source: nobody }\ne: [{ f: 1 }]\n";
    let mut document = Document::parse("x.yaml", text)?;
    document.set("b.c=1 TB/s")?;
    document.set("g=true")?;
    let fields = document.fields(|path| path.ends_with(".source"));
    let lines: Vec<String> = fields
        .iter()
        .map(|(field, value)| format!("{field}={value}"))
        .collect();
    assert_eq!(
        lines,
        ["a=5", "b.c=1 TB/s", "b.d=[1, 2]", "e=[{ f: 1 }]", "g=true"]
    );
    Ok(())
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused_with_a_place(text in "[a-z:{}\\[\\]\\-#&*!|>'\"%@` \n\t0-9.]{0,60}") {
        if let Err(error) = read(&text) {
            prop_assert!(error.to_string().starts_with("x.yaml"), "{}", error);
        }
    }

    #[test]
    fn any_override_is_applied_or_refused(text in ".{0,40}") {
        if let Ok(mut document) = Document::parse("x.yaml", GOOD) {
            let result = document.set(&text).and_then(|()| document.deserialize::<Sample>());
            if let Err(error) = result {
                prop_assert!(error.to_string().starts_with("--set"), "{}", error);
            }
        }
    }
}
