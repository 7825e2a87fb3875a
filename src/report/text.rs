//! The report in a terminal.
//!
//! The first line can be read alone. Then, per chip, one row per stage; the words of the header are defined
//! once below:
//!
//! ```text
//! tpu-v7x: TPU v7x, one of the 2 cores of a chip, 1 core at 1.9 GHz (default)
//!   fused      title                          time  bound     MXU     VPU     HBM     MXU  achieved/
//!                                               us         busy %  busy %  busy %  lane %     peak %
//!   op1        QKV and gate projections        163  mxu        97       1      31      81         85
//! ```

use std::fmt::Write as _;
use std::io::{self, Write};

use super::format::{self, DEFINITIONS, TimeUnit, percent, relative_error, signed};
use super::result::{
    ChipResult, NumericResult, PlanResult, PublishedComparison, RunResult, TokenBytes, TokenResult,
};

/// Widest line, so that a report fits beside an editor.
const WIDTH: usize = 116;
/// Title columns are not squeezed below this.
const NARROWEST_TITLE: usize = 18;
const GAP: usize = 2;
const INDENT: usize = 2;

/// How the parts of a report are set off. Without styles the text holds no escape sequence.
#[derive(Debug, Clone, Copy, Default)]
pub struct Style {
    headline: anstyle::Style,
    heading: anstyle::Style,
    quiet: anstyle::Style,
    total: anstyle::Style,
    warning: anstyle::Style,
}

impl Style {
    /// No styles at all.
    #[must_use]
    pub const fn plain() -> Self {
        let none = anstyle::Style::new();
        Self {
            headline: none,
            heading: none,
            quiet: none,
            total: none,
            warning: none,
        }
    }

    /// ANSI styles, for a terminal that shows them.
    #[must_use]
    pub const fn ansi() -> Self {
        let none = anstyle::Style::new();
        let yellow = anstyle::Color::Ansi(anstyle::AnsiColor::Yellow);
        Self {
            headline: none.bold(),
            heading: none.bold(),
            quiet: none.dimmed(),
            total: none.bold(),
            warning: none.fg_color(Some(yellow)),
        }
    }
}

/// Writes [`render`].
///
/// # Errors
/// Where the writer fails.
pub fn write(mut out: impl Write, result: &RunResult, style: &Style) -> io::Result<()> {
    out.write_all(render(result, style).as_bytes())
}

/// The report as text.
#[must_use]
pub fn render(result: &RunResult, style: &Style) -> String {
    let mut out = String::new();
    line(&mut out, style.headline, &result.headline);
    paragraph(&mut out, style.quiet, "layer: ", &result.layer);
    for chip in &result.chips {
        out.push('\n');
        chip_table(&mut out, chip, result.baseline.as_deref(), style);
    }
    if let Some(published) = &result.published {
        out.push('\n');
        published_table(&mut out, published, style);
    }
    if let Some(numeric) = &result.numeric {
        out.push('\n');
        numeric_check(&mut out, numeric, style);
    }
    if !result.warnings.is_empty() {
        out.push('\n');
        for warning in &result.warnings {
            paragraph(&mut out, style.warning, "warning: ", warning);
        }
    }
    out.push('\n');
    for (term, meaning) in DEFINITIONS {
        paragraph(&mut out, style.quiet, &format!("{term}: "), meaning);
    }
    out.push('\n');
    provenance(&mut out, result, style);
    out
}

/// One line in one style; a line that is empty carries no escape sequence, and neither does any text of the
/// result.
fn line(out: &mut String, style: anstyle::Style, text: &str) {
    let text: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    let text = text.trim_end();
    if text.is_empty() {
        out.push('\n');
    } else {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{style}{text}{style:#}");
    }
}

/// Text broken between words, with its continuation under its start.
fn paragraph(out: &mut String, style: anstyle::Style, start: &str, text: &str) {
    let indent = start.chars().count().min(WIDTH / 2);
    for (number, part) in wrap(text, WIDTH - indent).iter().enumerate() {
        let lead = if number == 0 {
            start.to_owned()
        } else {
            " ".repeat(indent)
        };
        line(out, style, &format!("{lead}{part}"));
    }
}

/// Text broken between words into lines of at most `width` characters; a longer word stands alone.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if let Some(last) = lines.last_mut() {
            let used = last.chars().count();
            if used == 0 {
                last.push_str(word);
            } else if used + 1 + length <= width {
                last.push(' ');
                last.push_str(word);
            } else {
                lines.push(word.to_owned());
            }
        }
    }
    lines
}

