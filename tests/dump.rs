//! Dumps of the TPU compiler: what is recovered from them against what their programs do by construction.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tpusim::dump::delays::Alignment;
use tpusim::dump::schedule::{LABEL, Schedule, read_lines};
use tpusim::dump::utilization::Utilization;
use tpusim::dump::{Analysis, Dump, DumpError, Generation, Machine, program_time};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dumps");
    folder.join(format!("{name}.tar.xz"))
}

/// A machine with round numbers; counts do not depend on it.
fn machine(generation: Generation, cores: u32) -> Machine {
    Machine {
        generation,
        clock_hz: 1e9,
        hbm_bytes_per_s: 1e12,
        hbm_achievable: 0.85,
        transfer_latency_s: 0.8e-6,
        launch_s: 0.1e-6,
        cores,
    }
}

fn analyse(dump: &Dump, machine: &Machine) -> Analysis {
    let calibration = tpusim::hardware::shipped_calibration();
    let constants = calibration.schedules.as_ref();
    tpusim::dump::analyse(
        dump,
        machine,
        constants.expect("the shipped calibration has them"),
    )
}

fn analysis(name: &str, cores: u32) -> Result<Analysis, DumpError> {
    let dump = Dump::read(&fixture(name), None, None)?;
    Ok(analyse(&dump, &machine(dump.generation, cores)))
}

/// Name and bytes.
type File = (String, Vec<u8>);

/// The files of an archive.
fn files(name: &str) -> Result<Vec<File>, Box<dyn std::error::Error>> {
    let stream = lzma_rust2::XzReader::new(fs::File::open(fixture(name))?, true);
    let mut archive = tar::Archive::new(stream);
    let mut found = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        if entry.header().entry_type().is_file() {
            let path = entry.path()?.into_owned();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes)?;
            found.push((
                path.file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned(),
                bytes,
            ));
        }
    }
    Ok(found)
}

fn unpack(name: &str, folder: &Path) -> Outcome {
    for (file, bytes) in files(name)? {
        fs::write(folder.join(file), bytes)?;
    }
    Ok(())
}

fn close(found: f64, expected: f64) -> bool {
    (found - expected).abs() <= 1e-9 * expected.abs()
}

/// 32 grid steps load a block of either operand, whose index changes at every step; 8 blocks are stored.
#[test]
fn a_blocked_matmul_moves_its_blocks() -> Outcome {
    let expected = f64::from(32 * (128 * 256 * 2) + 32 * (256 * 256 * 2) + 8 * (128 * 256 * 2));
    for (name, cores) in [("blocked_matmul_v6e", 1), ("blocked_matmul_v4", 2)] {
        let found = analysis(name, cores)?;
        let [kernel] = found.kernels.as_slice() else {
            return Err("expected one kernel".into());
        };
        assert!(
            close(kernel.hbm_bytes, expected),
            "{name}: {} bytes",
            kernel.hbm_bytes
        );
        assert_eq!((kernel.trips, kernel.transfers), (32, 72), "{name}");
        assert_eq!(kernel.alignment, Alignment::Exact, "{name}");
        assert!(
            found.undecided.is_empty() && found.checks.unknown_branches == 0,
            "{name}: {:?}",
            found.undecided
        );
        // Operands and result, each once.
        assert!(
            close(
                kernel.array_bytes,
                f64::from((512 * 1024 + 1024 * 512 + 512 * 512) * 2)
            ),
            "{name}"
        );
    }
    Ok(())
}

/// Each of 8 steps loads and stores a block of 256 rows.
#[test]
fn an_elementwise_kernel_moves_its_arrays_once() -> Outcome {
    let found = analysis("scale_rows_v5e", 1)?;
    let [kernel] = found.kernels.as_slice() else {
        return Err("expected one kernel".into());
    };
    assert!(close(found.hbm_bytes, f64::from(2 * 2048 * 512 * 4)));
    assert_eq!((kernel.trips, kernel.transfers), (8, 16));
    assert!(found.warnings.iter().any(|warning| warning.contains("tpu-v5e")));
    Ok(())
}

