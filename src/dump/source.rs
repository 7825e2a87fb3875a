//! Where a dump comes from: a folder or an archive, of which only the files that are needed are read.
//!
//! A folder may hold a gigabyte of intermediate stages; four files a program and three a kernel are read:
//!
//! | file | holds |
//! |---|---|
//! | `hlo.txt` | the optimised HLO |
//! | `<time>-<kernel>-<stage>-final_bundles.txt` | the listing of a kernel |
//! | `<time>-<kernel>-<stage>-final_hlo-static-per-bundle-utilization.txt` | its slots, row by row |
//! | `<time>-<kernel>-<stage>-pre-delay_hlo-static-per-bundle-utilization.txt` | the same with empty cycles |
//! | `meta.json` | which chip and compiler |
//! | `scalars.json` | run-time scalars, where the program depends on any |
//!
//! Where a kernel was dumped several times the latest is taken.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::bundles::{self, Bundle, Sink};
use super::chip::Generation;
use super::code::{Code, Listing};
use super::delays::Delays;
use super::error::DumpError;
use super::execute::Operands;
use super::hlo::Module;
use super::schedule::Case;
use super::utilization::Utilization;

/// Largest JSON file that is read, in bytes.
const LARGEST_JSON: u64 = 64 << 20;

/// Compiler versions whose dumps were compared with measured times.
pub const TESTED_COMPILERS: [&str; 1] = ["0.0.50.1"];

/// What `meta.json` says of a dump.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Meta {
    /// Chip, as JAX, XLA or this project calls it.
    pub device: Option<String>,
    /// Version of the compiler's library.
    pub libtpu: Option<String>,
    /// Version of JAX.
    pub jax: Option<String>,
    /// Family of kernels, for fits.
    pub family: Option<String>,
    /// Measured time, in microseconds, for fits.
    pub measured_us: Option<f64>,
    /// Where the measured time comes from.
    pub source: Option<String>,
    /// The same call as a case of `tpusim predict`.
    pub case: Option<Case>,
    /// Why constants are not to be fitted to it, where that is so.
    pub check: Option<String>,
    /// The command that compiled it.
    pub command: Option<String>,
    /// Digest of the sources of the program.
    pub source_digest: Option<String>,
    /// Options that the program was made with, by name.
    pub options: BTreeMap<String, serde_json::Value>,
}

/// Run-time scalars: for a kernel's name, or a part of it, the data of operands by number.
pub type Scalars = BTreeMap<String, BTreeMap<usize, Vec<i64>>>;

/// A kernel of a dump.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) file: String,
    pub(super) code: Code,
    pub(super) delays: Delays,
    /// The final table of slots, where there is one.
    pub(super) slots: Option<Utilization>,
}

/// A dump that has been read.
#[derive(Debug)]
pub struct Dump {
    /// Path of the folder or archive.
    pub path: String,
    /// The program between the kernels.
    pub module: Module,
    /// What is known of its origin.
    pub meta: Meta,
    /// Chip whose listings these are.
    pub generation: Generation,
    pub(super) scalars: Scalars,
    pub(super) kernels: BTreeMap<String, Kernel>,
    /// What was odd while reading.
    pub warnings: Vec<String>,
}

/// What a file of a dump is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Hlo,
    Meta,
    Scalars,
    Listing,
    Slots,
    SlotsBefore,
}

/// A file name taken apart: what it is, the kernel it belongs to, and when it was written.
fn part(name: &str) -> Option<(Part, &str, u64)> {
    match name {
        "hlo.txt" => return Some((Part::Hlo, "", u64::MAX)),
        "meta.json" => return Some((Part::Meta, "", 0)),
        "scalars.json" => return Some((Part::Scalars, "", 0)),
        _ if name.ends_with("after_optimizations.txt") => return Some((Part::Hlo, "", 0)),
        _ => {}
    }
    let (part, stem) = [
        (Part::Listing, "-final_bundles.txt"),
        (Part::Slots, "-final_hlo-static-per-bundle-utilization.txt"),
        (
            Part::SlotsBefore,
            "-pre-delay_hlo-static-per-bundle-utilization.txt",
        ),
    ]
    .into_iter()
    .find_map(|(part, suffix)| Some((part, name.strip_suffix(suffix)?)))?;
    let (time, rest) = stem.split_once('-')?;
    let (kernel, stage) = rest.rsplit_once('-')?;
    // The program between the kernels and its set-up are not timed by their listings.
    let other = kernel == "TLP" || kernel.starts_with('<');
    (!other && stage.parse::<u32>().is_ok()).then_some((part, kernel, time.parse().ok()?))
}

