//! Sweeps: every point is what a run says, whatever the order, the threads, the shards and the interruptions.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tpusim::hardware;
use tpusim::layer::Pass;
use tpusim::study::whatif::{Axis, Row, Sweep, SweepRequest, sensitivity};
use tpusim::study::{self, Extent, RunRequest};
use tpusim::workload;

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// A workload that is timed in a moment.
const SMALL: &str = "\
name: small
layer: { mechanism: sla, batch: 1, tokens: 512, model_width: 256, key_heads: 2, value_heads: 4, key_dim: 64, value_dim: 64, chunk: 64, decay_tiles: 4 }
plans: [unfused, fused]
pass: forward
hardware: [tpu-v6e, h100-sxm]
numeric: { tokens: 64, key_heads: 1, seed: 7 }
";

fn home() -> io::Result<tempfile::TempDir> {
    let home = tempfile::tempdir()?;
    fs::write(home.path().join("small.yaml"), SMALL)?;
    Ok(home)
}

fn command(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tpusim"));
    command.args(args).current_dir(home).env_remove("NO_COLOR");
    command
}

/// Output of a command that ends with `code`.
fn ends(code: i32, home: &Path, args: &[&str]) -> Result<Output, Box<dyn std::error::Error>> {
    let output = command(home, args).output()?;
    if output.status.code() == Some(code) {
        return Ok(output);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("{args:?} ended with {}: {errors}", output.status).into())
}

