//! Dumps of the TPU compiler: what is recovered from them against what their programs do by construction.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tpusim::dump::delays::Alignment;
use tpusim::dump::utilization::Utilization;
use tpusim::dump::{Analysis, Dump, DumpError, Generation, Machine, analyse};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dumps");
    folder.join(format!("{name}.tar.xz"))
}

/// A machine with round numbers; counts do not depend on it.
fn machine(generation: Generation, cores: u32) -> Machine {
    Machine::of(generation, 1e9, 1e12, cores)
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