/// The grid and the blocks it stores come from run-time data: without them they are asked for by name.
#[test]
fn run_time_scalars_decide_the_grid() -> Outcome {
    let block = 128 * 256 * 4;
    let without = analysis("gather_blocks_v7x", 1)?;
    assert!(without.checks.unknown_branches > 0);
    let asked = without
        .undecided
        .iter()
        .find(|entry| entry.name == "gather_blocks.1");
    assert!(
        asked.is_some_and(|entry| entry.what.contains("operand 0, s32[]") && entry.share > 0.0),
        "{asked:?}"
    );

    let folder = tempfile::tempdir()?;
    let scalars = folder.path().join("scalars.json");
    for steps in [1, 5, 8] {
        fs::write(
            &scalars,
            format!(r#"{{"gather_blocks": {{"0": [{steps}], "1": [3, 3, 1, 0, 2, 7, 6, 5]}}}}"#),
        )?;
        let dump = Dump::read(&fixture("gather_blocks_v7x"), Some(&scalars), None)?;
        let found = analyse(&dump, &machine(dump.generation, 1));
        let [kernel] = found.kernels.as_slice() else {
            return Err("expected one kernel".into());
        };
        // The table was copied into on-chip memory before: only results are moved.
        assert!(
            close(kernel.hbm_bytes, f64::from(steps * block)),
            "{steps}: {}",
            kernel.hbm_bytes
        );
        assert_eq!(found.checks.unknown_branches, 0);
    }
    Ok(())
}

/// The trip count of the loop is in its condition, not in an annotation.
#[test]
fn kernels_of_a_loop_count_as_often_as_it_runs() -> Outcome {
    let found = analysis("loop_v6e", 1)?;
    let product = found.kernels.iter().find(|kernel| kernel.opcode == "fusion");
    assert_eq!(product.map(|kernel| kernel.count), Some(6.0));
    // Two operands come in, one result goes out.
    assert!(close(found.hbm_bytes, f64::from(3 * 256 * 256 * 2)));
    assert!(found.undecided.is_empty(), "{:?}", found.undecided);
    Ok(())
}

/// Two cores read the input once between them and write the result once.
#[test]
fn two_cores_share_a_normalization() -> Outcome {
    let found = analysis("normalization_v5p", 2)?;
    let array = f64::from(2048 * 1024 * 2);
    let moved: Vec<f64> = found
        .kernels
        .iter()
        .map(|kernel| kernel.hbm_bytes)
        .filter(|&bytes| bytes > 0.0)
        .collect();
    assert!(moved.iter().all(|&bytes| close(bytes, array)), "{moved:?}");
    assert!(
        found.checks.arrays_not_covered.is_empty(),
        "{:?}",
        found.checks.arrays_not_covered
    );
    Ok(())
}

/// Parts add up to the whole, and slots stay within their capacity.
#[test]
fn parts_add_up() -> Outcome {
    for (name, cores) in [
        ("blocked_matmul_v6e", 1),
        ("loop_v6e", 1),
        ("normalization_v5p", 2),
        ("blocked_matmul_v4", 2),
    ] {
        let found = analysis(name, cores)?;
        let parts = found.parts;
        let sum = parts.issue_us + parts.empty_us + parts.wait_us + parts.launch_us + parts.other_us;
        assert!(
            (sum - found.time_us).abs() < 1e-6 * found.time_us,
            "{name}: {sum} of {}",
            found.time_us
        );
        for slot in &found.slots {
            assert!((0.0..=1.0).contains(&slot.share), "{name}: {slot:?}");
        }
        assert!(found.low_us < found.time_us && found.time_us < found.high_us);
    }
    Ok(())
}

/// A faster memory cannot make a program slower, and with a free one only the schedule is left.
#[test]
fn a_free_memory_leaves_the_schedule() -> Outcome {
    let dump = Dump::read(&fixture("blocked_matmul_v6e"), None, None)?;
    let slow = machine(dump.generation, 1);
    let free = Machine {
        hbm_bytes_per_s: 1e30,
        transfer_latency_s: 0.0,
        launch_s: 0.0,
        ..slow
    };
    let (slow, free) = (analyse(&dump, &slow), analyse(&dump, &free));
    let kernel = &free.kernels[0];
    let schedule_us = (kernel.issue_cycles + kernel.empty_cycles) as f64 / 1e3;
    assert!(
        close(free.time_us, schedule_us),
        "{} of {schedule_us}",
        free.time_us
    );
    assert!(slow.time_us > free.time_us);
    assert_eq!(slow.kernels[0].issue_cycles, kernel.issue_cycles);
    Ok(())
}

/// Bundles 2, 3 and 6 of a schedule were folded away.
#[test]
fn folded_cycles_are_found_again() -> Outcome {
    let table = |rows: &[&str]| {
        let text = format!(
            "== CAPACTIY:\nMXU, VALU, VLOAD\n 2 4 3\n== UTILIZATION:\n{}\n",
            rows.join("\n")
        );
        Utilization::read("table", text.as_bytes())
    };
    // The column of the matrix unit goes on while it is busy and does not count.
    let before = table(&[
        "0 1 0", "1 0 1", "1 0 0", "1 0 0", "0 2 0", "0 0 1", "0 0 0", "0 3 0",
    ])?;
    let last = table(&["0 1 0", "1 0 1", "1 2 0", "0 0 1", "0 3 0"])?;
    let delays = tpusim::dump::delays::Delays::recover(&before, &last);
    assert_eq!(delays.after, [0, 2, 0, 1, 0]);
    assert_eq!(delays.alignment, Alignment::Exact);
    // The matrix unit was busy in rows 1 to 3, all of them bundle 1 and the empty cycles behind it; the final
    // table has it in bundles 1 and 2.
    assert_eq!(delays.busy, [0, 2, -1, 0, 0]);
    Ok(())
}

#[test]
fn what_is_wrong_is_located() -> Outcome {
    let folder = tempfile::tempdir()?;
    let message = |name: &str, change: fn(&mut Vec<u8>)| -> Result<String, Box<dyn std::error::Error>> {
        unpack("blocked_matmul_v6e", folder.path())?;
        let entry = fs::read_dir(folder.path())?
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .find(|path| path.to_string_lossy().ends_with(name));
        let path = entry.ok_or("no such file")?;
        let mut bytes = fs::read(&path)?;
        change(&mut bytes);
        fs::write(&path, bytes)?;
        match Dump::read(folder.path(), None, None) {
            Ok(_) => Err(format!("{name} was read").into()),
            Err(error) => Ok(error.to_string()),
        }
    };
    let listing = "final_bundles.txt";
    assert!(message(listing, Vec::clear)?.contains("bundles.txt:1:1: expected a listing"));
    assert!(
        message(listing, |bytes| bytes.truncate(bytes.len() / 2))?
            .contains("expected `}` at the end of the bundle")
    );
    assert!(message(listing, |bytes| bytes[10] = 0xff)?.contains("bundles.txt:1:11: expected text"));
    assert!(message("hlo.txt", Vec::clear)?.contains("hlo.txt:1:1: expected an entry computation"));
    assert!(
        message("hlo.txt", |bytes| bytes.truncate(bytes.len() - 4))?.contains("found the end of the file")
    );
    let slots = "final_hlo-static-per-bundle-utilization.txt";
    assert!(message(slots, Vec::clear)?.contains(":1:1: expected a line that starts with"));
    assert!(
        message(slots, |bytes| bytes.extend(b"1 2 x\n"))?
            .contains(":5: expected a number of slots, found `x`")
    );
    assert!(message("meta.json", |bytes| bytes.truncate(20))?.contains("meta.json:1:20"));
    assert!(message("meta.json", |bytes| *bytes = b"{}".to_vec())?.contains("which chip"));
    Ok(())
}

#[test]
fn archives_that_are_none_are_refused() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("dump.tar.xz");
    let whole = fs::read(fixture("loop_v6e"))?;
    for bytes in [Vec::new(), b"garbage".to_vec(), whole[..whole.len() / 2].to_vec()] {
        fs::write(&path, bytes)?;
        let error = Dump::read(&path, None, None).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("dump.tar.xz"), "{error}");
    }
    Ok(())
}

