//! Decoding with a log of updates as tables and pictures.

use super::format::three_digits;
use super::plot::sweep::{self, Line, Panel, Series};
use super::plot::{PlotError, Theme, traffic};
use super::table::{Cell, Column, Table};
use crate::study::delta_log::{AppendTime, ChipTables, DeltaLogTables, StepTraffic};

/// Most numbers of sequences that get a panel of their own.
const MOST_PANELS: usize = 3;

/// The kinds of steps of a chip, each with its name.
fn steps(chip: &ChipTables) -> impl Iterator<Item = (&'static str, &AppendTime)> {
    std::iter::once(("eager", &chip.eager))
        .chain(chip.appends.iter().map(|step| ("append", step)))
        .chain(chip.append_merges.iter().map(|step| ("append and merge", step)))
        .chain(chip.merges.iter().map(|step| ("merge", step)))
}

/// Every row of every table as one, for programs: the column `table` says which it belongs to.
#[must_use]
pub fn rows(tables: &DeltaLogTables) -> Table {
    let mut rows = Table::new([
        Column::text("table", "table"),
        Column::text("chip", "chip"),
        Column::text("step", "step"),
        Column::number("sequences", "batch_count"),
        Column::number("states", "states_count"),
        Column::number("interval", "interval_count"),
        Column::number("entries", "length_count"),
        Column::number("programs", "programs_count"),
        Column::number("time (us)", "time_us"),
        Column::number("low (us)", "low_us"),
        Column::number("high (us)", "high_us"),
        Column::number("compared (us)", "compared_us"),
        Column::number("speedup", "speedup_ratio"),
        Column::text("bound", "bound"),
        Column::number("base read (B)", "base_read_bytes"),
        Column::number("log read (B)", "log_read_bytes"),
        Column::number("token read (B)", "token_read_bytes"),
        Column::number("base written (B)", "base_written_bytes"),
        Column::number("log written (B)", "log_written_bytes"),
        Column::number("token written (B)", "token_written_bytes"),
    ]);
    let bytes = |traffic: Option<&StepTraffic>| {
        let parts = traffic.map(|traffic| {
            [traffic.read, traffic.written]
                .map(|part| [part.base_bytes, part.log_bytes, part.token_bytes])
                .concat()
        });
        match parts {
            Some(parts) => parts.into_iter().map(|bytes| Cell::number(bytes, 0)).collect(),
            None => vec![Cell::none(); 6],
        }
    };
    let states = tables.batch * tables.states_per_sequence;
    for chip in &tables.chips {
        let first = |table: &str, step: &str, batch: usize, states: usize| {
            vec![
                Cell::from(table),
                Cell::from(&chip.chip),
                Cell::from(step),
                Cell::from(batch),
                Cell::from(states),
            ]
        };
        for (name, step) in steps(chip) {
            let mut row = first("step", name, tables.batch, states);
            row.extend([Cell::none(), Cell::from(step.length), Cell::none()]);
            row.extend([
                Cell::number(step.time_us, 3),
                Cell::none(),
                Cell::none(),
                Cell::number(chip.eager.time_us, 3),
                Cell::number(chip.eager.time_us / step.time_us, 3),
                Cell::from(step.bound),
            ]);
            row.extend(bytes(Some(&step.traffic)));
            rows.row(row);
        }
        let average = &chip.amortised;
        let mut row = first("average", "average", tables.batch, states);
        row.extend([Cell::from(tables.log.interval), Cell::none(), Cell::none()]);
        row.extend([
            Cell::number(average.time_us, 3),
            Cell::optional(average.low_us, 3),
            Cell::optional(average.high_us, 3),
            Cell::number(chip.eager.time_us, 3),
            Cell::number(average.speedup, 3),
            Cell::none(),
        ]);
        row.extend(bytes(Some(&average.traffic)));
        rows.row(row);
        for point in &chip.intervals {
            let mut row = first("interval", "average", point.batch, point.states);
            row.extend([Cell::from(point.interval), Cell::none(), Cell::none()]);
            row.extend([
                Cell::number(point.time_us, 3),
                Cell::none(),
                Cell::none(),
                Cell::number(point.eager_us, 3),
                Cell::number(point.speedup, 3),
                Cell::none(),
            ]);
            row.extend(bytes(None));
            rows.row(row);
        }
        for split in &chip.splits {
            let batch = split.batch;
            let mut row = first("split", "average", batch, batch * tables.states_per_sequence);
            row.extend([
                Cell::from(split.interval),
                Cell::none(),
                Cell::from(split.programs),
                Cell::number(split.split_us, 3),
                Cell::none(),
                Cell::none(),
                Cell::number(split.whole_us, 3),
                Cell::number(split.whole_us / split.split_us, 3),
                Cell::none(),
            ]);
            row.extend(bytes(None));
            rows.row(row);
        }
    }
    rows
}

