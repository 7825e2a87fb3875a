//! A drawing area in logical units, the same for SVG and bitmap.

use std::fmt::Display;
use std::path::Path;
use std::sync::OnceLock;

use plotters::backend::{BitMapBackend, DrawingBackend, SVGBackend};
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, PathElement, Polygon, Rectangle};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{
    Color, FontStyle, FontTransform, IntoFont, RGBColor, ShapeStyle, TextStyle, register_font,
};

use super::theme::Palette;

/// Device units of one logical unit.
const SCALE: f64 = 2.0;

/// Families of the SVG in order of preference; the bundled font is registered under the same name. It is the
/// widest of them, so text that was measured with it fits in any.
const FAMILY: &str = "Helvetica, Arial, DejaVu Sans, sans-serif";

/// The drawing library takes another unit for text than the em: in SVG it divides by this ...
const SVG_UNITS_PER_EM: f64 = 1.24;
/// ... and in bitmaps it is the height of the bundled font.
const BITMAP_UNITS_PER_EM: f64 = 1.164;
/// Where the library puts the baseline under the top of a text, in em.
const SVG_BASELINE: f64 = 0.76;
const BITMAP_BASELINE: f64 = 0.5 * BITMAP_UNITS_PER_EM;

/// Why a picture was not drawn.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlotError {
    /// The bundled font could not be read.
    #[error("the bundled font cannot be read")]
    Font,
    /// The drawing library failed.
    #[error("{0}")]
    Draw(String),
}

impl PlotError {
    fn draw(error: impl Display) -> Self {
        PlotError::Draw(error.to_string())
    }
}

/// Makes the bundled fonts known, once: no system font is ever looked for.
fn fonts() -> Result<(), PlotError> {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    let registered = REGISTERED.get_or_init(|| {
        let regular = include_bytes!("../../../assets/fonts/DejaVuSans.ttf");
        let bold = include_bytes!("../../../assets/fonts/DejaVuSans-Bold.ttf");
        register_font(FAMILY, FontStyle::Normal, regular).is_ok()
            && register_font(FAMILY, FontStyle::Bold, bold).is_ok()
    });
    if *registered { Ok(()) } else { Err(PlotError::Font) }
}

/// Size and weight of a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Type {
    /// The em, in logical units.
    pub(crate) em: f64,
    pub(crate) bold: bool,
}

impl Type {
    pub(crate) const fn regular(em: f64) -> Self {
        Self { em, bold: false }
    }

    pub(crate) const fn bold(em: f64) -> Self {
        Self { em, bold: true }
    }

    const fn style(self) -> FontStyle {
        if self.bold {
            FontStyle::Bold
        } else {
            FontStyle::Normal
        }
    }
}

/// Which end of a text the given point is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// Width of a text in logical units, in the bundled font.
pub(crate) fn text_width(text: &str, kind: Type) -> f64 {
    if fonts().is_err() {
        return 0.6 * kind.em * text.chars().count() as f64;
    }
    // The library rounds to whole units, so the text is measured large.
    let large = 1000.0;
    let width = (FAMILY, large * BITMAP_UNITS_PER_EM, kind.style())
        .into_font()
        .box_size(text)
        .map_or(0, |(width, _)| width);
    f64::from(width) / large * kind.em
}

/// Text broken between words into lines no wider than `width`; a longer word stands alone.
pub(crate) fn wrap(text: &str, width: f64, kind: Type) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        let longer = if line.is_empty() {
            word.to_owned()
        } else {
            format!("{line} {word}")
        };
        if line.is_empty() || text_width(&longer, kind) <= width {
            line = longer;
        } else {
            lines.push(std::mem::replace(&mut line, word.to_owned()));
        }
    }
    if !line.is_empty() {
        lines.push(line);
    }
    lines
}

/// Something that can be drawn.
pub(crate) trait Picture {
    /// Width and height in logical units.
    fn size(&self) -> (f64, f64);
    /// Colours.
    fn palette(&self) -> &Palette;
    /// What it shows, in a sentence, for those who do not see it.
    fn label(&self) -> String;
    /// Draws it.
    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> Result<(), PlotError>;
    /// What can be pointed at, in a page.
    fn hits(&self) -> Vec<Hit> {
        Vec::new()
    }
}

