//! The folder of a sweep: `whatif.json` says which rows there are, `rows.csv` and `rows.jsonl` hold them.
//!
//! Rows are appended in order and whole, so that what a folder holds is always the beginning of the sweep. A process that dies may leave half a line, which the
//! next one takes away. A shard has files of its own, `shard-3-of-16.csv`; [`merge`] puts the shards together to the very bytes of an undivided sweep.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::rows::Columns;
use crate::config::{Assignment, ConfigError};
use crate::report::result::Provenance;
use crate::study::whatif::{Axis, Grid, Row, Shard, Space};

/// Name and version of the schema of [`MANIFEST`].
pub const SCHEMA: &str = "tpusim.whatif/1";
/// The file that says which rows there are, and marks the folder.
pub const MANIFEST: &str = "whatif.json";
/// Name of the rows of an undivided sweep, without extension.
const ROWS: &str = "rows";
/// Non-dominated rows.
const FRONT: &str = "pareto.csv";

/// Why a folder is not written or read.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// Something of its owner stands there.
    #[error("`{path}` exists and is no folder of a sweep ({why}); choose another folder")]
    NotASweep {
        /// The folder.
        path: String,
        /// What tells it from one.
        why: String,
    },
    /// Another sweep stands there.
    #[error("`{path}` holds another sweep; choose another folder, or replace its rows with `--force`")]
    AnotherSweep {
        /// The folder.
        path: String,
    },
    /// The same sweep stands there.
    #[error(
        "`{path}` holds {done} of the {points} points; `--resume` goes on from there, `--force` begins again"
    )]
    Begun {
        /// The folder.
        path: String,
        /// Points it has.
        done: u64,
        /// Points it is to have.
        points: u64,
    },
    /// A file holds something that is no row of the sweep.
    #[error(
        "`{path}`, line {line}: not a row of this sweep ({what}); remove the file, or begin again with `--force`"
    )]
    NotARow {
        /// The file.
        path: String,
        /// Line, from 1.
        line: u64,
        /// What is wrong.
        what: String,
    },
    /// Shards are not all there.
    #[error("`{path}` is not complete:\n  {}", missing.join("\n  "))]
    Incomplete {
        /// The folder.
        path: String,
        /// What is missing, a line for each shard.
        missing: Vec<String>,
    },
    /// The manifest cannot be read as one.
    #[error("`{path}`: {problem}")]
    Manifest {
        /// The file.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// The file system refused.
    #[error("cannot {action} `{path}`: {problem}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: String,
        /// Why not.
        problem: io::Error,
    },
    /// A further format could not be written.
    #[error("cannot write `{path}`: {problem}")]
    Format {
        /// The file.
        path: String,
        /// Why not.
        problem: String,
    },
}

fn failed<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> FolderError + 'a {
    move |problem| FolderError::Io {
        action,
        path: path.display().to_string(),
        problem,
    }
}

/// One varied field.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Varied {
    field: String,
    values: Vec<String>,
    /// What every value changes, where the values are steps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    set: Vec<Vec<String>>,
}

/// Which rows there are, and where they come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    schema: String,
    name: String,
    layer: String,
    points: u64,
    rows: u64,
    fields: Vec<Varied>,
    chips: Vec<String>,
    plans: Vec<String>,
    pareto: Vec<String>,
    provenance: Provenance,
}

impl Manifest {
    /// The manifest of a sweep whose non-dominated rows in `pareto` are asked for.
    #[must_use]
    pub fn new(grid: &Grid, pareto: &[String], provenance: Provenance) -> Self {
        let varied = |axis: &Axis| Varied {
            field: axis.field().to_owned(),
            values: axis.values().to_vec(),
            set: if axis.is_steps() {
                let texts =
                    |changes: &Vec<_>| changes.iter().map(|c: &Assignment| c.text().to_owned()).collect();
                axis.changes().iter().map(texts).collect()
            } else {
                Vec::new()
            },
        };
        Manifest {
            schema: SCHEMA.to_owned(),
            name: grid.name.clone(),
            layer: grid.layer.clone(),
            points: grid.space.points(),
            rows: grid.space.points() * grid.rows_per_point(),
            fields: grid.space.axes().iter().map(varied).collect(),
            chips: grid.chips.clone(),
            plans: grid.plans.clone(),
            pareto: pareto.to_vec(),
            provenance,
        }
    }

    /// Reads the manifest of a folder.
    ///
    /// # Errors
    /// Where there is none, and where it is of another schema.
    pub fn read(dir: &Path) -> Result<Self, FolderError> {
        let path = dir.join(MANIFEST);
        let text = fs::read_to_string(&path).map_err(failed("read", &path))?;
        let problem = |problem: String| FolderError::Manifest {
            path: path.display().to_string(),
            problem,
        };
        let manifest: Manifest = serde_json::from_str(&text)
            .map_err(|error| problem(format!("not the description of a sweep: {error}")))?;
        if manifest.schema == SCHEMA {
            Ok(manifest)
        } else {
            Err(problem(format!(
                "expected schema `{SCHEMA}`, found `{}`",
                manifest.schema
            )))
        }
    }