/// A column: its header, line by line, and whether it holds numbers.
struct Column {
    header: Vec<String>,
    number: bool,
}

impl Column {
    fn words(header: &str) -> Self {
        Self {
            header: header.split('\n').map(str::to_owned).collect(),
            number: false,
        }
    }

    fn numbers(header: &str) -> Self {
        Self {
            number: true,
            ..Self::words(header)
        }
    }
}

/// A row of cells, or the name of a group of rows.
enum Row {
    Cells(anstyle::Style, Vec<String>),
    Group(anstyle::Style, String),
}

/// Writes a table whose columns are as wide as what they hold; column `wrapped` gives way where the line
/// would be too long.
fn table(out: &mut String, columns: &[Column], rows: &[Row], wrapped: Option<usize>, quiet: anstyle::Style) {
    let cell = |row: &Row, index: usize| match row {
        Row::Cells(_, cells) => cells.get(index).map_or(0, |cell| cell.chars().count()),
        Row::Group(..) => 0,
    };
    let mut widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(index, column)| {
            let header = column
                .header
                .iter()
                .map(|text| text.chars().count())
                .max()
                .unwrap_or(0);
            rows.iter()
                .map(|row| cell(row, index))
                .max()
                .unwrap_or(0)
                .max(header)
        })
        .collect();
    if let Some(index) = wrapped {
        let all = INDENT + widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1);
        if let Some(width) = widths.get_mut(index) {
            *width = width
                .saturating_sub(all.saturating_sub(WIDTH))
                .max(NARROWEST_TITLE.min(*width));
        }
    }
    let put = |out: &mut String, style: anstyle::Style, cells: &[String]| {
        let mut text = " ".repeat(INDENT);
        for (index, column) in columns.iter().enumerate() {
            let content = cells.get(index).map_or("", String::as_str);
            let width = widths.get(index).copied().unwrap_or(0);
            let gap = if index == 0 { 0 } else { GAP };
            let _ = if column.number {
                write!(text, "{:gap$}{content:>width$}", "")
            } else {
                write!(text, "{:gap$}{content:<width$}", "")
            };
        }
        line(out, style, &text);
    };
    let height = columns
        .iter()
        .map(|column| column.header.len())
        .max()
        .unwrap_or(0);
    for level in 0..height {
        let cells: Vec<_> = columns
            .iter()
            .map(|column| column.header.get(level).cloned().unwrap_or_default())
            .collect();
        put(out, quiet, &cells);
    }
    for row in rows {
        match row {
            Row::Group(style, name) => line(out, *style, &format!("{:INDENT$}{name}", "")),
            Row::Cells(style, cells) => {
                let mut cells = cells.clone();
                let mut rest = Vec::new();
                if let Some((index, width)) = wrapped.and_then(|index| Some((index, *widths.get(index)?)))
                    && let Some(cell) = cells.get_mut(index)
                {
                    rest = wrap(cell, width);
                    *cell = rest.remove(0);
                }
                put(out, *style, &cells);
                for part in rest {
                    let continued: Vec<_> = (0..columns.len())
                        .map(|index| {
                            if Some(index) == wrapped {
                                part.clone()
                            } else {
                                String::new()
                            }
                        })
                        .collect();
                    put(out, *style, &continued);
                }
            }
        }
    }
}

