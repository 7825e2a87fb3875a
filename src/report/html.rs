//! `index.html`: the whole report in one file that loads nothing.

use std::fmt::Write as _;

use super::format::{self, DEFINITIONS, TimeUnit, percent, relative_error, signed};
use super::json;
use super::plot::roofline::{self, Options};
use super::plot::{PlotError, bars, dark_mode_css};
use super::result::{ChipResult, RunResult};

/// Why a page was not made.
#[derive(Debug, thiserror::Error)]
pub enum HtmlError {
    /// A picture could not be drawn.
    #[error("{0}")]
    Plot(#[from] PlotError),
    /// The result could not be written as JSON.
    #[error("{0}")]
    Json(#[from] json::JsonError),
}

/// The page.
///
/// # Errors
/// Where a picture cannot be drawn or a number of the result is not finite.
pub fn render(result: &RunResult) -> Result<String, HtmlError> {
    let mut page = Page { out: String::new() };
    page.head(result);
    page.warnings(result);
    page.overview(result);
    page.bars(result)?;
    page.rooflines(result)?;
    page.stages(result);
    page.published(result);
    page.numeric(result);
    page.definitions();
    page.provenance(result);
    page.end(result)?;
    Ok(page.out)
}

/// Text for an element or a quoted attribute.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // XML has no such characters, not even escaped.
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// A column of a table: header and class.
struct Column(String, &'static str);

fn words(header: &str) -> Column {
    Column(header.to_owned(), "")
}

fn long_words(header: &str) -> Column {
    Column(header.to_owned(), "t")
}

/// The unit stands in a line of its own, which keeps the column narrow.
fn numbers(header: impl AsRef<str>) -> Column {
    Column(header.as_ref().replacen(" (", "\n(", 1), "n")
}

/// What a cell is sorted by.
enum Order {
    /// Its words.
    Words,
    /// A number.
    Number(f64),
    /// Nothing: it stands last.
    Last,
}

/// A cell: what is shown, and what it is sorted by.
struct Cell(String, Order);

impl Cell {
    fn text(text: impl Into<String>) -> Self {
        Cell(text.into(), Order::Words)
    }

    fn number(text: String, value: f64) -> Self {
        Cell(text, Order::Number(value))
    }

    /// An interval, sorted by its lower end.
    fn interval(unit: TimeUnit, low_us: Option<f64>, high_us: Option<f64>) -> Self {
        Cell(
            unit.interval(low_us, high_us),
            low_us.map_or(Order::Last, Order::Number),
        )
    }

    fn missing() -> Self {
        Cell(String::new(), Order::Last)
    }
}

struct Page {
    out: String,
}

impl Page {
    fn put(&mut self, line: &str) {
        self.out.push_str(line);
        self.out.push('\n');
    }

    fn heading(&mut self, text: &str) {
        self.put(&format!("<h2>{}</h2>", escape(text)));
    }

    fn note(&mut self, text: &str) {
        self.put(&format!("<p class=\"note\">{}</p>", escape(text)));
    }

    /// A table; column `stick` stays in view when a narrow screen scrolls the others.
    fn table(
        &mut self,
        label: &str,
        columns: &[Column],
        rows: &[Vec<Cell>],
        foot: &[Vec<Cell>],
        stick: usize,
    ) {
        let label = escape(label);
        self.put(&format!(
            "<div class=\"table\" tabindex=\"0\" role=\"region\" aria-label=\"{label}\">"
        ));
        let sort = if rows.len() > 2 { " class=\"sort\"" } else { "" };
        self.put(&format!("<table{sort}>\n<thead><tr>"));
        let class = |index: usize, class: &str| {
            let classes = [class, if index == stick { "stick" } else { "" }].join(" ");
            if classes.trim().is_empty() {
                String::new()
            } else {
                format!(" class=\"{}\"", classes.trim())
            }
        };
        for (index, Column(header, kind)) in columns.iter().enumerate() {
            self.put(&format!(
                "<th scope=\"col\"{}>{}</th>",
                class(index, kind),
                escape(header)
            ));
        }
        self.put("</tr></thead>");
        for (tag, rows) in [("tbody", rows), ("tfoot", foot)] {
            if rows.is_empty() && tag == "tfoot" {
                continue;
            }
            self.put(&format!("<{tag}>"));
            for row in rows {
                self.out.push_str("<tr>");
                for (index, (Cell(text, value), Column(_, kind))) in row.iter().zip(columns).enumerate() {
                    let value = match value {
                        Order::Number(value) => format!(" data-v=\"{value}\""),
                        Order::Last => " data-v=\"\"".to_owned(),
                        Order::Words => String::new(),
                    };
                    let _ = write!(self.out, "<td{}{value}>{}</td>", class(index, kind), escape(text));
                }
                self.put("</tr>");
            }
            self.put(&format!("</{tag}>"));
        }
        self.put("</table>\n</div>");
    }

    fn head(&mut self, result: &RunResult) {
        let css = include_str!("report.css");
        self.put("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">");
        self.put("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">");
        // An empty icon, so that a browser does not ask for one.
        self.put("<link rel=\"icon\" href=\"data:,\">");
        self.put(&format!(
            "<title>{} · tpusim</title>\n<style>",
            escape(&result.name)
        ));
        self.out.push_str(css);
        // Paper is light whatever the screen is.
        self.put("@media screen and (prefers-color-scheme: dark) {");
        self.put("  :root {");
        self.put("    --paper: #14181d; --ink: #e8eaed; --quiet: #a7b0ba; --rule: #39414a; --soft: #1b2027;");
        self.put("    --good: #4fd6a5; --warn: #e6b34a; --warn-soft: #2a2416; --accent: #6cb6ff;\n  }");
        self.out.push_str(&dark_mode_css());
        self.put("}\n</style>\n</head>\n<body>\n<main>");
        self.put(&format!("<h1>{}</h1>", escape(&result.name)));
        self.put(&format!("<p class=\"headline\">{}</p>", escape(&result.headline)));
        self.put(&format!("<p class=\"layer\">{}</p>", escape(&result.layer)));
    }

    fn warnings(&mut self, result: &RunResult) {
        if result.warnings.is_empty() {
            return;
        }
        self.put("<div class=\"warnings\" role=\"note\" aria-label=\"Warnings\">\n<ul>");
        for warning in &result.warnings {
            self.put(&format!("<li>{}</li>", escape(warning)));
        }
        self.put("</ul>\n</div>");
    }

    fn overview(&mut self, result: &RunResult) {
        let plans = || result.chips.iter().flat_map(|chip| &chip.plans);
        let unit = TimeUnit::for_times(plans().map(|plan| plan.total_us));
        let (intervals, speedups) = (
            plans().any(|plan| plan.low_us.is_some()),
            plans().any(|plan| plan.speedup_over_baseline.is_some()),
        );
        self.heading("Time per chip and plan");
        let mut columns = vec![
            words("chip"),
            words("plan"),
            numbers(format!("time ({})", unit.symbol())),
        ];
        if intervals {
            columns.push(numbers(format!("80 % interval ({})", unit.symbol())));
        }
        if speedups {
            let baseline = result.baseline.as_deref().unwrap_or("baseline");
            columns.push(numbers(format!("speedup over {baseline},\nsame plan (×)")));
        }
        columns.extend([numbers("cores"), numbers("clock (GHz)"), long_words("device")]);
        let mut rows = Vec::new();
        for chip in &result.chips {
            for plan in &chip.plans {
                let mut row = vec![
                    Cell::text(&chip.name),
                    Cell::text(&plan.name),
                    Cell::number(unit.format(plan.total_us), plan.total_us),
                ];
                if intervals {
                    row.push(Cell::interval(unit, plan.low_us, plan.high_us));
                }
                if speedups {
                    let speedup = plan.speedup_over_baseline;
                    row.push(speedup.map_or_else(Cell::missing, |factor| {
                        Cell::number(format!("{factor:.2}"), factor)
                    }));
                }
                row.extend([
                    Cell::number(chip.cores.to_string(), f64::from(chip.cores)),
                    Cell::number(format::clock(chip).replacen(" GHz", "", 1), chip.clock_ghz),
                    Cell::text(&chip.device),
                ]);
                rows.push(row);
            }
        }
        self.table("Time per chip and plan", &columns, &rows, &[], 0);
    }

    fn bars(&mut self, result: &RunResult) -> Result<(), PlotError> {
        let (wide, narrow) = bars::page(result)?;
        self.heading("Where the time goes");
        self.put(&format!("<figure class=\"wide\">\n{wide}</figure>"));
        self.put(&format!("<figure class=\"narrow\">\n{narrow}</figure>"));
        Ok(())
    }

    fn rooflines(&mut self, result: &RunResult) -> Result<(), PlotError> {
        let options = Options::default();
        self.heading("Roofline");
        self.put(&format!(
            "<figure class=\"wide\">\n{}</figure>",
            roofline::page_key(result, &options, roofline::KEY_WIDE)?
        ));
        self.put(&format!(
            "<figure class=\"narrow\">\n{}</figure>",
            roofline::page_key(result, &options, roofline::KEY_NARROW)?
        ));
        self.put("<div class=\"panels\">");
        for panel in roofline::page_panels(result, &options)? {
            self.put(&format!("<figure>\n{panel}</figure>"));
        }
        self.put("</div>");
        self.note(
            "A marker counts matrix FLOPs, vector operations and transcendentals together; each roof counts \
             its own kind alone, at the clock of the run. The numbers are the rows of the stage tables.",
        );
        Ok(())
    }

    fn stages(&mut self, result: &RunResult) {
        self.heading("Stages");
        let numbers = roofline::numbers(result, &Options::default());
        for chip in &result.chips {
            self.chip(chip, result.baseline.as_deref(), &numbers);
        }
    }

    fn chip(&mut self, chip: &ChipResult, baseline: Option<&str>, marks: &[roofline::Entry]) {
        self.put(&format!(
            "<h3>{}</h3>",
            escape(&format!("{} · {}", chip.name, chip.title))
        ));
        self.note(&format!(
            "{}, {} at {}",
            chip.device,
            format::cores(chip),
            format::clock(chip)
        ));
        let unit = TimeUnit::for_chip(chip);
        let intervals = chip
            .plans
            .iter()
            .flat_map(|plan| &plan.stages)
            .any(|row| row.low_us.is_some());
        let mut columns = vec![numbers("no."), words("plan"), words("stage"), long_words("title")];
        columns.push(numbers(format!("time ({})", unit.symbol())));
        if intervals {
            columns.push(numbers(format!("80 % interval ({})", unit.symbol())));
        }
        columns.extend([words("bound"), words("next bound")]);
        for header in [
            "MXU busy (%)",
            "VPU busy (%)",
            "HBM busy (%)",
            "MXU lane (%)",
            "achieved/peak (%)",
            "GFLOP",
            "HBM (MB)",
        ] {
            columns.push(numbers(header));
        }
        let (mut rows, mut foot) = (Vec::new(), Vec::new());
        for plan in &chip.plans {
            for (index, row) in plan.stages.iter().enumerate() {
                let mark = marks.iter().position(|entry| entry.is(plan, index));
                let mut cells = vec![
                    mark.map_or_else(Cell::missing, |at| Cell::number((at + 1).to_string(), at as f64)),
                    Cell::text(&plan.name),
                    Cell::text(&row.stage),
                    Cell::text(&row.title),
                    Cell::number(unit.format(row.time_us), row.time_us),
                ];
                if intervals {
                    cells.push(Cell::interval(unit, row.low_us, row.high_us));
                }
                cells.extend([Cell::text(row.bound.name()), Cell::text(row.next_bound.name())]);
                let shares = [
                    row.mxu_busy,
                    row.vpu_busy,
                    row.hbm_busy,
                    row.mxu_lane,
                    row.mxu_achieved,
                ];
                cells.extend(shares.map(|share| Cell::number(percent(share), share)));
                cells.push(Cell::number(
                    format!("{:.1}", row.flops as f64 * 1e-9),
                    row.flops as f64,
                ));
                cells.push(Cell::number(
                    format!("{:.1}", row.hbm_bytes as f64 * 1e-6),
                    row.hbm_bytes as f64,
                ));
                rows.push(cells);
            }
            let speedup = plan
                .speedup_over_baseline
                .map(|factor| format::speedup(factor, baseline, &plan.name));
            let mut cells = vec![
                Cell::text(""),
                Cell::text(&plan.name),
                Cell::text("total"),
                Cell::text(speedup.unwrap_or_default()),
                Cell::text(unit.format(plan.total_us)),
            ];
            if intervals {
                cells.push(Cell::text(unit.interval(plan.low_us, plan.high_us)));
            }
            while cells.len() < columns.len() {
                cells.push(Cell::text(""));
            }
            foot.push(cells);
        }
        self.table(&format!("Stages on {}", chip.title), &columns, &rows, &foot, 2);
        self.note(&format!("Rests on: {}", chip.coverage));
    }

    fn published(&mut self, result: &RunResult) {
        let Some(published) = &result.published else {
            return;
        };
        self.heading("Against published values");
        self.note(&format!("On {}, from {}", published.chip, published.source));
        let unit = TimeUnit::for_times(
            published
                .rows
                .iter()
                .flat_map(|row| [row.published_us, row.predicted_us]),
        );
        let columns = [
            words("plan"),
            words("stage"),
            numbers(format!("published ({})", unit.symbol())),
            numbers(format!("predicted ({})", unit.symbol())),
            numbers("error (%)"),
        ];
        let (mut rows, mut foot) = (Vec::new(), Vec::new());
        for row in &published.rows {
            let cells = vec![
                Cell::text(&row.plan),
                Cell::text(&row.stage),
                Cell::number(unit.format(row.published_us), row.published_us),
                Cell::number(unit.format(row.predicted_us), row.predicted_us),
                Cell::number(signed(row.error_percent), row.error_percent),
            ];
            if row.stage == "total" {
                foot.push(cells);
            } else {
                rows.push(cells);
            }
        }
        self.table("Published and predicted times", &columns, &rows, &foot, 1);
    }

    fn numeric(&mut self, result: &RunResult) {
        let Some(numeric) = &result.numeric else { return };
        self.heading("Numeric check");
        self.note(&format!(
            "Against the token recurrence in f64: {}",
            format::numeric_scope(numeric)
        ));
        let columns = [
            words(""),
            numbers("largest error / largest value (–)"),
            numbers("RMS error / RMS value (–)"),
        ];
        let row = |name: &str, largest: f64, rms: f64| {
            vec![
                Cell::text(name),
                Cell::number(relative_error(largest), largest),
                Cell::number(relative_error(rms), rms),
            ]
        };
        let mut rows = vec![row(
            "core output",
            numeric.output_rel_error,
            numeric.output_rms_error,
        )];
        if let (Some(largest), Some(rms)) = (numeric.state_rel_error, numeric.state_rms_error) {
            rows.push(row("final state", largest, rms));
        }
        self.table("Relative errors", &columns, &rows, &[], 0);
        let finite = numeric.non_finite.as_ref().map_or_else(
            || "Every value is finite.".to_owned(),
            |node| format!("First value that is not finite: {node}."),
        );
        let margin = format::overflow_margin(numeric)
            .map(|margin| format!("The {margin}."))
            .unwrap_or_default();
        self.put(&format!(
            "<p>{}</p>",
            escape([finite.as_str(), &numeric.overflow, &margin].join(" ").trim_end())
        ));
    }

    fn definitions(&mut self) {
        self.heading("What the columns mean");
        self.put("<dl>");
        for (term, meaning) in DEFINITIONS {
            self.put(&format!("<dt>{}</dt><dd>{}</dd>", escape(term), escape(meaning)));
        }
        self.put("</dl>");
    }

    fn provenance(&mut self, result: &RunResult) {
        let from = &result.provenance;
        self.heading("Where it comes from");
        self.put("<dl>");
        let mut item = |term: &str, text: &str| {
            self.put(&format!("<dt>{}</dt><dd>{}</dd>", escape(term), escape(text)));
        };
        item("tpusim", &from.version);
        item("hardware", &from.hardware_digest);
        item("workload", &from.workload_digest);
        item("calibration", &from.calibration_digest);
        for text in &from.overrides {
            item("override", text);
        }
        for text in &from.inferred {
            item("inferred, not published", text);
        }
        self.put("</dl>");
    }

    fn end(&mut self, result: &RunResult) -> Result<(), json::JsonError> {
        // Inside a script only `<` could end it, and JSON may write that sign as an escape.
        let data = json::to_string(result)?.replace('<', "\\u003c");
        self.put("</main>");
        self.put(&format!(
            "<script type=\"application/json\" id=\"result\">\n{data}</script>"
        ));
        self.put(&format!(
            "<script>\n{}</script>\n</body>\n</html>",
            include_str!("report.js")
        ));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    #[test]
    fn the_page_loads_nothing() -> Result<(), HtmlError> {
        let page = render(&fixture::five_chips())?;
        for word in ["http:", "https:", "src=", "@import", "url(", "fetch("] {
            assert!(!page.contains(word), "the page has `{word}`");
        }
        assert_eq!(page.matches("href=").count(), 1, "only the empty icon");
        Ok(())
    }

    #[test]
    fn nothing_of_the_result_becomes_markup() -> Result<(), HtmlError> {
        let mut result = fixture::one_chip();
        let evil = "</script><script>alert(1)</script>\"'&";
        for text in [&mut result.name, &mut result.headline, &mut result.layer] {
            evil.clone_into(text);
        }
        let chip = &mut result.chips[0];
        for text in [
            &mut chip.title,
            &mut chip.device,
            &mut chip.coverage,
            &mut chip.name,
            &mut chip.clock_state,
        ] {
            evil.clone_into(text);
        }
        evil.clone_into(&mut chip.plans[0].stages[0].title);
        evil.clone_into(&mut chip.plans[0].stages[0].stage);
        evil.clone_into(&mut chip.plans[0].name);
        result.warnings = vec![evil.to_owned()];
        let page = render(&result)?;
        assert_eq!(page.matches("<script").count(), 2);
        assert_eq!(page.matches("</script>").count(), 2);
        Ok(())
    }

    #[test]
    fn the_page_holds_the_result() -> Result<(), HtmlError> {
        let result = fixture::five_chips();
        let page = render(&result)?;
        let data = page
            .split_once("<script type=\"application/json\" id=\"result\">")
            .and_then(|(_, rest)| rest.split_once("</script>"))
            .map_or("", |(data, _)| data);
        assert_eq!(json::from_str(data)?, result);
        Ok(())
    }

    #[test]
    fn elements_are_closed() -> Result<(), HtmlError> {
        let page = render(&fixture::five_chips())?;
        for tag in [
            "table", "thead", "tbody", "tfoot", "tr", "td", "figure", "div", "svg", "text", "dl", "main",
            "style",
        ] {
            let opened =
                page.matches(&format!("<{tag} ")).count() + page.matches(&format!("<{tag}>")).count();
            assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
        }
        Ok(())
    }
}