/// A compiler that was never tested is read all the same.
#[test]
fn unknown_versions_are_read_with_a_warning() -> Outcome {
    let folder = tempfile::tempdir()?;
    unpack("loop_v6e", folder.path())?;
    fs::write(
        folder.path().join("meta.json"),
        r#"{"device": "TPU v6 lite", "libtpu": "9.9"}"#,
    )?;
    let dump = Dump::read(folder.path(), None, None)?;
    assert!(
        dump.warnings.iter().any(|warning| warning.contains("libtpu 9.9")),
        "{:?}",
        dump.warnings
    );
    let archive = Dump::read(&fixture("loop_v6e"), None, None)?;
    let machine = machine(Generation::V6e, 1);
    let read = [&dump, &archive].map(|dump| analyse(dump, &machine).time_us.to_bits());
    assert_eq!(read[0], read[1]);
    assert!(archive.warnings.is_empty(), "{:?}", archive.warnings);
    Ok(())
}

#[test]
fn bundles_of_a_block_are_read_again() -> Outcome {
    let dump = Dump::read(&fixture("scale_rows_v5e"), None, None)?;
    let found = analyse(&dump, &machine(dump.generation, 1));
    let block = &found.blocks[0];
    let texts = dump.bundles(&block.kernel, block.first..block.last + 1)?;
    assert_eq!(texts.len(), block.last + 1 - block.first);
    assert_eq!(texts.first().map(|text| text.0), Some(block.first));
    assert!(dump.bundles("nothing", 0..1).is_err());
    Ok(())
}