    /// The rows there are.
    ///
    /// # Errors
    /// Where a field or value is none.
    pub fn grid(&self) -> Result<Grid, ConfigError> {
        let axis = |varied: &Varied| {
            if varied.set.is_empty() {
                return Axis::new(varied.field.clone(), varied.values.clone());
            }
            let steps = varied.values.iter().cloned().zip(varied.set.iter().cloned());
            Axis::steps(&steps.collect::<Vec<_>>())
        };
        Ok(Grid {
            name: self.name.clone(),
            layer: self.layer.clone(),
            space: Space::new(self.fields.iter().map(axis).collect::<Result<_, _>>()?)?,
            chips: self.chips.clone(),
            plans: self.plans.clone(),
        })
    }

    /// The quantities whose non-dominated rows are asked for.
    #[must_use]
    pub fn pareto(&self) -> &[String] {
        &self.pareto
    }

    fn text(&self) -> String {
        // Nothing in a manifest can fail to be written.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }
}

/// What to do with rows that are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Refuse them; a shard goes on, because it may be started again by whoever watches over it.
    Refuse,
    /// Go on behind them.
    Resume,
    /// Begin again.
    Replace,
}

/// A folder to which rows are appended.
#[derive(Debug)]
pub struct Folder {
    csv: PathBuf,
    json: PathBuf,
    done: u64,
}

/// Whether a sweep writes files of this name.
fn own(name: &str) -> bool {
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let shard = stem.starts_with("shard-") && stem.contains("-of-");
    let rows = (stem == ROWS || shard)
        && [".csv", ".jsonl", ".parquet"]
            .iter()
            .any(|end| name.ends_with(end));
    rows || name == MANIFEST || name == FRONT || name.ends_with(TEMPORARY)
}

/// End of the name of a file that is being written.
const TEMPORARY: &str = ".part";

fn stem(shard: Shard) -> String {
    if shard == Shard::WHOLE {
        ROWS.to_owned()
    } else {
        format!("shard-{}-of-{}", shard.index, shard.of)
    }
}

/// Writes a file under another name and gives it its own when it is whole.
fn write_whole(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), FolderError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}{TEMPORARY}", std::process::id()));
    let part = path.with_file_name(name);
    let mut out = BufWriter::new(File::create(&part).map_err(failed("write", &part))?);
    write(&mut out)
        .and_then(|()| out.flush())
        .map_err(failed("write", &part))?;
    drop(out);
    fs::rename(&part, path).map_err(failed("write", path))
}

