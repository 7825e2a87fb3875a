//! The command line as people meet it: exit codes, streams, files and messages.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use snapbox::{Assert, Data};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// A workload that is timed in milliseconds.
const SMALL: &str = "\
name: small
layer:
  mechanism: sla
  batch: 1
  tokens: 512
  model_width: 256
  key_heads: 2
  value_heads: 4
  key_dim: 64
  value_dim: 64
  chunk: 64
  decay_tiles: 4
plans: [unfused, fused]
pass: forward
hardware: [tpu-v6e]
baseline: kda
numeric: { tokens: 64, key_heads: 1, seed: 7 }
";

const REPORT: [&str; 6] = [
    ".tpusim-report",
    "index.html",
    "result.json",
    "roofline.png",
    "roofline.svg",
    "stages.csv",
];

fn command<S: AsRef<OsStr>>(home: &Path, args: &[S]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tpusim"));
    // What the person who runs the tests prefers is no part of them.
    command
        .args(args)
        .current_dir(home)
        .env_remove("NO_COLOR")
        .env_remove("COLUMNS");
    command
}

fn tpusim<S: AsRef<OsStr>>(home: &Path, args: &[S]) -> io::Result<Output> {
    command(home, args).output()
}

/// Stdout of a command that has to succeed.
fn succeeds(home: &Path, args: &[&str]) -> Result<String, Box<dyn std::error::Error>> {
    let output = tpusim(home, args)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.code() != Some(0) {
        return Err(format!("{args:?} ended with {}: {errors}", output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Stderr of a command that has to refuse its input: exit code 2 and nothing on stdout.
fn refuses(home: &Path, args: &[&str]) -> Result<String, Box<dyn std::error::Error>> {
    let output = tpusim(home, args)?;
    if output.status.code() != Some(2) || !output.stdout.is_empty() {
        let (status, out) = (output.status, String::from_utf8_lossy(&output.stdout));
        return Err(format!("{args:?} ended with {status} and printed `{out}`").into());
    }
    Ok(String::from_utf8(output.stderr)?)
}

fn json(home: &Path, args: &[&str]) -> Result<Value, Box<dyn std::error::Error>> {
    Ok(serde_json::from_str(&succeeds(home, args)?)?)
}

fn names(dir: &Path) -> io::Result<BTreeSet<String>> {
    fs::read_dir(dir)?
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect()
}

fn contents(dir: &Path) -> io::Result<BTreeMap<String, Vec<u8>>> {
    names(dir)?
        .into_iter()
        .map(|name| fs::read(dir.join(&name)).map(|bytes| (name, bytes)))
        .collect()
}

/// A folder with the small workload as `small.yaml`.
fn home() -> io::Result<tempfile::TempDir> {
    let home = tempfile::tempdir()?;
    fs::write(home.path().join("small.yaml"), SMALL)?;
    Ok(home)
}

/// Every case of `tests/errors`: `NAME.yaml` is the bad file, `NAME.args` the arguments, one a line, where they are not `run NAME.yaml`
/// (`FILE` stands for the bad file), `NAME.stderr` the message. `SNAPSHOTS=overwrite` writes the messages anew.
#[test]
fn bad_input_is_located_and_leaves_nothing_behind() -> Outcome {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/errors");
    let cases: BTreeSet<String> = names(&folder)?
        .iter()
        .filter_map(|name| name.rsplit_once('.').map(|(stem, _)| stem.to_owned()))
        .collect();
    let assert = Assert::new().action_env("SNAPSHOTS");
    let mut complaints = Vec::new();
    for case in &cases {
        let home = tempfile::tempdir()?;
        let file = format!("{case}.yaml");
        let has_file = folder.join(&file).exists();
        if has_file {
            fs::copy(folder.join(&file), home.path().join(&file))?;
        }
        let written = folder.join(format!("{case}.args"));
        let args: Vec<String> = if written.exists() {
            let lines = fs::read_to_string(written)?;
            lines
                .lines()
                .map(|line| {
                    if line == "FILE" {
                        file.clone()
                    } else {
                        line.to_owned()
                    }
                })
                .collect()
        } else {
            vec!["run".to_owned(), file.clone()]
        };
        let before = names(home.path())?;
        let output = tpusim(home.path(), &args)?;
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        let mut expect = |holds: bool, what: &str| {
            if !holds {
                complaints.push(format!("{case}: {what}\n{message}"));
            }
        };
        expect(output.status.code() == Some(2), "the exit code is not 2");
        expect(output.stdout.is_empty(), "something stands on stdout");
        expect(names(home.path())? == before, "a file appeared");
        expect(message.lines().count() <= 8, "more than a glance");
        expect(
            !has_file || message.contains(case.as_str()),
            "the file is not named",
        );
        let expected = Data::read_from(&folder.join(format!("{case}.stderr")), None);
        if let Err(difference) = assert.try_eq(Some(case), Data::text(message), expected) {
            complaints.push(difference.to_string());
        }
    }
    assert!(cases.len() > 100, "only {} cases were found", cases.len());
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    Ok(())
}

#[test]
fn a_fault_of_the_baseline_is_located_in_the_baseline() -> Outcome {
    let home = home()?;
    fs::write(
        home.path().join("small.yaml"),
        SMALL.replace("baseline: kda", "baseline: old.yaml"),
    )?;
    fs::write(
        home.path().join("old.yaml"),
        SMALL.replace("batch: 1", "batch: 0"),
    )?;
    let message = refuses(home.path(), &["run", "small.yaml"])?;
    assert!(
        message.starts_with("error: old.yaml:4:10: layer.batch: "),
        "{message}"
    );
    Ok(())
}

#[test]
fn all_that_is_wrong_is_said_at_once() -> Outcome {
    let home = home()?;
    let text = SMALL
        .replace("name: small", "name: a/b")
        .replace("value_heads: 4", "value_heads: 5")
        .replace("[unfused, fused]", "[unfussed]");
    fs::write(home.path().join("small.yaml"), text)?;
    let message = refuses(home.path(), &["run", "small.yaml"])?;
    for place in [
        "small.yaml:1:7: name",
        "small.yaml:8:16: layer.value_heads",
        "small.yaml:13:9: plans.0",
    ] {
        assert!(message.contains(place), "{place} is not in\n{message}");
    }
    Ok(())
}

#[cfg(unix)]
#[test]
fn a_file_without_permission_is_named() -> Outcome {
    use std::os::unix::fs::PermissionsExt;
    let home = home()?;
    let path = home.path().join("small.yaml");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000))?;
    if fs::read(&path).is_ok() {
        // The administrator reads everything.
        return Ok(());
    }
    let message = refuses(home.path(), &["run", "small.yaml"])?;
    assert!(
        message.starts_with("error: small.yaml: cannot be read"),
        "{message}"
    );
    Ok(())
}

#[test]
fn usage_errors_end_with_2() -> Outcome {
    let home = home()?;
    let cases: [&[&str]; 6] = [
        &[],
        &["runn", "small.yaml"],
        &["run"],
        &["run", "small.yaml", "--format", "xml"],
        &["run", "small.yaml", "--numeric", "some"],
        &["run", "small.yaml", "--hardware", "tpu-v4"],
    ];
    for args in cases {
        let message = refuses(home.path(), args)?;
        assert!(message.contains("--help"), "{args:?}: {message}");
    }
    assert_eq!(names(home.path())?.len(), 1);
    Ok(())
}

#[test]
fn the_same_run_gives_the_same_bytes() -> Outcome {
    let home = home()?;
    for name in ["one", "two"] {
        succeeds(home.path(), &["run", "small.yaml", "--out", name])?;
    }
    let (one, two) = (
        contents(&home.path().join("one"))?,
        contents(&home.path().join("two"))?,
    );
    assert_eq!(one.keys().map(String::as_str).collect::<Vec<_>>(), REPORT);
    for (name, bytes) in &one {
        assert!(two.get(name) == Some(bytes), "{name} differs");
    }
    for format in ["table", "json", "csv"] {
        let args = ["run", "small.yaml", "--format", format];
        assert_eq!(succeeds(home.path(), &args)?, succeeds(home.path(), &args)?);
    }
    Ok(())
}

#[test]
fn a_report_is_written_replaced_and_protected() -> Outcome {
    let home = home()?;
    let run = ["run", "small.yaml", "--numeric", "off"];
    let report = home.path().join("reports/small");
    let output = tpusim(home.path(), &run)?;
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        String::from_utf8(output.stderr)?.trim(),
        "report: reports/small/index.html"
    );
    assert_eq!(names(&report)?, REPORT.map(str::to_owned).into());

    // The second run differs in one field, so every file of data changes and none is left from before.
    let first = contents(&report)?;
    succeeds(home.path(), &[&run[..], &["--set", "layer.tokens=1024"]].concat())?;
    let second = contents(&report)?;
    assert_eq!(names(&report)?, REPORT.map(str::to_owned).into());
    assert!(first["result.json"] != second["result.json"] && first["stages.csv"] != second["stages.csv"]);
    assert_eq!(names(&home.path().join("reports"))?.len(), 1);

    // A folder that holds something of its owner is left as it is.
    fs::write(report.join("notes.txt"), "mine")?;
    let message = refuses(home.path(), &run)?;
    assert!(message.contains("notes.txt"), "{message}");
    fs::create_dir(home.path().join("photos"))?;
    fs::write(home.path().join("photos/a.png"), "a")?;
    let message = refuses(home.path(), &[&run[..], &["--out", "photos"]].concat())?;
    assert!(
        message.contains("`photos` exists and is not a tpusim report"),
        "{message}"
    );
    assert_eq!(names(&home.path().join("photos"))?.len(), 1);
    assert!(contents(&report)?["result.json"] == second["result.json"]);
    Ok(())
}

#[test]
fn data_formats_write_a_report_only_where_asked() -> Outcome {
    let home = home()?;
    for format in ["json", "csv"] {
        let run = ["run", "small.yaml", "--numeric", "off", "--format", format];
        let output = tpusim(home.path(), &run)?;
        assert_eq!(output.status.code(), Some(0));
        assert!(
            output.stderr.is_empty(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert_eq!(names(home.path())?.len(), 1, "{format} wrote a report");
        let out = format!("with-{format}");
        let again = succeeds(home.path(), &[&run[..], &["--out", &out]].concat())?;
        assert_eq!(again.as_bytes(), output.stdout);
        let file = if format == "json" {
            "result.json"
        } else {
            "stages.csv"
        };
        assert_eq!(fs::read(home.path().join(&out).join(file))?, output.stdout);
        fs::remove_dir_all(home.path().join(out))?;
    }
    Ok(())
}

#[test]
fn the_json_has_the_promised_fields() -> Outcome {
    let home = home()?;
    let result = json(home.path(), &["run", "small.yaml", "--format", "json"])?;
    assert_eq!(result["schema"], "tpusim.result/1");
    let has = |value: &Value, fields: &[&str]| {
        for field in fields {
            assert!(value.get(field).is_some(), "no `{field}` in {value}");
        }
    };
    let chip = &result["chips"][0];
    assert_eq!((&chip["name"], &chip["cores"]), (&"tpu-v6e".into(), &1.into()));
    has(chip, &["clock_ghz", "plans"]);
    let plans = chip["plans"].as_array().ok_or("plans are a list")?;
    assert_eq!(plans.len(), 2);
    for plan in plans {
        has(
            plan,
            &[
                "name",
                "total_us",
                "low_us",
                "high_us",
                "speedup_over_baseline",
                "stages",
            ],
        );
        assert!(plan["speedup_over_baseline"].as_f64() > Some(0.0));
        for stage in plan["stages"].as_array().ok_or("stages are a list")? {
            has(
                stage,
                &[
                    "stage",
                    "time_us",
                    "low_us",
                    "high_us",
                    "bound",
                    "mxu_us",
                    "vpu_us",
                    "hbm_us",
                    "flops",
                    "vector_ops",
                    "transcendentals",
                    "hbm_bytes",
                ],
            );
        }
    }
    let labels: Vec<&str> = plans[1]["stages"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|stage| stage["stage"].as_str())
        .collect();
    assert_eq!(labels, ["op1", "op2-7a", "op7b-c"]);
    has(
        &result["numeric"],
        &["output_rel_error", "state_rel_error", "tokens", "heads", "seed"],
    );
    assert_eq!(
        (&result["numeric"]["tokens"], &result["numeric"]["seed"]),
        (&64.into(), &7.into())
    );
    has(
        &result["provenance"],
        &[
            "version",
            "hardware_digest",
            "workload_digest",
            "calibration_digest",
        ],
    );
    assert_eq!(result["provenance"]["version"], env!("CARGO_PKG_VERSION"));
    let off = json(
        home.path(),
        &["run", "small.yaml", "--format", "json", "--numeric", "off"],
    )?;
    assert!(off["numeric"].is_null());
    assert_eq!(off["chips"], result["chips"], "the numeric check changes no time");
    Ok(())
}

#[test]
fn an_override_changes_the_result_and_is_recorded() -> Outcome {
    let home = home()?;
    let run = ["run", "small.yaml", "--numeric", "off", "--format", "json"];
    let plain = json(home.path(), &run)?;
    let set = "hw.matrix_unit.rows=128";
    let half = json(home.path(), &[&run[..], &["--set", set]].concat())?;
    assert_eq!(half["provenance"]["overrides"], serde_json::json!([set]));
    assert_ne!(
        plain["provenance"]["hardware_digest"],
        half["provenance"]["hardware_digest"]
    );
    assert_eq!(
        plain["provenance"]["workload_digest"],
        half["provenance"]["workload_digest"]
    );
    let roof = |result: &Value| result["chips"][0]["roofs"]["matrix"][0]["per_second"].as_f64();
    assert_eq!(
        roof(&plain),
        roof(&half).map(|half| 2.0 * half),
        "256 rows to 128"
    );
    let total = |result: &Value| result["chips"][0]["plans"][0]["total_us"].as_f64();
    assert!(total(&plain) < total(&half));

    let longer = json(home.path(), &[&run[..], &["--set", "layer.tokens=1024"]].concat())?;
    assert_ne!(
        plain["provenance"]["workload_digest"],
        longer["provenance"]["workload_digest"]
    );
    let flops = |result: &Value| result["chips"][0]["plans"][1]["stages"][1]["flops"].as_u64();
    assert_eq!(flops(&plain).map(|flops| 2 * flops), flops(&longer));
    Ok(())
}

#[test]
fn a_workload_compared_with_itself_is_as_fast() -> Outcome {
    let home = home()?;
    succeeds(
        home.path(),
        &["run", "small.yaml", "--numeric", "off", "--out", "out"],
    )?;
    // A workload, its result and its report folder are the same thing.
    for other in ["small.yaml", "out/result.json", "out"] {
        let args = ["compare", "small.yaml", other, "--format", "json"];
        let found = json(home.path(), &args)?;
        assert_eq!(found["schema"], "tpusim.comparison/1");
        assert_eq!(found["identical"], true, "{other}: {}", found["differences"]);
        assert_eq!(
            (&found["differences"], &found["cautions"]),
            (&serde_json::json!([]), &serde_json::json!([]))
        );
        let plans = found["chips"][0]["plans"].as_array().ok_or("plans")?;
        assert_eq!(plans.len(), 2);
        for plan in plans {
            let rows = plan["rows"].as_array().ok_or("rows")?;
            for speedup in rows.iter().map(|row| &row["speedup"]).chain([&plan["speedup"]]) {
                assert_eq!(speedup["ratio"], 1.0);
                assert_eq!((&speedup["low"], &speedup["high"]), (&1.0.into(), &1.0.into()));
            }
        }
    }
    let text = succeeds(home.path(), &["compare", "out", "small.yaml"])?;
    assert!(text.contains("\ninputs are identical\n"), "{text}");
    assert!(!text.contains("caution"), "{text}");
    Ok(())
}

#[test]
fn what_differs_between_two_sides_is_listed_field_by_field() -> Outcome {
    let home = home()?;
    let compare = |more: &[&str]| {
        json(
            home.path(),
            &[&["compare", "small.yaml", "small.yaml", "--format", "json"], more].concat(),
        )
    };
    let differs = |found: &Value| -> Vec<String> {
        let entries = found["differences"].as_array().into_iter().flatten();
        entries
            .map(|entry| {
                let word = |key: &str| entry[key].as_str().unwrap_or("none").to_owned();
                format!("{} {}: {} {}", word("part"), word("field"), word("a"), word("b"))
            })
            .collect()
    };
    let found = compare(&["--set-b", "layer.chunk=32", "--set", "layer.state=bf16"])?;
    assert_eq!(differs(&found), ["workload layer.chunk: 64 32"]);
    assert_eq!(found["identical"], false);
    // The value of a field that is left out is known all the same.
    let found = compare(&["--set-b", "layer.state=bf16"])?;
    assert_eq!(differs(&found), ["workload layer.state: f32 bf16"]);
    let found = compare(&["--set-a", "hw.hbm.bandwidth=1 TB/s"])?;
    assert_eq!(differs(&found), ["hardware hbm.bandwidth: 1 TB/s 1638 GB/s"]);
    assert_eq!(
        found["a"]["overrides"],
        serde_json::json!(["hw.hbm.bandwidth=1 TB/s"])
    );
    let found = compare(&["--set-b", "name=other"])?;
    assert_eq!(differs(&found), Vec::<String>::new());
    assert_eq!(found["identical"], false);
    let found = compare(&["--hw-a", "tpu-v6e", "--hw-b", "tpu-v7x"])?;
    assert!(
        differs(&found).contains(&"hardware clock.states.default.frequency: 1.75 GHz 1.9 GHz".to_owned())
    );
    assert_eq!(
        found["chips"][0]["plans"][0]["speedup"]["interval_from"],
        "independent"
    );
    Ok(())
}

#[test]
fn a_result_of_another_version_or_calibration_is_said_first() -> Outcome {
    let home = home()?;
    succeeds(
        home.path(),
        &["run", "small.yaml", "--numeric", "off", "--out", "out"],
    )?;
    let text = fs::read_to_string(home.path().join("out/result.json"))?;
    let version = format!("\"version\": \"{}\"", env!("CARGO_PKG_VERSION"));
    let result: Value = serde_json::from_str(&text)?;
    let digest = result["provenance"]["calibration_digest"]
        .as_str()
        .ok_or("digest")?;
    fs::write(
        home.path().join("old.json"),
        text.replace(&version, "\"version\": \"0.0.9\""),
    )?;
    fs::write(
        home.path().join("fit.json"),
        text.replace(digest, "0123456789abcdef"),
    )?;
    for (file, words) in [
        ("old.json", "of tpusim 0.0.9"),
        ("fit.json", "calibration 0123456789abcdef"),
    ] {
        let text = succeeds(home.path(), &["compare", "small.yaml", file])?;
        let first = text.lines().next().ok_or("no line")?;
        assert!(first.starts_with("caution: ") && first.contains(words), "{first}");
        let found = json(home.path(), &["compare", "small.yaml", file, "--format", "json"])?;
        assert_eq!(found["identical"], false);
        assert_eq!(
            found["chips"][0]["plans"][0]["speedup"]["interval_from"],
            "independent"
        );
    }
    Ok(())
}

#[test]
fn a_result_is_located_and_cannot_be_changed() -> Outcome {
    let home = home()?;
    succeeds(
        home.path(),
        &["run", "small.yaml", "--numeric", "off", "--out", "out"],
    )?;
    fs::write(
        home.path().join("broken.json"),
        "{\n  \"schema\": \"tpusim.result/1\",\n  \"name\" 1\n}\n",
    )?;
    fs::write(
        home.path().join("other.json"),
        "{ \"schema\": \"tpusim.stack/1\" }\n",
    )?;
    let cases: [(&[&str], &str); 5] = [
        (
            &["compare", "broken.json", "small.yaml"],
            "broken.json: expected `:` at line 3 column 10",
        ),
        (
            &["compare", "small.yaml", "other.json"],
            "other.json: schema `tpusim.stack/1` is not `tpusim.result/1`",
        ),
        (
            &["compare", "out", "small.yaml", "--set", "layer.chunk=32"],
            "A is the result of a run",
        ),
        (
            &["compare", "small.yaml", "out", "--set-b", "layer.chunk=32"],
            "B is the result of a run",
        ),
        (
            &["compare", "small.yaml", "out", "--hw", "tpu-v7x"],
            "out/result.json: `tpu-v7x` is not among the chips",
        ),
    ];
    for (args, words) in cases {
        let message = refuses(home.path(), args)?;
        assert!(
            message.starts_with("error: ") && message.contains(words),
            "{args:?}: {message}"
        );
    }
    // The other side can be changed.
    succeeds(
        home.path(),
        &["compare", "out", "small.yaml", "--set-b", "layer.chunk=32"],
    )?;
    let message = refuses(
        home.path(),
        &["compare", "out", "out", "--hw", "tpu-v6e", "--hw-a", "tpu-v6e"],
    )?;
    assert!(message.contains("--help"), "{message}");
    Ok(())
}

#[test]
fn chips_of_the_command_line_replace_those_of_the_file() -> Outcome {
    let home = home()?;
    let run = ["run", "small.yaml", "--numeric", "off", "--format", "json"];
    let chips = |result: &Value| -> Vec<String> {
        let chips = result["chips"].as_array().into_iter().flatten();
        chips
            .filter_map(|chip| chip["name"].as_str().map(str::to_owned))
            .collect()
    };
    assert_eq!(chips(&json(home.path(), &run)?), ["tpu-v6e"]);
    let other = json(home.path(), &[&run[..], &["--hw", "h100-sxm,tpu-v4"]].concat())?;
    assert_eq!(chips(&other), ["h100-sxm", "tpu-v4"]);
    succeeds(home.path(), &["hw", "init", "mine.yaml"])?;
    let mine = json(home.path(), &[&run[..], &["--hw", "mine.yaml"]].concat())?;
    assert_eq!(chips(&mine), ["mine"]);
    Ok(())
}

#[test]
fn a_workload_finds_the_files_beside_it_from_any_folder() -> Outcome {
    let home = home()?;
    let project = home.path().join("project");
    fs::create_dir(&project)?;
    let text = SMALL
        .replace("[tpu-v6e]", "[chips/mine.yaml]")
        .replace("baseline: kda", "baseline: old.yaml");
    fs::write(project.join("new.yaml"), text)?;
    fs::write(
        project.join("old.yaml"),
        SMALL.replace("name: small", "name: older"),
    )?;
    fs::create_dir(project.join("chips"))?;
    succeeds(&project, &["hw", "init", "chips/mine.yaml"])?;
    let tail = ["--numeric", "off", "--format", "json"];
    let outside = json(home.path(), &[&["run", "project/new.yaml"], &tail[..]].concat())?;
    assert_eq!(outside["baseline"], "older");
    assert_eq!(outside["chips"][0]["name"], "mine");
    assert_eq!(
        outside,
        json(&project, &[&["run", "new.yaml"], &tail[..]].concat())?
    );
    Ok(())
}

#[test]
fn shipped_names_work_from_any_folder() -> Outcome {
    let home = tempfile::tempdir()?;
    let tail = [
        "--numeric",
        "off",
        "--format",
        "json",
        "--set",
        "layer.tokens=256",
        "--hw",
        "tpu-v4",
    ];
    let tail = [&tail[..], &["--set", "numeric.tokens=64"]].concat();
    let by_name = json(home.path(), &[&["run", "sla_r4"], &tail[..]].concat())?;
    let by_path = json(
        home.path(),
        &[&["run", "workloads/sla_r4.yaml"], &tail[..]].concat(),
    )?;
    assert_eq!(by_name, by_path);
    assert_eq!(by_name["baseline"], "kda-layer");
    assert_eq!(names(home.path())?.len(), 0);
    Ok(())
}

#[test]
fn lists_name_everything_shipped() -> Outcome {
    let home = tempfile::tempdir()?;
    let files = |folder: &str| -> io::Result<BTreeSet<String>> {
        let names = names(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder))?;
        Ok(names
            .iter()
            .filter_map(|name| name.strip_suffix(".yaml"))
            .map(str::to_owned)
            .collect())
    };
    for (command, folders) in [
        (&["list"][..], &["workloads", "workloads/studies", "models"][..]),
        (&["hw", "list"][..], &["hw"][..]),
    ] {
        let listed = json(home.path(), &[command, &["--format", "json"]].concat())?;
        let listed: BTreeSet<String> = listed
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|entry| entry["name"].as_str().map(str::to_owned))
            .collect();
        let mut shipped = BTreeSet::new();
        for folder in folders {
            shipped.extend(files(folder)?);
        }
        assert_eq!(listed, shipped);
        let table = succeeds(home.path(), command)?;
        let csv = succeeds(home.path(), &[command, &["--format", "csv"]].concat())?;
        assert_eq!(csv.lines().count(), listed.len() + 1);
        for name in &listed {
            assert!(table.contains(name) && csv.contains(name), "{name}");
        }
    }
    Ok(())
}

#[test]
fn hardware_is_shown_checked_and_begun() -> Outcome {
    let home = tempfile::tempdir()?;
    let shown = succeeds(home.path(), &["hw", "show", "tpu-v6e"])?;
    // The published bf16 peak of Trillium, 918 TFLOP/s.
    assert!(shown.contains("918"), "{shown}");
    let shown = json(home.path(), &["hw", "show", "tpu-v7x", "--format", "json"])?;
    assert!(shown["digest"].is_string());
    succeeds(home.path(), &["hw", "check"])?;

    succeeds(home.path(), &["hw", "init", "mine.yaml"])?;
    succeeds(home.path(), &["hw", "check", "mine.yaml"])?;
    let path = home.path().join("mine.yaml");
    let text = fs::read_to_string(&path)?;
    let message = refuses(home.path(), &["hw", "init", "mine.yaml"])?;
    assert!(message.contains("exists"), "{message}");
    assert_eq!(fs::read_to_string(&path)?, text, "the file was overwritten");

    // A published peak that the description cannot reach is a failed check, not bad input.
    assert!(text.contains("459 TFLOP/s"));
    fs::write(&path, text.replace("459 TFLOP/s", "600 TFLOP/s"))?;
    let output = tpusim(home.path(), &["hw", "check", "mine.yaml"])?;
    assert_eq!(
        output.status.code(),
        Some(1),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    Ok(())
}

#[test]
fn the_file_that_init_writes_runs() -> Outcome {
    let home = tempfile::tempdir()?;
    succeeds(home.path(), &["init", "mine.yaml"])?;
    let text = fs::read_to_string(home.path().join("mine.yaml"))?;
    let message = refuses(home.path(), &["init", "mine.yaml"])?;
    assert!(message.contains("exists"), "{message}");
    assert_eq!(fs::read_to_string(home.path().join("mine.yaml"))?, text);
    let run = [
        "run",
        "mine.yaml",
        "--format",
        "json",
        "--set",
        "numeric.tokens=64",
    ];
    let result = json(home.path(), &run)?;
    assert_eq!(result["name"], "my-layer");
    assert!(result["numeric"]["non_finite"].is_null());
    Ok(())
}

#[test]
fn what_init_writes_names_the_schema_that_is_printed() -> Outcome {
    let home = tempfile::tempdir()?;
    for (init, kind) in [
        (&["init", "w.yaml"][..], "workload"),
        (&["hw", "init", "h.yaml"], "hardware"),
    ] {
        let said = succeeds(home.path(), init)?;
        let (_, rest) = said.split_once("once `").ok_or("no hint")?;
        let hint = rest.split('`').next().unwrap_or_default();
        let (command, file) = hint.split_once(" > ").ok_or("no file")?;
        assert_eq!(command, format!("tpusim schema {kind}"));
        let text = fs::read_to_string(home.path().join(init.last().ok_or("file")?))?;
        let line = format!("# yaml-language-server: $schema={file}");
        assert_eq!(text.lines().next(), Some(line.as_str()));
        let schema = json(home.path(), &["schema", kind])?;
        assert_eq!(schema["$schema"], "http://json-schema.org/draft-07/schema#");
    }
    for format in ["table", "csv"] {
        let list = succeeds(home.path(), &["schema", "--format", format])?;
        assert_eq!(list.lines().count(), 6, "{list}");
    }
    assert_eq!(
        json(home.path(), &["schema", "--format", "json"])?
            .as_array()
            .map(Vec::len),
        Some(5)
    );
    assert!(refuses(home.path(), &["schema", "workloads"])?.contains("workload"));
    Ok(())
}

/// What another program prints for `script`, or `None` where it is not installed.
fn fed(program: &str, args: &[&str], script: &str) -> Result<Option<Output>, Box<dyn std::error::Error>> {
    use std::io::Write;
    use std::process::Stdio;
    let started = Command::new(program)
        .args(args)
        .env("MANPAGER", "cat")
        .env("PAGER", "cat")
        .env("MANWIDTH", "100")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match started {
        Ok(child) => child,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    child
        .stdin
        .take()
        .ok_or("no stdin")?
        .write_all(script.as_bytes())?;
    Ok(Some(child.wait_with_output()?))
}

#[test]
fn completions_are_scripts_of_their_shells() -> Outcome {
    let home = tempfile::tempdir()?;
    let bash = succeeds(home.path(), &["completions", "bash"])?;
    for word in ["compare", "--hw-a", "whitening", "hw__subcmd__show"] {
        assert!(bash.contains(word), "no {word}");
    }
    if let Some(parsed) = fed("bash", &["-n"], &bash)? {
        assert!(parsed.status.success() && parsed.stderr.is_empty(), "{parsed:?}");
    }
    // The words that bash offers are the commands.
    let ask = format!(
        "{bash}\nCOMP_WORDS=(tpusim com); COMP_CWORD=1; _tpusim tpusim com tpusim; echo \"${{COMPREPLY[@]}}\"\n"
    );
    if let Some(found) = fed("bash", &["--norc"], &ask)? {
        assert_eq!(String::from_utf8(found.stdout)?.trim(), "compare completions");
    }
    for (shell, word) in [
        ("zsh", "#compdef tpusim"),
        ("fish", "complete -c tpusim"),
        ("elvish", "tpusim"),
        ("powershell", "tpusim"),
    ] {
        assert!(
            succeeds(home.path(), &["completions", shell])?.contains(word),
            "{shell}"
        );
    }
    assert!(refuses(home.path(), &["completions", "cmd"])?.contains("bash"));
    Ok(())
}

#[test]
fn pages_of_the_manual_render() -> Outcome {
    let home = tempfile::tempdir()?;
    for (args, title) in [
        (&["man"][..], "tpusim(1)"),
        (&["man", "compare"], "tpusim-compare(1)"),
        (&["man", "hw", "show"], "tpusim-hw-show(1)"),
    ] {
        let page = succeeds(home.path(), args)?;
        let heading = title.trim_end_matches("(1)");
        assert!(page.contains(&format!(".TH {heading} 1")), "{page}");
        if let Some(shown) = fed("man", &["-l", "-"], &page)? {
            assert!(shown.status.success() && shown.stderr.is_empty(), "{shown:?}");
            let text = String::from_utf8_lossy(&shown.stdout).into_owned();
            assert!(
                text.contains("SYNOPSIS") && text.to_lowercase().contains(title),
                "{text}"
            );
        }
    }
    let message = refuses(home.path(), &["man", "compair"])?;
    assert!(message.contains("did you mean `compare`?"), "{message}");
    let message = refuses(home.path(), &["man", "run", "x"])?;
    assert!(message.contains("`run` has no commands"), "{message}");
    Ok(())
}

#[test]
fn quiet_leaves_stderr_empty() -> Outcome {
    let home = home()?;
    let run = ["run", "small.yaml", "--numeric", "off"];
    let loud = tpusim(home.path(), &run)?;
    let quiet = tpusim(home.path(), &[&run[..], &["--quiet"]].concat())?;
    assert!(!loud.stderr.is_empty() && quiet.stderr.is_empty());
    assert_eq!(loud.stdout, quiet.stdout);
    // An error is no message to be silent about.
    assert!(!refuses(home.path(), &["run", "smal.yaml", "--quiet"])?.is_empty());
    Ok(())
}

#[test]
fn colours_come_only_where_asked() -> Outcome {
    let home = home()?;
    let run = ["run", "small.yaml", "--numeric", "off"];
    let coloured = |args: &[&str], no_color: bool| -> io::Result<bool> {
        let mut command = command(home.path(), &[&run[..], args].concat());
        if no_color {
            command.env("NO_COLOR", "1");
        }
        Ok(command.output()?.stdout.contains(&0x1b))
    };
    assert!(!coloured(&[], false)?, "a pipe is no terminal");
    assert!(!coloured(&["--color", "never"], false)?);
    assert!(coloured(&["--color", "always"], false)?);
    // What a person writes on the line outranks the environment.
    assert!(coloured(&["--color", "always"], true)?);
    assert!(!coloured(&["--color", "auto"], true)?);
    Ok(())
}

#[test]
fn a_reader_that_left_is_no_failure() -> Outcome {
    let home = home()?;
    let run = ["run", "small.yaml", "--numeric", "off", "--format"];
    let commands: [&[&str]; 8] = [
        &[&run[..], &["table"]].concat(),
        &[&run[..], &["json"]].concat(),
        &[&run[..], &["csv"]].concat(),
        &["list"],
        &["list", "--format", "json"],
        &["hw", "list", "--format", "csv"],
        &["hw", "show", "tpu-v4"],
        &["hw", "check", "--format", "json"],
    ];
    for args in commands {
        let (reader, writer) = io::pipe()?;
        drop(reader);
        let output = command(home.path(), args).stdout(writer).output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {errors}");
        assert!(!errors.contains("error") && !errors.contains("panic"), "{errors}");
    }
    // The report does not depend on who reads the table: `tpusim run .. | head -1`.
    assert_eq!(
        names(&home.path().join("reports/small"))?,
        REPORT.map(str::to_owned).into()
    );
    Ok(())
}

#[test]
fn a_numeric_check_that_overflows_ends_with_1() -> Outcome {
    let home = home()?;
    // 32 rows on a side of the pivot at 20 nats a token: exp of 640, far beyond ln of the largest f32, 88.7.
    let run = [
        "run",
        "small.yaml",
        "--format",
        "json",
        "--set",
        "layer.decay_bound=-20",
    ];
    let output = tpusim(home.path(), &run)?;
    assert_eq!(
        output.status.code(),
        Some(1),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let result: Value = serde_json::from_slice(&output.stdout)?;
    assert!(result["numeric"]["non_finite"].is_string());
    let warnings = result["warnings"].to_string();
    assert!(warnings.contains("not finite"), "{warnings}");
    Ok(())
}

/// The picture alone: one marker per row of the plan asked for and one in the key, on the paper asked for, as often as it is asked the same.
#[test]
fn programs_are_listed_from_their_schedules_alone() -> Outcome {
    let home = home()?;
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dumps");
    let dump = |name: &str| fixtures.join(name).to_string_lossy().into_owned();
    let (first, second) = (dump("blocked_matmul_v6e.tar.xz"), dump("scale_rows_v5e.tar.xz"));
    let of_dumps = json(
        home.path(),
        &[
            "dump",
            &first,
            &second,
            "--schedules",
            "two.jsonl",
            "--format",
            "json",
        ],
    )?;
    let listed = json(home.path(), &["dump", "two.jsonl", "--format", "json"])?;
    for (at, name) in ["blocked_matmul_v6e", "scale_rows_v5e"].into_iter().enumerate() {
        assert_eq!(listed[at]["name"], name);
        for field in ["chip", "clock_ghz", "binds"] {
            assert_eq!(listed[at][field], of_dumps[at][field], "{name}: {field}");
        }
        let [found, expected] = [&listed, &of_dumps].map(|all| all[at]["time_us"].as_f64());
        let [found, expected] = [found.ok_or("no time")?, expected.ok_or("no time")?];
        assert!(
            (found - expected).abs() < 1e-9 * expected,
            "{name}: {found} of {expected}"
        );
    }
    let table = succeeds(home.path(), &["dump", "two.jsonl"])?;
    assert_eq!(table.lines().count(), 3, "{table}");
    let csv = succeeds(home.path(), &["dump", "two.jsonl", "--format", "csv"])?;
    assert!(csv.starts_with("program,family,chip,"), "{csv}");
    assert_eq!(csv.lines().count(), 3, "{csv}");

    let message = refuses(home.path(), &["dump", "two.jsonl", "--out", "report"])?;
    assert!(message.contains("--out needs a dump"), "{message}");
    let message = refuses(home.path(), &["dump", "two.jsonl", &first])?;
    assert!(message.contains("expected all of one kind"), "{message}");
    fs::write(home.path().join("broken.jsonl"), "{\"schema\": 1}\n")?;
    let message = refuses(home.path(), &["dump", "broken.jsonl"])?;
    assert!(message.contains("broken.jsonl:1:"), "{message}");
    Ok(())
}

#[test]
fn a_roofline_is_drawn_alone() -> Outcome {
    let home = home()?;
    let args = [
        "roofline",
        "small.yaml",
        "--hw",
        "tpu-v6e,h100-sxm",
        "--plan",
        "fused",
        "--theme",
        "dark",
        "--untitled",
        "--out",
        "deep/figure.2",
    ];
    succeeds(home.path(), &args)?;
    let folder = home.path().join("deep");
    assert_eq!(
        names(&folder)?,
        BTreeSet::from(["figure.2.png".to_owned(), "figure.2.svg".to_owned()])
    );
    let first = contents(&folder)?;
    let svg = fs::read_to_string(folder.join("figure.2.svg"))?;
    let rows = json(
        home.path(),
        &["run", "small.yaml", "--format", "json", "--numeric", "off"],
    )?;
    let fused = rows["chips"][0]["plans"][1]["stages"]
        .as_array()
        .map_or(0, Vec::len);
    assert_eq!(svg.matches("<circle").count(), 2 * fused + 1);
    assert!(!svg.contains("Roofline: ") && !svg.contains("#FFFFFF"));
    succeeds(home.path(), &args)?;
    assert_eq!(contents(&folder)?, first);
    let error = refuses(home.path(), &["roofline", "small.yaml", "--plan", "fussed"])?;
    assert!(error.contains("did you mean `fused`?"), "{error}");
    let error = refuses(home.path(), &["roofline", "hybrid_7L1A"])?;
    assert!(error.contains("stack of layers"), "{error}");
    Ok(())
}

#[test]
fn help_is_short_and_current() -> Outcome {
    let home = tempfile::tempdir()?;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/help");
    let assert = Assert::new().action_env("SNAPSHOTS");
    for (name, args) in [
        ("tpusim", &["-h"][..]),
        ("run", &["run", "-h"]),
        ("roofline", &["roofline", "-h"]),
        ("hw", &["hw", "-h"]),
        ("hw_show", &["hw", "show", "-h"]),
        ("init", &["init", "-h"]),
        ("explain", &["explain", "-h"]),
        ("whatif", &["whatif", "-h"]),
        ("compare", &["compare", "-h"]),
        ("decode", &["decode", "-h"]),
    ] {
        let help = succeeds(home.path(), args)?;
        // The list of commands has a line for each of them.
        let most = if name == "tpusim" { 35 } else { 30 };
        assert!(help.lines().count() <= most, "{name} does not fit a screen");
        let expected = Data::read_from(&folder.join(format!("{name}.txt")), None);
        if let Err(difference) = assert.try_eq(Some(&name), Data::text(help), expected) {
            panic!("{difference}");
        }
    }
    let version = succeeds(home.path(), &["--version"])?;
    assert_eq!(version.trim(), format!("tpusim {}", env!("CARGO_PKG_VERSION")));
    Ok(())
}