fn lines(home: &Path, code: i32, args: &[&str]) -> Result<Vec<Value>, Box<dyn std::error::Error>> {
    let output = ends(code, home, &[args, &["--format", "json"]].concat())?;
    let text = String::from_utf8(output.stdout)?;
    Ok(text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

fn contents(dir: &Path) -> io::Result<BTreeMap<String, Vec<u8>>> {
    fs::read_dir(dir)?
        .map(|entry| {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            Ok((name, fs::read(entry.path())?))
        })
        .collect()
}

fn sweep(name: &str, chips: &[&str], vary: &[&str]) -> Result<Sweep, Box<dyn std::error::Error>> {
    let workload = workload::load::<&str>(name, &[])?;
    let chips = chips
        .iter()
        .map(|name| Ok(((*name).to_owned(), hardware::read(name)?)))
        .collect::<Result<Vec<_>, tpusim::config::ConfigError>>()?;
    Ok(Sweep::new(SweepRequest {
        workload: &workload,
        chips: &chips,
        axes: vary
            .iter()
            .map(|text| Axis::parse(text))
            .collect::<Result<_, _>>()?,
    })?)
}

/// What `tpusim run --set ...` finds: by plan, the time, its interval, and the bytes.
type Run = BTreeMap<String, (f64, Option<f64>, Option<f64>, u64)>;

fn run(name: &str, chip: &str, set: &[String]) -> Result<Run, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let (of_chip, mut of_layer): (Vec<String>, Vec<String>) =
        set.iter().cloned().partition(|set| set.starts_with("hw."));
    // A tree has no such size: its check executes all of it.
    let (as_shipped, _) = workload::load::<&str>(name, &[]).map_err(|error| text(&error))?;
    if as_shipped.layer.pass != Pass::Verify {
        of_layer.push("numeric.tokens=1".to_owned());
    }
    let workload = workload::load(name, &of_layer).map_err(|error| text(&error))?;
    let chips = vec![hardware::load_with(chip, &of_chip).map_err(|error| text(&error))?];
    let result = study::run(RunRequest {
        workload: &workload,
        baseline: None,
        chips: &chips,
        overrides: Vec::new(),
        numeric: None,
    })
    .map_err(|error| text(&error))?;
    Ok(result.chips[0]
        .plans
        .iter()
        .map(|plan| {
            let bytes = plan.stages.iter().map(|stage| stage.hbm_bytes).sum();
            (
                plan.name.clone(),
                (plan.total_us, plan.low_us, plan.high_us, bytes),
            )
        })
        .collect())
}

/// Every row against the run with the same overrides; returns how many rows have no time.
fn rows_are_runs(
    name: &str,
    chips: &[&str],
    vary: &[&str],
    every: usize,
) -> Result<usize, Box<dyn std::error::Error>> {
    let sweep = sweep(name, chips, vary)?;
    let grid = sweep.grid();
    let rows = sweep.rows(0..grid.space.points());
    assert_eq!(rows.len() as u64, grid.space.points() * grid.rows_per_point());
    let mut untimed = 0;
    for of_point in rows.chunks(grid.rows_per_point() as usize).step_by(every) {
        for of_chip in of_point.chunks(grid.plans.len()) {
            let set = grid.space.assignments(of_chip[0].point);
            let run = run(name, chips[of_chip[0].chip], &set);
            for row in of_chip {
                match (&row.outcome, &run) {
                    (Ok(timing), Ok(run)) => {
                        let (us, low, high, bytes) = run[&grid.plans[row.plan]];
                        let found = (Some(timing.time_us), timing.interval_us);
                        // The same sums of the same numbers: no digit may differ.
                        assert_eq!(found, (Some(us), low.zip(high)), "{set:?}");
                        assert_eq!(timing.hbm_bytes, bytes, "{set:?}");
                    }
                    (Err(_), Err(_)) => untimed += 1,
                    (found, run) => panic!("{set:?}: {found:?} against {run:?}"),
                }
            }
        }
    }
    Ok(untimed)
}

#[test]
fn a_point_is_what_a_run_with_the_same_overrides_says() -> Outcome {
    let layer = [
        "chunk=32,64,96",
        "decay_tiles=1,3,256",
        "value_heads=8,32",
        "state=f32,bf16",
        "program.heads=1,2",
    ];
    // A chunk of 96 is no power of two, and 3 tiles do not divide 256 channels.
    let untimed = rows_are_runs("sla_r4", &["tpu-v5p", "a100-sxm"], &layer, 1)?;
    assert_eq!(untimed, 2 * 2 * 8 * (3 * 3 - 2 * 2));
    Ok(())
}

#[test]
fn patched_chips_are_the_chips_of_a_run() -> Outcome {
    let core = [
        "hw.matrix_unit.rows=64,256",
        "hw.matrix_unit.rows_per_cycle.bf16=0.5,3",
        "hw.vector_unit.slots.alu=0.5,6",
        "hw.vector_unit.lanes=64,128",
        "hw.vector_unit.registers=16,256",
        "hw.latency.cross_lane_cycles=10,200",
    ];
    let around = [
        "hw.on_chip.capacity=256 KiB,32 MiB",
        "hw.hbm.bandwidth=600 GB/s,4 TB/s",
        "hw.hbm.achievable=0.5,0.9",
        "hw.launch.time=0 us,30 us",
        "hw.cores.per_device=1,2",
    ];
    let clocks = [
        "hw.clock.default=default,boost,other",
        "hw.clock.states.default.frequency=1 GHz,2 GHz",
        "hw.cores.per_chip=1,4",
        "hw.cores.per_device=1,4",
        "hw.matrix_unit.count=1,3,65",
    ];
    for chip in ["tpu-v7x", "h100-sxm"] {
        rows_are_runs("sla_r4", &[chip], &core, 7)?;
        rows_are_runs("kda_packed", &[chip], &around, 3)?;
        let untimed = rows_are_runs("softmax_gqa", &[chip], &clocks, 1)?;
        assert!(
            untimed > 0,
            "an unknown clock, too many cores and arrays are no chips"
        );
    }
    Ok(())
}

#[test]
fn every_shipped_workload_can_be_swept() -> Outcome {
    for name in workload::shipped() {
        let chips = ["tpu-v5e", "b200"];
        rows_are_runs(name, &chips, &["batch=1,2", "hw.vector_unit.slots.alu=1,2"], 1)?;
    }
    Ok(())
}

#[test]
fn time_never_falls_with_the_bandwidth() -> Outcome {
    for name in ["sla_r4", "kda", "mla", "gdn_decode"] {
        let sweep = sweep(
            name,
            &["tpu-v4", "tpu-v7x", "h100-sxm"],
            &["hw.hbm.bandwidth=100..6400:*1.5 GB/s"],
        )?;
        let grid = sweep.grid();
        let rows = sweep.rows(0..grid.space.points());
        let per_point = grid.rows_per_point() as usize;
        for (slow, fast) in rows.iter().zip(&rows[per_point..]) {
            let us = |row: &Row| row.outcome.as_ref().map(|timing| timing.time_us).ok();
            // Rounding of sums of a few terms.
            assert!(
                us(fast) <= us(slow).map(|us| us * (1.0 + 1e-12)),
                "{slow:?} {fast:?}"
            );
        }
    }
    Ok(())
}

const VARY: [&str; 6] = [
    "--vary",
    "hw.hbm.bandwidth=400..1600:+200 GB/s",
    "--vary",
    "chunk=32,48,64",
    "--vary",
    "decay_tiles=1..64:*2",
];

/// The sweep of the tests below: 147 points, 49 of them with a chunk that the inverse does not take.
fn arguments<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [
        &["whatif", "small.yaml", "--pareto", "latency,decay_tiles"],
        &VARY[..],
        more,
    ]
    .concat()
}

