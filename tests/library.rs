//! Single kernels and library calls: nothing beats its roof, nothing gets cheaper by growing or on less hardware, and what is not known is said.

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::RngSeed;
use tpusim::hardware::{self, Architecture, Calibration, Chip};
use tpusim::measurements::{self, Row};
use tpusim::study::predict::{self, Prediction};

/// Rounding of sums of a few terms.
const ROUNDING: f64 = 1e-9;

fn row(device: &str, op: &str, params: &str, dtype: &str) -> Row {
    Row {
        line: 2,
        device: device.to_owned(),
        cores: None,
        op: op.to_owned(),
        params: params.to_owned(),
        dtype: dtype.to_owned(),
        timing: String::new(),
        latency_us: None,
        source: String::new(),
        cells: Vec::new(),
    }
}

fn chip(name: &str, fields: &[&str]) -> Chip {
    hardware::load_with(name, fields).expect("a shipped chip").0
}

fn timed(chip: &Chip, op: &str, params: &str, dtype: &str) -> Prediction {
    predict::case(&row(&chip.name, op, params, dtype), chip)
        .unwrap_or_else(|reason| panic!("{op} {params}: {reason}"))
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 96,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(17),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    /// `2 m k n` FLOPs never take less than the published matrix rate of the fastest clock state allows, nor the operands less than the published bandwidth.
    #[test]
    fn products_stay_below_their_roofs(
        name in select(hardware::shipped()),
        batch in select(vec![1_u64, 3, 64]),
        m in 1..5000_u64,
        k in 1..5000_u64,
        n in 1..5000_u64,
    ) {
        let chip = chip(name, &[]);
        let (op, params) = if batch == 1 {
            ("matmul", format!("m={m};k={k};n={n}"))
        } else {
            ("bmm", format!("batch={batch};m={m};k={k};n={n}"))
        };
        let seconds = timed(&chip, op, &params, "bf16").predicted_us * 1e-6;
        let flops = 2.0 * (batch * m) as f64 * (k * n) as f64;
        let fastest = chip
            .clock_states
            .iter()
            .map(|state| state.frequency.get())
            .fold(0.0, f64::max);
        let peak = chip.matrix_flops_per_second(tpusim::dtype::Dtype::Bf16).expect("a bf16 rate").get() / chip.clock().get() * fastest;
        prop_assert!(flops / seconds <= peak * (1.0 + ROUNDING), "{} of {peak} FLOP/s", flops / seconds);
        let bytes = 2.0 * (batch * (m * k + k * n + m * n)) as f64;
        prop_assert!(bytes / seconds <= chip.hbm_bandwidth_per_device().get() * (1.0 + ROUNDING));
    }

    /// Copies and sums move no more than the published bandwidth, whatever their size.
    #[test]
    fn streams_stay_below_the_bandwidth(
        name in select(hardware::shipped()),
        op in select(vec![("copy", 2.0), ("add", 3.0), ("silu", 2.0)]),
        dtype in select(vec![("bf16", 2.0), ("f32", 4.0)]),
        n in 1..200_000_000_u64,
    ) {
        let chip = chip(name, &[]);
        let seconds = timed(&chip, op.0, &format!("n={n}"), dtype.0).predicted_us * 1e-6;
        let bytes = op.1 * dtype.1 * n as f64;
        prop_assert!(bytes / seconds <= chip.hbm_bandwidth_per_device().get() * (1.0 + ROUNDING));
    }

    /// More elements never stream faster.
    #[test]
    fn streams_never_get_cheaper_by_growing(
        name in select(hardware::shipped()),
        n in 1..50_000_000_u64,
        more in 1..50_000_000_u64,
    ) {
        let chip = chip(name, &[]);
        let few = timed(&chip, "add", &format!("n={n}"), "bf16").predicted_us;
        let many = timed(&chip, "add", &format!("n={}", n + more), "bf16").predicted_us;
        prop_assert!(many >= few * (1.0 - ROUNDING), "{n}: {few} us, {}: {many} us", n + more);
    }

    /// More sequences, heads or tokens never take less time. Doubled, so that they are cut as before.
    #[test]
    fn doubled_calls_never_get_cheaper(
        name in select(vec!["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x"]),
        call in select(vec![
            ("flash_attention", "B=@;Tq=2048;Tk=2048;Hq=8;Hkv=8;D=128;Dv=128;causal=1;block_q=1024;block_kv=1024"),
            ("flash_attention", "B=2;Tq=2048;Tk=2048;Hq=@;Hkv=@;D=128;Dv=128;causal=0;block_q=512;block_kv=1024"),
            ("attention_xla", "B=@;Tq=1024;Tk=1024;Hq=8;Hkv=8;D=128;Dv=128;causal=1"),
            ("chunked_attention", "B=@;Tq=2048;Tk=2048;Hq=8;Hkv=8;D=128;Dv=128;causal=0"),
            ("ragged_dot", "m=@;k=1024;n=1024;groups=8;tile_m=128;tile_k=1024;tile_n=512"),
            ("gated_linear_unit", "m=@;k=768;n=1536;x=@x768;act=silu"),
            ("linear_cross_entropy", "tokens=@;d=2048;vocab=32768;reduction=mean;b_block_size=1024;h_block_size=2048;v_block_size=512"),
            ("kda_chunk", "B=1;T=@;H=8;K=128;V=128"),
            ("gdn_decode", "B=@;T=1;H=8;K=128;V=128"),
            ("gdn_fused", "tokens=@;seqs=1;Hk=2;Hv=8;dk=128;dv=128;conv=4"),
        ]),
        power in 4..11_u32,
    ) {
        let chip = chip(name, &[]);
        let at = |size: u64| timed(&chip, call.0, &call.1.replace('@', &size.to_string()), "bf16").predicted_us;
        let size = 1_u64 << power;
        let (few, many) = (at(size), at(2 * size));
        prop_assert!(many >= few * (1.0 - ROUNDING), "{} {size}: {few} us, twice: {many} us", call.0);
    }

    /// A slower chip never takes less time.
    #[test]
    fn less_hardware_never_helps(
        name in select(vec!["tpu-v5p", "tpu-v6e", "tpu-v7x"]),
        call in select(vec![
            ("flash_attention", "B=2;Tq=2048;Tk=2048;Hq=8;Hkv=8;D=128;Dv=128;causal=1;block_q=1024;block_kv=1024;block_kv_compute=512"),
            ("ragged_dot", "m=16384;k=1024;n=2048;groups=8;tile_m=128;tile_k=1024;tile_n=512"),
            ("linear_cross_entropy", "tokens=4096;d=2048;vocab=32768;reduction=mean;b_block_size=1024;h_block_size=2048;v_block_size=512"),
            ("kda_chunk", "B=1;T=4096;H=8;K=128;V=128"),
            ("gdn_decode", "B=64;T=1;H=8;K=128;V=128"),
            ("softmax", "rows=8192;cols=4096"),
        ]),
        weaker in select(vec![
            "hbm.bandwidth=400 GB/s",
            "vector_unit.slots.alu=1",
            "vector_unit.slots.transcendental=0.25",
            "latency.matrix_result_cycles=900",
            "launch.time=20 us",
        ]),
    ) {
        let whole = timed(&chip(name, &[]), call.0, call.1, "bf16").predicted_us;
        let part = timed(&chip(name, &[weaker]), call.0, call.1, "bf16").predicted_us;
        prop_assert!(part >= whole * (1.0 - ROUNDING), "{}: {whole} us, with {weaker} {part} us", call.0);
    }
}

