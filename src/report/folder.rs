//! The report folder: `index.html`, `roofline.svg`, `roofline.png`, `stages.csv` and `result.json`, whole or
//! not at all.
//!
//! Everything is written into a new folder beside the final one, which then takes the final name in one
//! rename. A process that dies on the way leaves the old report, or none, under that name; never a half of
//! one.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::plot::PlotError;
use super::plot::roofline::{self, Options};
use super::result::{RunResult, SCHEMA};
use super::{csv, html, json};

/// Name of the file that marks a folder as a report of this tool and lists what it wrote there.
pub const MARKER: &str = ".tpusim-report";

/// First line of the marker.
const MARKER_LINE: &str =
    "tpusim report; replaced as a whole by the next run, so keep nothing of your own here";

/// Why a report was not written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The folder holds something else.
    #[error("`{path}` exists and is not a tpusim report ({why}); choose another folder, or remove this one")]
    NotAReport {
        /// The folder.
        path: String,
        /// What tells it from a report.
        why: String,
    },
    /// The folder is a report to which somebody added a file that replacing would destroy.
    #[error("`{path}` holds `{file}`, which tpusim did not write; move it away, or choose another folder")]
    ForeignFile {
        /// The folder.
        path: String,
        /// The file.
        file: String,
    },
    /// A path such as `/` or `..` that cannot be the name of a new folder.
    #[error("`{path}` cannot be the name of a report folder; write a name, such as `reports/my-layer`")]
    NoName {
        /// The path.
        path: String,
    },
    /// An extra file whose name is taken or is not a plain name.
    #[error(
        "`{name}` cannot be the name of a further file of a report; use a plain name \
         that the report does not use"
    )]
    ExtraName {
        /// The name.
        name: String,
    },
    /// The file system refused.
    #[error("cannot {action} `{path}`: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// The table could not be written.
    #[error("cannot write the stage table: {0}")]
    Csv(#[from] ::csv::Error),
    /// The result could not be written as JSON.
    #[error("cannot write the result: {0}")]
    Json(#[from] json::JsonError),
    /// A picture could not be drawn.
    #[error("cannot draw the report: {0}")]
    Plot(#[from] PlotError),
    /// The page could not be made.
    #[error("cannot make the page: {0}")]
    Html(#[from] html::HtmlError),
}

/// A further file of a report, such as a trace.
#[derive(Debug, Clone, Copy)]
pub struct Extra<'a> {
    /// Plain file name.
    pub name: &'a str,
    /// Content.
    pub bytes: &'a [u8],
}

/// Whether a report could be written as folder `dir`: nothing stands there, or an empty folder, or a report written before.
///
/// # Errors
/// As [`write_report`] would refuse `dir`.
pub fn check_target(dir: &Path) -> Result<(), ReportError> {
    Target::look(dir).map(|_| ())
}

/// Writes the report of `result` as folder `dir` and returns the files in it, without the marker.
///
/// A report that this function wrote before is replaced as a whole; an empty folder is filled.
///
/// # Errors
/// Where `dir` is anything else, where a number of the result is not finite, or where the file system
/// refuses; `dir` is then as it was.
pub fn write_report(dir: &Path, result: &RunResult) -> Result<Vec<PathBuf>, ReportError> {
    write_report_with(dir, result, &[])
}

/// [`write_report`] with further files beside the usual ones.
///
/// # Errors
/// As [`write_report`], and where the name of a further file is taken or not plain.
pub fn write_report_with(
    dir: &Path,
    result: &RunResult,
    extras: &[Extra],
) -> Result<Vec<PathBuf>, ReportError> {
    let target = Target::look(dir)?;
    let mut csv_bytes = Vec::new();
    csv::write(&mut csv_bytes, result)?;
    let options = Options::default();
    let mut files: Vec<(&str, Vec<u8>)> = vec![
        ("index.html", html::render(result)?.into_bytes()),
        ("roofline.svg", roofline::svg(result, &options)?.into_bytes()),
        ("stages.csv", csv_bytes),
        ("result.json", json::to_string(result)?.into_bytes()),
    ];
    let mut names = vec![
        "index.html",
        "roofline.svg",
        "roofline.png",
        "stages.csv",
        "result.json",
    ];
    for extra in extras {
        let plain = Path::new(extra.name)
            .file_name()
            .is_some_and(|name| name == extra.name);
        if !plain || extra.name.contains(['\n', '\\']) || extra.name == MARKER || names.contains(&extra.name)
        {
            return Err(ReportError::ExtraName {
                name: extra.name.to_owned(),
            });
        }
        names.push(extra.name);
        files.push((extra.name, extra.bytes.to_vec()));
    }
    files.push((
        MARKER,
        format!("{MARKER_LINE}\n{}\n", names.join("\n")).into_bytes(),
    ));

    let parent = target.path.parent().unwrap_or(Path::new(""));
    if !parent.as_os_str().is_empty() {
        fs::create_dir_all(parent).map_err(|source| io_error("create", parent, source))?;
    }
    let fresh = Scratch::create(&target.path)?;
    for (name, bytes) in &files {
        let path = fresh.path.join(name);
        fs::write(&path, bytes).map_err(|source| io_error("write", &path, source))?;
    }
    roofline::png(result, &options, &fresh.path.join("roofline.png"))?;
    target.replace_with(fresh)?;
    Ok(names.iter().map(|name| dir.join(name)).collect())
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> ReportError {
    ReportError::Io {
        action,
        path: path.display().to_string(),
        source,
    }
}

/// What stands under the final name.
enum Present {
    Nothing,
    EmptyFolder,
    Report,
}

/// The final name and what stands there.
struct Target {
    path: PathBuf,
    present: Present,
}

impl Target {
    fn look(dir: &Path) -> Result<Self, ReportError> {
        let metadata = match fs::metadata(dir) {
            Ok(metadata) => metadata,
            // Through a link that points nowhere a rename would destroy the link.
            Err(error) if error.kind() == io::ErrorKind::NotFound && fs::symlink_metadata(dir).is_err() => {
                // A trailing `..` has no name of its own.
                return match dir.file_name() {
                    Some(_) => Ok(Self {
                        path: dir.to_owned(),
                        present: Present::Nothing,
                    }),
                    None => Err(ReportError::NoName {
                        path: dir.display().to_string(),
                    }),
                };
            }
            Err(source) => return Err(io_error("read", dir, source)),
        };
        // The folder itself, not a link to it, changes place; `.` gets a name.
        let path = fs::canonicalize(dir).map_err(|source| io_error("read", dir, source))?;
        if path.file_name().is_none() {
            return Err(ReportError::NoName {
                path: dir.display().to_string(),
            });
        }
        let refuse = |why: &str| ReportError::NotAReport {
            path: dir.display().to_string(),
            why: why.to_owned(),
        };
        if !metadata.is_dir() {
            return Err(refuse("it is a file"));
        }
        let mut present_names = Vec::new();
        for entry in fs::read_dir(&path).map_err(|source| io_error("read", dir, source))? {
            let entry = entry.map_err(|source| io_error("read", dir, source))?;
            present_names.push(entry.file_name().to_string_lossy().into_owned());
        }
        present_names.sort();
        if present_names.is_empty() {
            return Ok(Self {
                path,
                present: Present::EmptyFolder,
            });
        }
        let marker =
            fs::read_to_string(path.join(MARKER)).map_err(|_| refuse(&format!("it has no `{MARKER}`")))?;
        if !has_schema(&path.join("result.json")) {
            return Err(refuse(&format!("its `result.json` is not of schema `{SCHEMA}`")));
        }
        let written: Vec<_> = marker.lines().skip(1).collect();
        if let Some(file) = present_names
            .iter()
            .find(|name| *name != MARKER && !written.contains(&name.as_str()))
        {
            return Err(ReportError::ForeignFile {
                path: dir.display().to_string(),
                file: file.clone(),
            });
        }
        Ok(Self {
            path,
            present: Present::Report,
        })
    }

    /// Gives the finished folder its final name.
    fn replace_with(self, fresh: Scratch) -> Result<(), ReportError> {
        let rename =
            |from: &Path, to: &Path| fs::rename(from, to).map_err(|source| io_error("rename", from, source));
        match self.present {
            Present::Nothing => rename(&fresh.path, &self.path)?,
            Present::EmptyFolder => {
                // Removes nothing but an empty folder: a file that came meanwhile stops it.
                fs::remove_dir(&self.path).map_err(|source| io_error("replace", &self.path, source))?;
                if let Err(error) = rename(&fresh.path, &self.path) {
                    // The folder was there before, so it is again.
                    let _ = fs::create_dir(&self.path);
                    return Err(error);
                }
            }
            Present::Report => {
                // No file system call exchanges two full folders everywhere, so the old one steps aside
                // first.
                let aside = Scratch::create(&self.path)?;
                let old = aside.path.join("old");
                rename(&self.path, &old)?;
                if let Err(error) = rename(&fresh.path, &self.path) {
                    // Back as it was; if even that fails, the old report must not be deleted with the scratch
                    // folder.
                    if fs::rename(&old, &self.path).is_err() {
                        aside.keep();
                    }
                    return Err(error);
                }
            }
        }
        fresh.keep();
        Ok(())
    }
}

/// Whether the file is a result of this schema; the rest of it is not read as a result, so that an older
/// field set counts.
fn has_schema(path: &Path) -> bool {
    fs::read_to_string(path)
        .ok()
        .and_then(|text| serde_json::from_str::<serde_json::Value>(&text).ok())
        .is_some_and(|value| value.get("schema").and_then(serde_json::Value::as_str) == Some(SCHEMA))
}

/// A folder beside the final one that goes away again unless it is kept.
struct Scratch {
    path: PathBuf,
    keep: bool,
}

impl Scratch {
    fn create(beside: &Path) -> Result<Self, ReportError> {
        let process = std::process::id();
        let mut number = 0_u32;
        loop {
            let mut name = OsString::from(".");
            name.push(beside.file_name().unwrap_or_default());
            name.push(format!(".tpusim-{process}-{number}"));
            let path = beside.with_file_name(name);
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self { path, keep: false }),
                // Left by a process of the same number that was killed, or in use by another thread.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < 1000 => number += 1,
                Err(source) => return Err(io_error("create", &path, source)),
            }
        }
    }

    fn keep(mut self) {
        self.keep = true;
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.keep {
            // Nothing can be done about a failure here, and the report itself is not touched by it.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    type Outcome = Result<(), Box<dyn std::error::Error>>;

    fn names(dir: &Path) -> io::Result<Vec<String>> {
        let mut names = fs::read_dir(dir)?
            .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
            .collect::<io::Result<Vec<_>>>()?;
        names.sort();
        Ok(names)
    }

    const FILES: [&str; 6] = [
        ".tpusim-report",
        "index.html",
        "result.json",
        "roofline.png",
        "roofline.svg",
        "stages.csv",
    ];

    #[test]
    fn a_report_is_whole_and_leaves_nothing_beside_it() -> Outcome {
        let home = tempfile::tempdir()?;
        let dir = home.path().join("deep/layer");
        let written = write_report(&dir, &fixture::one_chip())?;
        assert_eq!(names(&dir)?, FILES);
        assert_eq!(names(&home.path().join("deep"))?, ["layer"]);
        assert_eq!(written.len(), 5);
        assert!(written.iter().all(|path| path.is_file()));
        assert!(fs::read(dir.join("roofline.png"))?.starts_with(b"\x89PNG\r\n"));
        Ok(())
    }

    #[test]
    fn the_same_result_gives_the_same_bytes() -> Outcome {
        let home = tempfile::tempdir()?;
        let result = fixture::one_chip();
        let (first, second) = (home.path().join("a"), home.path().join("b"));
        write_report(&first, &result)?;
        write_report(&second, &result)?;
        for name in FILES {
            assert_eq!(
                fs::read(first.join(name))?,
                fs::read(second.join(name))?,
                "{name}"
            );
        }
        Ok(())
    }

    #[test]
    fn a_report_is_replaced_as_a_whole() -> Outcome {
        let home = tempfile::tempdir()?;
        let dir = home.path().join("layer");
        let mut result = fixture::one_chip();
        write_report_with(
            &dir,
            &result,
            &[Extra {
                name: "trace.json",
                bytes: b"[]",
            }],
        )?;
        assert!(dir.join("trace.json").is_file());
        "another".clone_into(&mut result.name);
        write_report(&dir, &result)?;
        assert_eq!(
            names(&dir)?,
            FILES,
            "the trace of the first report is gone with it"
        );
        assert_eq!(names(home.path())?, ["layer"]);
        assert_eq!(
            json::from_str(&fs::read_to_string(dir.join("result.json"))?)?.name,
            "another"
        );
        Ok(())
    }

    #[test]
    fn an_empty_folder_is_filled() -> Outcome {
        let home = tempfile::tempdir()?;
        write_report(home.path(), &fixture::one_chip())?;
        assert_eq!(names(home.path())?, FILES);
        Ok(())
    }

    #[test]
    fn a_folder_that_is_not_a_report_is_refused_and_left_alone() -> Outcome {
        let home = tempfile::tempdir()?;
        let dir = home.path().join("thesis");
        fs::create_dir(&dir)?;
        fs::write(dir.join("chapter.tex"), "text")?;
        let error = write_report(&dir, &fixture::one_chip()).map_err(|error| error.to_string());
        assert!(
            error
                .as_ref()
                .is_err_and(|error| error.contains("thesis") && error.contains("choose another folder")),
            "{error:?}"
        );
        assert_eq!(names(&dir)?, ["chapter.tex"]);
        assert_eq!(names(home.path())?, ["thesis"]);
        // A marker alone does not make it one.
        fs::write(dir.join(MARKER), MARKER_LINE)?;
        assert!(matches!(
            write_report(&dir, &fixture::one_chip()),
            Err(ReportError::NotAReport { .. })
        ));
        Ok(())
    }

    #[test]
    fn a_file_somebody_added_is_not_destroyed() -> Outcome {
        let home = tempfile::tempdir()?;
        let dir = home.path().join("layer");
        write_report(&dir, &fixture::one_chip())?;
        fs::write(dir.join("notes.md"), "mine")?;
        let error = write_report(&dir, &fixture::one_chip());
        assert!(
            matches!(&error, Err(ReportError::ForeignFile { file, .. }) if file == "notes.md"),
            "{error:?}"
        );
        assert_eq!(fs::read_to_string(dir.join("notes.md"))?, "mine");
        Ok(())
    }

    #[test]
    fn a_file_is_refused() -> Outcome {
        let home = tempfile::tempdir()?;
        let path = home.path().join("layer");
        fs::write(&path, "text")?;
        assert!(matches!(
            write_report(&path, &fixture::one_chip()),
            Err(ReportError::NotAReport { .. })
        ));
        assert_eq!(fs::read_to_string(&path)?, "text");
        Ok(())
    }

    #[test]
    fn a_result_that_cannot_be_written_leaves_the_old_report() -> Outcome {
        let home = tempfile::tempdir()?;
        let dir = home.path().join("layer");
        let mut result = fixture::one_chip();
        write_report(&dir, &result)?;
        let before = fs::read(dir.join("result.json"))?;
        result.chips[0].clock_ghz = f64::INFINITY;
        assert!(write_report(&dir, &result).is_err());
        assert_eq!(fs::read(dir.join("result.json"))?, before);
        assert_eq!(names(home.path())?, ["layer"]);
        Ok(())
    }

    #[test]
    fn a_further_file_needs_a_name_of_its_own() {
        for name in ["result.json", "../x", "a/b", "", ".tpusim-report"] {
            let outcome = write_report_with(
                Path::new("never"),
                &fixture::one_chip(),
                &[Extra { name, bytes: b"" }],
            );
            assert!(matches!(outcome, Err(ReportError::ExtraName { .. })), "{name}");
        }
        assert!(!Path::new("never").exists());
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_a_report_stays_a_link() -> Outcome {
        let home = tempfile::tempdir()?;
        let (real, link) = (home.path().join("real"), home.path().join("link"));
        write_report(&real, &fixture::one_chip())?;
        std::os::unix::fs::symlink(&real, &link)?;
        write_report(&link, &fixture::one_chip())?;
        assert!(fs::symlink_metadata(&link)?.file_type().is_symlink());
        assert_eq!(names(&real)?, FILES);
        Ok(())
    }

    /// Renders the fixtures for a person to look at: `REPORT_DIR=/tmp/look cargo test -- --ignored look_at`.
    #[test]
    #[ignore = "for a person to look at"]
    fn look_at_the_fixtures() -> Outcome {
        let home = PathBuf::from(std::env::var("REPORT_DIR")?);
        write_report(&home.join("five"), &fixture::five_chips())?;
        write_report(&home.join("one"), &fixture::one_chip())?;
        write_report(&home.join("crowded"), &fixture::crowded())?;
        let style = super::super::text::Style::plain();
        fs::write(
            home.join("five.txt"),
            super::super::text::render(&fixture::five_chips(), &style),
        )?;
        fs::write(
            home.join("one.txt"),
            super::super::text::render(&fixture::one_chip(), &style),
        )?;
        Ok(())
    }
}