#[test]
fn neither_threads_nor_formats_change_a_row() -> Outcome {
    let home = home()?;
    let mut seen = BTreeSet::new();
    for threads in ["1", "2", "5"] {
        let dir = format!("with-{threads}");
        let mut command = command(home.path(), &arguments(&["--out", &dir]));
        let output = command.env("RAYON_NUM_THREADS", threads).output()?;
        assert_eq!(
            output.status.code(),
            Some(1),
            "48 rows a chunk are no power of two"
        );
        let mut files = contents(&home.path().join(dir))?;
        files.insert("stdout".to_owned(), output.stdout);
        seen.insert(files);
    }
    assert_eq!(seen.len(), 1);
    let files = seen.pop_first().unwrap_or_default();
    let names: Vec<&str> = files
        .keys()
        .map(String::as_str)
        .filter(|name| !name.ends_with("parquet"))
        .collect();
    assert_eq!(
        names,
        ["pareto.csv", "rows.csv", "rows.jsonl", "stdout", "whatif.json"]
    );

    // CSV and JSON lines hold the same values under the documented names.
    let docs = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/formats.md"))?;
    let json: Vec<Value> = String::from_utf8_lossy(&files["rows.jsonl"])
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    let mut csv = csv::Reader::from_reader(&files["rows.csv"][..]);
    let headers = csv.headers()?.clone();
    let mut rows = 0;
    for (record, object) in csv.records().zip(&json) {
        let record = record?;
        rows += 1;
        for (name, cell) in headers.iter().zip(&record) {
            assert!(
                name.contains('.') || docs.contains(&format!("`{name}`")),
                "{name}"
            );
            let value = &object[name.trim_end_matches("_count")];
            let text = match value {
                Value::Null => String::new(),
                Value::String(text) => text.clone(),
                Value::Number(number) if cell.contains('.') => {
                    assert_eq!(number.as_f64(), cell.parse().ok(), "{name}");
                    continue;
                }
                other => other.to_string(),
            };
            let same = text == cell || value.as_f64().is_some_and(|value| Ok(value) == cell.parse());
            assert!(same, "{name}: {cell} against {value}");
        }
    }
    assert_eq!((rows, json.len()), (147 * 4, 147 * 4));
    Ok(())
}

