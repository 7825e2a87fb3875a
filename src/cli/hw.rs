//! `tpusim hw`: accelerators, with derived against published peaks and sources.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::{Context as _, bail};
use serde::Serialize;

use super::json;
use crate::config::Document;
use crate::dtype::Dtype;
use crate::hardware::{self, Architecture, Chip, Provenance, PublishedFigure};
use crate::report::table::{Cell, Column, Format, Table};
use crate::schema::Kind;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, Hertz, Seconds};

/// How a command ended that did what it was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All is well: exit code 0.
    Done,
    /// A check failed: exit code 1.
    CheckFailed,
}

/// A derived peak may differ from a published one by this share before it needs a note: datasheets print
/// three digits.
const TOLERANCE: f64 = 0.01;

/// Rates of one device as `hw list` prints them.
#[derive(Debug, Serialize)]
struct Summary {
    name: String,
    title: String,
    cores_per_device: u32,
    cores_per_chip: u32,
    clock_ghz: f64,
    bf16_tflops: Option<f64>,
    vector_tops: f64,
    hbm_gb_per_s: f64,
    ridge_flop_per_byte: Option<f64>,
    mxu_vpu_ratio: Option<f64>,
}

impl Summary {
    fn of(chip: &Chip) -> Self {
        Self {
            name: chip.name.clone(),
            title: chip.title.clone(),
            cores_per_device: chip.cores_per_device,
            cores_per_chip: chip.cores_per_chip,
            clock_ghz: chip.clock().get() / 1e9,
            bf16_tflops: chip
                .matrix_flops_per_second(Dtype::Bf16)
                .map(|rate| rate.get() / 1e12),
            vector_tops: chip.vector_ops_per_second().get() / 1e12,
            hbm_gb_per_s: chip.hbm_bandwidth_per_device().get() / 1e9,
            ridge_flop_per_byte: chip.ridge_point(Dtype::Bf16),
            mxu_vpu_ratio: chip.matrix_to_vector_ratio(),
        }
    }
}

/// Every shipped accelerator with the rates of one device.
///
/// # Errors
/// What `out` reports.
pub fn list(out: &mut impl Write, format: Format) -> anyhow::Result<Outcome> {
    let mut summaries = Vec::new();
    for name in hardware::shipped() {
        summaries.push(Summary::of(&hardware::load(name)?.0));
    }
    let mut table = Table::new([
        Column::text("name", "name"),
        Column::text("chip", "title"),
        Column::number("cores", "cores_per_device"),
        Column::number("of", "cores_per_chip"),
        Column::number("clock (GHz)", "clock_ghz"),
        Column::number("bf16 (TFLOP/s)", "bf16_tflops"),
        Column::number("vector (Top/s)", "vector_tops"),
        Column::number("HBM (GB/s)", "hbm_gb_per_s"),
        Column::number("ridge (FLOP/B)", "ridge_flop_per_byte"),
        Column::number("MXU:VPU", "mxu_vpu_ratio"),
    ]);
    for chip in &summaries {
        table.row([
            Cell::from(&chip.name),
            Cell::from(&chip.title),
            Cell::from(chip.cores_per_device),
            Cell::from(chip.cores_per_chip),
            Cell::number(chip.clock_ghz, 2),
            Cell::optional(chip.bf16_tflops, 1),
            Cell::number(chip.vector_tops, 2),
            Cell::number(chip.hbm_gb_per_s, 0),
            Cell::optional(chip.ridge_flop_per_byte, 1),
            Cell::optional(chip.mxu_vpu_ratio, 1),
        ]);
    }
    match format {
        Format::Json => json(out, &summaries)?,
        Format::Csv => table.write_csv(out)?,
        Format::Table => {
            table.write_text(out)?;
            writeln!(
                out,
                "\nper device, in the default clock state; vector counts a multiply-add once; ridge: bf16 \
                 peak over datasheet bandwidth"
            )?;
        }
    }
    Ok(Outcome::Done)
}

/// One number of a chip: its field in the file or the name of what is derived, and its value.
struct Entry<'a> {
    field: String,
    value: f64,
    unit: &'static str,
    shown: String,
    /// `None` for what the tool derives itself.
    provenance: Option<&'a Provenance>,
}

