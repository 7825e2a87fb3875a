//! Stacked bars: the time of each plan on each chip, stage by stage.

use plotters::backend::DrawingBackend;
use plotters::style::RGBColor;

use super::canvas::{self, Anchor, Canvas, Hit, Picture, Place, PlotError, Type, text_width};
use super::theme::{Palette, STAGES, Theme, ink_on};
use crate::report::format::{self, TimeUnit, three_digits};
use crate::report::result::{PlanResult, RunResult};

/// The bars as SVG, for a page of its own width.
///
/// # Errors
/// Where the drawing library fails.
pub fn svg(result: &RunResult, theme: Theme) -> Result<String, PlotError> {
    canvas::svg(&Bars::new(result, theme, WIDE), Place::File)
}

/// The bars for a page: for wide and for narrow screens.
pub(crate) fn page(result: &RunResult) -> Result<(String, String), PlotError> {
    let picture = |width| canvas::svg(&Bars::new(result, Theme::Light, width), Place::Page);
    Ok((picture(WIDE)?, picture(NARROW)?))
}

const WIDE: f64 = 860.0;
const NARROW: f64 = 370.0;
const MARGIN: f64 = 12.0;
const BAR: f64 = 18.0;
const BAR_STEP: f64 = 23.0;
const CHIP_HEAD: f64 = 24.0;
const KEY_ROW: f64 = 18.0;
const AXIS: f64 = 42.0;

const HEAD: Type = Type::bold(12.0);
const BODY: Type = Type::regular(11.5);
const INSIDE: Type = Type::regular(10.5);

struct Bars<'a> {
    result: &'a RunResult,
    palette: &'static Palette,
    width: f64,
    unit: TimeUnit,
    /// Stage and title, in order of first appearance; the place gives the colour.
    stages: Vec<(String, String)>,
    label_width: f64,
    total_width: f64,
}

/// Stage and title of every stage of a run, in order of first appearance; the place gives the colour.
pub(super) fn stages(result: &RunResult) -> Vec<(String, String)> {
    let mut stages: Vec<(String, String)> = Vec::new();
    let plans = result.chips.iter().flat_map(|chip| &chip.plans);
    for row in plans.flat_map(|plan| &plan.stages) {
        if !stages.iter().any(|(stage, _)| *stage == row.stage) {
            stages.push((row.stage.clone(), row.title.clone()));
        }
    }
    stages
}

/// Colour of a stage by its place.
pub(super) fn stage_color(index: usize) -> RGBColor {
    STAGES
        .get(index % STAGES.len())
        .copied()
        .unwrap_or(RGBColor(120, 120, 130))
}

/// The round number, one, two or five times a power of ten, that is not below `rough`.
pub(super) fn tick_step(rough: f64) -> f64 {
    let power = 10_f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0]
        .map(|part| part * power)
        .into_iter()
        .find(|step| *step >= rough)
        .unwrap_or(10.0 * power)
}

impl<'a> Bars<'a> {
    fn new(result: &'a RunResult, theme: Theme, width: f64) -> Self {
        let plans = || result.chips.iter().flat_map(|chip| &chip.plans);
        let unit = TimeUnit::for_times(plans().map(|plan| plan.total_us));
        let widest = |texts: &mut dyn Iterator<Item = f64>| texts.fold(0.0, f64::max);
        let label_width = widest(&mut plans().map(|plan| text_width(&plan.name, BODY)));
        let total_width = widest(&mut plans().map(|plan| text_width(&unit.format(plan.total_us), BODY)));
        Self {
            result,
            palette: theme.palette(),
            width,
            unit,
            stages: stages(result),
            label_width,
            total_width,
        }
    }

    fn left(&self) -> f64 {
        MARGIN + self.label_width.min(0.4 * self.width) + 8.0
    }

    fn right(&self) -> f64 {
        (self.width - MARGIN - self.total_width - 10.0).max(self.left() + 1.0)
    }

    /// Spacing of the ticks and end of the axis, in microseconds.
    fn axis(&self) -> (f64, f64) {
        let ends = self
            .result
            .chips
            .iter()
            .flat_map(|chip| &chip.plans)
            .flat_map(|plan| {
                [Some(plan.total_us), plan.high_us, plan.published_us]
                    .into_iter()
                    .flatten()
            });
        let longest = ends.filter(|end| end.is_finite()).fold(0.0, f64::max);
        if longest <= 0.0 {
            return (1.0, 1.0);
        }
        let step = tick_step(longest / if self.width > 600.0 { 8.0 } else { 5.0 });
        (step, longest)
    }

    /// Where a time stands on an axis up to `longest`.
    fn at(&self, us: f64, longest: f64) -> f64 {
        let us = if us.is_finite() { us } else { 0.0 };
        self.left() + (self.right() - self.left()) * (us / longest)
    }