/// Every case of the shipped measurements can be timed, but for the backward passes of the mechanisms.
#[test]
fn every_measured_operation_is_known() {
    for table in tpusim::calibration::data::shipped().expect("well-formed files") {
        for (row, result) in table.rows.iter().zip(predict::predict(
            &table,
            &predict::ChipFiles::default(),
            &Calibration::empty(),
        )) {
            if let Err(reason) = result {
                assert!(row.op.ends_with("_bwd"), "{}:{}: {reason}", table.name, row.line);
            }
        }
    }
}

#[test]
fn what_is_not_known_is_said_with_the_nearest_name() {
    let chip = chip("tpu-v6e", &[]);
    let reason = |op: &str, params: &str, dtype: &str| {
        predict::case(&row("tpu-v6e", op, params, dtype), &chip).expect_err("not a case")
    };
    assert!(reason("matmull", "m=8;k=8;n=8", "bf16").contains("did you mean `matmul`"));
    assert!(reason("matmul", "m=8;k=8", "bf16").contains("needs the parameter `n`"));
    assert!(reason("matmul", "m=8;k=8;n=8;q=1", "bf16").contains("does not know the parameter `q`"));
    assert!(
        reason("matmul", "m=8;k=8;n=0", "bf16")
            .contains("`n`: expected a whole number of at least 1, found `0`")
    );
    assert!(reason("matmul", "m=8;k=8;n=8", "bf17").contains("unknown dtype `bf17`"));
    assert!(reason("matmul", "m", "bf16").contains("found `m`"));
    assert!(reason("matmul", "m=99999999999;k=99999999999;n=8", "bf16").contains("too large"));
    assert!(
        reason(
            "attention_cudnn",
            "B=1;Tq=64;Tk=64;Hq=1;Hkv=1;D=64;Dv=64;causal=1",
            "bf16"
        )
        .contains("GPUs only")
    );
    assert!(reason("matmul", "m=8;k=8;n=8;clock=turbo", "bf16").contains("turbo"));
}