/// An entry of the file.
fn entry<'a>(block: &str, field: &str, value: f64, unit: &'static str, from: &'a Provenance) -> Entry<'a> {
    let shown = match unit {
        "Hz" => Hertz(value).to_string(),
        "B" => Bytes(value).to_string(),
        "B/s" => BytesPerSecond(value).to_string(),
        "s" => Seconds(value).to_string(),
        _ => value.to_string(),
    };
    let provenance = Some(from.of(field));
    Entry {
        field: format!("{block}.{field}"),
        value,
        unit,
        shown,
        provenance,
    }
}

fn described(chip: &Chip) -> Vec<Entry<'_>> {
    let mut entries = Vec::new();
    let cores = [
        ("per_chip", chip.cores_per_chip),
        ("per_device", chip.cores_per_device),
    ];
    entries
        .extend(cores.map(|(field, count)| entry("cores", field, count.into(), "1", &chip.cores_provenance)));
    for state in &chip.clock_states {
        let block = format!("clock.states.{}", state.name);
        entries.push(entry(
            &block,
            "frequency",
            state.frequency.get(),
            "Hz",
            &state.provenance,
        ));
    }
    let matrix = &chip.matrix_unit;
    let sizes = [
        ("count", matrix.count),
        ("rows", matrix.rows),
        ("columns", matrix.columns),
    ];
    entries
        .extend(sizes.map(|(field, size)| entry("matrix_unit", field, size.into(), "1", &matrix.provenance)));
    if chip.architecture == Architecture::Gpu {
        let issued = f64::from(u8::from(matrix.asynchronous));
        entries.push(entry(
            "matrix_unit",
            "asynchronous",
            issued,
            "1 if so",
            &matrix.provenance,
        ));
    }
    for (dtype, rate) in &matrix.rows_per_cycle {
        entries.push(entry(
            "matrix_unit",
            &format!("rows_per_cycle.{dtype}"),
            *rate,
            "1",
            &matrix.provenance,
        ));
    }
    let vector = &chip.vector_unit;
    let fields = [
        ("lanes", f64::from(vector.lanes)),
        ("sublanes", f64::from(vector.sublanes)),
        ("registers", f64::from(vector.registers)),
        ("slots.alu", vector.slots.alu),
        ("slots.transcendental", vector.slots.transcendental),
        ("slots.cross_lane", vector.slots.cross_lane),
        ("slots.load", vector.slots.load),
        ("slots.store", vector.slots.store),
        ("flops_per_alu_op", vector.flops_per_alu_op),
    ];
    entries.extend(fields.map(|(field, value)| entry("vector_unit", field, value, "1", &vector.provenance)));
    let latency = &chip.latency;
    let fields = [
        ("matrix_result_cycles", latency.matrix_result),
        ("vector_cycles", latency.vector),
        ("transcendental_cycles", latency.transcendental),
        ("cross_lane_cycles", latency.cross_lane),
    ];
    entries
        .extend(fields.map(|(field, value)| entry("latency", field, value, "cycles", &latency.provenance)));
    for (block, memory) in [("on_chip", Some(&chip.on_chip)), ("cache", chip.cache.as_ref())] {
        if let Some(memory) = memory {
            entries.push(entry(
                block,
                "capacity",
                memory.capacity.get(),
                "B",
                &memory.provenance,
            ));
            if let Some(limit) = memory.scoped_limit {
                entries.push(entry(block, "scoped_limit", limit.get(), "B", &memory.provenance));
            }
        }
    }
    let hbm = &chip.hbm;
    entries.push(entry("hbm", "capacity", hbm.capacity.get(), "B", &hbm.provenance));
    entries.push(entry(
        "hbm",
        "bandwidth",
        hbm.bandwidth.get(),
        "B/s",
        &hbm.provenance,
    ));
    entries.push(entry(
        "hbm",
        "achievable",
        hbm.achievable,
        "1",
        &hbm.achievable_provenance,
    ));
    if let Some(links) = &chip.interconnect {
        let rate = links.bidirectional.get();
        entries.push(entry(
            "interconnect",
            "bidirectional",
            rate,
            "B/s",
            &links.provenance,
        ));
    }
    entries.push(entry(
        "launch",
        "time",
        chip.launch.get(),
        "s",
        &chip.launch_provenance,
    ));
    entries
}