    /// Place of every entry of the key, and its height.
    fn key(&self) -> (Vec<(usize, String, f64, f64)>, f64) {
        let (mut x, mut y) = (MARGIN, MARGIN + KEY_ROW - 6.0);
        let mut items = Vec::new();
        let mut entries: Vec<_> = self
            .stages
            .iter()
            .enumerate()
            .map(|(index, (stage, title))| (index, format!("{stage} {title}")))
            .collect();
        if self.published() {
            entries.push((usize::MAX, "published total".to_owned()));
        }
        for (index, text) in entries {
            let lines = canvas::wrap(&text, self.width - 2.0 * MARGIN - 18.0, BODY);
            let wide = 18.0
                + lines
                    .iter()
                    .map(|line| text_width(line, BODY))
                    .fold(0.0, f64::max);
            if x > MARGIN && x + wide > self.width - MARGIN {
                x = MARGIN;
                y += KEY_ROW;
            }
            for (number, line) in lines.into_iter().enumerate() {
                if number > 0 {
                    y += KEY_ROW - 3.0;
                }
                // Only the first line of an entry has a sign, so the others carry a number that is none.
                items.push((if number == 0 { index } else { usize::MAX - 1 }, line, x, y));
            }
            x += wide + 18.0;
        }
        (items, y + 8.0)
    }

    fn published(&self) -> bool {
        self.result
            .chips
            .iter()
            .flat_map(|chip| &chip.plans)
            .any(|plan| plan.published_us.is_some())
    }

    fn draw_bar<B: DrawingBackend>(
        &self,
        canvas: &Canvas<B>,
        plan: &PlanResult,
        top: f64,
        at: &impl Fn(f64) -> f64,
    ) -> Result<(), PlotError> {
        let palette = self.palette;
        let baseline = top + BAR / 2.0 + 4.0;
        canvas.text(
            &plan.name,
            (self.left() - 8.0, baseline),
            BODY,
            Anchor::End,
            palette.ink,
        )?;
        let mut start = 0.0;
        for row in plan
            .stages
            .iter()
            .filter(|row| row.time_us.is_finite() && row.time_us > 0.0)
        {
            let index = self
                .stages
                .iter()
                .position(|(stage, _)| *stage == row.stage)
                .unwrap_or(0);
            let color = stage_color(index);
            let (from, to) = (at(start), at(start + row.time_us));
            canvas.block((from, top), (to, top + BAR), color)?;
            if start > 0.0 {
                // A hairline of paper keeps neighbours apart for eyes that see their colours alike.
                canvas.line(&[(from, top), (from, top + BAR)], palette.paper, 0.5)?;
            }
            if text_width(&row.stage, INSIDE) + 8.0 <= to - from {
                let middle = f64::midpoint(from, to);
                canvas.text(
                    &row.stage,
                    (middle, baseline),
                    INSIDE,
                    Anchor::Middle,
                    ink_on(color),
                )?;
            }
            start += row.time_us;
        }
        let mut end = at(plan.total_us);
        if let (Some(low), Some(high)) = (plan.low_us, plan.high_us) {
            // Under the bar, where it crosses no name.
            let (low, high, middle) = (at(low), at(high), top + BAR + 1.5);
            canvas.line(&[(low, middle), (high, middle)], palette.ink, 1.0)?;
            for x in [low, high] {
                canvas.line(&[(x, middle - 2.0), (x, middle + 2.0)], palette.ink, 1.0)?;
            }
            end = end.max(high);
        }
        if let Some(published) = plan.published_us {
            let x = at(published);
            published_sign(canvas, (x, top), palette.ink)?;
            end = end.max(x + 3.0);
        }
        let total = self.unit.format(plan.total_us);
        canvas.text(&total, (end + 6.0, baseline), BODY, Anchor::Start, palette.ink)
    }
}

/// A mark across a bar, with a head above it.
fn published_sign<B: DrawingBackend>(
    canvas: &Canvas<B>,
    (x, top): (f64, f64),
    color: RGBColor,
) -> Result<(), PlotError> {
    canvas.line(&[(x, top - 1.0), (x, top + BAR + 1.0)], color, 1.5)?;
    canvas.polygon(
        &[(x - 3.5, top - 3.0), (x + 3.5, top - 3.0), (x, top + 3.0)],
        color,
    )
}