/// Files of one kernel from one run of the compiler.
#[derive(Debug, Default)]
struct Parts {
    listing: Option<(String, Listing)>,
    slots: Option<Utilization>,
    before: Option<Utilization>,
}

/// Gathers the files of a dump.
#[derive(Debug, Default)]
struct Gathered {
    module: Option<(Module, u64)>,
    meta: Meta,
    scalars: Option<Scalars>,
    /// Kernels, and of each the runs of the compiler by time.
    kernels: BTreeMap<String, BTreeMap<u64, Parts>>,
}

impl Gathered {
    /// Whether a file is still wanted: not where a later run has already been read.
    fn wants(&self, part: Part, kernel: &str, time: u64) -> bool {
        match part {
            Part::Hlo => self.module.as_ref().is_none_or(|(_, known)| *known < time),
            Part::Meta | Part::Scalars => true,
            Part::Listing | Part::Slots | Part::SlotsBefore => self
                .kernels
                .get(kernel)
                .is_none_or(|runs| !runs.range(time + 1..).any(|(_, parts)| parts.listing.is_some())),
        }
    }

    fn add(&mut self, path: &str, name: &str, stream: impl BufRead) -> Result<(), DumpError> {
        let Some((part, kernel, time)) = part(name) else {
            return Ok(());
        };
        if !self.wants(part, kernel, time) {
            return Ok(());
        }
        match part {
            Part::Hlo => self.module = Some((Module::read(path, stream)?, time)),
            Part::Meta => self.meta = json(path, stream)?,
            Part::Scalars => self.scalars = Some(json(path, stream)?),
            Part::Listing => {
                let listing = Listing::read(path, stream)?;
                let runs = self.kernels.entry(kernel.to_owned()).or_default();
                runs.retain(|&other, _| other >= time);
                runs.entry(time).or_default().listing = Some((path.to_owned(), listing));
            }
            Part::Slots | Part::SlotsBefore => {
                let table = Utilization::read(path, stream)?;
                let parts = self
                    .kernels
                    .entry(kernel.to_owned())
                    .or_default()
                    .entry(time)
                    .or_default();
                if part == Part::Slots {
                    parts.slots = Some(table);
                } else {
                    parts.before = Some(table);
                }
            }
        }
        Ok(())
    }
}