/// The compact schedule takes as long as the program it was written down from, whatever the machine is.
#[test]
fn schedules_take_as_long_as_their_programs() -> Outcome {
    let fast = |generation, cores| Machine {
        hbm_bytes_per_s: 7e12,
        transfer_latency_s: 0.3e-6,
        launch_s: 0.0,
        ..machine(generation, cores)
    };
    for (name, cores) in [
        ("blocked_matmul_v6e", 1),
        ("blocked_matmul_v4", 2),
        ("scale_rows_v5e", 1),
        ("loop_v6e", 1),
        ("normalization_v5p", 2),
    ] {
        let dump = Dump::read(&fixture(name), None, None)?;
        let written = serde_json::to_string(&tpusim::dump::schedule(&dump, cores))?;
        let read = tpusim::dump::schedule::read_lines("schedules", &written)?;
        let [schedule] = read.as_slice() else {
            return Err("expected one schedule".into());
        };
        let timed = schedule.timed("schedules")?;
        for machine in [machine(dump.generation, cores), fast(dump.generation, cores)] {
            let found = analyse(&dump, &machine);
            let us = timed.cycles(&machine) / machine.clock_hz * 1e6;
            assert!(close(us, found.time_us), "{name}: {us} of {}", found.time_us);
            let cycles: f64 = found
                .kernels
                .iter()
                .map(|kernel| (kernel.issue_cycles + kernel.empty_cycles) as f64 * kernel.count)
                .sum();
            assert!(close(schedule.schedule_cycles(), cycles), "{name}");
        }
    }
    Ok(())
}

/// A schedule as it is read back from its line.
fn read_back(name: &str, cores: u32) -> Result<Schedule, Box<dyn std::error::Error>> {
    let dump = Dump::read(&fixture(name), None, None)?;
    let written = serde_json::to_string(&tpusim::dump::schedule(&dump, cores))?;
    let mut read = read_lines("schedules", &written)?;
    Ok(read.pop().ok_or("expected one schedule")?)
}

/// What a kernel does by construction, read off its compact schedule: memory for two buffers of every block and
/// the f32 accumulator, one pass a grid step, and of an elementwise kernel one store of every register of 1024
/// numbers, and two operations on it.
#[test]
fn schedules_count_memory_and_slots() -> Outcome {
    for (name, cores) in [("blocked_matmul_v6e", 1), ("blocked_matmul_v4", 2)] {
        let schedule = read_back(name, cores)?;
        let [kernel] = schedule.kernels.as_slice() else {
            return Err("expected one kernel".into());
        };
        let buffers = 2 * 2 * (128 * 256 + 256 * 256 + 128 * 256);
        assert_eq!(kernel.vmem_bytes, Some(buffers + 128 * 256 * 4), "{name}");
        assert_eq!(kernel.hottest_block.map(|block| block.trips), Some(32), "{name}");
        assert_eq!(kernel.alignment, Some(Alignment::Exact), "{name}");
        // It never asks which core it runs on.
        assert_eq!((schedule.cores, kernel.cores_used), (cores, Some(1)), "{name}");
        assert_eq!(schedule.label.as_deref(), Some(LABEL));
    }
    let schedule = read_back("scale_rows_v5e", 1)?;
    let [kernel] = schedule.kernels.as_slice() else {
        return Err("expected one kernel".into());
    };
    let used = |name: &str| -> Option<f64> {
        let slot = kernel.slots.iter().find(|slot| slot.name == name);
        slot.map(|slot| slot.used)
    };
    assert_eq!(kernel.vmem_bytes, Some(2 * 2 * 256 * 512 * 4));
    let registers = f64::from(2048 * 512 / 1024);
    assert_eq!(used("VSTORE"), Some(registers));
    assert_eq!(used("VALU"), Some(2.0 * registers));
    assert_eq!((used("MXU"), used("EUP")), (Some(0.0), Some(0.0)));
    let spills = kernel.spills.ok_or("expected spills")?;
    assert_eq!((spills.stores, spills.loads), (0.0, 0.0));
    // Kernels of a program for two cores.
    let schedule = read_back("normalization_v5p", 2)?;
    let used: Vec<Option<u32>> = schedule.kernels.iter().map(|kernel| kernel.cores_used).collect();
    assert!(used.contains(&Some(2)), "{used:?}");
    Ok(())
}