impl Folder {
    /// Opens folder `dir` for the rows of a shard of the sweep that `manifest` and `columns` describe.
    ///
    /// # Errors
    /// Where the folder holds something else, or rows that `existing` does not allow, or where the file system refuses. Nothing is changed then.
    pub fn open(
        dir: &Path,
        (manifest, columns): (&Manifest, &Columns<'_>),
        shard: Shard,
        existing: Existing,
    ) -> Result<Self, FolderError> {
        let (csv, json) = (
            dir.join(format!("{}.csv", stem(shard))),
            dir.join(format!("{}.jsonl", stem(shard))),
        );
        match Self::found(dir, manifest)? {
            Found::Nothing => {
                fs::create_dir_all(dir).map_err(failed("create", dir))?;
                write_whole(&dir.join(MANIFEST), |out| {
                    out.write_all(manifest.text().as_bytes())
                })?;
            }
            Found::Other if existing == Existing::Replace => {
                for entry in fs::read_dir(dir).map_err(failed("read", dir))? {
                    let path = entry.map_err(failed("read", dir))?.path();
                    if path.file_name().and_then(|name| name.to_str()).is_some_and(own) {
                        fs::remove_file(&path).map_err(failed("remove", &path))?;
                    }
                }
                write_whole(&dir.join(MANIFEST), |out| {
                    out.write_all(manifest.text().as_bytes())
                })?;
            }
            Found::Other => {
                return Err(FolderError::AnotherSweep {
                    path: dir.display().to_string(),
                });
            }
            Found::Same => {}
        }
        let mut done = 0;
        if csv.exists() && existing != Existing::Replace {
            let header = columns.header();
            let lines = |path: &Path| complete_lines(path, None).map(|(lines, _)| lines);
            let rows = lines(&csv)?
                .saturating_sub(1)
                .min(if json.exists() { lines(&json)? } else { 0 });
            let per_point = columns.grid().rows_per_point().max(1);
            done = rows / per_point;
            if shard == Shard::WHOLE && existing == Existing::Refuse {
                return Err(FolderError::Begun {
                    path: dir.display().to_string(),
                    done,
                    points: columns.grid().space.points(),
                });
            }
            check_header(&csv, &header)?;
            for (path, keep) in [(&csv, 1 + done * per_point), (&json, done * per_point)] {
                if done > 0 {
                    let (_, bytes) = complete_lines(path, Some(keep))?;
                    let file = OpenOptions::new().write(true).open(path);
                    file.and_then(|file| file.set_len(bytes))
                        .map_err(failed("shorten", path))?;
                }
            }
        }
        if done == 0 {
            for name in [FRONT, "rows.parquet"] {
                let stale = dir.join(name);
                if shard == Shard::WHOLE && stale.exists() {
                    fs::remove_file(&stale).map_err(failed("remove", &stale))?;
                }
            }
            fs::write(&csv, columns.header()).map_err(failed("write", &csv))?;
            fs::write(&json, "").map_err(failed("write", &json))?;
        }
        Ok(Folder { csv, json, done })
    }

    fn found(dir: &Path, manifest: &Manifest) -> Result<Found, FolderError> {
        let refuse = |why: &str| FolderError::NotASweep {
            path: dir.display().to_string(),
            why: why.to_owned(),
        };
        match fs::metadata(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
            Err(error) => return Err(failed("read", dir)(error)),
            Ok(metadata) if !metadata.is_dir() => return Err(refuse("it is a file")),
            Ok(_) => {}
        }
        if fs::read_dir(dir).map_err(failed("read", dir))?.next().is_none() {
            return Ok(Found::Nothing);
        }
        if !dir.join(MANIFEST).exists() {
            // Another shard may be about to write it.
            let parts = fs::read_dir(dir).map_err(failed("read", dir))?;
            let only_begun = parts.flatten().all(|entry| {
                let name = entry.file_name();
                name.to_str().is_some_and(|name| name.ends_with(TEMPORARY))
            });
            return if only_begun {
                Ok(Found::Nothing)
            } else {
                Err(refuse(&format!("it has no `{MANIFEST}`")))
            };
        }
        let there = Manifest::read(dir).map_err(|error| refuse(&error.to_string()))?;
        Ok(if there == *manifest {
            Found::Same
        } else {
            Found::Other
        })
    }

    /// Points whose rows are there.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Hands over the rows that are there.
    ///
    /// # Errors
    /// Where a line is not a row of the sweep.
    pub fn replay(&self, columns: &Columns<'_>, each: impl FnMut(Row)) -> Result<(), FolderError> {
        read_rows(&self.csv, columns, each)
    }

    /// Appends rows.
    ///
    /// # Errors
    /// Where the file system refuses.
    pub fn append(&self, columns: &Columns<'_>, rows: &[Row]) -> Result<(), FolderError> {
        for (path, bytes) in [
            (&self.csv, columns.csv(rows, None)),
            (&self.json, columns.json(rows, None)),
        ] {
            let file = OpenOptions::new().append(true).open(path);
            file.and_then(|mut file| file.write_all(&bytes))
                .map_err(failed("write", path))?;
        }
        Ok(())
    }
}

/// What stands where a sweep is to be written.
enum Found {
    Nothing,
    Same,
    Other,
}

/// Lines of a file that end with a line break, and the bytes of the first `keep` of them.
fn complete_lines(path: &Path, keep: Option<u64>) -> Result<(u64, u64), FolderError> {
    let mut reader = BufReader::with_capacity(1 << 16, File::open(path).map_err(failed("read", path))?);
    let (mut lines, mut bytes) = (0_u64, 0_u64);
    loop {
        let buffer = reader.fill_buf().map_err(failed("read", path))?;
        if buffer.is_empty() || Some(lines) == keep {
            return Ok((lines, bytes));
        }
        let mut used = 0;
        for (at, byte) in buffer.iter().enumerate() {
            if *byte == b'\n' {
                lines += 1;
                used = at + 1;
                if Some(lines) == keep {
                    return Ok((lines, bytes + used as u64));
                }
            }
        }
        // What stands behind the last break of the buffer belongs to a line that ends in the next one, or to none.
        let rest = buffer.len() - used;
        bytes += (used + rest) as u64;
        let length = buffer.len();
        reader.consume(length);
    }
}

fn check_header(path: &Path, header: &str) -> Result<(), FolderError> {
    let mut found = vec![0; header.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut found));
    if read.is_ok() && found == header.as_bytes() {
        return Ok(());
    }
    Err(FolderError::NotARow {
        path: path.display().to_string(),
        line: 1,
        what: "another header".to_owned(),
    })
}

