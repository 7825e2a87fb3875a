//! `predict`, `validate` and `fit` as people meet them: files in, tables out, exit codes.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn tpusim(home: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tpusim"))
        .args(args)
        .current_dir(home)
        .env_remove("NO_COLOR")
        .env_remove("COLUMNS")
        .output()
        .expect("the binary runs")
}

const CASES: &str = "\
device,cores,op,params,dtype,timing,latency_us,source
tpu-v6e,1,matmul,m=4096;k=4096;n=4096,bf16,device,180,\"a note, with a comma\"
tpu-v6e,1,matmull,m=4096;k=4096;n=4096,bf16,device,180,x
tpu-v6e,1,flash_attention,B=2;Tq=4096;Tk=4096;Hq=8;Hkv=8;D=128;Dv=128;causal=1;block_q=1024;block_kv=1024,bf16,device,,x
tpu-v66,1,matmul,m=8;k=8;n=8,bf16,device,1,x
tpu-v5p,2,gdn_decode,B=64;T=1;H=8;K=128;V=128;q=1,bf16,device,50,x
";

fn home() -> tempfile::TempDir {
    let home = tempfile::tempdir().expect("a folder");
    fs::write(home.path().join("cases.csv"), CASES).expect("a file");
    home
}

#[test]
fn rows_that_cannot_be_timed_stand_at_the_end() {
    let home = home();
    let output = tpusim(home.path(), &["predict", "cases.csv", "--format", "csv"]);
    assert_eq!(output.status.code(), Some(1));
    let mut reader = csv::Reader::from_reader(output.stdout.as_slice());
    let headers: Vec<String> = reader
        .headers()
        .expect("headers")
        .iter()
        .map(str::to_owned)
        .collect();
    assert_eq!(
        headers.join(","),
        "device,cores,op,params,dtype,timing,latency_us,source,predicted_us,low_us,high_us,bound,reason"
    );
    let rows: Vec<Vec<String>> = reader
        .records()
        .map(|record| record.expect("a row").iter().map(str::to_owned).collect())
        .collect();
    let ops: Vec<&str> = rows.iter().map(|row| row[2].as_str()).collect();
    assert_eq!(
        ops,
        ["matmul", "flash_attention", "matmull", "matmul", "gdn_decode"]
    );
    // 2 x 4096^3 FLOPs at the published 918 TFLOP/s take 149.7 us.
    let predicted: f64 = rows[0][8].parse().expect("a number");
    assert!((149.7..230.0).contains(&predicted), "{predicted}");
    assert_eq!(rows[0][7], "a note, with a comma");
    assert!(rows[0][12].is_empty() && rows[2][8].is_empty());
    assert!(rows[2][12].contains("did you mean `matmul`"), "{}", rows[2][12]);
    assert!(
        rows[3][12].contains("unknown device `tpu-v66`"),
        "{}",
        rows[3][12]
    );
    assert!(
        rows[4][12].contains("does not know the parameter `q`"),
        "{}",
        rows[4][12]
    );
}

#[test]
fn a_prediction_of_a_prediction_is_the_same() {
    let home = home();
    let first = tpusim(home.path(), &["predict", "cases.csv", "--format", "csv"]);
    fs::write(home.path().join("again.csv"), &first.stdout).expect("a file");
    let second = tpusim(home.path(), &["predict", "again.csv", "--format", "csv"]);
    assert_eq!(
        String::from_utf8_lossy(&first.stdout),
        String::from_utf8_lossy(&second.stdout)
    );
}