/// A program of which the schedule alone is at hand takes as long, and for the same reasons, as its dump.
#[test]
fn a_schedule_alone_tells_the_time_and_its_parts() -> Outcome {
    let calibration = tpusim::hardware::shipped_calibration();
    let constants = calibration.schedules.as_ref().ok_or("no constants")?;
    for (name, cores) in [
        ("blocked_matmul_v6e", 1),
        ("blocked_matmul_v4", 2),
        ("scale_rows_v5e", 1),
        ("loop_v6e", 1),
        ("normalization_v5p", 2),
    ] {
        let schedule = read_back(name, cores)?;
        let dump = Dump::read(&fixture(name), None, None)?;
        let machine = machine(dump.generation, cores);
        let expected = analyse(&dump, &machine);
        let found = program_time(&schedule, "schedules", &machine, constants)?;
        let parts = expected.parts;
        for (found, expected) in [
            (found.time_us, expected.time_us),
            (found.low_us, expected.low_us),
            (found.high_us, expected.high_us),
            (found.issue_us, parts.issue_us),
            (found.empty_us, parts.empty_us),
            (found.launch_us, parts.launch_us),
        ] {
            assert!(close(found, expected), "{name}: {found} of {expected}");
        }
        let waits = parts.wait_us + parts.other_us;
        assert!((found.wait_us - waits).abs() < 1e-6 * expected.time_us, "{name}");
        assert_eq!(found.slots.len(), expected.slots.len(), "{name}");
        for (found, expected) in found.slots.iter().zip(&expected.slots) {
            assert!(
                close(found.used, expected.used),
                "{name}: {found:?} of {expected:?}"
            );
            assert!((found.share - expected.share).abs() < 1e-9, "{name}: {found:?}");
        }
        let spills = found.spills.ok_or("expected spills")?;
        assert!(close(spills.cycles_alone, expected.spills.cycles_alone), "{name}");
        assert_eq!(found.binds, expected.binds, "{name}");
    }
    Ok(())
}

/// Fields that came later are left out of lines that were written without them.
#[test]
fn schedules_without_later_fields_are_read_and_written_as_they_are() -> Outcome {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("measurements/compiled/schedules.jsonl");
    let text = fs::read_to_string(path)?;
    for (line, schedule) in text.lines().zip(read_lines("schedules", &text)?) {
        assert_eq!(serde_json::to_string(&schedule)?, line);
    }
    Ok(())
}

/// 1000 steps that each fetch 1000 bytes at 1 byte a cycle and work 300 cycles while the next are on their way.
#[test]
fn a_steady_state_is_multiplied() -> Outcome {
    let events = "s1 h0:1000:1 999( h1:1000:1 w0:1 c300 h0:1000:1 w1:1 c300 ) w0:1";
    let text = |events: &str| {
        format!(
            r#"{{"schema": "tpusim.schedule/1", "name": "steps", "program": "steps", "chip": "tpu-v6e", "cores": 1, "libtpu": null, "jax": null, "family": null, "measured_us": null, "source": null, "compiler_estimate_cycles": 0, "unknown_branches": 0, "kernels": [], "events": "{events}"}}"#
        )
    };
    let slow = Machine {
        hbm_bytes_per_s: 1e9,
        hbm_achievable: 1.0,
        transfer_latency_s: 0.0,
        ..machine(Generation::V6e, 1)
    };
    let schedules = tpusim::dump::schedule::read_lines("schedules", &text(events))?;
    let cycles = schedules[0].timed("schedules")?.cycles(&slow);
    // 1999 transfers one behind the other; nothing is worked on behind the last of them.
    assert!(close(cycles, 1_999_000.0), "{cycles}");
    for (events, expected) in [
        ("c", "expected an event, found `c`"),
        ("3( c1", "expected `)`"),
        ("h1:2", "expected an event"),
        ("cx", "expected a number in `cx`, found `x`"),
        ("s0", "expected an event, found `s0`"),
        (")", "expected an event, found `)`"),
    ] {
        let schedules = tpusim::dump::schedule::read_lines("schedules", &text(events))?;
        let error = schedules[0].timed("schedules").unwrap_err().to_string();
        assert!(error.contains(expected), "{events}: {error}");
    }
    assert!(tpusim::dump::schedule::read_lines("schedules", "{}").is_err());
    Ok(())
}

