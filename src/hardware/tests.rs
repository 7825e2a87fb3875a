//! Shipped files against published figures, and bad files against their messages.

use approx::assert_relative_eq;

use super::*;
use crate::config::{ConfigError, Document};
use crate::dtype::Dtype;
use crate::units::FlopsPerSecond;

/// Datasheets print three digits.
const DATASHEET: f64 = 0.005;

fn peak(chip: &Chip, dtype: Dtype) -> f64 {
    chip.matrix_flops_per_second_chip(dtype)
        .map_or(0.0, FlopsPerSecond::get)
        / 1e12
}

#[test]
fn all_shipped_chips_load_and_are_named() -> Result<(), ConfigError> {
    assert_eq!(shipped().len(), 13);
    for name in shipped() {
        let (chip, document) = load(name)?;
        assert_eq!(chip.name, name);
        assert_eq!(document.name(), format!("hw/{name}.yaml"));
        // After the line that tells editors the schema.
        assert!(
            document
                .text()
                .lines()
                .nth(1)
                .is_some_and(|line| line.starts_with("# One device is ")),
            "{name} says first what one device is"
        );
        assert!(chip.launch.get() > 0.0 && chip.ridge_point(Dtype::Bf16).is_some_and(|ridge| ridge > 1.0));
    }
    Ok(())
}

#[test]
fn derived_peaks_are_the_published_ones() -> Result<(), ConfigError> {
    // (chip, clock state, format, TFLOP/s): Google's and NVIDIA's pages.
    let published = [
        ("tpu-v4", "default", Dtype::Bf16, 275.0),
        ("tpu-v5e", "default", Dtype::Bf16, 197.0),
        ("tpu-v5e", "default", Dtype::Int8, 393.0),
        ("tpu-v5p", "default", Dtype::Bf16, 459.0),
        ("tpu-v5p", "default", Dtype::Int8, 918.0),
        ("tpu-v6e", "default", Dtype::Bf16, 918.0),
        ("tpu-v6e", "default", Dtype::Int8, 1836.0),
        ("tpu-v6e", "default", Dtype::Fp8E4m3, 918.0),
        ("tpu-v7x", "boost", Dtype::Bf16, 2307.0),
        ("tpu-v7x", "boost", Dtype::Fp8E5m2, 4614.0),
        ("tpu-8i", "default", Dtype::Bf16, 1101.0),
        ("tpu-8t", "default", Dtype::Fp8E4m3, 5976.9),
        ("a100-sxm", "default", Dtype::F16, 312.0),
        ("h100-sxm", "default", Dtype::Bf16, 989.0),
        ("h100-sxm", "default", Dtype::Fp8E4m3, 1979.0),
        ("h200-nvl", "default", Dtype::Bf16, 835.0),
        ("b200", "default", Dtype::Bf16, 2250.0),
        ("rtx-4090", "default", Dtype::Bf16, 165.15),
    ];
    for (name, state, dtype, expected) in published {
        let chip = load(name)?.0.with_clock(state)?;
        assert_relative_eq!(peak(&chip, dtype), expected, max_relative = DATASHEET);
    }
    Ok(())
}

#[test]
fn derived_peaks_are_exact_products() -> Result<(), ConfigError> {
    // cores x arrays x rows x columns x rows per cycle x 2 x clock, by hand.
    assert_relative_eq!(
        peak(&load("tpu-v4")?.0, Dtype::Bf16),
        275.2512,
        max_relative = 1e-12
    );
    assert_relative_eq!(
        peak(&load("tpu-v5e")?.0, Dtype::Bf16),
        196.608,
        max_relative = 1e-12
    );
    assert_relative_eq!(
        peak(&load("tpu-v5p")?.0, Dtype::Bf16),
        458.752,
        max_relative = 1e-12
    );
    assert_relative_eq!(
        peak(&load("tpu-v6e")?.0, Dtype::Bf16),
        917.504,
        max_relative = 1e-12
    );
    let v7x = load("tpu-v7x")?.0;
    assert_relative_eq!(
        peak(&v7x.with_clock("boost")?, Dtype::Bf16),
        2306.8672,
        max_relative = 1e-12
    );
    assert_relative_eq!(peak(&v7x, Dtype::Bf16), 1992.2944, max_relative = 1e-12);
    Ok(())
}