#[test]
fn json_has_units_in_its_names_and_intervals_around_its_times() {
    let home = home();
    let output = tpusim(home.path(), &["predict", "cases.csv", "--format", "json"]);
    let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rows = json["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 2);
    assert_eq!(json["not_timed"].as_array().map(Vec::len), Some(3));
    for row in rows {
        let at = |name: &str| row[name].as_f64().unwrap_or(f64::NAN);
        assert!(
            at("low_us") <= at("predicted_us") * 1.2 && at("low_us") < at("high_us"),
            "{row}"
        );
    }
}

#[test]
fn a_file_that_is_none_gives_exit_code_two() {
    let home = home();
    fs::write(home.path().join("bad.csv"), "device,op\n").expect("a file");
    for (file, message) in [("bad.csv", "missing column"), ("none.csv", "no such file")] {
        for command in ["predict", "validate"] {
            let output = tpusim(home.path(), &[command, file]);
            assert_eq!(output.status.code(), Some(2), "{command} {file}");
            assert!(output.stdout.is_empty());
            assert!(
                String::from_utf8_lossy(&output.stderr).contains(message),
                "{command} {file}"
            );
        }
    }
}

/// A chip whose rows were made with known quantities is found again from a dozen of them.
#[test]
fn a_fit_finds_the_floor_and_the_bandwidth_that_made_the_rows() {
    let home = tempfile::tempdir().expect("a folder");
    // Streams of a chip with 2.5 us per launch and 80 % of 1640 GB/s.
    let mut text = String::from("device,cores,op,params,dtype,timing,latency_us,source\n");
    for power in 10..26 {
        let n = 1_u64 << power;
        let us = 2.5 + 8.0 * n as f64 / (0.8 * 1640e9) * 1e6;
        writeln!(text, "tpu-v6e,1,copy,n={n},f32,device,{us:.4},made").expect("a string");
    }
    fs::write(home.path().join("made.csv"), text).expect("a file");
    let output = tpusim(
        home.path(),
        &["fit", "made.csv", "--only-given", "--format", "json"],
    );
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let value = |name: &str| {
        json["chips"]["tpu-v6e"][name]["value"]
            .as_f64()
            .unwrap_or(f64::NAN)
    };
    // The first fetch and the last store have a latency each, which rows of one kind cannot tell from the launch.
    let latency = json["coefficients"]["dma_latency"]["value"]
        .as_f64()
        .unwrap_or(f64::NAN);
    let floor = value("launch_us") + 2.0 * latency;
    assert!((floor / 2.5 - 1.0).abs() < 0.05, "{floor}");

    assert!(
        (value("hbm_achievable") / 0.8 - 1.0).abs() < 0.05,
        "{}",
        value("hbm_achievable")
    );
}

#[test]
fn a_calibration_is_not_overwritten_unasked() {
    let home = home();
    fs::write(home.path().join("mine.json"), "kept").expect("a file");
    let output = tpusim(
        home.path(),
        &["fit", "cases.csv", "--only-given", "--out", "mine.json"],
    );
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        fs::read_to_string(home.path().join("mine.json")).expect("the file"),
        "kept"
    );
}

/// A case is taken apart down to the sum that the table prints.
#[test]
fn a_case_can_be_explained() {
    let home = home();
    let table = tpusim(home.path(), &["predict", "cases.csv", "--format", "json"]);
    let json: Value = serde_json::from_slice(&table.stdout).expect("JSON");
    let predicted = json["rows"][0]["predicted_us"].as_f64().expect("a time");
    let output = tpusim(home.path(), &["predict", "cases.csv", "--explain", "2"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success());
    assert!(
        text.contains(&format!("{predicted:.2} us")),
        "{predicted}: {text}"
    );
    let wrong = tpusim(home.path(), &["predict", "cases.csv", "--explain", "99"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("no case on line 99"));
}

/// A calibration of one's own is taken instead of the shipped one, and a file that is none is refused.
#[test]
fn another_calibration_can_be_taken() {
    let home = home();
    fs::write(
        home.path().join("mine.json"),
        r#"{"schema": "tpusim.calibration/1", "version": "0.1.0", "data_digest": "none", "rows": 0,
            "coefficients": {}, "chips": {}, "residuals": []}"#,
    )
    .expect("a file");
    let time = |args: &[&str]| {
        let output = tpusim(
            home.path(),
            &[&["predict", "cases.csv", "--format", "json"], args].concat(),
        );
        let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        (
            json["rows"][0]["predicted_us"].as_f64(),
            json["rows"][0]["low_us"].as_f64(),
        )
    };
    let (shipped, low) = time(&[]);
    let (mine, none) = time(&["--calibration", "mine.json"]);
    assert!(shipped.is_some() && mine.is_some() && shipped != mine);
    assert!(low.is_some() && none.is_none());
    let wrong = tpusim(
        home.path(),
        &["predict", "cases.csv", "--calibration", "cases.csv"],
    );
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("cases.csv: "));
}

/// The picture of a page is protected as the page is, before anything is fitted.
#[test]
fn the_picture_of_a_page_is_not_overwritten_unasked() {
    let home = home();
    let picture = home.path().join("images").join("validation.svg");
    fs::create_dir(home.path().join("images")).expect("a folder");
    fs::write(&picture, "kept").expect("a file");
    let output = tpusim(home.path(), &["validate", "--page", "page.md"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(!home.path().join("page.md").exists());
    assert_eq!(fs::read_to_string(picture).expect("the file"), "kept");
}
