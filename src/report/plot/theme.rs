//! Colours.

use std::fmt::Write as _;

use plotters::style::RGBColor;

use crate::report::result::Bound;

/// Light or dark paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Theme {
    /// Dark ink on white.
    #[default]
    Light,
    /// Light ink on near-black.
    Dark,
}

/// The colours of a theme, by role.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Palette {
    pub(crate) paper: RGBColor,
    pub(crate) ink: RGBColor,
    pub(crate) quiet: RGBColor,
    pub(crate) axis: RGBColor,
    pub(crate) grid: RGBColor,
    pub(crate) hbm: RGBColor,
    pub(crate) mxu: RGBColor,
    pub(crate) vpu: RGBColor,
    pub(crate) transcendental: RGBColor,
    pub(crate) vmem: RGBColor,
    pub(crate) chain: RGBColor,
}

const LIGHT: Palette = Palette {
    paper: RGBColor(255, 255, 255),
    ink: RGBColor(31, 35, 40),
    quiet: RGBColor(87, 96, 106),
    axis: RGBColor(139, 147, 156),
    grid: RGBColor(228, 231, 235),
    hbm: RGBColor(11, 95, 165),
    mxu: RGBColor(194, 65, 12),
    vpu: RGBColor(10, 125, 90),
    transcendental: RGBColor(139, 63, 168),
    vmem: RGBColor(138, 109, 0),
    chain: RGBColor(75, 85, 99),
};

const DARK: Palette = Palette {
    paper: RGBColor(20, 24, 29),
    ink: RGBColor(232, 234, 237),
    quiet: RGBColor(167, 176, 186),
    axis: RGBColor(107, 116, 128),
    grid: RGBColor(43, 49, 56),
    hbm: RGBColor(108, 182, 255),
    mxu: RGBColor(255, 154, 98),
    vpu: RGBColor(79, 214, 165),
    transcendental: RGBColor(215, 160, 240),
    vmem: RGBColor(230, 195, 74),
    chain: RGBColor(180, 188, 198),
};

impl Theme {
    pub(crate) const fn palette(self) -> &'static Palette {
        match self {
            Theme::Light => &LIGHT,
            Theme::Dark => &DARK,
        }
    }
}

impl Palette {
    /// Colour of what binds a stage: that of the roof it stands under.
    pub(crate) const fn bound(&self, bound: Bound) -> RGBColor {
        match bound {
            Bound::Mxu => self.mxu,
            Bound::Vpu | Bound::CrossLane => self.vpu,
            Bound::Transcendental => self.transcendental,
            Bound::Hbm => self.hbm,
            Bound::Vmem => self.vmem,
            Bound::Latency | Bound::Launch | Bound::Interconnect => self.chain,
        }
    }

    const fn roles(&self) -> [RGBColor; 11] {
        [
            self.paper,
            self.ink,
            self.quiet,
            self.axis,
            self.grid,
            self.hbm,
            self.mxu,
            self.vpu,
            self.transcendental,
            self.vmem,
            self.chain,
        ]
    }
}

/// Colours of the stages in the bars, on either theme; a stage beyond the last takes the first again.
pub(crate) const STAGES: [RGBColor; 9] = [
    RGBColor(68, 119, 170),
    RGBColor(102, 194, 165),
    RGBColor(221, 170, 51),
    RGBColor(187, 85, 102),
    RGBColor(136, 204, 238),
    RGBColor(153, 153, 90),
    RGBColor(170, 68, 153),
    RGBColor(204, 121, 87),
    RGBColor(120, 120, 130),
];

/// Colour of one of several series, such as devices; they repeat after nine.
pub(crate) fn series_color(index: usize) -> RGBColor {
    // Neighbours in this order differ in lightness as well as in hue.
    let order = [0, 2, 3, 1, 6, 8, 4, 7, 5];
    STAGES
        .get(order[index % order.len()])
        .copied()
        .unwrap_or(RGBColor(120, 120, 130))
}

/// Ink on a coloured area: the darker or the lighter of two, whichever stands out. Neither is a colour of a
/// palette, so that a change of theme leaves them alone.
pub(crate) fn ink_on(area: RGBColor) -> RGBColor {
    let luminance = 0.299 * f64::from(area.0) + 0.587 * f64::from(area.1) + 0.114 * f64::from(area.2);
    if luminance > 140.0 {
        RGBColor(17, 17, 17)
    } else {
        RGBColor(254, 254, 254)
    }
}

/// Rules that colour the name of a bound in a page, on light and on dark paper.
pub(crate) fn bound_css() -> String {
    let mut css = String::new();
    for (palette, open, close) in [
        (LIGHT, "", ""),
        (DARK, "@media screen and (prefers-color-scheme: dark) {\n", "}\n"),
    ] {
        css.push_str(open);
        for bound in Bound::ALL {
            let color = palette.bound(bound);
            let _ = writeln!(
                css,
                ".bound.{} {{ color: #{:02X}{:02X}{:02X}; }}",
                bound.name(),
                color.0,
                color.1,
                color.2
            );
        }
        css.push_str(close);
    }
    css
}

/// Rules that turn a light picture in a page into a dark one, so that a page holds each picture once.
pub(crate) fn dark_mode_css() -> String {
    let hex = |color: RGBColor| format!("#{:02X}{:02X}{:02X}", color.0, color.1, color.2);
    let mut css = String::new();
    for (light, dark) in LIGHT.roles().into_iter().zip(DARK.roles()) {
        let (light, dark) = (hex(light), hex(dark));
        for attribute in ["fill", "stroke"] {
            let _ = writeln!(css, "  svg [{attribute}=\"{light}\"] {{ {attribute}: {dark}; }}");
        }
    }
    css
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_role_has_a_colour_of_its_own() {
        for palette in [LIGHT, DARK] {
            let mut roles: Vec<_> = palette
                .roles()
                .iter()
                .map(|color| (color.0, color.1, color.2))
                .collect();
            roles.sort_unstable();
            roles.dedup();
            assert_eq!(roles.len(), 11);
        }
    }

    #[test]
    fn text_stands_out_from_paper() {
        let luminance = |color: RGBColor| {
            let linear = |part: u8| {
                let part = f64::from(part) / 255.0;
                if part <= 0.040_45 {
                    part / 12.92
                } else {
                    ((part + 0.055) / 1.055).powf(2.4)
                }
            };
            0.2126 * linear(color.0) + 0.7152 * linear(color.1) + 0.0722 * linear(color.2)
        };
        for palette in [LIGHT, DARK] {
            let paper = luminance(palette.paper);
            for text in [
                palette.ink,
                palette.quiet,
                palette.hbm,
                palette.mxu,
                palette.vpu,
                palette.transcendental,
            ] {
                let text = luminance(text);
                let contrast = (paper.max(text) + 0.05) / (paper.min(text) + 0.05);
                assert!(contrast >= 4.5, "contrast {contrast}");
            }
        }
    }
}