/// Steps of a chip: time, what binds it, megabytes by what they belong to.
#[must_use]
pub fn by_step(tables: &DeltaLogTables, chip: &ChipTables) -> Table {
    let mut table = Table::new([
        Column::text("step", "step"),
        Column::number("entries", "length_count"),
        Column::number("time (us)", "time_us"),
        Column::text("bound", "bound"),
        Column::number("read: base (MB)", "base_read_megabytes"),
        Column::number("log", "log_read_megabytes"),
        Column::number("token", "token_read_megabytes"),
        Column::number("written: base (MB)", "base_written_megabytes"),
        Column::number("log", "log_written_megabytes"),
        Column::number("token", "token_written_megabytes"),
    ]);
    let mut row = |name: &str, length: Cell, time_us: f64, bound: Cell, traffic: &StepTraffic| {
        let mut cells = vec![Cell::from(name), length, Cell::number(time_us, 2), bound];
        for part in [traffic.read, traffic.written] {
            for bytes in [part.base_bytes, part.log_bytes, part.token_bytes] {
                cells.push(Cell::number(bytes / 1e6, 3));
            }
        }
        table.row(cells);
    };
    for (name, step) in steps(chip) {
        row(
            name,
            Cell::from(step.length),
            step.time_us,
            Cell::from(step.bound),
            &step.traffic,
        );
    }
    let name = format!("average of {}", tables.log.interval);
    let average = &chip.amortised;
    row(
        &name,
        Cell::none(),
        average.time_us,
        Cell::none(),
        &average.traffic,
    );
    table
}

/// Speed of an average step against the eager one, by sequences and interval, the best interval named.
#[must_use]
pub fn by_interval(tables: &DeltaLogTables) -> Table {
    let mut intervals: Vec<usize> = Vec::new();
    for point in tables.chips.iter().flat_map(|chip| &chip.intervals) {
        if !intervals.contains(&point.interval) {
            intervals.push(point.interval);
        }
    }
    let mut columns = vec![
        Column::text("chip", "chip"),
        Column::number("sequences", "batch_count"),
        Column::number("states (MB)", "states_megabytes"),
        Column::number("eager (us)", "eager_us"),
    ];
    for interval in &intervals {
        columns.push(Column::number(
            format!("M={interval}"),
            format!("speedup_{interval}"),
        ));
    }
    columns.push(Column::number("best M", "best_interval_count"));
    let mut table = Table::new(columns);
    for chip in &tables.chips {
        let mut batches: Vec<usize> = chip.intervals.iter().map(|point| point.batch).collect();
        batches.dedup();
        for batch in batches {
            let points: Vec<_> = chip
                .intervals
                .iter()
                .filter(|point| point.batch == batch)
                .collect();
            let Some(first) = points.first() else { continue };
            let mut cells = vec![
                Cell::from(&chip.chip),
                Cell::from(batch),
                Cell::number(first.state_bytes as f64 / 1e6, 1),
                Cell::number(first.eager_us, 2),
            ];
            for interval in &intervals {
                let point = points.iter().find(|point| point.interval == *interval);
                cells.push(Cell::optional(point.map(|point| point.speedup), 2));
            }
            let best = points.iter().find(|point| point.best);
            cells.push(best.map_or_else(Cell::none, |point| Cell::from(point.interval)));
            table.row(cells);
        }
    }
    table
}

/// Average steps with the log replayed in one kernel and in two.
#[must_use]
pub fn by_split(tables: &DeltaLogTables) -> Table {
    let mut table = Table::new([
        Column::text("chip", "chip"),
        Column::number("interval", "interval_count"),
        Column::number("programs per state", "programs_count"),
        Column::number("one kernel (us)", "whole_us"),
        Column::number("two kernels (us)", "split_us"),
        Column::number("speedup", "speedup_ratio"),
    ]);
    for chip in &tables.chips {
        for split in &chip.splits {
            table.row([
                Cell::from(&chip.chip),
                Cell::from(split.interval),
                Cell::from(split.programs),
                Cell::number(split.whole_us, 2),
                Cell::number(split.split_us, 2),
                Cell::number(split.whole_us / split.split_us, 3),
            ]);
        }
    }
    table
}