impl Dump {
    /// Reads a dump: a folder, or an archive that ends in `.tar.xz` or `.tar`. `scalars` is a file of run-time
    /// scalars that replaces the dump's own; `generation` the chip, where the dump does not say it.
    ///
    /// # Errors
    /// Files that cannot be read or are not what their names say; a dump without HLO, kernels or chip.
    pub fn read(
        path: &Path,
        scalars: Option<&Path>,
        generation: Option<Generation>,
    ) -> Result<Self, DumpError> {
        let shown = path.display().to_string();
        let mut gathered = Gathered::default();
        if path.is_dir() {
            folder(path, &mut gathered)?;
        } else {
            archive(path, &shown, &mut |file, name, stream| {
                gathered.add(file, name, stream)
            })?;
        }
        if let Some(file) = scalars {
            let shown = file.display().to_string();
            let stream = File::open(file).map_err(|source| DumpError::read(&shown, source))?;
            gathered.scalars = Some(json(&shown, BufReader::new(stream))?);
        }
        let Some((module, _)) = gathered.module else {
            let message = "no optimised HLO: expected a file `hlo.txt`, the text of the compiled program";
            return Err(DumpError::incomplete(&shown, message));
        };
        let mut warnings = Vec::new();
        let named = gathered.meta.device.as_deref();
        let from_meta = match named {
            Some(name) => match Generation::named(name) {
                Some(found) => Some(found),
                None if generation.is_some() => None,
                None => {
                    let message =
                        format!("meta.json names the device `{name}`, which is no TPU that is known");
                    return Err(DumpError::incomplete(&shown, message));
                }
            },
            None => None,
        };
        let Some(generation) = generation.or(from_meta) else {
            let message = "which chip it was compiled for is not recorded: expected `device` in meta.json, or name the chip";
            return Err(DumpError::incomplete(&shown, message));
        };
        if let Some(known) = from_meta.filter(|known| *known != generation) {
            warnings.push(format!(
                "compiled for {}, timed as {}: schedules of one chip do not hold for another",
                known.chip(),
                generation.chip()
            ));
        }
        match gathered.meta.libtpu.as_deref() {
            None => warnings.push(format!(
                "compiler version not recorded; tested with libtpu {}",
                TESTED_COMPILERS.join(", ")
            )),
            Some(version) if !TESTED_COMPILERS.contains(&version) => warnings.push(format!(
                "compiled by libtpu {version}; tested with {}: the format may have changed",
                TESTED_COMPILERS.join(", ")
            )),
            Some(_) => {}
        }
        let mut kernels = BTreeMap::new();
        for (name, runs) in gathered.kernels {
            let Some(parts) = runs.into_values().rev().find(|parts| parts.listing.is_some()) else {
                continue;
            };
            let Some((file, listing)) = parts.listing else {
                continue;
            };
            let code = listing.finish(generation);
            let delays = match (&parts.before, &parts.slots) {
                (Some(before), Some(last)) => Delays::recover(before, last),
                _ => Delays::missing(),
            };
            if let Some(slots) = &parts.slots
                && slots.len() != code.bundles
            {
                warnings.push(format!(
                    "{name}: {} bundles, but {} rows of slots",
                    code.bundles,
                    slots.len()
                ));
            }
            let kernel = Kernel {
                file,
                code,
                delays,
                slots: parts.slots,
            };
            kernels.insert(name, kernel);
        }
        if kernels.is_empty() {
            let message = "no listing of a kernel: expected files that end in `-final_bundles.txt`";
            return Err(DumpError::incomplete(&shown, message));
        }
        Ok(Self {
            path: shown,
            module,
            meta: gathered.meta,
            generation,
            scalars: gathered.scalars.unwrap_or_default(),
            kernels,
            warnings,
        })
    }

    /// Empty cycles behind a bundle of a kernel.
    #[must_use]
    pub fn empty_cycles(&self, kernel: &str, bundle: usize) -> u32 {
        let kernel = self.kernels.get(kernel);
        kernel
            .and_then(|kernel| kernel.delays.after.get(bundle))
            .copied()
            .unwrap_or(0)
    }

    /// Slots that a bundle of a kernel uses, a number a kind; empty where there is no table of them.
    #[must_use]
    pub fn slots(&self, kernel: &str, bundle: usize) -> &[u16] {
        let slots = self.kernels.get(kernel).and_then(|kernel| kernel.slots.as_ref());
        slots.map_or(&[], |slots| slots.row(bundle))
    }

    /// Text of some bundles of a kernel, with their numbers. The dump is read again for it.
    ///
    /// # Errors
    /// The dump can no longer be read, or has no such kernel.
    pub fn bundles(&self, kernel: &str, range: Range<usize>) -> Result<Vec<(usize, String)>, DumpError> {
        let Some(kernel) = self.kernels.get(kernel) else {
            return Err(DumpError::incomplete(
                &self.path,
                format!("no listing of a kernel `{kernel}`"),
            ));
        };
        let mut texts = Texts {
            range,
            number: 0,
            found: Vec::new(),
        };
        let path = Path::new(&self.path);
        if path.is_dir() {
            let stream = File::open(&kernel.file).map_err(|source| DumpError::read(&kernel.file, source))?;
            bundles::read(&kernel.file, BufReader::new(stream), &mut texts)?;
        } else {
            archive(path, &self.path, &mut |file, _, stream| {
                if file == kernel.file {
                    bundles::read(file, stream, &mut texts)?;
                }
                Ok(())
            })?;
        }
        Ok(texts.found)
    }

    /// Names of the kernels that have a listing.
    pub fn kernel_names(&self) -> impl Iterator<Item = &str> {
        self.kernels.keys().map(String::as_str)
    }