/// Several small kernels around a measured one, and a clock state, are part of the case and not of a coefficient.
#[test]
fn a_faster_clock_state_is_faster() {
    let chip = chip("tpu-v7x", &[]);
    let usual = timed(&chip, "matmul", "m=8192;k=8192;n=8192", "bf16").predicted_us;
    let boosted = timed(&chip, "matmul", "m=8192;k=8192;n=8192;clock=boost", "bf16").predicted_us;
    // By default the chip throttles; in the state that a case asks for it does not.
    let clocks = chip.with_clock("boost").expect("a state").clock().get()
        / (chip.clock().get() * chip.sustained_clock);
    // Bound by the arrays, so nearly in proportion.
    assert!(
        (usual / boosted / clocks - 1.0).abs() < 0.02,
        "{usual} {boosted} {clocks}"
    );
}

/// A malformed file is refused as a whole, with its line.
#[test]
fn a_malformed_file_is_located() {
    let error = measurements::parse(
        "cases.csv",
        b"device,op,params,dtype,latency_us\ntpu-v4,add,n=8,f32,fast\n",
    )
    .expect_err("no number");
    assert_eq!(
        error.to_string(),
        "cases.csv:2: `latency_us`: expected microseconds above zero or nothing, found `fast`"
    );
}

/// A two-core chip whose kernel uses one core takes twice the time of the matrix work.
#[test]
fn grouped_products_use_one_core_of_two() {
    let chip = chip("tpu-v5p", &[]);
    assert_eq!((chip.architecture, chip.cores_per_device), (Architecture::Tpu, 2));
    let params = "m=262144;k=4096;n=1536;groups=128;tile_m=128;tile_k=4096;tile_n=768";
    let seconds = timed(&chip, "ragged_dot", params, "bf16").predicted_us * 1e-6;
    let flops = 2.0 * 262_144.0 * 4096.0 * 1536.0;
    let peak = chip
        .matrix_flops_per_second(tpusim::dtype::Dtype::Bf16)
        .expect("a bf16 rate")
        .get();
    assert!(flops / seconds < 0.5 * peak, "{}", flops / seconds / peak);
}