#[test]
fn every_published_figure_is_met_or_explained() -> Result<(), ConfigError> {
    for name in shipped() {
        let (chip, _) = load(name)?;
        assert!(!chip.published.is_empty(), "{name}");
        for figure in &chip.published {
            let derived = chip.derived(figure).map_or(0.0, FlopsPerSecond::get);
            let close = (derived / figure.value.get() - 1.0).abs() <= 0.01;
            assert!(
                close || !figure.provenance.note.is_empty(),
                "{name} {}",
                figure.quantity
            );
        }
    }
    Ok(())
}

#[test]
fn vector_rates_and_ridge_points_are_those_of_the_paper() -> Result<(), ConfigError> {
    // Accelerator table of the SLA paper, per chip; v6e with the paper's bandwidth, v7x at its boost clock.
    // The paper's vector rates of v4 and v5p fit no other source and are not compared.
    let overrides = |name: &str| match name {
        "tpu-v6e" => vec!["hbm.bandwidth=1600 GB/s"],
        "tpu-v7x" => vec!["hw.hbm.bandwidth=7373 GB/s", "hw.clock.default=boost"],
        _ => Vec::new(),
    };
    for (name, ridge) in [
        ("h100-sxm", 295.0),
        ("tpu-v4", 229.0),
        ("tpu-v5p", 166.0),
        ("tpu-v6e", 574.0),
        ("tpu-v7x", 313.0),
    ] {
        let (chip, _) = load_with(name, &overrides(name))?;
        let derived = chip.ridge_point(Dtype::Bf16).unwrap_or(0.0);
        assert!((derived - ridge).abs() < 1.0, "{name}: {derived} against {ridge}");
    }
    let v6e = load("tpu-v6e")?.0;
    assert_relative_eq!(
        v6e.vector_flops_per_second().get(),
        7.2e12,
        max_relative = DATASHEET
    );
    let v7x = load("tpu-v7x")?.0.with_clock("boost")?.with_cores(2)?;
    assert_relative_eq!(
        v7x.vector_flops_per_second().get(),
        18.0e12,
        max_relative = DATASHEET
    );
    let h100 = load("h100-sxm")?.0.with_clock("boost")?;
    assert_relative_eq!(
        h100.vector_flops_per_second().get(),
        67.0e12,
        max_relative = DATASHEET
    );
    Ok(())
}

#[test]
fn a_device_is_its_share_of_the_chip() -> Result<(), ConfigError> {
    let v7x = load("tpu-v7x")?.0;
    assert_relative_eq!(v7x.hbm_bandwidth_per_device().get(), 3690e9, max_relative = 1e-12);
    // What the file assumes, before the calibration.
    assert_relative_eq!(
        load_uncalibrated("tpu-v7x")?
            .achievable_hbm_bandwidth_per_device()
            .get(),
        0.85 * 3690e9,
        max_relative = 1e-12
    );
    assert_relative_eq!(
        v7x.on_chip_per_device().get(),
        64.0 * 1_048_576.0,
        max_relative = 1e-12
    );
    assert_eq!(
        v7x.ridge_point(Dtype::Bf16),
        v7x.with_cores(2)?.ridge_point(Dtype::Bf16)
    );
    let v4 = load("tpu-v4")?.0;
    assert_relative_eq!(v4.hbm_bandwidth_per_device().get(), 1200e9, max_relative = 1e-12);
    assert_relative_eq!(
        v4.on_chip_per_device().get(),
        32.0 * 1_048_576.0,
        max_relative = 1e-12
    );
    // One core, 128 lanes x 8 sublanes, 1 slot, 1.05 GHz.
    assert_relative_eq!(
        v4.with_cores(1)?.transcendentals_per_second().get(),
        1024.0 * 1.05e9,
        max_relative = 1e-12
    );
    assert_eq!(v4.matrix_to_vector_ratio(), Some(64.0));
    assert!(v4.with_cores(3).is_err() && v4.with_cores(0).is_err());
    Ok(())
}