/// What the log gains, a line for each chip.
#[must_use]
pub fn gains(tables: &DeltaLogTables) -> Table {
    let mut table = Table::new([
        Column::text("chip", "chip"),
        Column::number("eager (us)", "eager_us"),
        Column::number("average (us)", "time_us"),
        Column::number("low (us)", "low_us"),
        Column::number("high (us)", "high_us"),
        Column::number("speedup", "speedup_ratio"),
        Column::number("by bytes", "traffic_ratio"),
        Column::number("by bytes of state and log", "state_traffic_ratio"),
        Column::number("writes of state and log", "state_write_ratio"),
        Column::text("appends bound by", "append_bound"),
        Column::text("merging step", "merge_bound"),
    ]);
    for chip in &tables.chips {
        let average = &chip.amortised;
        table.row([
            Cell::from(&chip.chip),
            Cell::number(chip.eager.time_us, 2),
            Cell::number(average.time_us, 2),
            Cell::optional(average.low_us, 2),
            Cell::optional(average.high_us, 2),
            Cell::number(average.speedup, 2),
            Cell::number(average.traffic_gain, 2),
            Cell::number(average.state_traffic_gain, 2),
            Cell::number(average.state_write_gain, 2),
            chip.appends
                .iter()
                .rev()
                .nth(1)
                .or(chip.appends.last())
                .map_or_else(Cell::none, |step| Cell::from(step.bound)),
            chip.append_merges
                .last()
                .map_or_else(Cell::none, |step| Cell::from(step.bound)),
        ]);
    }
    table
}

/// The pictures of a workload: name of the file without extension, and the SVG.
///
/// # Errors
/// Where the drawing library fails.
pub fn pictures(tables: &DeltaLogTables) -> Result<Vec<(&'static str, String)>, PlotError> {
    let mut pictures = vec![("traffic", traffic_sheet(tables).svg(Theme::Light)?)];
    for (name, series) in [
        ("steps", steps_series(tables)),
        ("intervals", intervals_series(tables)),
        ("states", states_series(tables)),
        ("split", split_series(tables)),
    ] {
        if series.panels.iter().any(|panel| !panel.lines.is_empty()) && !series.values.is_empty() {
            pictures.push((name, sweep::Sheet::Series(series).svg(Theme::Light)?));
        }
    }
    Ok(pictures)
}

/// One line for each chip.
fn lines(tables: &DeltaLogTables, times: impl Fn(&ChipTables) -> Vec<Option<f64>>) -> Vec<Line> {
    let of_chip = |chip: &ChipTables| Line {
        chip: chip.chip.clone(),
        times_us: times(chip),
    };
    tables.chips.iter().map(of_chip).collect()
}

fn steps_series(tables: &DeltaLogTables) -> Series {
    let panel = |plan: &str, of: fn(&ChipTables) -> &[AppendTime]| Panel {
        plan: plan.to_owned(),
        lines: lines(tables, |chip| {
            of(chip).iter().map(|step| Some(step.time_us)).collect()
        }),
    };
    Series {
        title: format!(
            "{}, {} sequences: time of a step over the entries of its log",
            tables.name, tables.batch
        ),
        field: "entries in the log before the step (before the merge)".to_owned(),
        values: (0..tables.log.interval)
            .map(|length| length.to_string())
            .collect(),
        panels: vec![
            panel("append", |chip| &chip.appends),
            panel("append and merge", |chip| &chip.append_merges),
            panel("merge on its own, of one entry more", |chip| &chip.merges),
        ],
    }
}

/// First, middle and last of the numbers of sequences.
fn some_batches(tables: &DeltaLogTables) -> Vec<usize> {
    let mut batches: Vec<usize> = Vec::new();
    for point in tables.chips.iter().take(1).flat_map(|chip| &chip.intervals) {
        if !batches.contains(&point.batch) {
            batches.push(point.batch);
        }
    }
    if batches.len() > MOST_PANELS {
        batches = vec![batches[0], batches[batches.len() / 2], batches[batches.len() - 1]];
    }
    batches
}