fn derived(chip: &Chip) -> Vec<Entry<'static>> {
    let mut entries = Vec::new();
    let mut add = |field: String, value: f64, unit: &'static str, shown: String| {
        entries.push(Entry {
            field,
            value,
            unit,
            shown,
            provenance: None,
        });
    };
    for dtype in chip.matrix_unit.rows_per_cycle.keys() {
        if let Some(rate) = chip.matrix_flops_per_second(*dtype) {
            add(
                format!("matrix peak {dtype}"),
                rate.get(),
                "FLOP/s",
                rate.to_string(),
            );
        }
    }
    // Operations are counted once here, so the unit of datasheets would mislead.
    let operations = |rate: FlopsPerSecond| rate.to_string().replace("FLOP/s", "op/s");
    let rate = chip.vector_ops_per_second();
    add(
        "vector operations".to_owned(),
        rate.get(),
        "op/s",
        operations(rate),
    );
    let rate = chip.vector_flops_per_second();
    add(
        "vector peak as datasheets count".to_owned(),
        rate.get(),
        "FLOP/s",
        rate.to_string(),
    );
    let rate = chip.transcendentals_per_second();
    add(
        "transcendental operations".to_owned(),
        rate.get(),
        "op/s",
        operations(rate),
    );
    let rate = chip.hbm_bandwidth_per_device();
    add(
        "HBM bandwidth, datasheet".to_owned(),
        rate.get(),
        "B/s",
        rate.to_string(),
    );
    let rate = chip.achievable_hbm_bandwidth_per_device();
    add(
        "HBM bandwidth, achievable".to_owned(),
        rate.get(),
        "B/s",
        rate.to_string(),
    );
    let size = chip.hbm_capacity_per_device();
    add("HBM capacity".to_owned(), size.get(), "B", size.to_string());
    let size = chip.on_chip_per_device();
    add("on-chip memory".to_owned(), size.get(), "B", size.to_string());
    for dtype in chip.matrix_unit.rows_per_cycle.keys() {
        if let Some(point) = chip.ridge_point(*dtype) {
            add(
                format!("ridge point {dtype}"),
                point,
                "FLOP/B",
                format!("{point:.1} FLOP/B"),
            );
        }
    }
    if let Some(ratio) = chip.matrix_to_vector_ratio() {
        add(
            "MXU:VPU, bf16 FLOP per vector operation".to_owned(),
            ratio,
            "1",
            format!("{ratio:.1}"),
        );
    }
    entries
}

/// One published figure beside what the description derives.
#[derive(Debug, Serialize)]
struct Comparison {
    name: String,
    quantity: String,
    clock: String,
    published_tflops: f64,
    derived_tflops: Option<f64>,
    difference_percent: Option<f64>,
    verdict: &'static str,
    note: String,
    source: String,
}

impl Comparison {
    fn of(chip: &Chip, figure: &PublishedFigure) -> Self {
        let derived = chip.derived(figure);
        let difference = derived.map(|derived| derived / figure.value - 1.0);
        let close = difference.is_some_and(|difference| difference.abs() <= TOLERANCE);
        let verdict = match (close, figure.provenance.note.is_empty()) {
            (true, _) => "ok",
            (false, false) => "differs, see note",
            (false, true) if derived.is_none() => "no rate described",
            (false, true) => "differs",
        };
        Self {
            name: chip.name.clone(),
            quantity: figure.quantity.clone(),
            clock: figure.clock.clone(),
            published_tflops: figure.value.get() / 1e12,
            derived_tflops: derived.map(|derived| derived.get() / 1e12),
            difference_percent: difference.map(|difference| difference * 100.0),
            verdict,
            note: figure.provenance.note.clone(),
            source: figure.provenance.source.clone(),
        }
    }

    fn explained(&self) -> bool {
        self.verdict == "ok" || !self.note.is_empty()
    }
}

fn comparisons(chip: &Chip) -> Vec<Comparison> {
    chip.published
        .iter()
        .map(|figure| Comparison::of(chip, figure))
        .collect()
}

fn comparison_table(rows: &[Comparison]) -> Table {
    let mut table = Table::new([
        Column::text("name", "name"),
        Column::text("peak of the chip", "quantity"),
        Column::text("clock state", "clock"),
        Column::number("published (TFLOP/s)", "published_tflops"),
        Column::number("derived (TFLOP/s)", "derived_tflops"),
        Column::number("difference (%)", "difference_percent"),
        Column::text("verdict", "verdict"),
    ]);
    for row in rows {
        table.row([
            Cell::from(&row.name),
            Cell::from(&row.quantity),
            Cell::from(&row.clock),
            Cell::number(row.published_tflops, 2),
            Cell::optional(row.derived_tflops, 2),
            Cell::optional(row.difference_percent, 2),
            Cell::from(row.verdict),
        ]);
    }
    table
}

