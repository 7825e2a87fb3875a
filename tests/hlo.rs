//! HLO text: operations and bytes of programs whose counts are known by construction, or from XLA's cost analysis.

use tpusim::dump::hlo::Module;
use tpusim::hardware;
use tpusim::hlo::{HloProgram, program};
use tpusim::report::result::Bound;
use tpusim::study::hlo::{counts, time};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn read(text: &str) -> Result<HloProgram, Box<dyn std::error::Error>> {
    Ok(program(&Module::read("text", text.as_bytes())?))
}

const RECURRENT_GDN: &str = include_str!("fixtures/hlo/recurrent_gdn.txt");

/// XLA counts the body of a loop once, so that its figure does not depend on the number of tokens; of these
/// 525314 flops two are the counter of the loop.
#[test]
fn operations_of_a_loop_grow_with_its_trips() -> Outcome {
    let flops = |tokens: &str| -> Result<(f64, f64), Box<dyn std::error::Error>> {
        let found = read(&RECURRENT_GDN.replace("2048", tokens))?;
        assert!(
            !found
                .warnings
                .iter()
                .any(|warning| warning.contains("trip count")),
            "{:?}",
            found.warnings
        );
        let (executed, once) = counts(&found);
        Ok((executed.flops(), once.flops()))
    };
    let xla = 525_314.0;
    for (tokens, trips) in [("256", 256.0), ("2048", 2048.0), ("4096", 4096.0)] {
        let (executed, once) = flops(tokens)?;
        assert!((once - (xla - 2.0)).abs() < 0.5, "{once}");
        assert!((executed - trips * once).abs() < 0.5, "{executed}");
    }
    // Three products of a state of 128 x 128 with or into a vector, its decay and its update.
    let (executed, _) = flops("2048")?;
    let leading = 2048.0 * 4.0 * 128.0 * 128.0;
    assert!((executed / leading - 8.0).abs() < 0.02, "{}", executed / leading);
    Ok(())
}

const FUSED: &str = r#"HloModule fused, is_scheduled=true

%inner (a: bf16[256,512], b: bf16[512,1024]) -> bf16[256,1024] {
  %a = bf16[256,512]{1,0} parameter(0)
  %b = bf16[512,1024]{1,0} parameter(1)
  %d = f32[256,1024]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %t = f32[256,1024]{1,0} tanh(%d)
  ROOT %c = bf16[256,1024]{1,0} convert(%t)
}

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

ENTRY %main (p: bf16[256,512], q: bf16[512,1024], r: f32[64,128]) -> (bf16[256,1024], f32[64], f32[1,128]) {
  %p = bf16[256,512]{1,0} parameter(0)
  %q = bf16[512,1024]{1,0} parameter(1)
  %r = f32[64,128]{1,0} parameter(2)
  %zero = f32[] constant(0)
  %at = s32[] constant(3)
  %o = s32[] constant(0)
  %f = bf16[256,1024]{1,0} fusion(%p, %q), kind=kOutput, calls=%inner
  %s = f32[64]{0} reduce(%r, %zero), dimensions={1}, to_apply=%sum
  %l = f32[1,128]{1,0} dynamic-slice(%r, %at, %o), dynamic_slice_sizes={1,128}
  %k = f32[64,128]{1,0} custom-call(%r), custom_call_target="somewhere"
  ROOT %out = (bf16[256,1024]{1,0}, f32[64]{0}, f32[1,128]{1,0}) tuple(%f, %s, %l)
}
"#;

#[test]
fn kernels_count_what_they_hold_and_move_what_they_take() -> Outcome {
    let found = read(FUSED)?;
    let names: Vec<&str> = found.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
    assert_eq!(names, ["f", "s", "l", "k"]);
    let [product, sum, slice, call] = found.kernels.as_slice() else {
        return Err("expected four kernels".into());
    };
    assert!((product.matrix_flops() - 2.0 * 256.0 * 512.0 * 1024.0).abs() < 0.5);
    // One conversion and one tanh per element.
    assert!((product.fused.vector_ops - 256.0 * 1024.0).abs() < 0.5);
    assert!((product.fused.transcendentals - 256.0 * 1024.0).abs() < 0.5);
    let moved = [(256 * 512 + 512 * 1024) * 2, 256 * 1024 * 2].map(f64::from);
    assert_eq!(product.fused.bytes.map(f64::to_bits), moved.map(f64::to_bits));
    // 127 additions a row.
    assert!((sum.fused.vector_ops - 64.0 * 127.0).abs() < 0.5);
    // A slice reads what it takes.
    assert!((slice.bytes() - 2.0 * 128.0 * 4.0).abs() < 0.5);
    assert!(call.opaque && (call.bytes() - 2.0 * 64.0 * 128.0 * 4.0).abs() < 0.5);
    assert!(
        found
            .warnings
            .iter()
            .any(|warning| warning.contains("custom call, `somewhere`"))
    );
    Ok(())
}