#[test]
fn shards_come_together_as_the_whole() -> Outcome {
    let home = home()?;
    ends(1, home.path(), &arguments(&["--out", "whole"]))?;
    let shard = |index: usize| format!("{index}/4");
    let running = (0..4)
        .filter(|index| *index != 2)
        .map(|index| {
            let shard = shard(index);
            let mut command = command(home.path(), &arguments(&["--out", "parts", "--shard", &shard]));
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()
        })
        .collect::<Result<Vec<_>, _>>()?;
    for mut child in running {
        assert!(child.wait()?.code().is_some_and(|code| code < 2));
    }
    let parts = home.path().join("parts");
    let before = contents(&parts)?;
    let output = ends(1, home.path(), &["whatif", "merge", "parts"])?;
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("shard 2/4 is missing"), "{message}");
    assert_eq!(contents(&parts)?, before, "nothing is written");

    // A shard that died in the middle of a line, and one that is started again though it is whole.
    ends(1, home.path(), &arguments(&["--out", "parts", "--shard", "2/4"]))?;
    let rows = parts.join("shard-2-of-4.csv");
    let text = fs::read(&rows)?;
    fs::write(&rows, &text[..text.len() / 2])?;
    let output = ends(1, home.path(), &["whatif", "merge", "parts"])?;
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        message.contains("shard 2/4 has ") && message.contains(" of 37 points"),
        "{message}"
    );
    ends(1, home.path(), &arguments(&["--out", "parts", "--shard", "2/4"]))?;
    assert_eq!(fs::read(&rows)?, text);
    let again = ends(0, home.path(), &arguments(&["--out", "parts", "--shard", "0/4"]))?;
    assert!(!again.stdout.is_empty());

    ends(1, home.path(), &["whatif", "merge", "parts"])?;
    let (whole, parts) = (contents(&home.path().join("whole"))?, contents(&parts)?);
    for (name, bytes) in &whole {
        assert_eq!(parts.get(name), Some(bytes), "{name}");
    }
    Ok(())
}

#[test]
fn every_shipped_study_runs_and_is_described() -> Outcome {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/studies.md"))?;
    let mut files = BTreeSet::new();
    for name in contents(&root.join("workloads/studies"))?.into_keys() {
        files.extend(name.strip_suffix(".yaml").map(str::to_owned));
    }
    let shipped: BTreeSet<String> = workload::shipped_studies()
        .into_iter()
        .map(str::to_owned)
        .collect();
    assert_eq!(files, shipped);
    let home = home()?;
    for name in &shipped {
        let picture = format!("{name}-picture");
        let path = format!("workloads/studies/{name}.yaml");
        // What a study executes is executed on few tokens here; of a tree all of it.
        let mut options = vec!["--hw", "tpu-v7x,h100-sxm"];
        if !fs::read_to_string(root.join(&path))?.contains("layer.tree") {
            options.extend(["--set", "numeric.tokens=64"]);
        }
        let by_name = [&["whatif", name, "--plot", &picture], &options[..]].concat();
        let by_name = ends(0, home.path(), &by_name)?;
        let by_path = ends(0, home.path(), &[&["whatif", &path], &options[..]].concat())?;
        assert_eq!(by_name.stdout, by_path.stdout, "{name}");
        let text = String::from_utf8(by_name.stdout)?;
        let (title, reading) = (text.lines().next(), text.lines().last());
        for part in [title, reading] {
            let part = part.ok_or("text")?;
            assert!(
                page.contains(part),
                "docs/studies.md lacks `{part}`; run tools/studies.sh"
            );
        }
        let svg = fs::read_to_string(home.path().join(format!("{picture}.svg")))?;
        for word in ["tpu-v7x", "h100-sxm", title.unwrap_or_default()] {
            assert!(svg.contains(word), "{name}: `{word}`");
        }
        assert!(fs::read(home.path().join(format!("{picture}.png")))?.starts_with(b"\x89PNG"));
    }
    Ok(())
}