#[test]
fn formats_without_a_native_rate_have_none() -> Result<(), ConfigError> {
    let v7x = load("tpu-v7x")?.0;
    assert_eq!(v7x.matrix_flops_per_second(Dtype::F32), None);
    assert_eq!(v7x.matrix_flops_per_second(Dtype::Int8), None);
    assert_eq!(v7x.rows_per_cycle(Dtype::F16), Some(2.0));
    assert_eq!(load("tpu-v4")?.0.rows_per_cycle(Dtype::Fp8E5m2), None);
    Ok(())
}

#[test]
fn sources_of_fields_differ_from_their_block() -> Result<(), ConfigError> {
    let (chip, _) = load_with("tpu-v7x", &["vector_unit.slots.alu=8", "matrix_unit.rows=128"])?;
    let vector = &chip.vector_unit.provenance;
    assert_eq!(vector.of("slots.alu").kind, Kind::Assumed);
    assert_eq!(vector.of("slots.alu").source, "--set vector_unit.slots.alu=8");
    assert_eq!(vector.of("slots.load").kind, Kind::Published);
    assert_eq!(vector.of("registers").kind, Kind::Assumed);
    assert_eq!(chip.matrix_unit.provenance.of("rows").kind, Kind::Assumed);
    assert_eq!(chip.matrix_unit.provenance.of("columns").kind, Kind::Published);
    assert_eq!(load("h200-sxm")?.0.hbm.achievable_provenance.kind, Kind::Measured);
    Ok(())
}

#[test]
fn unknown_names_list_what_there_is() {
    let message = |result: Result<(Chip, Document), ConfigError>| {
        result.map_or_else(|error| error.to_string(), |(chip, _)| chip.name)
    };
    assert_eq!(
        message(load("tpu-v7")),
        "unknown hardware `tpu-v7`; did you mean `tpu-v7x`? shipped: `tpu-v4`, `tpu-v5e`, `tpu-v5p`, \
         `tpu-v6e`, `tpu-v7x`, `tpu-8i`, `tpu-8t`, `a100-sxm`, `h100-sxm`, `h200-sxm`, `h200-nvl`, \
         `b200`, `rtx-4090`; a path to a file ends in `.yaml`"
    );
    assert_eq!(
        message(load("nowhere/tpu-v4.yaml")),
        "nowhere/tpu-v4.yaml: no such file"
    );
    assert_eq!(message(load("tpu-v4.yml")), "tpu-v4.yml: no such file");
    let state = load("tpu-v7x").and_then(|(chip, _)| chip.with_clock("bost"));
    assert_eq!(
        state.map_or_else(|error| error.to_string(), |chip| chip.name),
        "`tpu-v7x` has no clock state `bost`; did you mean `boost`? it has: `default`, `boost`"
    );
}

#[test]
fn the_template_is_a_valid_file() -> Result<(), ConfigError> {
    let chip = resolve::resolve("mine", &Document::parse("mine.yaml", TEMPLATE)?)?;
    assert_eq!(chip.clock.name, "default");
    for figure in &chip.published {
        let derived = chip.derived(figure).map_or(0.0, FlopsPerSecond::get);
        assert_relative_eq!(derived, figure.value.get(), max_relative = 0.01);
    }
    Ok(())
}