/// A place of a picture that says more when it is pointed at.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Hit {
    /// Corner at the left top and corner at the right bottom, in logical units.
    pub(crate) corners: ((f64, f64), (f64, f64)),
    /// What it says, in lines.
    pub(crate) text: String,
}

impl Hit {
    /// A square of the given half side around a point.
    pub(crate) fn around((x, y): (f64, f64), half: f64, text: String) -> Self {
        Self {
            corners: ((x - half, y - half), (x + half, y + half)),
            text,
        }
    }

    fn svg(&self) -> String {
        let ((left, top), (right, bottom)) = self.corners;
        let device = |value: f64| (value * SCALE).round().max(0.0);
        format!(
            "<rect class=\"hit\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"transparent\"><title>{}</title></rect>\n",
            device(left),
            device(top),
            device(right - left).max(1.0),
            device(bottom - top).max(1.0),
            crate::report::html::escape_lines(&self.text)
        )
    }
}

fn device_size(picture: &impl Picture) -> (u32, u32) {
    let (width, height) = picture.size();
    (
        (width.max(1.0) * SCALE).round() as u32,
        (height.max(1.0) * SCALE).round() as u32,
    )
}

/// Where an SVG is going to stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// A file of its own.
    File,
    /// Inside a page, as wide as the page lets it.
    Page,
}

/// The picture as SVG.
pub(crate) fn svg(picture: &impl Picture, place: Place) -> Result<String, PlotError> {
    fonts()?;
    let size = device_size(picture);
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        let canvas = Canvas {
            area,
            size,
            bitmap: false,
        };
        canvas.paint(picture)?;
    }
    // The library's own first tag says the device size; ours shows it at half, and says what it is.
    let body = text.split_once('\n').map_or("", |(_, body)| body);
    let (width, height) = size;
    let extent = match place {
        Place::File => format!(
            "width=\"{}\" height=\"{}\" xmlns=\"http://www.w3.org/2000/svg\" font-family=\"{FAMILY}\"",
            f64::from(width) / SCALE,
            f64::from(height) / SCALE
        ),
        Place::Page => format!("style=\"max-width:{}px\"", f64::from(width) / SCALE),
    };
    let label = crate::report::html::escape(&picture.label());
    let mut body = compact(body);
    let hits = match place {
        Place::File => Vec::new(),
        Place::Page => picture.hits(),
    };
    let role = if hits.is_empty() { "img" } else { "group" };
    if let Some(end) = body.rfind("</svg>") {
        let hits: String = hits.iter().map(Hit::svg).collect();
        body.insert_str(end, &hits);
    }
    Ok(format!(
        "<svg {extent} viewBox=\"0 0 {width} {height}\" role=\"{role}\" aria-label=\"{label}\">\n{body}"
    ))
}

/// The same picture in fewer bytes: attributes that say nothing go, the fonts stand in the first tag, and lines of one style that follow each other,
/// such as dashes, are one path.
fn compact(body: &str) -> String {
    const LINE: &str = "<polyline fill=\"none\" opacity=\"1\" ";
    let family = format!(" font-family=\"{FAMILY}\"");
    let mut out = String::with_capacity(body.len() / 2);
    let mut open: Option<&str> = None;
    for line in body.lines() {
        let drawn = line
            .strip_prefix(LINE)
            .and_then(|rest| rest.strip_suffix(" \"/>"))
            .and_then(|rest| rest.split_once(" points=\""));
        let style = drawn.map(|(style, _)| style);
        if open.is_some() && open != style {
            out.push_str("\"/>\n");
        }
        if let Some((style, points)) = drawn {
            if open != Some(style) {
                out.push_str("<path fill=\"none\" ");
                out.push_str(style);
                out.push_str(" d=\"");
            }
            out.push('M');
            out.push_str(&points.replace(' ', "L"));
        } else if line.starts_with('<') {
            // Only in a tag: a text is what it is.
            out.push_str(&line.replace(&family, "").replace(" opacity=\"1\"", ""));
            out.push('\n');
        } else {
            out.push_str(line);
            out.push('\n');
        }
        open = style;
    }
    if open.is_some() {
        out.push_str("\"/>\n");
    }
    out
}