impl Picture for Bars<'_> {
    fn size(&self) -> (f64, f64) {
        let chips = self.result.chips.iter();
        let bars: f64 = chips
            .map(|chip| CHIP_HEAD + BAR_STEP * chip.plans.len() as f64)
            .sum();
        (self.width, self.key().1 + bars + AXIS)
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        format!("Time of each plan of {} on each chip, by stage", self.result.name)
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        let palette = self.palette;
        let (items, top) = self.key();
        for (index, text, x, y) in items {
            if index < usize::MAX - 1 {
                canvas.block((x, y - 9.0), (x + 11.0, y + 2.0), stage_color(index))?;
            } else if index == usize::MAX {
                canvas.line(&[(x + 5.5, y - 9.0), (x + 5.5, y + 2.0)], palette.ink, 1.5)?;
                canvas.polygon(
                    &[(x + 2.0, y - 11.0), (x + 9.0, y - 11.0), (x + 5.5, y - 5.0)],
                    palette.ink,
                )?;
            }
            canvas.text(&text, (x + 17.0, y), BODY, Anchor::Start, palette.ink)?;
        }
        let (step, longest) = self.axis();
        let at = |us: f64| self.at(us, longest);
        let bottom = self.size().1 - AXIS + 4.0;
        let decimals = if self.unit == TimeUnit::Milli { 1000.0 } else { 1.0 };
        // Ticks past the end of the longest bar would stand among the totals.
        for number in 0..=(longest / step).floor().clamp(0.0, 20.0) as u32 {
            let us = step * f64::from(number);
            canvas.line(&[(at(us), top + 4.0), (at(us), bottom)], palette.grid, 0.5)?;
            canvas.line(&[(at(us), bottom), (at(us), bottom + 4.0)], palette.axis, 1.0)?;
            canvas.text(
                &three_digits(us / decimals),
                (at(us), bottom + 16.0),
                INSIDE,
                Anchor::Middle,
                palette.quiet,
            )?;
        }
        canvas.line(
            &[(self.left(), bottom), (self.right(), bottom)],
            palette.axis,
            1.0,
        )?;
        let middle = f64::midpoint(self.left(), self.right());
        let axis_title = format!("time ({})", self.unit.symbol());
        canvas.text(
            &axis_title,
            (middle, bottom + 32.0),
            BODY,
            Anchor::Middle,
            palette.ink,
        )?;
        let mut y = top;
        for chip in &self.result.chips {
            let title = format!("{}, {}, {}", chip.title, format::cores(chip), format::clock(chip));
            canvas.text(&title, (MARGIN, y + 17.0), HEAD, Anchor::Start, palette.ink)?;
            y += CHIP_HEAD;
            for plan in &chip.plans {
                self.draw_bar(canvas, plan, y, &at)?;
                y += BAR_STEP;
            }
        }
        Ok(())
    }

    fn hits(&self) -> Vec<Hit> {
        let (_, longest) = self.axis();
        let mut hits = Vec::new();
        let mut y = self.key().1;
        for chip in &self.result.chips {
            y += CHIP_HEAD;
            for plan in &chip.plans {
                let mut start = 0.0;
                for row in plan
                    .stages
                    .iter()
                    .filter(|row| row.time_us.is_finite() && row.time_us > 0.0)
                {
                    let end = start + row.time_us;
                    hits.push(Hit {
                        corners: ((self.at(start, longest), y), (self.at(end, longest), y + BAR)),
                        text: format::stage_words(chip, plan, row),
                    });
                    start = end;
                }
                y += BAR_STEP;
            }
        }
        hits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    #[test]
    fn there_is_one_block_per_row_one_per_stage_of_the_key_and_the_paper() -> Result<(), PlotError> {
        let result = fixture::five_chips();
        let rows: usize = result
            .chips
            .iter()
            .flat_map(|chip| &chip.plans)
            .map(|plan| plan.stages.len())
            .sum();
        let (wide, narrow) = page(&result)?;
        // In a page every block can be pointed at, in a file nothing can.
        for (picture, hits) in [(wide, rows), (narrow, rows), (svg(&result, Theme::Dark)?, 0)] {
            assert_eq!(picture.matches("<rect class=\"hit\"").count(), hits);
            assert_eq!(picture.matches("<rect").count(), rows + 7 + 1 + hits);
        }
        Ok(())
    }

    #[test]
    fn the_axis_has_few_round_ticks() {
        let result = fixture::five_chips();
        let (step, longest) = Bars::new(&result, Theme::Light, WIDE).axis();
        assert!(
            (step - 2000.0).abs() < 1e-9 && longest > 8000.0,
            "{step} {longest}"
        );
    }

    #[test]
    fn nothing_to_draw_gives_an_empty_picture() -> Result<(), PlotError> {
        let mut result = fixture::five_chips();
        result.chips.clear();
        assert!(svg(&result, Theme::Light)?.ends_with("</svg>\n"));
        Ok(())
    }
}