    /// Run-time scalars given for an instruction: those of its name, else of the longest name that it starts
    /// with or holds.
    pub(super) fn scalars_of(&self, instruction: &str) -> Operands {
        let fits = |key: &&String| instruction.contains(key.as_str());
        let best = self
            .scalars
            .keys()
            .filter(fits)
            .max_by_key(|key| (instruction.starts_with(key.as_str()), key.len()));
        best.and_then(|key| self.scalars.get(key))
            .cloned()
            .unwrap_or_default()
    }
}

/// Reads what is needed of a folder, and of the only folder in it where it holds nothing else.
fn folder(path: &Path, gathered: &mut Gathered) -> Result<(), DumpError> {
    let shown = path.display().to_string();
    let fail = |source| DumpError::read(&shown, source);
    let mut files: Vec<(String, PathBuf)> = Vec::new();
    let mut folders = Vec::new();
    for entry in std::fs::read_dir(path).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        if entry.path().is_dir() {
            folders.push(entry.path());
        } else if part(&name).is_some() {
            files.push((name, entry.path()));
        }
    }
    if let ([only], true) = (folders.as_slice(), files.is_empty()) {
        return folder(only, gathered);
    }
    // Latest listings first, so that earlier ones need not be read.
    files.sort_by(|a, b| {
        let key = |name: &str| part(name).map(|(part, _, time)| (time, part == Part::Listing));
        key(&b.0).cmp(&key(&a.0)).then_with(|| a.0.cmp(&b.0))
    });
    for (name, file) in files {
        let shown = file.display().to_string();
        let Some((kind, kernel, time)) = part(&name) else {
            continue;
        };
        if gathered.wants(kind, kernel, time) {
            let stream = File::open(&file).map_err(|source| DumpError::read(&shown, source))?;
            gathered.add(&shown, &name, BufReader::with_capacity(1 << 16, stream))?;
        }
    }
    Ok(())
}

/// What is done with a file of an archive: its path, its name, and what it holds.
type Visit<'a> = dyn FnMut(&str, &str, &mut dyn BufRead) -> Result<(), DumpError> + 'a;

/// Reads an archive in one pass.
fn archive(path: &Path, shown: &str, visit: &mut Visit<'_>) -> Result<(), DumpError> {
    let file = File::open(path).map_err(|source| DumpError::read(shown, source))?;
    let mut stream = BufReader::with_capacity(1 << 16, file);
    let start = stream
        .fill_buf()
        .map_err(|source| DumpError::read(shown, source))?;
    if start.is_empty() {
        let message = "the file is empty; expected a folder or a .tar.xz archive of a dump";
        Err(DumpError::incomplete(shown, message))
    } else if start.starts_with(b"\xfd7zXZ\0") {
        entries(shown, lzma_rust2::XzReader::new(stream, true), visit)
    } else {
        entries(shown, stream, visit)
    }
}

fn entries(shown: &str, stream: impl Read, visit: &mut Visit<'_>) -> Result<(), DumpError> {
    let fail = |source: std::io::Error| DumpError::read(shown, source);
    let mut archive = tar::Archive::new(stream);
    for entry in archive.entries().map_err(fail)? {
        let entry = entry.map_err(fail)?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let inner = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let name = inner.rsplit('/').next().unwrap_or_default().to_owned();
        if part(&name).is_some() {
            visit(
                &format!("{shown}/{inner}"),
                &name,
                &mut BufReader::with_capacity(1 << 16, entry),
            )?;
        }
    }
    Ok(())
}

/// Keeps the text of some bundles.
struct Texts {
    range: Range<usize>,
    number: usize,
    found: Vec<(usize, String)>,
}

impl Sink for Texts {
    fn statement(&mut self, _: &str, _: &str) {}

    fn bundle(&mut self, bundle: &Bundle<'_>) {
        if self.range.contains(&self.number) {
            self.found.push((self.number, bundle.text.to_owned()));
        }
        self.number += 1;
    }
}

fn json<T: for<'de> Deserialize<'de>>(path: &str, stream: impl Read) -> Result<T, DumpError> {
    let mut text = String::new();
    stream
        .take(LARGEST_JSON)
        .read_to_string(&mut text)
        .map_err(|source| DumpError::read(path, source))?;
    serde_json::from_str(&text).map_err(|error| {
        let message = error.to_string();
        let message = message.split(" at line ").next().unwrap_or_default().to_owned();
        DumpError::syntax(path, error.line().max(1), error.column().max(1), message)
    })
}