/// Writes the picture as PNG of twice its size.
pub(crate) fn png(picture: &impl Picture, path: &Path) -> Result<(), PlotError> {
    fonts()?;
    let size = device_size(picture);
    let area = BitMapBackend::new(path, size).into_drawing_area();
    Canvas {
        area,
        size,
        bitmap: true,
    }
    .paint(picture)
}

/// The drawing area.
pub(crate) struct Canvas<B: DrawingBackend> {
    area: DrawingArea<B, Shift>,
    size: (u32, u32),
    bitmap: bool,
}

impl<B: DrawingBackend> Canvas<B> {
    const fn units_per_em(&self) -> f64 {
        if self.bitmap {
            BITMAP_UNITS_PER_EM
        } else {
            SVG_UNITS_PER_EM
        }
    }

    const fn baseline(&self) -> f64 {
        if self.bitmap {
            BITMAP_BASELINE
        } else {
            SVG_BASELINE
        }
    }

    fn paint(&self, picture: &impl Picture) -> Result<(), PlotError> {
        self.area
            .fill(&picture.palette().paper)
            .map_err(PlotError::draw)?;
        picture.draw(self)?;
        self.area.present().map_err(PlotError::draw)
    }

    /// Device coordinates, held inside the picture: a line to infinity would never end.
    fn at(&self, (x, y): (f64, f64)) -> (i32, i32) {
        let hold = |value: f64, limit: u32| (value * SCALE).round().clamp(0.0, f64::from(limit)) as i32;
        (hold(x, self.size.0), hold(y, self.size.1))
    }

    fn stroke(color: RGBColor, width: f64) -> ShapeStyle {
        color.stroke_width(((width * SCALE).round() as u32).max(1))
    }

    /// A line through points.
    pub(crate) fn line(&self, points: &[(f64, f64)], color: RGBColor, width: f64) -> Result<(), PlotError> {
        let points: Vec<_> = points.iter().map(|&point| self.at(point)).collect();
        self.area
            .draw(&PathElement::new(points, Self::stroke(color, width)))
            .map_err(PlotError::draw)
    }

    /// A dashed line between two points.
    pub(crate) fn dashed(
        &self,
        (x0, y0): (f64, f64),
        (x1, y1): (f64, f64),
        color: RGBColor,
        width: f64,
    ) -> Result<(), PlotError> {
        let (dash, gap) = (5.0, 3.5);
        let length = (x1 - x0).hypot(y1 - y0);
        let mut start = 0.0;
        while start < length && length.is_finite() {
            let end = (start + dash).min(length);
            let point = |along: f64| (x0 + (x1 - x0) * along / length, y0 + (y1 - y0) * along / length);
            self.line(&[point(start), point(end)], color, width)?;
            start += dash + gap;
        }
        Ok(())
    }

    /// A filled rectangle between two corners.
    pub(crate) fn block(&self, from: (f64, f64), to: (f64, f64), color: RGBColor) -> Result<(), PlotError> {
        self.area
            .draw(&Rectangle::new([self.at(from), self.at(to)], color.filled()))
            .map_err(PlotError::draw)
    }

    /// A filled polygon.
    pub(crate) fn polygon(&self, corners: &[(f64, f64)], color: RGBColor) -> Result<(), PlotError> {
        let corners: Vec<_> = corners.iter().map(|&point| self.at(point)).collect();
        self.area
            .draw(&Polygon::new(corners, color.filled()))
            .map_err(PlotError::draw)
    }

    /// A disc.
    pub(crate) fn disc(&self, center: (f64, f64), radius: f64, color: RGBColor) -> Result<(), PlotError> {
        self.area
            .draw(&Circle::new(self.at(center), radius * SCALE, color.filled()))
            .map_err(PlotError::draw)
    }

