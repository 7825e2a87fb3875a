//! `index.html`: the whole report in one file that loads nothing.

use std::fmt::Write as _;

use super::format::{self, DEFINITIONS, TimeUnit, percent, relative_error, signed};
use super::json;
use super::plot::roofline::{self, Options};
use super::plot::{PlotError, bars, bound_css, dark_mode_css, timeline};
use super::result::{Bound, ChipResult, RunResult, StageResult, TokenBytes};
use crate::hardware::Kind;

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

/// A part of the page with a heading. A further one is a line of [`SECTIONS`].
struct Section {
    /// Its name in links.
    id: &'static str,
    title: &'static str,
    /// Whether the result has something for it.
    present: fn(&RunResult) -> bool,
    body: Body,
}

/// What writes a section.
enum Body {
    Words(fn(&mut Page, &RunResult)),
    Pictures(fn(&mut Page, &RunResult) -> Result<(), PlotError>),
}

/// Quantities that the page shows of each plan, those that move its time most.
const SHOWN_QUANTITIES: usize = 6;

/// The sections in order.
const SECTIONS: [Section; 11] = [
    Section {
        id: "times",
        title: "Time per chip and plan",
        present: |_| true,
        body: Body::Words(Page::overview),
    },
    Section {
        id: "bounds",
        title: "What binds each stage",
        present: |_| true,
        body: Body::Words(Page::bounds),
    },
    Section {
        id: "bars",
        title: "Where the time goes",
        present: |_| true,
        body: Body::Pictures(Page::bars),
    },
    Section {
        id: "roofline",
        title: "Roofline",
        present: |_| true,
        body: Body::Pictures(Page::rooflines),
    },
    Section {
        id: "timeline",
        title: "Timeline",
        present: |_| true,
        body: Body::Pictures(Page::timelines),
    },
    Section {
        id: "stages",
        title: "Stages",
        present: |_| true,
        body: Body::Words(Page::stages),
    },
    Section {
        id: "published",
        title: "Against published values",
        present: |result| result.published.is_some(),
        body: Body::Words(Page::published),
    },
    Section {
        id: "numeric",
        title: "Numeric check",
        present: |result| result.numeric.is_some(),
        body: Body::Words(Page::numeric),
    },
    Section {
        id: "sensitivity",
        title: "What moves the time most",
        present: |result| !result.sensitivity.is_empty(),
        body: Body::Words(Page::sensitivity),
    },
    Section {
        id: "coverage",
        title: "What each time rests on",
        present: |_| true,
        body: Body::Words(Page::coverage),
    },
    Section {
        id: "provenance",
        title: "Where it comes from",
        present: |_| true,
        body: Body::Words(Page::provenance),
    },
];

/// The page.
///
/// # Errors
/// Where a picture cannot be drawn or a number of the result is not finite.
pub fn render(result: &RunResult) -> Result<String, HtmlError> {
    let mut page = Page { out: String::new() };
    let present = || SECTIONS.iter().filter(|section| (section.present)(result));
    page.head(result);
    page.put("<nav aria-label=\"Sections\">");
    for section in present() {
        page.put(&format!(
            "<a href=\"#{}\">{}</a>",
            section.id,
            escape(section.title)
        ));
    }
    page.put("</nav>");
    page.warnings(result);
    for section in present() {
        page.put(&format!(
            "<section id=\"{}\" aria-labelledby=\"{0}-title\">\n<h2 id=\"{0}-title\">{}</h2>",
            section.id,
            escape(section.title)
        ));
        match section.body {
            Body::Words(write) => write(&mut page, result),
            Body::Pictures(draw) => draw(&mut page, result)?,
        }
        page.put("</section>");
    }
    page.end(result)?;
    Ok(page.out)
}