/// Words of `text` on lines of at most 100 characters, each after `indent` blanks.
fn wrapped(text: &str, indent: usize) -> String {
    let mut lines = String::new();
    let mut column = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > 0 && indent + column + 1 + length > 100 {
            lines.push('\n');
            column = 0;
        }
        if column == 0 {
            lines.push_str(&" ".repeat(indent));
        } else {
            lines.push(' ');
            column += 1;
        }
        lines.push_str(word);
        column += length;
    }
    lines
}

/// What `hw show` prints as JSON.
#[derive(Serialize)]
struct Shown<'a> {
    chip: &'a Chip,
    digest: String,
    device: Summary,
    published: Vec<Comparison>,
}

/// Everything about one accelerator: the numbers of its file with their sources, what follows for one
/// device, and published peaks beside derived ones. `overrides` are `--set` assignments, `clock` another
/// clock state.
///
/// # Errors
/// For a name or file that cannot be loaded, an override that does not fit, an unknown clock state, and what
/// `out` reports.
pub fn show(
    out: &mut impl Write,
    name: &str,
    overrides: &[String],
    clock: Option<&str>,
    format: Format,
) -> anyhow::Result<Outcome> {
    let (mut chip, document) = hardware::load_with(name, overrides)?;
    if let Some(state) = clock {
        chip = chip.with_clock(state)?;
    }
    match format {
        Format::Json => {
            let device = Summary::of(&chip);
            json(
                out,
                &Shown {
                    chip: &chip,
                    digest: document.digest(),
                    device,
                    published: comparisons(&chip),
                },
            )?;
        }
        Format::Csv => show_csv(out, &chip)?,
        Format::Table => show_text(out, &chip, &document)?,
    }
    Ok(Outcome::Done)
}

fn show_csv(out: &mut impl Write, chip: &Chip) -> anyhow::Result<()> {
    let columns = ["quantity", "value", "unit", "kind", "source", "note"];
    let mut table = Table::new(columns.map(|name| Column::text(name, name)));
    for entry in described(chip).into_iter().chain(derived(chip)) {
        let (kind, source, note) = match entry.provenance {
            Some(from) => (from.kind.name(), from.source.as_str(), from.note.as_str()),
            None => ("derived", "this description", ""),
        };
        table.row([
            Cell::from(entry.field),
            Cell::number(entry.value, 3),
            Cell::from(entry.unit),
            Cell::from(kind),
            Cell::from(source),
            Cell::from(note),
        ]);
    }
    table.write_csv(out)?;
    Ok(())
}

fn show_text(out: &mut impl Write, chip: &Chip, document: &Document) -> anyhow::Result<()> {
    writeln!(out, "{}: {}", chip.name, chip.title)?;
    writeln!(
        out,
        "one device is {} of {} cores; clock state `{}`, {}; {}, digest {}\n",
        chip.cores_per_device,
        chip.cores_per_chip,
        chip.clock.name,
        chip.clock(),
        document.name(),
        document.digest()
    )?;
    let mut references: Vec<(&str, &str)> = Vec::new();
    let mut table = Table::new([
        Column::text("field", "field"),
        Column::number("value", "value"),
        Column::text("kind", "kind"),
        Column::text("source", "source"),
    ]);
    for entry in described(chip) {
        let Some(from) = entry.provenance else { continue };
        let reference = (from.source.as_str(), from.note.as_str());
        let known = references.iter().position(|other| *other == reference);
        let number = known.unwrap_or_else(|| {
            references.push(reference);
            references.len() - 1
        });
        table.row([
            Cell::from(entry.field),
            Cell::from(entry.shown),
            Cell::from(from.kind.name()),
            Cell::from(format!("[{}]", number + 1)),
        ]);
    }
    table.write_text(out)?;
    writeln!(out)?;
    for (index, (source, note)) in references.iter().enumerate() {
        let text = wrapped(source, 5);
        writeln!(out, "{:<4} {}", format!("[{}]", index + 1), text.trim_start())?;
        if !note.is_empty() {
            writeln!(out, "{}", wrapped(note, 5))?;
        }
    }
    let mut table = Table::new([
        Column::text("derived for one device", "quantity"),
        Column::number("value", "value"),
    ]);
    for entry in derived(chip) {
        table.row([Cell::from(entry.field), Cell::from(entry.shown)]);
    }
    writeln!(out)?;
    table.write_text(out)?;
    let rows = comparisons(chip);
    if !rows.is_empty() {
        writeln!(out)?;
        comparison_table(&rows).write_text(out)?;
        write_notes(out, &rows)?;
    }
    if !chip.unknown.is_empty() {
        writeln!(out, "\nnot known: {}", chip.unknown.join("; "))?;
    }
    Ok(())
}

