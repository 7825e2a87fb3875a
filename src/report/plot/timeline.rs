//! The timeline of a chip: kernel after kernel of each plan, and below them how far each unit is occupied.
//!
//! A lane is as high as the share of the kernel in which its unit is occupied. Which operation holds it when is another picture: the trace.

use plotters::backend::DrawingBackend;
use plotters::style::RGBColor;

use super::bars::stage_color;
use super::canvas::{self, Anchor, Canvas, Hit, Picture, Place, PlotError, Type, text_width};
use super::theme::{Palette, Theme, ink_on};
use crate::report::format::{self, TimeUnit, percent, three_digits};
use crate::report::result::{Bound, ChipResult, PlanResult, RunResult, StageResult};

/// The timeline of each chip, as SVG for a page.
pub(crate) fn page(result: &RunResult) -> Result<Vec<String>, PlotError> {
    let stages = super::bars::stages(result);
    result
        .chips
        .iter()
        .map(|chip| {
            let picture = Timeline {
                chip,
                stages: &stages,
                palette: Theme::Light.palette(),
            };
            canvas::svg(&picture, Place::Page)
        })
        .collect()
}

const WIDTH: f64 = 400.0;
const HEAD: f64 = 24.0;
const PLAN_HEAD: f64 = 20.0;
const KERNEL: f64 = 17.0;
const LANE: f64 = 13.0;
const LANE_STEP: f64 = 16.0;
const PLAN_GAP: f64 = 10.0;
const AXIS: f64 = 40.0;
const LEFT: f64 = 98.0;
const RIGHT: f64 = WIDTH - 14.0;

const TITLE: Type = Type::bold(12.0);
const BODY: Type = Type::regular(10.5);
const BODY_BOLD: Type = Type::bold(10.5);

/// Lanes from top to bottom: unit, name, and the time it is occupied.
type Lane = (Bound, &'static str, fn(&StageResult) -> f64);

const LANES: [Lane; 7] = [
    (Bound::Mxu, "mxu", |row| row.mxu_us),
    (Bound::Vpu, "vpu, busiest slots", |row| row.vpu_us),
    (Bound::Transcendental, "transcendental", |row| {
        row.transcendental_us
    }),
    (Bound::CrossLane, "cross-lane", |row| row.cross_lane_us),
    (Bound::Vmem, "vmem", |row| row.vmem_us),
    (Bound::Hbm, "hbm", |row| row.hbm_us),
    (Bound::Latency, "latency, launch", |row| {
        row.latency_us + row.launch_us
    }),
];

struct Timeline<'a> {
    chip: &'a ChipResult,
    /// Stages of the run, whose place gives the colour.
    stages: &'a [(String, String)],
    palette: &'static Palette,
}

/// Height of a plan with its lanes.
fn plan_height() -> f64 {
    PLAN_HEAD + KERNEL + 4.0 + LANE_STEP * LANES.len() as f64 + PLAN_GAP
}

/// Share of a row in which a lane is occupied.
fn share(row: &StageResult, of: fn(&StageResult) -> f64) -> f64 {
    let share = of(row) / row.time_us;
    if share.is_finite() {
        share.clamp(0.0, 1.0)
    } else {
        0.0
    }
}

/// Rows with a time, each with its start.
fn timed(plan: &PlanResult) -> impl Iterator<Item = (f64, &StageResult)> {
    plan.stages
        .iter()
        .filter(|row| row.time_us.is_finite() && row.time_us > 0.0)
        .scan(0.0, |end, row| {
            let start = *end;
            *end += row.time_us;
            Some((start, row))
        })
}

impl Timeline<'_> {
    fn longest(&self) -> f64 {
        let ends = self
            .chip
            .plans
            .iter()
            .map(|plan| timed(plan).map(|(_, row)| row.time_us).sum::<f64>());
        let longest = ends.fold(0.0, f64::max);
        if longest > 0.0 { longest } else { 1.0 }
    }

    fn at(&self, us: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * us / self.longest()
    }

    fn color(&self, row: &StageResult) -> RGBColor {
        let index = self.stages.iter().position(|(stage, _)| *stage == row.stage);
        stage_color(index.unwrap_or(0))
    }

    fn draw_plan<B: DrawingBackend>(
        &self,
        canvas: &Canvas<B>,
        plan: &PlanResult,
        top: f64,
    ) -> Result<(), PlotError> {
        let palette = self.palette;
        let unit = TimeUnit::for_chip(self.chip);
        let head = format!("{}, {} {}", plan.name, unit.format(plan.total_us), unit.symbol());
        canvas.text(&head, (LEFT, top + 14.0), BODY_BOLD, Anchor::Start, palette.ink)?;
        let top = top + PLAN_HEAD;
        let lanes = top + KERNEL + 4.0;
        for (number, (bound, name, _)) in LANES.iter().enumerate() {
            let bottom = lanes + LANE_STEP * number as f64 + LANE;
            canvas.line(&[(LEFT, bottom), (RIGHT, bottom)], palette.grid, 0.5)?;
            canvas.text(
                name,
                (LEFT - 6.0, bottom - 2.5),
                BODY,
                Anchor::End,
                palette.bound(*bound),
            )?;
        }
        for (start, row) in timed(plan) {
            let (from, to) = (self.at(start), self.at(start + row.time_us));
            let color = self.color(row);
            canvas.block((from, top), (to, top + KERNEL), color)?;
            if text_width(&row.stage, BODY) + 6.0 <= to - from {
                let middle = (f64::midpoint(from, to), top + KERNEL - 5.0);
                canvas.text(&row.stage, middle, BODY, Anchor::Middle, ink_on(color))?;
            }
            for (number, (bound, _, of)) in LANES.iter().enumerate() {
                let bottom = lanes + LANE_STEP * number as f64 + LANE;
                let height = LANE * share(row, *of);
                // Less than a hair is nothing to see.
                if height >= 0.25 {
                    canvas.block((from, bottom - height), (to, bottom), palette.bound(*bound))?;
                }
            }
            if start > 0.0 {
                let bottom = lanes + LANE_STEP * LANES.len() as f64 - 3.0;
                canvas.line(&[(from, top), (from, bottom)], palette.paper, 0.5)?;
            }
        }
        Ok(())
    }
}