/// Programs whose times follow from four constants by division: the fit finds the constants.
#[test]
fn constants_are_found_again() -> Outcome {
    let chip = tpusim::hardware::load_uncalibrated("tpu-v6e")?;
    let (clock, bandwidth) = (chip.clock().get(), chip.hbm_bandwidth_per_device().get());
    let (achievable, latency_us, launch_us, sustained) = (0.8, 0.9, 0.3, 0.9);
    let bytes = 1e9;
    let line = |family: &str, events: &str, us: f64| {
        format!(
            r#"{{"schema": "tpusim.schedule/1", "name": "{family}", "program": "p", "chip": "tpu-v6e", "cores": 1, "libtpu": null, "jax": null, "family": "{family}", "measured_us": {us}, "source": null, "compiler_estimate_cycles": 0, "unknown_branches": 0, "kernels": [], "events": "{events}"}}"#
        )
    };
    let lines = [
        line("compute", "s1 c10000000", 1e7 / (clock * sustained) * 1e6),
        line(
            "stream",
            &format!("s1 h0:{bytes}:1 w0:1"),
            bytes / (bandwidth * achievable) * 1e6 + latency_us,
        ),
        line("launches", "s1 1000( k0 )", 1000.0 * launch_us),
        // So small that only the latency counts.
        line("latency", "s1 1000( h0:0:1 w0:1 )", 1000.0 * latency_us),
    ];
    let programs = tpusim::calibration::schedules::programs("lines", &lines.join("\n"))?;
    let fitted = tpusim::calibration::schedules::fit(&programs)?.constants;
    for (name, found, expected) in [
        ("achievable", fitted.hbm_achievable.value, achievable),
        ("latency", fitted.transfer_latency_us.value, latency_us),
        ("launch", fitted.launch_us.value, launch_us),
        ("clock", fitted.sustained_clock["tpu-v6e"].value, sustained),
    ] {
        assert!((found - expected).abs() < 2e-3, "{name}: {found}");
    }
    // Measured times and families are asked for by name.
    let without = lines[0].replace("\"family\": \"compute\"", "\"family\": null");
    let error = tpusim::calibration::schedules::programs("lines", &without).unwrap_err();
    assert!(error.to_string().contains("expected `family`"), "{error}");
    assert!(tpusim::calibration::schedules::fit(&[]).is_err());
    Ok(())
}

/// The shipped constants are those of the shipped schedules.
#[test]
fn shipped_constants_are_those_of_the_shipped_schedules() -> Outcome {
    use tpusim::calibration::schedules;
    let programs = schedules::shipped()?;
    let fitted: Vec<&schedules::Program> = programs.iter().filter(|p| p.check.is_none()).collect();
    let calibration = tpusim::hardware::shipped_calibration();
    let constants = calibration.schedules.as_ref().ok_or("no constants")?;
    assert_eq!(
        (constants.data_digest.as_str(), constants.rows),
        (schedules::data_digest(&fitted)?.as_str(), fitted.len()),
        "`tpusim fit --dumps --out hw/calibration.json --force`"
    );
    Ok(())
}

/// What is drawn covers the time: on the core nothing overlaps and nothing is left out.
#[test]
fn a_timeline_covers_the_core() -> Outcome {
    use tpusim::dump::schedule::Activity;
    let dump = Dump::read(&fixture("blocked_matmul_v6e"), None, None)?;
    let machine = Machine {
        launch_s: 0.0,
        ..machine(dump.generation, 1)
    };
    let schedule = tpusim::dump::schedule(&dump, 1);
    let timeline = schedule.timed("schedule")?.timeline(&machine);
    assert_eq!(timeline.left_out(), 0);
    let mut end = 0.0;
    for span in &timeline.spans {
        match span.activity {
            Activity::Core | Activity::Wait | Activity::Repeated(_) => {
                assert!((span.start - end).abs() < 1e-3, "{span:?} after {end}");
                end = span.end;
            }
            Activity::Memory | Activity::SparseCore => {}
        }
    }
    assert!(close(end, timeline.cycles), "{end} of {}", timeline.cycles);
    assert_eq!(timeline.kernels.len(), 1);
    Ok(())
}

/// Slots of the matrix unit say how many operations were issued: those of the product, and what pads its tiles.
#[test]
fn slots_count_the_operations_of_a_product() -> Outcome {
    let dump = Dump::read(&fixture("blocked_matmul_v6e"), None, None)?;
    let calibration = tpusim::hardware::shipped_calibration();
    let constants = calibration.schedules.as_ref().ok_or("no constants")?;
    let chip = tpusim::hardware::load("tpu-v6e")?.0;
    let bandwidth = chip.hbm_bandwidth_per_device().get();
    let machine = Machine::of(constants, dump.generation, chip.clock().get(), bandwidth, 1);
    let analysis = analyse(&dump, &machine);
    let schedule = tpusim::dump::schedule(&dump, 1);
    let result = tpusim::study::dump::result(&analysis, &schedule, &chip, &machine, constants);
    let plan = &result.chips[0].plans[0];
    let sum: f64 = plan.stages.iter().map(|row| row.time_us).sum();
    assert!(close(sum, plan.total_us), "{sum} of {}", plan.total_us);
    let issued = plan.stages[0].flops as f64 / (2.0 * 512.0 * 1024.0 * 512.0);
    assert!((1.0..1.5).contains(&issued), "{issued}");
    Ok(())
}

