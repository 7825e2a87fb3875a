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

/// Rows made with another launch, bandwidth and clock than the file of the chip says: a calibration of the chip alone finds them again.
#[test]
fn a_chip_of_ones_own_is_calibrated_from_a_dozen_rows() {
    let home = tempfile::tempdir().expect("a folder");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = fs::read_to_string(root.join("hw/tpu-v6e.yaml")).expect("a shipped file");
    fs::write(home.path().join("mine.yaml"), &file).expect("a file");
    let mut cases = String::from("device,op,params,dtype\n");
    for (op, params) in [
        ("add", "n=1024"),
        ("add", "n=65536"),
        ("copy", "shape=32768x8192"),
        ("copy", "shape=4096x4096"),
        ("add", "shape=8192x8192"),
        ("exp", "shape=8192x4096"),
        ("matmul", "m=8192;k=8192;n=8192"),
        ("matmul", "m=4096;k=4096;n=4096"),
        ("matmul", "m=256;k=256;n=256"),
        ("matmul", "m=8192;k=128;n=4096"),
        ("rms_norm", "rows=8192;d=4096"),
        ("softmax", "rows=8192;d=2048"),
    ] {
        let _ = writeln!(cases, "mine,{op},{params},bf16");
    }
    fs::write(home.path().join("cases.csv"), cases).expect("a file");
    // The truth is written into a calibration by hand.
    let calibration = fs::read_to_string(root.join("hw/calibration.json")).expect("the shipped calibration");
    let mut truth: Value = serde_json::from_str(&calibration).expect("JSON");
    let fitted = |value: f64| serde_json::json!({"value": value, "unit": "", "standard_error": null, "low": 0.0, "high": 50.0, "prior": 0.0, "rows": 0});
    let quantities = [
        ("launch_us", 3.5),
        ("hbm_achievable", 0.72),
        ("sustained_clock", 0.9),
    ];
    for (name, value) in quantities {
        truth["chips"]["mine"][name] = fitted(value);
    }
    let fitted = tpusim(home.path(), &["hw", "show", "mine.yaml", "--format", "json"]);
    let digest: Value = serde_json::from_slice(&fitted.stdout).expect("JSON");
    truth["own_chips"]["mine"] = serde_json::json!({
        "hardware_digest": digest["digest"], "data_digest": "none", "rows": 0
    });
    fs::write(home.path().join("truth.json"), truth.to_string()).expect("a file");
    let made = tpusim(
        home.path(),
        &[
            "--calibration",
            "truth.json",
            "predict",
            "cases.csv",
            "--chip",
            "mine.yaml",
            "--format",
            "csv",
        ],
    );
    assert_eq!(
        made.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    let rows = String::from_utf8(made.stdout)
        .expect("UTF-8")
        .replace("predicted_us", "latency_us");
    fs::write(home.path().join("measured.csv"), rows).expect("a file");
    let fit = tpusim(
        home.path(),
        &["fit", "--chip", "mine.yaml", "measured.csv", "--out", "mine.json"],
    );
    assert_eq!(
        fit.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&fit.stderr)
    );
    let found: Value =
        serde_json::from_str(&fs::read_to_string(home.path().join("mine.json")).expect("a file"))
            .expect("JSON");
    for (name, value) in quantities {
        let got = found["chips"]["mine"][name]["value"].as_f64().expect("a number");
        assert!((got / value - 1.0).abs() < 0.02, "{name}: {got} for {value}");
    }
    assert_eq!(found["coefficients"], truth["coefficients"]);

    // What a chip nobody measured is assumed to take for a launch does not depend on it.
    let launch_of = |args: &[&str]| {
        let all: Vec<&str> = args
            .iter()
            .chain(&["hw", "show", "rtx-4090", "--format", "json"])
            .copied()
            .collect();
        let shown: Value = serde_json::from_slice(&tpusim(home.path(), &all).stdout).expect("JSON");
        shown["chip"]["launch"].as_f64().expect("seconds")
    };
    let shipped = launch_of(&[]);
    assert!(
        (launch_of(&["--calibration", "mine.json"]) - shipped).abs() < 1e-12,
        "{shipped}"
    );

    // The values hold for the text they were fitted with.
    let with = |args: &[&str]| {
        let all: Vec<&str> = [
            "--calibration",
            "mine.json",
            "predict",
            "cases.csv",
            "--chip",
            "mine.yaml",
        ]
        .iter()
        .chain(args)
        .copied()
        .collect();
        tpusim(home.path(), &all)
    };
    assert_eq!(with(&[]).status.code(), Some(0));
    fs::write(
        home.path().join("mine.yaml"),
        file.replace("GB/s", "GB/s ").replace("1.75 GHz", "1.70 GHz"),
    )
    .expect("a file");
    let refused = with(&[]);
    assert_eq!(refused.status.code(), Some(2));
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(message.contains("another text of `mine`"), "{message}");
}

/// Rows of another chip have no place in the calibration of one.
#[test]
fn rows_of_another_chip_are_refused() {
    let home = home();
    let output = tpusim(home.path(), &["fit", "--chip", "tpu-v5e", "cases.csv"]);
    assert_eq!(output.status.code(), Some(2));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        message.contains("cases.csv:2: expected rows of `tpu-v5e`") && message.contains("`tpu-v6e`"),
        "{message}"
    );
}