/// The first line of each complaint about the template with one text replaced.
fn after(from: &str, to: &str) -> Vec<String> {
    assert!(TEMPLATE.contains(from), "{from}");
    let text = TEMPLATE.replacen(from, to, 1);
    let result = Document::parse("x.yaml", &text).and_then(|document| resolve::resolve("x", &document));
    match result {
        Ok(_) => Vec::new(),
        Err(error) => error
            .problems()
            .iter()
            .map(|p| format!("{}: {}", p.location, p.message))
            .collect(),
    }
}

/// The clock block of the template.
const CLOCK: &str = concat!(
    "clock:\n",
    "  default: default # the state used unless another is asked for\n",
    "  states:\n",
    "    default: { frequency: 1.5 GHz, kind: assumed, source: example }\n",
    "    boost: { frequency: 1.75 GHz, kind: assumed, source: example }\n",
);

/// Text of the template, what stands in its place, and the complaint.
const MISTAKES: &[(&str, &str, &str)] = &[
    (
        "  bandwidth: 1600",
        "  bandwidht: 1600",
        "x.yaml:59:3: hbm: unknown key `bandwidht`; did you mean `bandwidth`? valid keys: `capacity`, \
        `bandwidth`, `achievable`, `kind`, `source`, `note`, `except`",
    ),
    (CLOCK, "", "x.yaml:15:1: missing key `clock`"),
    (
        "1600 GB/s",
        "1600 GHz",
        "x.yaml:59:14: hbm.bandwidth: unit `GHz` is not a unit of bandwidth; expected one such as `819 \
        GB/s`",
    ),
    (
        "1600 GB/s",
        "1600",
        "x.yaml:59:14: hbm.bandwidth: bare number `1600`; write it with a unit, such as `1600 GB/s`",
    ),
    (
        "1600 GB/s",
        "0 GB/s",
        "x.yaml:59:14: hbm.bandwidth: bandwidth `0 GB/s` is not positive; expected more than zero, such \
        as `819 GB/s`",
    ),
    (
        "  rows: 128",
        "\trows: 128",
        "x.yaml:32:1: tab in the indentation; YAML allows only blanks there",
    ),
    (
        "  rows: 128",
        "  rows: 0",
        "x.yaml:32:9: matrix_unit.rows: expected more than zero, found `0`",
    ),
    (
        "alu: 4",
        "alu: 0",
        "x.yaml:43:17: vector_unit.slots.alu: expected more than zero, found `0`",
    ),
    (
        "bf16: 1,",
        "bf16: -1,",
        "x.yaml:34:27: matrix_unit.rows_per_cycle.bf16: expected more than zero, found `-1`",
    ),
    (
        "{ bf16: 1, int8: 2 }",
        "{}",
        "x.yaml:34:3: matrix_unit.rows_per_cycle: expected a rate for at least one number format, such as \
        `{ bf16: 1 }`, found none",
    ),
    (
        "achievable: 0.85",
        "achievable: 85",
        "x.yaml:60:15: hbm.achievable: expected a share above 0 and at most 1, such as `0.85`, found `85`",
    ),
    (
        "per_device: 1",
        "per_device: 3",
        "x.yaml:20:15: cores.per_device: expected at most the 2 cores of the chip, found `3`",
    ),
    (
        "default: default",
        "default: turbo",
        "x.yaml:25:12: clock.default: unknown clock state `turbo`; states: `boost`, `default`",
    ),
    (
        "clock: boost",
        "clock: bosst",
        "x.yaml:82:57: published.0.clock: unknown clock state `bosst`; did you mean `boost`? states: \
        `boost`, `default`",
    ),
    (
        "matrix.bf16",
        "matrix.bf61",
        "x.yaml:82:17: published.0.quantity: unknown number format `bf61`; did you mean `bf16`? formats: \
        `f64`, `f32`, `bf16`, `f16`, `fp8_e4m3`, `fp8_e5m2`, `int8`",
    ),
    (
        "kind: assumed",
        "kind: guessed",
        "x.yaml:21:9: cores.kind: unknown name `guessed`; valid names: `measured`, `fitted`, `published`, \
        `derived`, `assumed`",
    ),
    (
        "  source: example\n",
        "",
        "x.yaml:18:1: cores: missing key `source`",
    ),
    (
        "source: example\n",
        "source: \"\"\n",
        "x.yaml:22:11: cores.source: expected where the numbers come from, found nothing",
    ),
    (
        "    slots.transcendental:",
        "    slots.transcendent:",
        "x.yaml:48:5: vector_unit.except.slots.transcendent: unknown field `slots.transcendent`; did you \
        mean `slots.transcendental`? the block has: `lanes`, `sublanes`, `registers`, `slots`, \
        `flops_per_alu_op`, `slots.alu`, `slots.transcendental`, `slots.cross_lane`, `slots.load`, \
        `slots.store`",
    ),
    (
        "architecture: tpu",
        "architecture: tpuu",
        "x.yaml:16:15: architecture: unknown name `tpuu`; did you mean `tpu`? valid names: `tpu`, `gpu`",
    ),
];