/// A step of chunked attention of 512 queries and 1024 keys on a device of two cores: the logits in f32 once out and twice in, the accumulator six times (product out; read and
/// written by the rescaling; both read and the sum written), the operands once; after the loop the accumulator in and the output out.
#[test]
fn chunked_attention_moves_its_logits_three_times() {
    let chip = chip("tpu-v5p", &[]);
    let (heads, tokens, width) = (16_u64, 4096_u64, 128_u64);
    let params = format!("B=1;Tq={tokens};Tk={tokens};Hq={heads};Hkv={heads};D={width};Dv={width};causal=0");
    let prediction = timed(&chip, "chunked_attention", &params, "bf16");
    let moved = |label: &str| -> u64 {
        let of = prediction.launches.iter().filter(|launch| launch.label == label);
        of.map(|launch| launch.times * launch.hbm_bytes).sum()
    };
    let steps = (tokens / 512) * (tokens / 1024);
    let accumulator = heads * 512 * width * 4;
    // Two statistics of a row, in f32.
    let statistics = heads * 512 * 8;
    assert_eq!(moved("statistics"), steps * (heads * 512 * 1024 * 4 + statistics));
    let output = heads * tokens * width * (4 + 2);
    assert_eq!(moved("accumulate"), steps * 5 * accumulator + output);
    let products = moved("logits") + moved("output");
    assert!(products >= steps * (2 * heads * 512 * 1024 * 4 + accumulator));
}

/// What stays on chip costs no traffic: 67 MB of logits fit into v6e beside what XLA leaves to operations, and no intermediate stays on a device of two cores.
#[test]
fn logits_stay_on_chip_where_they_fit() {
    let params = "B=2;Tq=8192;Tk=8192;Hq=16;Hkv=16;D=128;Dv=128;causal=0";
    let statistics = |name: &str| {
        let prediction = timed(&chip(name, &[]), "chunked_attention", params, "bf16");
        let found = prediction
            .launches
            .iter()
            .find(|launch| launch.label == "statistics");
        found.expect("statistics").hbm_bytes
    };
    let logits = 2 * 16 * 512 * 1024 * 4;
    let sums = 2 * 16 * 512 * 8;
    assert_eq!(statistics("tpu-v6e"), sums);
    assert_eq!(statistics("tpu-v7x"), logits + sums);
    assert_eq!(statistics("tpu-v5p"), logits + sums);
}

/// Kernels of flash-linear-attention keep the states of chunks in bf16 and their chunk matrices in f32, whether or not the two have as many elements: with 64 channels and chunks
/// of 64 they do.
#[test]
fn states_of_chunks_are_told_from_chunk_matrices() {
    let chip = chip("h200-sxm", &[]);
    let (tokens, heads, channels, chunk) = (8192_u64, 16_u64, 64_u64, 64_u64);
    let params = format!("B=1;T={tokens};H={heads};K={channels};V={channels}");
    let (launches, _) = predict::launches(&row("h200-sxm", "gdn_chunk", &params, "bf16"), &chip)
        .unwrap_or_else(|reason| panic!("{params}: {reason}"));
    let states = tokens / chunk * heads * channels * channels;
    let moved = |label: &str, writes: bool| {
        let kernel = &launches
            .iter()
            .find(|launch| launch.kernel.label == label)
            .unwrap_or_else(|| panic!("a kernel `{label}`"))
            .kernel;
        let transfers = if writes { &kernel.writes } else { &kernel.reads };
        transfers
            .iter()
            .map(|transfer| (transfer.name.clone(), transfer.bytes))
            .collect::<Vec<_>>()
    };
    assert!(
        moved("op6", true).contains(&("S".into(), 2 * states)),
        "{:?}",
        moved("op6", true)
    );
    assert!(moved("op7a", false).contains(&("S".into(), 2 * states)));
    let matrix = tokens * heads * chunk;
    assert!(
        moved("op7a", true).contains(&("A".into(), 4 * matrix)),
        "{:?}",
        moved("op7a", true)
    );
}