/// Sources of differing figures, with the note that explains them.
fn write_notes(out: &mut impl Write, rows: &[Comparison]) -> anyhow::Result<()> {
    for row in rows.iter().filter(|row| row.verdict != "ok") {
        writeln!(out, "\n{} {}: {}", row.name, row.quantity, row.source)?;
        let note = if row.note.is_empty() {
            "no note explains the difference"
        } else {
            &row.note
        };
        writeln!(out, "{}", wrapped(note, 2))?;
    }
    Ok(())
}

/// Compares derived with published peaks, for one accelerator or all that are shipped.
///
/// The outcome is [`Outcome::CheckFailed`] where a peak differs by more than 1 % and has no note that
/// explains it.
///
/// # Errors
/// For a name or file that cannot be loaded, and what `out` reports.
pub fn check(out: &mut impl Write, name: Option<&str>, format: Format) -> anyhow::Result<Outcome> {
    let names: Vec<&str> = match name {
        Some(name) => vec![name],
        None => hardware::shipped(),
    };
    let mut rows = Vec::new();
    for name in &names {
        rows.extend(comparisons(&hardware::load(name)?.0));
    }
    let failed = rows.iter().filter(|row| !row.explained()).count();
    match format {
        Format::Json => json(out, &rows)?,
        Format::Csv => comparison_table(&rows).write_csv(out)?,
        Format::Table => {
            if rows.is_empty() {
                writeln!(
                    out,
                    "{}: valid; no published peak to compare with",
                    names.join(", ")
                )?;
            } else {
                comparison_table(&rows).write_text(out)?;
                write_notes(out, &rows)?;
                writeln!(
                    out,
                    "\n{} peaks compared, {failed} of them differ by more than 1 % unexplained",
                    rows.len()
                )?;
            }
        }
    }
    Ok(if failed == 0 {
        Outcome::Done
    } else {
        Outcome::CheckFailed
    })
}