#[test]
fn bad_files_are_refused_at_the_spot() {
    for (from, to, expected) in MISTAKES {
        assert_eq!(after(from, to), [*expected], "{from} -> {to}");
    }
}

#[test]
fn several_bad_values_are_reported_together() {
    let text = "matrix_unit.rows=0|vector_unit.lanes=0|hbm.achievable=0"
        .split('|')
        .collect::<Vec<_>>();
    let error = load_with("tpu-v4", &text).map_or_else(|error| error.render(), |(chip, _)| chip.name);
    assert_eq!(
        error,
        "error: --set matrix_unit.rows=0: matrix_unit.rows: expected more than zero, found `0`\n\
         error: --set vector_unit.lanes=0: vector_unit.lanes: expected more than zero, found `0`\n\
         error: --set hbm.achievable=0: hbm.achievable: expected a share above 0 and at most 1, such as \
         `0.85`, found `0`"
    );
}

#[test]
fn hardware_files_and_their_schema_agree() -> Result<(), Box<dyn std::error::Error>> {
    use crate::schema::agreement::{Reader, disagreements, other_names};
    let reader = Reader {
        kind: crate::schema::Kind::Hardware,
        well_formed: |document| document.deserialize::<file::ChipFile>().map(|_| ()),
        accepts: |document| resolve::resolve("changed", document).is_ok(),
    };
    // The template with what is a comment in it.
    let whole = TEMPLATE
        .replace("# cache:", "cache:")
        .replace("# interconnect:", "interconnect:");
    let (complaints, tried) = disagreements(&reader, &whole)?;
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    assert!(tried > 500, "only {tried}");
    let (complaints, compared) = other_names(&reader, &whole)?;
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    // Thirteen blocks, their kinds and those of an exception, the architecture.
    assert!(compared > 25, "only {compared}");
    Ok(())
}

/// The scaling book (jax-ml.github.io/scaling-book) gives VMEM of TPU v5e about 22 times the bandwidth of its HBM.
#[test]
fn on_chip_memory_is_as_fast_as_published() -> Result<(), ConfigError> {
    let (v5e, _) = load("tpu-v5e")?;
    let times = v5e.on_chip_bandwidth_per_device() / v5e.hbm_bandwidth_per_device();
    assert!((21.5..22.8).contains(&times), "{times}");
    // 32 banks of 4 bytes per multiprocessor and cycle: CUDA C++ Programming Guide, shared memory.
    let (h100, _) = load("h100-sxm")?;
    let per_cycle = h100.on_chip_bandwidth_per_device().get() / h100.clock().get();
    assert!((per_cycle / f64::from(h100.cores_per_device) - 128.0).abs() < 1e-9);
    Ok(())
}