#[test]
fn steps_keep_what_the_steps_before_them_changed() -> Outcome {
    let home = home()?;
    let study = "\
title: from one to the other
workload: small.yaml
steps:
  - { name: as it is, plan: unfused }
  - { name: longer, set: [layer.tokens=1024] }
  - { name: fused, set: [layer.chunk=32], plan: fused }
reading: as it stands
";
    fs::write(home.path().join("steps.yaml"), study)?;
    let rows = lines(home.path(), 0, &["whatif", "steps.yaml", "--hw", "tpu-v6e"])?;
    let set = [
        &[][..],
        &["layer.tokens=1024"],
        &["layer.tokens=1024", "layer.chunk=32"],
    ];
    assert_eq!(rows.len(), 3 * 2);
    for (of_step, set) in rows.chunks(2).zip(set) {
        let mut args = vec![
            "run",
            "small.yaml",
            "--numeric",
            "off",
            "--hw",
            "tpu-v6e",
            "--format",
            "json",
        ];
        args.extend(set.iter().flat_map(|set| ["--set", set]));
        let run: Value = serde_json::from_slice(&ends(0, home.path(), &args)?.stdout)?;
        for (row, plan) in of_step
            .iter()
            .zip(run["chips"][0]["plans"].as_array().ok_or("plans")?)
        {
            assert_eq!(
                (&row["plan"], &row["time_us"]),
                (&plan["name"], &plan["total_us"]),
                "{set:?}"
            );
        }
    }
    // What a folder holds of the steps is enough to put shards of them together.
    ends(0, home.path(), &["whatif", "steps.yaml", "--out", "whole"])?;
    for shard in ["0/2", "1/2"] {
        ends(
            0,
            home.path(),
            &["whatif", "steps.yaml", "--out", "parts", "--shard", shard],
        )?;
    }
    ends(0, home.path(), &["whatif", "merge", "parts"])?;
    let [whole, parts] = ["whole", "parts"].map(|dir| fs::read(home.path().join(dir).join("rows.jsonl")));
    assert_eq!(whole?, parts?);
    Ok(())
}

/// The program of a script, or none where this machine lacks it.
fn script(home: &Path, program: &str, name: &str) -> Option<Command> {
    let there = Command::new(program).arg("--version").output().is_ok();
    there.then(|| {
        let mut command = Command::new(program);
        command
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name))
            .current_dir(home)
            .env("TPUSIM", env!("CARGO_BIN_EXE_tpusim"));
        command
    })
}

/// Workload and fields of the sweeps that the scripts divide.
const OF_SCRIPTS: [&str; 5] = [
    "small.yaml",
    "--vary",
    "chunk=32,64",
    "--vary",
    "hw.hbm.bandwidth=400..1600:+200 GB/s",
];

#[test]
fn a_slurm_array_gives_the_whole() -> Outcome {
    let home = home()?;
    ends(
        0,
        home.path(),
        &[&["whatif"], &OF_SCRIPTS[..], &["--out", "whole"]].concat(),
    )?;
    // Array tasks may be numbered from anywhere.
    for task in 3..6 {
        let Some(mut command) = script(home.path(), "bash", "slurm-array.sh") else {
            return Ok(());
        };
        let status = command
            .arg("parts")
            .args(OF_SCRIPTS)
            .env("SLURM_ARRAY_TASK_ID", task.to_string())
            .env("SLURM_ARRAY_TASK_MIN", "3")
            .env("SLURM_ARRAY_TASK_COUNT", "3")
            .stdout(Stdio::null())
            .status()?;
        assert!(status.success());
    }
    ends(0, home.path(), &["whatif", "merge", "parts"])?;
    let [whole, parts] = ["whole", "parts"].map(|dir| fs::read(home.path().join(dir).join("rows.csv")));
    assert_eq!(whole?, parts?);
    Ok(())
}

#[test]
fn the_ray_script_gives_the_whole_with_processes_of_one_machine() -> Outcome {
    let home = home()?;
    ends(
        0,
        home.path(),
        &[&["whatif"], &OF_SCRIPTS[..], &["--out", "whole"]].concat(),
    )?;
    let Some(mut command) = script(home.path(), "python3", "ray_sweep.py") else {
        return Ok(());
    };
    let status = command
        .args([
            "--program",
            env!("CARGO_BIN_EXE_tpusim"),
            "--parts",
            "5",
            "--local",
            "2",
        ])
        .args(["--out", "parts", "--"])
        .args(OF_SCRIPTS)
        .stdout(Stdio::null())
        .status()?;
    assert!(status.success());
    let [whole, parts] = ["whole", "parts"].map(|dir| fs::read(home.path().join(dir).join("rows.csv")));
    assert_eq!(whole?, parts?);
    // Bad input is said once and ends it.
    let Some(mut command) = script(home.path(), "python3", "ray_sweep.py") else {
        return Ok(());
    };
    let output = command
        .args([
            "--program",
            env!("CARGO_BIN_EXE_tpusim"),
            "--parts",
            "2",
            "--local",
            "2",
        ])
        .args(["--out", "bad", "--", "small.yaml", "--vary", "chunks=32,64"])
        .output()?;
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_eq!(message.matches("unknown key `chunks`").count(), 1, "{message}");
    Ok(())
}