fn chip_table(out: &mut String, chip: &ChipResult, baseline: Option<&str>, style: &Style) {
    let heading = format!(
        "{}: {}, {}, {} at {}",
        chip.name,
        chip.title,
        chip.device,
        format::cores(chip),
        format::clock(chip)
    );
    line(out, style.heading, &heading);
    let unit = TimeUnit::for_chip(chip);
    let rows_of = |plan: &PlanResult| {
        plan.stages
            .iter()
            .any(|row| row.low_us.is_some() && row.high_us.is_some())
    };
    let intervals = chip.plans.iter().any(rows_of);
    let mut columns = vec![Column::words("stage"), Column::words("title")];
    columns.push(Column::numbers(&format!("time\n{}", unit.name())));
    if intervals {
        columns.push(Column::numbers(&format!("80 % interval\n{}", unit.name())));
    }
    columns.push(Column::words("bound"));
    columns.extend(
        [
            "MXU\nbusy %",
            "VPU\nbusy %",
            "HBM\nbusy %",
            "MXU\nlane %",
            "achieved/\npeak %",
        ]
        .map(Column::numbers),
    );
    let mut rows = Vec::new();
    for plan in &chip.plans {
        rows.push(Row::Group(style.heading, plan.name.clone()));
        for row in &plan.stages {
            let mut cells = vec![row.stage.clone(), row.title.clone(), unit.format(row.time_us)];
            if intervals {
                cells.push(unit.interval(row.low_us, row.high_us));
            }
            cells.push(row.bound.to_string());
            cells.extend(
                [
                    row.mxu_busy,
                    row.vpu_busy,
                    row.hbm_busy,
                    row.mxu_lane,
                    row.mxu_achieved,
                ]
                .map(percent),
            );
            rows.push(Row::Cells(anstyle::Style::new(), cells));
        }
        let speedup = plan
            .speedup_over_baseline
            .map(|factor| format::speedup(factor, baseline, &plan.name));
        let mut cells = vec![
            "total".to_owned(),
            speedup.unwrap_or_default(),
            unit.format(plan.total_us),
        ];
        if intervals {
            cells.push(unit.interval(plan.low_us, plan.high_us));
        }
        rows.push(Row::Cells(style.total, cells));
    }
    table(out, &columns, &rows, Some(1), style.quiet);
    token_table(out, chip, style);
    paragraph(out, style.quiet, "  rests on: ", &chip.coverage);
}

/// What a token of a decode step takes, per plan.
fn token_table(out: &mut String, chip: &ChipResult, style: &Style) {
    let tokens: Vec<(&PlanResult, TokenResult)> = chip
        .plans
        .iter()
        .filter_map(|plan| Some((plan, plan.token?)))
        .collect();
    let Some((_, first)) = tokens.first() else { return };
    let heading = format!("  per token, {} to a step; bytes in kB", first.tokens);
    line(out, style.heading, &heading);
    let unit = TimeUnit::for_times(tokens.iter().map(|(_, token)| token.time_us));
    let mut columns = vec![
        Column::words("plan"),
        Column::numbers(&format!("time\n{}", unit.name())),
        Column::words("bytes"),
    ];
    columns.extend(
        TokenBytes::default()
            .parts()
            .map(|(part, _)| Column::numbers(part)),
    );
    columns.push(Column::numbers("all"));
    let mut rows = Vec::new();
    for (plan, token) in tokens {
        let lines = [("read", token.read_bytes), ("written", token.written_bytes)];
        for (at, (word, bytes)) in lines.into_iter().enumerate() {
            let mut cells = if at == 0 {
                vec![plan.name.clone(), unit.format(token.time_us)]
            } else {
                vec![String::new(), String::new()]
            };
            cells.push(word.to_owned());
            cells.extend(bytes.parts().map(|(_, bytes)| format::kilobytes(bytes)));
            cells.push(format::kilobytes(bytes.total()));
            rows.push(Row::Cells(anstyle::Style::new(), cells));
        }
    }
    table(out, &columns, &rows, None, style.quiet);
}

fn published_table(out: &mut String, published: &PublishedComparison, style: &Style) {
    line(
        out,
        style.heading,
        &format!(
            "against published values on {}: {}",
            published.chip, published.source
        ),
    );
    let unit = TimeUnit::for_times(
        published
            .rows
            .iter()
            .flat_map(|row| [row.published_us, row.predicted_us]),
    );
    let columns = [
        Column::words("plan"),
        Column::words("stage"),
        Column::numbers(&format!("published\n{}", unit.name())),
        Column::numbers(&format!("predicted\n{}", unit.name())),
        Column::numbers("error\n%"),
    ];
    let rows: Vec<_> = published
        .rows
        .iter()
        .map(|row| {
            let cells = vec![
                row.plan.clone(),
                row.stage.clone(),
                unit.format(row.published_us),
                unit.format(row.predicted_us),
                signed(row.error_percent),
            ];
            Row::Cells(
                if row.stage == "total" {
                    style.total
                } else {
                    anstyle::Style::new()
                },
                cells,
            )
        })
        .collect();
    table(out, &columns, &rows, None, style.quiet);
}