fn intervals_series(tables: &DeltaLogTables) -> Series {
    let points = tables.chips.first().map_or(&[][..], |chip| &chip.intervals);
    let first = points.first().map(|point| point.batch);
    let of_first = points.iter().filter(|point| Some(point.batch) == first);
    Series {
        title: format!("{}: time of an average step over the interval", tables.name),
        field: "tokens from merge to merge".to_owned(),
        values: of_first.map(|point| point.interval.to_string()).collect(),
        panels: some_batches(tables)
            .into_iter()
            .map(|batch| Panel {
                plan: format!("{batch} sequences"),
                lines: lines(tables, |chip| {
                    let of_batch = chip.intervals.iter().filter(|point| point.batch == batch);
                    of_batch.map(|point| Some(point.time_us)).collect()
                }),
            })
            .collect(),
    }
}

fn states_series(tables: &DeltaLogTables) -> Series {
    let interval = tables.log.interval;
    // The interval of the workload, or the nearest below it in the sweep.
    let points = tables.chips.first().map_or(&[][..], |chip| &chip.intervals);
    let shown = points
        .iter()
        .map(|point| point.interval)
        .filter(|swept| *swept <= interval)
        .max()
        .unwrap_or(interval);
    let of_shown = points.iter().filter(|point| point.interval == shown);
    Series {
        title: format!("{}: time of a step over the states of all sequences", tables.name),
        field: "states (sequences times heads)".to_owned(),
        values: of_shown.map(|point| point.states.to_string()).collect(),
        panels: [
            ("eager".to_owned(), true),
            (format!("log, merge every {shown} tokens"), false),
        ]
        .into_iter()
        .map(|(plan, eager)| Panel {
            plan,
            lines: lines(tables, |chip| {
                let points = chip.intervals.iter().filter(|point| point.interval == shown);
                points
                    .map(|point| Some(if eager { point.eager_us } else { point.time_us }))
                    .collect()
            }),
        })
        .collect(),
    }
}

fn split_series(tables: &DeltaLogTables) -> Series {
    let splits = tables.chips.first().map_or(&[][..], |chip| &chip.splits);
    let mut programs: Vec<u64> = Vec::new();
    for split in splits {
        if !programs.contains(&split.programs) {
            programs.push(split.programs);
        }
    }
    let first = programs.first().copied();
    let of_first = splits.iter().filter(|split| Some(split.programs) == first);
    let mut panels = vec![Panel {
        plan: "one kernel".to_owned(),
        lines: lines(tables, |chip| {
            let of_first = chip.splits.iter().filter(|split| Some(split.programs) == first);
            of_first.map(|split| Some(split.whole_us)).collect()
        }),
    }];
    panels.extend(programs.iter().map(|&programs| Panel {
        plan: format!("two kernels, {programs} programs per state"),
        lines: lines(tables, |chip| {
            let of = chip.splits.iter().filter(|split| split.programs == programs);
            of.map(|split| Some(split.split_us)).collect()
        }),
    }));
    Series {
        title: format!(
            "{}, {} sequences: time of an average step with the log replayed in one kernel and in two",
            tables.name, tables.batch
        ),
        field: "tokens from merge to merge".to_owned(),
        values: of_first.map(|split| split.interval.to_string()).collect(),
        panels,
    }
}

fn traffic_sheet(tables: &DeltaLogTables) -> traffic::Sheet {
    let parts = [
        "state or base read",
        "log read",
        "token read",
        "state or base written",
        "log written",
        "token written",
    ];
    let bytes = |traffic: &StepTraffic| {
        [traffic.read, traffic.written]
            .map(|part| [part.base_bytes, part.log_bytes, part.token_bytes])
            .concat()
    };
    let mut bars = Vec::new();
    if let Some(chip) = tables.chips.first() {
        let merges = tables.log.interval.saturating_sub(1);
        for (name, step) in steps(chip) {
            // Of merging steps the one of this interval.
            let shown = match name {
                "eager" => true,
                "append" => step.length < merges.max(1),
                "append and merge" => step.length == merges,
                _ => step.length == tables.log.interval,
            };
            if shown {
                bars.push(traffic::Bar {
                    name: if name == "eager" {
                        name.to_owned()
                    } else {
                        format!("{name}, {} entries", step.length)
                    },
                    bytes: bytes(&step.traffic),
                });
            }
        }
        bars.push(traffic::Bar {
            name: format!("average of {}", tables.log.interval),
            bytes: bytes(&chip.amortised.traffic),
        });
    }
    traffic::Sheet {
        title: format!(
            "{}, {} sequences: bytes of a step ({} times less written of state and log than eager)",
            tables.name,
            tables.batch,
            tables
                .chips
                .first()
                .map_or_else(String::new, |chip| three_digits(chip.amortised.state_write_gain)),
        ),
        parts: parts.map(str::to_owned).to_vec(),
        bars,
    }
}