impl Picture for Timeline<'_> {
    fn size(&self) -> (f64, f64) {
        (
            WIDTH,
            HEAD + plan_height() * self.chip.plans.len() as f64 + AXIS - PLAN_GAP,
        )
    }

    fn palette(&self) -> &Palette {
        self.palette
    }

    fn label(&self) -> String {
        format!(
            "Timeline on {}: kernels of each plan one after the other, and the share of each in which a unit is occupied",
            self.chip.title
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError> {
        let palette = self.palette;
        let title = format!("{}, {}", self.chip.name, format::clock(self.chip));
        canvas.text(&title, (LEFT, 15.0), TITLE, Anchor::Start, palette.ink)?;
        let bottom = self.size().1 - AXIS;
        let unit = TimeUnit::for_chip(self.chip);
        let scale = if unit == TimeUnit::Milli { 1000.0 } else { 1.0 };
        let step = super::bars::tick_step(self.longest() / 4.0);
        for number in 0..=(self.longest() / step).floor().clamp(0.0, 20.0) as u32 {
            let us = step * f64::from(number);
            let x = self.at(us);
            canvas.line(&[(x, HEAD), (x, bottom)], palette.grid, 0.5)?;
            canvas.line(&[(x, bottom), (x, bottom + 4.0)], palette.axis, 1.0)?;
            canvas.text(
                &three_digits(us / scale),
                (x, bottom + 16.0),
                BODY,
                Anchor::Middle,
                palette.quiet,
            )?;
        }
        canvas.line(&[(LEFT, bottom), (RIGHT, bottom)], palette.axis, 1.0)?;
        canvas.text(
            &format!("time ({})", unit.symbol()),
            (f64::midpoint(LEFT, RIGHT), bottom + 31.0),
            BODY,
            Anchor::Middle,
            palette.ink,
        )?;
        for (number, plan) in self.chip.plans.iter().enumerate() {
            self.draw_plan(canvas, plan, HEAD + plan_height() * number as f64)?;
        }
        Ok(())
    }

    fn hits(&self) -> Vec<Hit> {
        let mut hits = Vec::new();
        for (number, plan) in self.chip.plans.iter().enumerate() {
            let top = HEAD + plan_height() * number as f64 + PLAN_HEAD;
            let bottom = top + KERNEL + 4.0 + LANE_STEP * LANES.len() as f64 - 3.0;
            for (start, row) in timed(plan) {
                let lanes: Vec<String> = LANES
                    .iter()
                    .map(|(_, name, of)| format!("{name} {} %", percent(share(row, *of))))
                    .collect();
                hits.push(Hit {
                    corners: ((self.at(start), top), (self.at(start + row.time_us), bottom)),
                    text: format!(
                        "{}\n{}",
                        format::stage_words(self.chip, plan, row),
                        lanes.join("; ")
                    ),
                });
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
    fn a_kernel_can_be_pointed_at_and_they_fill_the_plan_without_gap() {
        let result = fixture::one_chip();
        let stages = crate::report::plot::bars::stages(&result);
        let timeline = Timeline {
            chip: &result.chips[0],
            stages: &stages,
            palette: Theme::Light.palette(),
        };
        let hits = timeline.hits();
        let rows: usize = result.chips[0].plans.iter().map(|plan| plan.stages.len()).sum();
        assert_eq!(hits.len(), rows);
        assert!((hits[0].corners.0.0 - LEFT).abs() < 1e-9);
        // The unfused plan is the longer one, so it ends where the axis does.
        let unfused = &hits[..result.chips[0].plans[0].stages.len()];
        for pair in unfused.windows(2) {
            assert!((pair[0].corners.1.0 - pair[1].corners.0.0).abs() < 1e-9);
        }
        assert!((unfused[unfused.len() - 1].corners.1.0 - RIGHT).abs() < 1e-9);
    }

    #[test]
    fn a_result_without_a_time_still_gives_a_picture() -> Result<(), PlotError> {
        let mut result = fixture::one_chip();
        for row in result.chips[0].plans.iter_mut().flat_map(|plan| &mut plan.stages) {
            row.time_us = f64::NAN;
        }
        assert!(page(&result)?[0].ends_with("</svg>\n"));
        Ok(())
    }
}