/// Every field of the outputs is described.
#[test]
fn fields_are_described() -> Outcome {
    fn keys(value: &serde_json::Value, found: &mut Vec<String>) {
        match value {
            serde_json::Value::Object(map) => {
                for (key, value) in map {
                    found.push(key.clone());
                    // Its keys are operations.
                    if key != "not_understood" {
                        keys(value, found);
                    }
                }
            }
            serde_json::Value::Array(values) => values.iter().for_each(|value| keys(value, found)),
            _ => {}
        }
    }
    let docs = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/formats.md"))?;
    let dump = Dump::read(&fixture("normalization_v5p"), None, None)?;
    let analysis = analyse(&dump, &machine(dump.generation, 2));
    let schedule = tpusim::dump::schedule(&dump, 2);
    let calibration = tpusim::hardware::shipped_calibration();
    let mut found = Vec::new();
    keys(&serde_json::to_value(&analysis)?, &mut found);
    keys(&serde_json::to_value(&schedule)?, &mut found);
    keys(&serde_json::to_value(&calibration.schedules)?, &mut found);
    let constants = calibration.schedules.as_ref().ok_or("no constants")?;
    let timed = program_time(&schedule, "schedules", &machine(dump.generation, 2), constants)?;
    keys(&serde_json::to_value(&timed)?, &mut found);
    for key in found.iter().filter(|key| !key.starts_with("tpu-")) {
        let named = [format!("`{key}`"), format!("`{key}[]`")];
        assert!(named.iter().any(|name| docs.contains(name)), "{key}");
    }
    Ok(())
}

/// Exit code, stdout and stderr of the command in a folder.
fn tpusim(folder: &Path, args: &[&str]) -> Result<(Option<i32>, String, String), Box<dyn std::error::Error>> {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_tpusim"))
        .args(args)
        .current_dir(folder)
        .output()?;
    Ok((
        output.status.code(),
        String::from_utf8(output.stdout)?,
        String::from_utf8(output.stderr)?,
    ))
}

#[test]
fn dumps_have_reports_and_are_compared() -> Outcome {
    let folder = tempfile::tempdir()?;
    let place = fixture("blocked_matmul_v6e");
    let dump = place.to_str().ok_or("path")?;
    let (code, _, error) = tpusim(folder.path(), &["dump", dump, "--out", "report"])?;
    assert_eq!(code, Some(0), "{error}");
    let read = |name: &str| fs::read(folder.path().join("report").join(name));
    let first = [
        "index.html",
        "result.json",
        "roofline.svg",
        "stages.csv",
        "trace.json",
    ]
    .map(read);
    let (code, _, error) = tpusim(folder.path(), &["dump", dump, "--out", "report"])?;
    assert_eq!(code, Some(0), "{error}");
    for (name, first) in [
        "index.html",
        "result.json",
        "roofline.svg",
        "stages.csv",
        "trace.json",
    ]
    .into_iter()
    .zip(first)
    {
        assert_eq!(read(name)?, first?, "{name}");
    }
    // The slices of a track do not overlap.
    let trace: serde_json::Value = serde_json::from_slice(&read("trace.json")?)?;
    let mut ends = std::collections::BTreeMap::new();
    for event in trace["traceEvents"].as_array().ok_or("no events")? {
        if event["ph"] == "X" {
            let number = |key: &str| event[key].as_f64().ok_or("no number");
            let (start, length) = (number("ts")?, number("dur")?);
            let end = ends.entry(event["tid"].to_string()).or_insert(0.0);
            assert!(start >= *end - 1e-6, "{event}");
            *end = start + length;
        }
    }

    let (code, same, _) = tpusim(folder.path(), &["compare", dump, "report", "--format", "json"])?;
    assert_eq!(code, Some(0));
    let same: serde_json::Value = serde_json::from_str(&same)?;
    assert_eq!(same["identical"], true, "{same}");
    let other = fixture("loop_v6e");
    let (code, text, _) = tpusim(folder.path(), &["compare", dump, other.to_str().ok_or("path")?])?;
    assert_eq!(code, Some(0));
    assert!(
        text.contains("schedule") && text.contains("convolution_tanh_fusion"),
        "{text}"
    );
    let (code, _, error) = tpusim(
        folder.path(),
        &["compare", dump, "report", "--set-a", "layer.chunk=4"],
    )?;
    assert!(code == Some(2) && error.contains("compiled program"), "{error}");

    let (code, _, error) = tpusim(folder.path(), &["fit", "--dumps", dump, "--only-given"])?;
    assert!(code == Some(2) && error.contains("measured_us"), "{error}");
    let (code, _, error) = tpusim(folder.path(), &["dump", dump, dump, "--out", "two"])?;
    assert!(code == Some(2) && error.contains("report of one dump"), "{error}");
    Ok(())
}