#[test]
fn an_interrupted_sweep_goes_on_where_it_stopped() -> Outcome {
    let home = home()?;
    let vary = [
        "whatif",
        "small.yaml",
        "--vary",
        "chunk=32,64",
        "--vary",
        "hw.vector_unit.slots.alu=1..4:+0.02",
    ];
    let to = |dir: &'static str| [&vary[..], &["--out", dir]].concat();
    ends(0, home.path(), &to("whole"))?;
    let mut child = command(home.path(), &to("stopped"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let rows = home.path().join("stopped/rows.csv");
    while fs::metadata(&rows).map_or(0, |file| file.len()) < 1000 && child.try_wait()?.is_none() {
        std::thread::yield_now();
    }
    Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()?;
    let output = child.wait_with_output()?;
    let text = fs::read_to_string(&rows)?;
    assert!(text.ends_with('\n'));
    if output.status.code() == Some(1) {
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(message.contains("--resume"), "{message}");
        let message = ends(2, home.path(), &to("stopped"))?.stderr;
        assert!(String::from_utf8_lossy(&message).contains("`--resume` goes on"));
    }
    // Half a line, as a power failure would leave it, in one of the files.
    fs::write(&rows, &text[..text.len() - 7])?;
    ends(0, home.path(), &[&to("stopped")[..], &["--resume"]].concat())?;
    assert_eq!(
        contents(&home.path().join("stopped"))?,
        contents(&home.path().join("whole"))?
    );
    Ok(())
}

#[test]
fn folders_of_others_are_left_alone() -> Outcome {
    let home = home()?;
    let to = |dir: &'static str, vary: &'static str| ["whatif", "small.yaml", "--vary", vary, "--out", dir];
    fs::create_dir(home.path().join("photos"))?;
    fs::write(home.path().join("photos/rows.csv"), "mine")?;
    for more in [&[][..], &["--resume"], &["--force"], &["--shard", "0/2"]] {
        let args = [&to("photos", "chunk=32,64"), more].concat();
        let message = ends(2, home.path(), &args)?.stderr;
        assert!(String::from_utf8_lossy(&message).contains("no folder of a sweep"));
    }
    assert_eq!(fs::read(home.path().join("photos/rows.csv"))?, b"mine");
    assert_eq!(contents(&home.path().join("photos"))?.len(), 1);

    ends(0, home.path(), &to("mine", "chunk=32,64"))?;
    fs::write(home.path().join("mine/notes.txt"), "mine")?;
    let first = contents(&home.path().join("mine"))?;
    for (vary, more, part) in [
        ("chunk=32,64", &[][..], "holds 2 of the 2 points"),
        ("chunk=32", &[], "holds another sweep"),
        ("chunk=32", &["--resume"], "holds another sweep"),
    ] {
        let message = ends(2, home.path(), &[&to("mine", vary), more].concat())?.stderr;
        assert!(String::from_utf8_lossy(&message).contains(part), "{vary}");
    }
    assert_eq!(contents(&home.path().join("mine"))?, first);
    ends(
        0,
        home.path(),
        &[&to("mine", "chunk=32")[..], &["--force"]].concat(),
    )?;
    let second = contents(&home.path().join("mine"))?;
    assert_eq!(second["notes.txt"], b"mine");
    assert_eq!(
        String::from_utf8_lossy(&second["rows.csv"]).lines().count(),
        1 + 4
    );
    Ok(())
}

#[test]
fn marked_rows_are_those_that_nothing_beats() -> Outcome {
    let home = home()?;
    let rows = lines(home.path(), 1, &arguments(&[]))?;
    let key = |row: &Value| Some((row["time_us"].as_f64()?, row["layer.decay_tiles"].as_f64()?));
    let mut marked = 0;
    for row in &rows {
        let beaten = key(row).is_none_or(|(us, tiles)| {
            rows.iter()
                .filter(|other| other["chip"] == row["chip"])
                .any(|other| {
                    key(other).is_some_and(|(other_us, other_tiles)| {
                        other_us <= us && other_tiles <= tiles && (other_us, other_tiles) != (us, tiles)
                    })
                })
        });
        assert_eq!(row["pareto"], !beaten, "{row}");
        marked += usize::from(!beaten);
    }
    assert!(marked >= 2, "each chip has a best row");
    Ok(())
}

#[test]
fn elasticities_are_slopes_between_runs() -> Outcome {
    for (name, chip) in [("sla_r4", "tpu-v7x"), ("kda", "h100-sxm")] {
        let found = sensitivity(&sweep(name, &[chip], &[])?).map_err(|reason| reason.to_string())?;
        for plan in &found {
            let of = |field: &str| plan.elasticities.iter().find(|of| of.field == field);
            let (tokens, bandwidth, achievable) = (
                of("layer.tokens").ok_or("tokens")?,
                of("hw.hbm.bandwidth").ok_or("bandwidth")?,
                of("hw.hbm.achievable").ok_or("share")?,
            );
            let us = |set: &str| run(name, chip, &[set.to_owned()]).map(|run| run[&plan.plan].0);
            // Half and twice the 8192 tokens are a factor of four apart.
            let slope = (us("layer.tokens=16384")? / us("layer.tokens=4096")?).ln() / 4_f64.ln();
            assert!(
                (tokens.total - slope).abs() < 1e-9,
                "{} against {slope}",
                tokens.total
            );
            assert_eq!(tokens.step, "x2");
            // Only the product of the two enters anywhere, except that writes of a GPU reach a share of the bandwidth of their own.
            let gained = bandwidth.total - achievable.total;
            assert!(
                gained.abs() < 1e-6 || (chip == "h100-sxm" && gained < 0.0),
                "{name} {}",
                plan.plan
            );
            assert!(bandwidth.total <= 0.0);
            // The time of a plan is the sum of its stages, so its slope is the mean of theirs, up to the curvature over a step of one in a hundred.
            let mean: f64 = bandwidth
                .stages
                .iter()
                .zip(&plan.stage_us)
                .filter_map(|(slope, us)| Some((*slope)? * us / plan.time_us))
                .sum();
            assert!(
                (mean - bandwidth.total).abs() < 1e-3,
                "{mean} against {}",
                bandwidth.total
            );
        }
    }
    Ok(())
}

#[test]
fn layers_of_a_sweep_are_executed_as_their_checks() -> Outcome {
    let set = ["numeric.tokens=32", "layer.value_dim=16", "layer.key_dim=32"];
    let workload = workload::load("sla_r4", &set)?;
    let chips = vec![("tpu-v7x".to_owned(), hardware::read("tpu-v7x")?)];
    let sweep = Sweep::new(SweepRequest {
        workload: &workload,
        chips: &chips,
        axes: vec![
            Axis::parse("chunk=16,32")?,
            Axis::parse("hw.vector_unit.slots.alu=1,2")?,
        ],
    })?;
    let layers = sweep.numerics()?;
    assert_eq!(layers.len(), 2, "the hardware does not matter");
    for (layer, chunk) in layers.iter().zip([16.0, 32.0]) {
        let of_layer: Vec<String> = set
            .map(str::to_owned)
            .into_iter()
            .chain(layer.set.clone())
            .collect();
        let check = study::check(&workload::load("sla_r4", &of_layer)?.0, Extent::Sample)?;
        let found = layer.found.as_ref().ok_or("executed")?;
        assert_eq!(found.output_rel_error, Some(check.output_rel_error));
        assert_eq!(found.state_rel_error, check.state_rel_error);
        assert_eq!((found.tokens, found.heads, found.seed), (32, 1, 7));
        // f32 ends at 2^128; half a chunk of decay on either side of its middle.
        let limit = 128.0 * std::f64::consts::LN_2 / (chunk / 2.0);
        assert!((found.decay_limit.ok_or("a folded Gram")? - limit).abs() < 1e-9);
        let bound = found.overflowing_bound.ok_or("a bounded gate")?;
        assert!(bound > limit && found.strongest_decay <= 1.3, "{bound} {limit}");
        // The check of the same layer with that bound is not usable, with one below the limit it is.
        for (bound, usable) in [(bound, false), (0.999 * limit, true)] {
            let set = [of_layer.clone(), vec![format!("layer.decay_bound={}", -bound)]].concat();
            let check = study::check(&workload::load("sla_r4", &set)?.0, Extent::Sample)?;
            assert_eq!(check.non_finite.is_none(), usable, "{bound}");
        }
    }
    Ok(())
}

#[test]
fn sensitivities_are_printed_in_every_format() -> Outcome {
    let home = home()?;
    let args = ["whatif", "small.yaml", "--sensitivity"];
    let table = String::from_utf8(ends(0, home.path(), &args)?.stdout)?;
    assert!(
        table.contains("hw.clock.states.default.frequency") && table.contains("op2-7a"),
        "{table}"
    );
    let json = lines(home.path(), 0, &args)?;
    let csv = ends(0, home.path(), &[&args[..], &["--format", "csv"]].concat())?.stdout;
    assert_eq!(String::from_utf8(csv)?.lines().count(), 1 + json.len());
    assert!(
        json.iter()
            .any(|line| line["stage"] == "total" && line["field"] == "layer.tokens")
    );
    Ok(())
}

#[cfg(feature = "parquet")]
#[test]
fn parquet_holds_the_rows_of_the_csv() -> Outcome {
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::Field;

    let home = home()?;
    ends(1, home.path(), &arguments(&["--out", "rows"]))?;
    let dir = home.path().join("rows");
    let reader = SerializedFileReader::new(fs::File::open(dir.join("rows.parquet"))?)?;
    let mut csv = csv::Reader::from_path(dir.join("rows.csv"))?;
    let headers = csv.headers()?.clone();
    let mut rows = 0;
    for (row, record) in reader.get_row_iter(None)?.zip(csv.records()) {
        let (row, record) = (row?, record?);
        rows += 1;
        for ((name, field), (header, cell)) in row.get_column_iter().zip(headers.iter().zip(&record)) {
            assert_eq!(name, header);
            let same = match field {
                Field::Null => cell.is_empty(),
                Field::Long(value) => Ok(*value) == cell.parse(),
                Field::Double(value) => Ok(*value) == cell.parse(),
                Field::Str(value) => value == cell,
                other => panic!("{name}: {other}"),
            };
            assert!(same, "{name}: {field} against {cell}");
        }
    }
    assert_eq!(rows, 147 * 4);
    Ok(())
}

/// The page of a report shows the elasticities that `--sensitivity` prints, and its JSON holds all of them.
#[test]
fn a_report_says_what_moves_the_time_most() -> Outcome {
    let home = home()?;
    ends(
        0,
        home.path(),
        &[
            "run",
            "sla_r4",
            "--hw",
            "tpu-v7x",
            "--numeric",
            "off",
            "--out",
            "r",
        ],
    )?;
    let page = fs::read_to_string(home.path().join("r/index.html"))?;
    assert!(page.contains("id=\"sensitivity\""));
    let result: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(home.path().join("r/result.json"))?)?;
    let printed = ends(
        0,
        home.path(),
        &[
            "whatif",
            "sla_r4",
            "--hw",
            "tpu-v7x",
            "--sensitivity",
            "--format",
            "json",
        ],
    )?;
    let mut totals = 0;
    for line in String::from_utf8(printed.stdout)?.lines() {
        let line: serde_json::Value = serde_json::from_str(line)?;
        if line["stage"] != "total" {
            continue;
        }
        totals += 1;
        let plans = result["sensitivity"].as_array().ok_or("no sensitivity")?;
        let plan = plans
            .iter()
            .find(|plan| plan["plan"] == line["plan"])
            .ok_or("no plan")?;
        let all = plan["elasticities"].as_array().ok_or("no elasticities")?;
        let one = all
            .iter()
            .find(|one| one["field"] == line["field"])
            .ok_or("no field")?;
        assert_eq!(one["total"], line["elasticity"]);
    }
    assert!(totals > 20, "{totals}");
    Ok(())
}