/// An array in on-chip memory costs no traffic but the copy that brought it there.
#[test]
fn what_lies_on_chip_moves_once() -> Outcome {
    let found = read(
        r"HloModule prefetch, is_scheduled=true

ENTRY %main (x: f32[1024,1024]) -> f32[1024,1024] {
  %x = f32[1024,1024]{1,0} parameter(0)
  %s = (f32[1024,1024]{1,0:S(1)}, f32[1024,1024]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %d = f32[1024,1024]{1,0:S(1)} copy-done(%s)
  %e = f32[1024,1024]{1,0:S(1)} exponential(%d)
  ROOT %n = f32[1024,1024]{1,0} negate(%e)
}
",
    )?;
    let array = 4.0 * 1024.0 * 1024.0;
    let moved: Vec<f64> = found.kernels.iter().map(tpusim::hlo::HloKernel::bytes).collect();
    assert_eq!(moved.len(), 2);
    assert!(moved.iter().all(|bytes| (bytes - array).abs() < 0.5), "{moved:?}");
    Ok(())
}

/// Texts that no compiler writes end in an answer or an error.
#[test]
fn odd_texts_do_no_harm() -> Outcome {
    let (chip, _) = hardware::load("tpu-v6e")?;
    let calibration = hardware::shipped_calibration();
    let within = |body: &str| {
        format!(
            "HloModule odd, is_scheduled=true\n\n%self (a: f32[8]) -> f32[8] {{\n  %a = f32[8]{{0}} parameter(0)\n  ROOT %f = f32[8]{{0}} fusion(%a), kind=kLoop, calls=%self\n}}\n\nENTRY %main {{\n  %x = f32[8]{{0}} parameter(0)\n{body}\n}}\n"
        )
    };
    for body in [
        "  ROOT %f = f32[8]{0} fusion(%x), kind=kLoop, calls=%self",
        "  ROOT %c = f32[8]{0} call(%x), to_apply=%self",
        "  %e = f32[0,8]{1,0} parameter(1)\n  ROOT %d = f32[0]{0} dot(%e, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "  ROOT %d = f32[8]{0} dot(%x, %missing), lhs_contracting_dims={7}, rhs_contracting_dims={9}",
        "  ROOT %d = f32[8]{0} convolution(%x, %x), window={size=3}, dim_labels=b_io->",
    ] {
        let found = read(&within(body))?;
        let result = time(("text", "odd"), &found, &chip, calibration, None)?;
        assert!(result.time_us.is_finite(), "{body}");
    }
    let huge = "  %e = f32[4000000000,4000000000]{1,0} parameter(1)\n  ROOT %d = f32[4000000000,4000000000]{1,0} dot(%e, %e), lhs_contracting_dims={1}, rhs_contracting_dims={0}";
    let found = read(&within(huge))?;
    assert!(time(("text", "odd"), &found, &chip, calibration, None).is_err());
    Ok(())
}

/// Elementwise operations before optimisation are one kernel with what uses them.
#[test]
fn a_chain_before_optimisation_is_one_kernel() -> Outcome {
    let found = read(
        r"HloModule chain

ENTRY main {
  x = f32[1024,1024]{1,0} parameter(0)
  e = f32[1024,1024]{1,0} exponential(x)
  a = f32[1024,1024]{1,0} add(e, x)
  ROOT m = f32[1024,1024]{1,0} multiply(a, e)
}
",
    )?;
    let [kernel] = found.kernels.as_slice() else {
        return Err(format!("{:?}", found.kernels).into());
    };
    let elements = 1024.0 * 1024.0;
    assert!((kernel.fused.vector_ops - 2.0 * elements).abs() < 0.5);
    assert!((kernel.fused.transcendentals - elements).abs() < 0.5);
    assert!((kernel.bytes() - 8.0 * elements).abs() < 0.5);
    Ok(())
}

/// No kernel is faster than its bytes at the published bandwidth or its products at the published peak.
#[test]
fn times_stay_above_the_roofs() -> Outcome {
    let found = read(FUSED)?;
    for name in ["tpu-v6e", "tpu-v7x", "h100-sxm"] {
        let (chip, _) = hardware::load(name)?;
        let calibration = hardware::shipped_calibration();
        let result = time(("text", "fused"), &found, &chip, calibration, None)?;
        let peak = chip
            .matrix_flops_per_second(tpusim::dtype::Dtype::Bf16)
            .map_or(0.0, tpusim::units::FlopsPerSecond::get);
        for row in &result.kernels {
            let least = (row.counts.bytes / chip.hbm_bandwidth_per_device().get())
                .max(row.counts.matrix_flops / peak)
                * 1e6;
            assert!(row.time_us >= least, "{name}: {row:?} under {least}");
        }
        let share: f64 = result.kernels.iter().map(|row| row.share).sum();
        assert!((share - 1.0).abs() < 1e-9);
        assert!(result.by_bound_us.keys().all(|bound| Bound::ALL.contains(bound)));
        assert!(
            result
                .warnings
                .iter()
                .any(|warning| warning.contains("operations are unknown"))
        );
    }
    Ok(())
}