#[test]
fn hlo_texts_are_timed_and_refused() -> Outcome {
    let folder = tempfile::tempdir()?;
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hlo/recurrent_gdn.txt");
    let text = text.to_str().ok_or("path")?;
    fs::write(folder.path().join("cost.json"), r#"{"xla_flops": 525314}"#)?;
    let args = [
        "hlo",
        text,
        "--hw",
        "tpu-v7x,h100-sxm",
        "--cost",
        "cost.json",
        "--format",
        "json",
    ];
    let (code, json, error) = tpusim(folder.path(), &args)?;
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(json, tpusim(folder.path(), &args)?.1);
    let found: serde_json::Value = serde_json::from_str(&json)?;
    assert_eq!(found[0]["xla"]["flops"], 525_314.0);
    let docs = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/formats.md"))?;
    for value in [&found[0], &found[0]["executed"], &found[0]["kernels"][0]] {
        for key in value.as_object().ok_or("no object")?.keys() {
            let named = [format!("`{key}`"), format!("`{key}[]`")];
            assert!(named.iter().any(|name| docs.contains(name)), "{key}");
        }
    }
    fs::write(
        folder.path().join("bad.txt"),
        "HloModule m\n\nENTRY main {\n  x = f32[2] what\n}\n",
    )?;
    let (code, out, error) = tpusim(folder.path(), &["hlo", "bad.txt", "--hw", "tpu-v7x"])?;
    assert!(
        code == Some(2) && out.is_empty() && error.contains("bad.txt:4:14"),
        "{error}"
    );
    let (code, _, error) = tpusim(folder.path(), &["hlo", text, "--hw", "tpu-v7"])?;
    assert!(code == Some(2) && error.contains("tpu-v7x"), "{error}");
    Ok(())
}

/// One change to the bytes of a file.
#[derive(Debug, Clone)]
enum Change {
    Set(usize, u8),
    Cut(usize, usize),
    Repeat(usize, usize),
    Insert(usize, &'static str),
    End(usize),
}

fn change() -> impl Strategy<Value = Change> {
    let place = any::<prop::sample::Index>().prop_map(|index| index.index(1 << 20));
    let words = [
        "99999999999999999999",
        "-1",
        "%p1",
        "((((",
        "/*",
        "*/",
        ";;",
        "0x",
        "é",
        "\0",
        "]]",
        "{",
        "}",
    ];
    prop_oneof![
        (place.clone(), any::<u8>()).prop_map(|(at, byte)| Change::Set(at, byte)),
        (place.clone(), b'0'..=b'9').prop_map(|(at, digit)| Change::Set(at, digit)),
        (place.clone(), 1..200_usize).prop_map(|(at, length)| Change::Cut(at, length)),
        (place.clone(), 1..300_usize).prop_map(|(at, length)| Change::Repeat(at, length)),
        (place.clone(), prop::sample::select(words.to_vec())).prop_map(|(at, word)| Change::Insert(at, word)),
        place.prop_map(Change::End),
    ]
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    let length = bytes.len().max(1);
    let until = |at: usize, count: usize| (at % length + count).min(bytes.len());
    match *change {
        Change::Set(at, byte) => {
            if let Some(place) = bytes.get_mut(at % length) {
                *place = byte;
            }
        }
        Change::Cut(at, count) => drop(bytes.drain(at % length..until(at, count))),
        Change::Repeat(at, count) => {
            let copy = bytes[at % length..until(at, count)].to_vec();
            bytes.splice(at % length..at % length, copy);
        }
        Change::Insert(at, word) => drop(bytes.splice(at % length..at % length, word.bytes())),
        Change::End(at) => bytes.truncate(at % length),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever happens to a dump, it is read or refused, and what is said of it is finite.
    #[test]
    fn damaged_dumps_do_no_harm(
        name in prop::sample::select(vec!["blocked_matmul_v6e", "gather_blocks_v7x", "loop_v6e", "blocked_matmul_v4"]),
        file in any::<prop::sample::Index>(),
        changes in prop::collection::vec(change(), 1..4),
    ) {
        let folder = tempfile::tempdir()?;
        let mut files = files(name).map_err(|error| TestCaseError::fail(error.to_string()))?;
        let victim = file.index(files.len());
        for change in &changes {
            apply(&mut files[victim].1, change);
        }
        for (file, bytes) in &files {
            fs::write(folder.path().join(file), bytes)?;
        }
        if let Ok(dump) = Dump::read(folder.path(), None, None) {
            let found = analyse(&dump, &machine(dump.generation, 2));
            prop_assert!(found.time_us.is_finite() && found.time_us >= 0.0);
            prop_assert!(serde_json::to_string(&found).is_ok());
        }
    }
}