fn read_rows(path: &Path, columns: &Columns<'_>, mut each: impl FnMut(Row)) -> Result<(), FolderError> {
    let not_a_row = |line: u64, what: String| FolderError::NotARow {
        path: path.display().to_string(),
        line,
        what,
    };
    let file = File::open(path).map_err(failed("read", path))?;
    let mut reader = csv::Reader::from_reader(BufReader::new(file));
    let mut record = csv::StringRecord::new();
    let mut line = 1;
    loop {
        line += 1;
        match reader.read_record(&mut record) {
            Ok(false) => return Ok(()),
            Ok(true) => each(columns.read(&record).map_err(|what| not_a_row(line, what))?),
            Err(error) => return Err(not_a_row(line, error.to_string())),
        }
    }
}

/// Writes the files that need all rows: the non-dominated ones, where they are asked for, and Parquet where this build writes it.
///
/// # Errors
/// Where the file system refuses.
pub fn finish(dir: &Path, columns: &Columns<'_>, front: Option<&[&Row]>) -> Result<(), FolderError> {
    if let Some(front) = front {
        let rows: Vec<Row> = front.iter().map(|row| (*row).clone()).collect();
        write_whole(&dir.join(FRONT), |out| {
            out.write_all(columns.header().as_bytes())?;
            out.write_all(&columns.csv(&rows, None))
        })?;
    }
    #[cfg(feature = "parquet")]
    {
        let path = dir.join(format!("{ROWS}.parquet"));
        let mut outcome = Ok(());
        write_whole(&path, |out| {
            let mut writer = super::parquet::Writer::new(out, columns);
            let source = dir.join(format!("{ROWS}.csv"));
            outcome = read_rows(&source, columns, |row| writer.add(row));
            writer.close().map_err(io::Error::other)
        })?;
        outcome?;
    }
    Ok(())
}

/// Puts the shards of a folder together as `rows.csv` and `rows.jsonl`, and hands over their rows.
///
/// # Errors
/// Where shards or points are missing, all of which are listed; nothing is written then.
pub fn merge(dir: &Path, columns: &Columns<'_>, each: impl FnMut(Row)) -> Result<(), FolderError> {
    let incomplete = |missing: Vec<String>| FolderError::Incomplete {
        path: dir.display().to_string(),
        missing,
    };
    let mut divisions: Vec<u64> = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed("read", dir))? {
        let name = entry.map_err(failed("read", dir))?.file_name();
        let of: Option<u64> = name
            .to_str()
            .and_then(|name| {
                name.strip_prefix("shard-")?
                    .strip_suffix(".csv")?
                    .split_once("-of-")
            })
            .and_then(|(_, of)| of.parse().ok());
        divisions.extend(of);
    }
    divisions.sort_unstable();
    divisions.dedup();
    let of = match divisions[..] {
        [of] => of,
        [] => return Err(incomplete(vec!["it holds no shard".to_owned()])),
        _ => {
            let all: Vec<String> = divisions.iter().map(u64::to_string).collect();
            return Err(incomplete(vec![format!(
                "it holds shards of sweeps divided by {}; remove those of all but one",
                all.join(" and by ")
            )]));
        }
    };
    let (space, per_point) = (&columns.grid().space, columns.grid().rows_per_point());
    let mut missing = Vec::new();
    let shards: Vec<Shard> = (0..of).map(|index| Shard { index, of }).collect();
    for &shard in &shards {
        let range = space.shard(shard);
        let points = range.end - range.start;
        let csv = dir.join(format!("{}.csv", stem(shard)));
        let json = dir.join(format!("{}.jsonl", stem(shard)));
        if !csv.exists() || !json.exists() {
            missing.push(format!("shard {}/{of} is missing", shard.index));
            continue;
        }
        check_header(&csv, &columns.header())?;
        let rows = complete_lines(&csv, None)?.0.saturating_sub(1);
        let rows = rows.min(complete_lines(&json, None)?.0);
        if rows != points * per_point {
            missing.push(format!(
                "shard {}/{of} has {} of {points} points",
                shard.index,
                rows / per_point.max(1)
            ));
        }
    }
    if !missing.is_empty() {
        return Err(incomplete(missing));
    }
    for (end, header) in [("csv", columns.header()), ("jsonl", String::new())] {
        write_whole(&dir.join(format!("{ROWS}.{end}")), |out| {
            out.write_all(header.as_bytes())?;
            for &shard in &shards {
                let mut part = BufReader::new(File::open(dir.join(format!("{}.{end}", stem(shard))))?);
                io::copy(&mut part.by_ref().take(header.len() as u64), &mut io::sink())?;
                io::copy(&mut part, out)?;
            }
            Ok(())
        })?;
    }
    read_rows(&dir.join(format!("{ROWS}.csv")), columns, each)
}