fn numeric_check(out: &mut String, numeric: &NumericResult, style: &Style) {
    let heading = format!(
        "numeric check against the token recurrence in f64 ({})",
        format::numeric_scope(numeric)
    );
    line(out, style.heading, &heading);
    let columns = [
        Column::words(""),
        Column::numbers("largest error /\nlargest value"),
        Column::numbers("RMS error /\nRMS value"),
    ];
    let rows = [
        Some(("core output", numeric.output_rel_error, numeric.output_rms_error)),
        numeric
            .state_rel_error
            .zip(numeric.state_rms_error)
            .map(|(largest, rms)| ("final state", largest, rms)),
    ]
    .into_iter()
    .flatten()
    .map(|(name, largest, rms)| {
        Row::Cells(
            anstyle::Style::new(),
            vec![name.to_owned(), relative_error(largest), relative_error(rms)],
        )
    })
    .collect::<Vec<_>>();
    table(out, &columns, &rows, None, style.quiet);
    let exact = relative_error(numeric.exact_rel_error);
    let sentence = format!("  the same graph in f64 without rounding errs by {exact}");
    line(out, anstyle::Style::new(), &sentence);
    match &numeric.non_finite {
        Some(node) => line(
            out,
            style.warning,
            &format!("  first value that is not finite: {node}"),
        ),
        None => line(out, anstyle::Style::new(), "  every value is finite"),
    }
    if !numeric.overflow.is_empty() {
        paragraph(out, anstyle::Style::new(), "  ", &numeric.overflow);
    }
    if let Some(margin) = format::overflow_margin(numeric) {
        line(out, anstyle::Style::new(), &format!("  {margin}"));
    }
}

fn provenance(out: &mut String, result: &RunResult, style: &Style) {
    let from = &result.provenance;
    for item in &from.inferred {
        paragraph(out, style.quiet, "inferred, not published: ", item);
    }
    for item in &from.overrides {
        paragraph(out, style.quiet, "override: ", item);
    }
    let digests = format!(
        "tpusim {}; hardware {}; workload {}; calibration {}",
        from.version, from.hardware_digest, from.workload_digest, from.calibration_digest
    );
    paragraph(out, style.quiet, "made by: ", &digests);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    #[test]
    fn the_first_line_is_the_headline() {
        let result = fixture::five_chips();
        assert_eq!(
            render(&result, &Style::plain()).lines().next(),
            Some(result.headline.as_str())
        );
    }

    #[test]
    fn no_line_is_wider_than_a_terminal() {
        for result in [fixture::five_chips(), fixture::one_chip()] {
            for text in render(&result, &Style::plain()).lines() {
                assert!(
                    text.chars().count() <= 120,
                    "{} columns: {text}",
                    text.chars().count()
                );
                assert_eq!(text, text.trim_end());
            }
        }
    }

    #[test]
    fn styles_change_no_character() {
        let result = fixture::one_chip();
        let styled = render(&result, &Style::ansi());
        assert!(styled.contains('\u{1b}'));
        let mut plain = String::new();
        let mut inside = false;
        for c in styled.chars() {
            match (inside, c) {
                (false, '\u{1b}') => inside = true,
                (true, 'm') => inside = false,
                (true, _) => {}
                (false, c) => plain.push(c),
            }
        }
        assert_eq!(plain, render(&result, &Style::plain()));
    }

    #[test]
    fn every_stage_and_every_warning_is_there() {
        let result = fixture::five_chips();
        // A title may be broken over two lines, so words are compared without the space between them.
        let text = render(&result, &Style::plain());
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for row in result
            .chips
            .iter()
            .flat_map(|chip| &chip.plans)
            .flat_map(|plan| &plan.stages)
        {
            assert!(words.contains(&row.stage));
        }
        for warning in &result.warnings {
            assert!(words.contains(&format!("warning: {warning}")));
        }
        for (term, _) in DEFINITIONS {
            assert_eq!(
                text.lines()
                    .filter(|line| line.starts_with(&format!("{term}: ")))
                    .count(),
                1
            );
        }
    }

    #[test]
    fn a_name_cannot_command_the_terminal() {
        let mut result = fixture::one_chip();
        "a\u{1b}[2Jb\nc".clone_into(&mut result.headline);
        result.warnings = vec!["x\u{1b}]0;y\u{7}".to_owned()];
        let text = render(&result, &Style::plain());
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'));
        assert_eq!(text.lines().next(), Some("a [2Jb c"));
    }

    #[test]
    fn one_chip_with_intervals() {
        insta::assert_snapshot!(render(&fixture::one_chip(), &Style::plain()));
    }

    #[test]
    fn a_result_without_anything_is_still_a_report() {
        let mut result = fixture::five_chips();
        result.chips.clear();
        result.numeric = None;
        result.published = None;
        result.warnings.clear();
        assert!(render(&result, &Style::plain()).starts_with(&result.headline));
    }
}