/// Writes a commented file to start from.
///
/// # Errors
/// Where `path` exists, does not end in `.yaml`, or cannot be written.
pub fn init(out: &mut impl Write, path: &str) -> anyhow::Result<Outcome> {
    // Without it, `tpusim hw check` would take the name for that of a shipped chip.
    if !Path::new(path)
        .extension()
        .is_some_and(|extension| extension == "yaml" || extension == "yml")
    {
        bail!("`{path}` does not end in `.yaml`; write `{path}.yaml`");
    }
    let mut file = match OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            bail!("`{path}` exists already; choose another name or remove it first")
        }
        Err(error) => return Err(error).with_context(|| format!("cannot write `{path}`")),
    };
    file.write_all(hardware::TEMPLATE.as_bytes())
        .with_context(|| format!("cannot write `{path}`"))?;
    writeln!(out, "wrote {path}; fill it in, then run `tpusim hw check {path}`")?;
    writeln!(out, "{}", super::init::schema_hint(Kind::Hardware))?;
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(command: impl FnOnce(&mut Vec<u8>) -> anyhow::Result<Outcome>) -> (String, Option<Outcome>) {
        let mut out = Vec::new();
        match command(&mut out) {
            Ok(outcome) => (String::from_utf8_lossy(&out).into_owned(), Some(outcome)),
            Err(error) => (format!("{error:#}"), None),
        }
    }

    #[test]
    fn list_has_a_line_per_chip_in_each_format() -> anyhow::Result<()> {
        let (table, _) = text(|out| list(out, Format::Table));
        assert!(table.starts_with("name      chip "));
        let v5e = table
            .lines()
            .find(|line| line.starts_with("tpu-v5e"))
            .unwrap_or_default();
        let cells: Vec<&str> = v5e.split_whitespace().collect();
        assert_eq!(
            cells,
            [
                "tpu-v5e", "Google", "TPU", "v5e", "1", "1", "1.50", "196.6", "6.14", "819", "240.1", "32.0"
            ]
        );
        let (csv, _) = text(|out| list(out, Format::Csv));
        assert_eq!(csv.lines().count(), 14);
        let (json, _) = text(|out| list(out, Format::Json));
        let value: serde_json::Value = serde_json::from_str(&json)?;
        assert_eq!(
            value.get(1).and_then(|chip| chip.get("hbm_gb_per_s")),
            Some(&serde_json::json!(819.0))
        );
        Ok(())
    }

    #[test]
    fn show_prints_numbers_with_kinds_and_sources() -> anyhow::Result<()> {
        let overrides = ["hbm.bandwidth=8 TB/s".to_owned()];
        let (shown, _) = text(|out| show(out, "tpu-v7x", &overrides, Some("boost"), Format::Table));
        assert!(
            shown.contains(
                "one device is 1 of 2 cores; clock state `boost`, 2.2 GHz; hw/tpu-v7x.yaml, digest "
            )
        );
        let line = shown
            .lines()
            .find(|line| line.starts_with("hbm.bandwidth"))
            .unwrap_or_default();
        let cells: Vec<&str> = line.split_whitespace().take(4).collect();
        assert_eq!(cells, ["hbm.bandwidth", "8", "TB/s", "assumed"]);
        assert!(shown.contains("--set hbm.bandwidth=8 TB/s"));
        let (json, _) = text(|out| show(out, "tpu-v7x", &[], None, Format::Json));
        let value: serde_json::Value = serde_json::from_str(&json)?;
        assert_eq!(
            value.pointer("/chip/hbm/bandwidth"),
            Some(&serde_json::json!(7.38e12))
        );
        let (csv, _) = text(|out| show(out, "tpu-v7x", &[], None, Format::Csv));
        assert!(csv.starts_with("quantity,value,unit,kind,source,note\ncores.per_chip,2,1,published,"));
        Ok(())
    }

    #[test]
    fn shipped_chips_pass_the_check() {
        let (shown, outcome) = text(|out| check(out, None, Format::Table));
        assert_eq!(outcome, Some(Outcome::Done));
        assert!(shown.contains("differs, see note"));
        assert!(shown.ends_with(" peaks compared, 0 of them differ by more than 1 % unexplained\n"));
    }

    #[test]
    fn a_peak_that_differs_fails_unless_explained() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("mine.yaml");
        let name = path.display().to_string();
        let (_, outcome) = text(|out| init(out, &name));
        assert_eq!(outcome, Some(Outcome::Done));
        let (message, outcome) = text(|out| init(out, &name));
        assert_eq!(outcome, None);
        assert!(message.ends_with("exists already; choose another name or remove it first"));
        assert_eq!(
            text(|out| check(out, Some(&name), Format::Table)).1,
            Some(Outcome::Done)
        );

        let template = hardware::TEMPLATE;
        std::fs::write(&path, template.replace("459 TFLOP/s", "500 TFLOP/s"))?;
        let (shown, outcome) = text(|out| check(out, Some(&name), Format::Table));
        assert_eq!(outcome, Some(Outcome::CheckFailed));
        assert!(shown.contains("no note explains the difference"));

        let explained = template.replace("459 TFLOP/s,", "500 TFLOP/s, note: counts a third core,");
        std::fs::write(&path, explained)?;
        assert_eq!(
            text(|out| check(out, Some(&name), Format::Csv)).1,
            Some(Outcome::Done)
        );

        std::fs::write(&path, template.replace("rows: 128", "rows: zero"))?;
        let (message, outcome) = text(|out| check(out, Some(&name), Format::Table));
        assert_eq!(outcome, None);
        assert!(
            message.contains("mine.yaml:32:9: matrix_unit.rows: expected a whole number"),
            "{message}"
        );
        Ok(())
    }

    #[test]
    fn init_wants_a_yaml_name() {
        let (message, outcome) = text(|out| init(out, "mine"));
        assert_eq!(
            (message.as_str(), outcome),
            ("`mine` does not end in `.yaml`; write `mine.yaml`", None)
        );
    }
}