    /// A ring.
    pub(crate) fn ring(
        &self,
        center: (f64, f64),
        radius: f64,
        color: RGBColor,
        width: f64,
    ) -> Result<(), PlotError> {
        if self.bitmap {
            // The rasteriser leaves notches in a thick ring, and none in thin ones side by side.
            let (middle, half) = (
                (radius * SCALE).round() as u32,
                ((width * SCALE).round() as u32) / 2,
            );
            for radius in middle.saturating_sub(half)..=middle + half {
                let ring = Circle::new(self.at(center), radius, color.stroke_width(1));
                self.area.draw(&ring).map_err(PlotError::draw)?;
            }
            return Ok(());
        }
        let ring = Circle::new(self.at(center), radius * SCALE, Self::stroke(color, width));
        self.area.draw(&ring).map_err(PlotError::draw)
    }

    /// A text whose baseline passes through the point.
    pub(crate) fn text(
        &self,
        text: &str,
        (x, y): (f64, f64),
        kind: Type,
        anchor: Anchor,
        color: RGBColor,
    ) -> Result<(), PlotError> {
        self.put_text(
            text,
            (x, y - self.baseline() * kind.em),
            kind,
            anchor,
            color,
            FontTransform::None,
        )
    }

    /// A text that reads upwards and whose baseline passes through the point.
    pub(crate) fn upward_text(
        &self,
        text: &str,
        (x, y): (f64, f64),
        kind: Type,
        anchor: Anchor,
        color: RGBColor,
    ) -> Result<(), PlotError> {
        self.put_text(
            text,
            (x - self.baseline() * kind.em, y),
            kind,
            anchor,
            color,
            FontTransform::Rotate270,
        )
    }

    fn put_text(
        &self,
        text: &str,
        at: (f64, f64),
        kind: Type,
        anchor: Anchor,
        color: RGBColor,
        turn: FontTransform,
    ) -> Result<(), PlotError> {
        let position = match anchor {
            Anchor::Start => HPos::Left,
            Anchor::Middle => HPos::Center,
            Anchor::End => HPos::Right,
        };
        let font = (FAMILY, kind.em * SCALE * self.units_per_em(), kind.style())
            .into_font()
            .transform(turn);
        // XML has no control characters, not even escaped.
        let text: String = text
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        let style = TextStyle::from(font)
            .color(&color)
            .pos(Pos::new(position, VPos::Top));
        self.area
            .draw_text(&text, &style, self.at(at))
            .map_err(PlotError::draw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wide_letter_is_wider_than_a_narrow_one() {
        let kind = Type::regular(10.0);
        assert!(text_width("m", kind) > 2.0 * text_width("i", kind));
        // A digit of the bundled font is 0.636 em wide.
        assert!((text_width("0000000000", kind) - 63.6).abs() < 0.2);
    }

    #[test]
    fn lines_of_one_style_become_one_path() {
        let dash = |from: u32| {
            format!(
                "<polyline fill=\"none\" opacity=\"1\" stroke=\"#000000\" stroke-width=\"2\" points=\"{from},1 {},1 \"/>\n",
                from + 2
            )
        };
        let text = "<text x=\"0\" opacity=\"1\">\n opacity=\"1\"\n</text>\n";
        assert_eq!(
            compact(&format!("{}{}{text}{}", dash(0), dash(4), dash(8))),
            "<path fill=\"none\" stroke=\"#000000\" stroke-width=\"2\" d=\"M0,1L2,1M4,1L6,1\"/>\n\
             <text x=\"0\">\n opacity=\"1\"\n</text>\n\
             <path fill=\"none\" stroke=\"#000000\" stroke-width=\"2\" d=\"M8,1L10,1\"/>\n"
        );
    }

    #[test]
    fn wrapping_keeps_every_word() {
        let text = "one two three four five six seven";
        let lines = wrap(text, 60.0, Type::regular(10.0));
        assert!(lines.len() > 2);
        assert_eq!(lines.join(" "), text);
    }

    #[test]
    fn the_fonts_have_every_sign_that_is_drawn() {
        // A sign without a glyph is as wide as the box that stands for it.
        let kind = Type::regular(100.0);
        let missing = text_width("\u{4e2d}", kind);
        for sign in ["µ", "×", "⁻", "⁹", "²", "·", "–", "…", "≥"] {
            assert!((text_width(sign, kind) - missing).abs() > 0.01, "{sign}");
        }
    }
}