/// Text for the title of a shape, where a new line stays one.
pub(crate) fn escape_lines(text: &str) -> String {
    text.lines().map(escape).collect::<Vec<_>>().join("&#10;")
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

fn short_words(header: &str) -> Column {
    Column(header.to_owned(), "s")
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

/// A cell: what is shown, what it is sorted by, and what it says when it is pointed at.
struct Cell {
    text: String,
    order: Order,
    hover: Option<String>,
    /// Coloured by what binds it.
    bound: Option<Bound>,
}

impl Cell {
    fn new(text: String, order: Order) -> Self {
        Self {
            text,
            order,
            hover: None,
            bound: None,
        }
    }

    fn text(text: impl Into<String>) -> Self {
        Self::new(text.into(), Order::Words)
    }

    fn number(text: String, value: f64) -> Self {
        Self::new(text, Order::Number(value))
    }

    /// An interval, sorted by its lower end.
    fn interval(unit: TimeUnit, low_us: Option<f64>, high_us: Option<f64>) -> Self {
        Self::new(
            unit.interval(low_us, high_us),
            low_us.map_or(Order::Last, Order::Number),
        )
    }

    fn missing() -> Self {
        Self::new(String::new(), Order::Last)
    }

    fn bound(bound: Bound) -> Self {
        Self {
            bound: Some(bound),
            ..Self::text(bound.name())
        }
    }

    fn hover(self, text: String) -> Self {
        Self {
            hover: Some(text),
            ..self
        }
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
        // The button appears where a script can fill it.
        self.put("<div class=\"tools\"></div>");
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
                for (index, (cell, Column(_, kind))) in row.iter().zip(columns).enumerate() {
                    let value = match &cell.order {
                        Order::Number(value) => format!(" data-v=\"{value}\""),
                        Order::Last => " data-v=\"\"".to_owned(),
                        Order::Words => String::new(),
                    };
                    let hover = cell
                        .hover
                        .as_ref()
                        .map(|text| format!(" title=\"{}\"", escape_lines(text)));
                    let text = match cell.bound {
                        Some(bound) => {
                            format!(
                                "<span class=\"bound {}\">{}</span>",
                                bound.name(),
                                escape(&cell.text)
                            )
                        }
                        None => escape(&cell.text),
                    };
                    let _ = write!(
                        self.out,
                        "<td{}{value}{}>{text}</td>",
                        class(index, kind),
                        hover.unwrap_or_default()
                    );
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
        self.out.push_str(&bound_css());
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

    /// A row per plan and stage, a column per chip: what binds, and its part of the plan.
    fn bounds(&mut self, result: &RunResult) {
        let entries = roofline::numbers(result, &Options::default());
        let mut columns = vec![words("plan"), words("stage"), long_words("title")];
        for chip in &result.chips {
            columns.push(words(&chip.name));
            columns.push(numbers("of plan (%)"));
        }
        let mut rows = Vec::new();
        for entry in &entries {
            let mut cells = vec![
                Cell::text(&entry.plan),
                Cell::text(&entry.stage),
                Cell::text(&entry.title),
            ];
            for chip in &result.chips {
                let plan = chip.plans.iter().find(|plan| plan.name == entry.plan);
                let (Some(plan), Some(row)) = (plan, entry.row(chip)) else {
                    cells.extend([Cell::missing(), Cell::missing()]);
                    continue;
                };
                let share = row.time_us / plan.total_us;
                let hover = format::stage_words(chip, plan, row);
                cells.extend([
                    Cell::bound(row.bound).hover(hover.clone()),
                    Cell::number(percent(share), share).hover(hover),
                ]);
            }
            rows.push(cells);
        }
        self.table("What binds each stage on each chip", &columns, &rows, &[], 1);
        self.note(
            "Beside what binds a stage stands its part of the time of the plan. The resource named is the one whose \
             removal would shorten the stage first.",
        );
    }

    fn sensitivity(&mut self, result: &RunResult) {
        let columns = [
            words("chip"),
            words("plan"),
            long_words("quantity"),
            words("step"),
            numbers("time of the plan (% per %)"),
            words("most in"),
            numbers("there (% per %)"),
        ];
        let mut rows = Vec::new();
        for plan in &result.sensitivity {
            for of in plan.elasticities.iter().take(SHOWN_QUANTITIES) {
                let stages = plan.stages.iter().zip(&of.stages);
                let most = stages
                    .filter_map(|(stage, slope)| Some((stage, (*slope)?)))
                    .max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()));
                let signed = |slope: f64| Cell::number(format!("{slope:+.2}"), slope);
                let mut cells = vec![
                    Cell::text(&plan.chip),
                    Cell::text(&plan.plan),
                    Cell::text(&of.field),
                    Cell::text(&of.step),
                    signed(of.total),
                ];
                match most {
                    Some((stage, slope)) => cells.extend([Cell::text(stage), signed(slope)]),
                    None => cells.extend([Cell::missing(), Cell::missing()]),
                }
                rows.push(cells);
            }
        }
        self.table("What moves the time of each plan most", &columns, &rows, &[], 1);
        self.note(
            "Change of the time in % where a quantity of the workload or of the chip grows by 1 %, all others as they are: 1 grows in proportion, -1 halves \
             with twice the quantity. Continuous quantities take a step of 1 %, whole numbers are doubled and halved. `tpusim whatif --sensitivity` lists all.",
        );
    }

    fn bars(&mut self, result: &RunResult) -> Result<(), PlotError> {
        let (wide, narrow) = bars::page(result)?;
        self.put(&format!("<figure class=\"wide\">\n{wide}</figure>"));
        self.put(&format!("<figure class=\"narrow\">\n{narrow}</figure>"));
        Ok(())
    }

    fn rooflines(&mut self, result: &RunResult) -> Result<(), PlotError> {
        let options = Options::default();
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
             its own kind alone, at the clock of the run. The slope of on-chip memory counts bytes loaded from it, \
             in place of HBM bytes. The numbers are the rows of the stage tables.",
        );
        Ok(())
    }

    fn timelines(&mut self, result: &RunResult) -> Result<(), PlotError> {
        self.put("<div class=\"panels\">");
        for picture in timeline::page(result)? {
            self.put(&format!("<figure>\n{picture}</figure>"));
        }
        self.put("</div>");
        self.note(
            "Kernels run one after the other. A lane is as high as the part of the kernel in which its unit is \
             occupied; which operation holds it when is in the trace that --trace writes.",
        );
        Ok(())
    }

    fn stages(&mut self, result: &RunResult) {
        let numbers = roofline::numbers(result, &Options::default());
        for chip in &result.chips {
            self.chip(chip, result.baseline.as_deref(), &numbers);
        }
        self.put("<dl>");
        for (term, meaning) in DEFINITIONS {
            self.put(&format!("<dt>{}</dt><dd>{}</dd>", escape(term), escape(meaning)));
        }
        self.put("</dl>");
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
                    Cell::number(unit.format(row.time_us), row.time_us)
                        .hover(format::stage_words(chip, plan, row)),
                ];
                if intervals {
                    cells.push(Cell::interval(unit, row.low_us, row.high_us));
                }
                cells.extend([Cell::bound(row.bound), Cell::bound(row.next_bound)]);
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
        self.tokens(chip);
    }

    /// What a token of a decode step takes, per plan.
    fn tokens(&mut self, chip: &ChipResult) {
        let unit = TimeUnit::for_times(chip.plans.iter().filter_map(|plan| Some(plan.token?.time_us)));
        let mut columns = vec![
            words("plan"),
            numbers(format!("time ({})", unit.symbol())),
            words("bytes"),
        ];
        let parts = TokenBytes::default().parts();
        columns.extend(parts.map(|(part, _)| numbers(format!("{part} (kB)"))));
        columns.push(numbers("all (kB)"));
        let mut rows = Vec::new();
        let mut step = 0;
        for plan in &chip.plans {
            let Some(token) = plan.token else { continue };
            step = token.tokens;
            for (word, bytes) in [("read", token.read_bytes), ("written", token.written_bytes)] {
                let mut cells = vec![
                    Cell::text(&plan.name),
                    Cell::number(unit.format(token.time_us), token.time_us),
                    Cell::text(word),
                ];
                let values = bytes.parts().map(|(_, bytes)| bytes);
                let cell = |bytes: f64| Cell::number(format::kilobytes(bytes), bytes);
                cells.extend(values.map(cell));
                cells.push(cell(bytes.total()));
                rows.push(cells);
            }
        }
        if rows.is_empty() {
            return;
        }
        self.note(&format!(
            "One token: the step, which decodes {step}, over its tokens; what all sequences share is divided among them."
        ));
        self.table(&format!("One token on {}", chip.title), &columns, &rows, &[], 0);
    }

    fn published(&mut self, result: &RunResult) {
        let Some(published) = &result.published else {
            return;
        };
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
        let Some(numeric) = &result.numeric else {
            return;
        };
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

    /// For every printed time what it is as good as, and every number behind them with its source.
    fn coverage(&mut self, result: &RunResult) {
        const KINDS: [Kind; 5] = [
            Kind::Measured,
            Kind::Fitted,
            Kind::Published,
            Kind::Derived,
            Kind::Assumed,
        ];
        self.note(
            "The numbers that set the bound of a stage, by how far they can be trusted: measured on silicon, fitted to \
             measurements, published, derived from published ones, or assumed because nobody has published them. The \
             interval rests on measured kernels that the fit had not seen.",
        );
        for chip in &result.chips {
            self.put(&format!("<h3>{}</h3>", escape(&chip.name)));
            let unit = TimeUnit::for_chip(chip);
            let mut columns = vec![
                words("plan"),
                words("stage"),
                numbers(format!("time ({})", unit.symbol())),
                words("bound"),
            ];
            // A kind that none of them is has no column.
            let kinds: Vec<Kind> = KINDS
                .into_iter()
                .filter(|&kind| {
                    let rows = chip.plans.iter().flat_map(|plan| &plan.stages);
                    rows.flat_map(|row| row.rests_on(&chip.sources))
                        .any(|source| source.kind == kind)
                })
                .collect();
            columns.extend(kinds.iter().map(|kind| short_words(kind.name())));
            columns.push(short_words("interval from"));
            let mut rows = Vec::new();
            for (plan, row) in chip
                .plans
                .iter()
                .flat_map(|plan| plan.stages.iter().map(move |row| (plan, row)))
            {
                let of = |kind: Kind| {
                    let names: Vec<&str> = row
                        .rests_on(&chip.sources)
                        .filter(|source| source.kind == kind)
                        .map(|source| source.number.as_str())
                        .collect();
                    names.join(", ")
                };
                let mut cells = vec![
                    Cell::text(&plan.name),
                    Cell::text(&row.stage),
                    Cell::number(unit.format(row.time_us), row.time_us),
                    Cell::bound(row.bound),
                ];
                cells.extend(kinds.iter().map(|&kind| Cell::text(of(kind))));
                cells.push(Cell::text(interval_source(row)));
                rows.push(cells);
            }
            self.table(
                &format!("What each time on {} rests on", chip.title),
                &columns,
                &rows,
                &[],
                1,
            );
            self.put("<details>\n<summary>Every number with its source</summary>");
            let columns = [
                words("number"),
                words("kind"),
                long_words("source"),
                long_words("sets the time of stages bound by"),
            ];
            let rows: Vec<Vec<Cell>> = chip
                .sources
                .iter()
                .map(|source| {
                    let sets: Vec<&str> = source.sets.iter().map(|bound| bound.name()).collect();
                    vec![
                        Cell::text(&source.number),
                        Cell::text(source.kind.name()),
                        Cell::text(&source.source),
                        Cell::text(sets.join(", ")),
                    ]
                })
                .collect();
            self.table(
                &format!("Sources of the numbers of {}", chip.title),
                &columns,
                &rows,
                &[],
                0,
            );
            self.note(&format!("Rests on: {}", chip.coverage));
            self.put("</details>");
        }
    }

    fn provenance(&mut self, result: &RunResult) {
        let from = &result.provenance;
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

/// What the interval of a row rests on, in words.
fn interval_source(row: &StageResult) -> String {
    row.interval_from.map_or_else(
        || "no interval: nothing comparable was measured".to_owned(),
        |evidence| evidence.words().to_owned(),
    )
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
        let links = page.split("href=\"").skip(1);
        assert!(
            links
                .clone()
                .all(|link| link.starts_with('#') || link.starts_with("data:,\"")),
            "only places of the page and the empty icon"
        );
        // Every place that is linked to is there.
        for id in links.filter_map(|link| link.strip_prefix('#')?.split('"').next()) {
            assert_eq!(page.matches(&format!("<section id=\"{id}\"")).count(), 1, "{id}");
        }
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
            "nav", "section", "span", "h2", "details", "summary", "style",
        ] {
            let opened =
                page.matches(&format!("<{tag} ")).count() + page.matches(&format!("<{tag}>")).count();
            assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
        }
        Ok(())
    }
}
