//! Where a label may stand so that it covers nothing.

/// A rectangle in logical units, y downwards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Area {
    pub(crate) left: f64,
    pub(crate) top: f64,
    pub(crate) right: f64,
    pub(crate) bottom: f64,
}

impl Area {
    /// Area of the given size around a point.
    pub(crate) fn around((x, y): (f64, f64), width: f64, height: f64) -> Self {
        Self {
            left: x - width / 2.0,
            top: y - height / 2.0,
            right: x + width / 2.0,
            bottom: y + height / 2.0,
        }
    }

    pub(crate) fn width(&self) -> f64 {
        self.right - self.left
    }

    pub(crate) fn height(&self) -> f64 {
        self.bottom - self.top
    }

    pub(crate) fn center(&self) -> (f64, f64) {
        (
            f64::midpoint(self.left, self.right),
            f64::midpoint(self.top, self.bottom),
        )
    }

    /// The area with a border of `by` around it.
    fn grown(&self, by: f64) -> Self {
        Self {
            left: self.left - by,
            top: self.top - by,
            right: self.right + by,
            bottom: self.bottom + by,
        }
    }

    /// Length of the part of a line that lies inside (Liang and Barsky, 1984).
    fn length_inside(&self, (x0, y0): (f64, f64), (x1, y1): (f64, f64)) -> f64 {
        let (across, down) = (x1 - x0, y1 - y0);
        let (mut from, mut to) = (0.0_f64, 1.0_f64);
        for (step, before, after) in [
            (across, self.left - x0, self.right - x0),
            (down, self.top - y0, self.bottom - y0),
        ] {
            if step == 0.0 {
                if before > 0.0 || after < 0.0 {
                    return 0.0;
                }
                continue;
            }
            let (enter, leave) = (before / step, after / step);
            from = from.max(enter.min(leave));
            to = to.min(enter.max(leave));
        }
        across.hypot(down) * (to - from).max(0.0)
    }

    /// Common area of two.
    pub(crate) fn overlap(&self, other: &Area) -> f64 {
        let width = self.right.min(other.right) - self.left.max(other.left);
        let height = self.bottom.min(other.bottom) - self.top.max(other.top);
        width.max(0.0) * height.max(0.0)
    }

    /// Part of this one that lies outside another.
    fn outside(&self, other: &Area) -> f64 {
        self.width() * self.height() - self.overlap(other)
    }

    /// How far from a point outside the way to the centre enters.
    pub(crate) fn along(&self, (x, y): (f64, f64)) -> f64 {
        let (to_x, to_y) = self.center();
        let (across, down) = ((to_x - x).abs(), (to_y - y).abs());
        let inside = (self.width() / 2.0 / across)
            .min(self.height() / 2.0 / down)
            .min(1.0);
        across.hypot(down) * (1.0 - inside)
    }

    pub(crate) fn contains(&self, (x, y): (f64, f64)) -> bool {
        x >= self.left && x <= self.right && y >= self.top && y <= self.bottom
    }
}

/// What is already drawn, and how bad it would be to cover it.
pub(crate) struct Placer {
    room: Area,
    taken: Vec<(Area, f64)>,
    lines: Vec<Segment>,
}

/// A line that is drawn: its ends and its weight.
type Segment = ((f64, f64), (f64, f64), f64);

/// Width of what a line takes.
const LINE: f64 = 3.0;

/// Weight of text and markers, which must stay readable.
pub(crate) const FIRM: f64 = 20.0;
/// Weight of a line that says something, which a label should not hide.
pub(crate) const SOLID: f64 = 9.0;
/// Weight of a line, which may pass under a label if nothing else is free.
pub(crate) const SOFT: f64 = 3.0;
/// What speaks against a place that touches text or a marker at all: more than any liking for a place.
const TOUCH: f64 = 500.0;
/// Weight of leaving the room.
const OUTSIDE: f64 = 100.0;

impl Placer {
    /// A placer of labels inside `room`.
    pub(crate) fn new(room: Area) -> Self {
        Self {
            room,
            taken: Vec::new(),
            lines: Vec::new(),
        }
    }

    /// Says that an area is taken.
    pub(crate) fn take(&mut self, area: Area, weight: f64) {
        self.taken.push((area, weight));
    }

    /// Says that a line is drawn.
    pub(crate) fn take_line(&mut self, from: (f64, f64), to: (f64, f64), weight: f64) {
        self.lines.push((from, to, weight));
    }

    /// How bad a place is.
    pub(crate) fn cost(&self, area: &Area) -> f64 {
        self.cost_touching(area, TOUCH)
    }

    /// How bad a place is, with what speaks against touching text or a marker at all.
    fn cost_touching(&self, area: &Area, touch: f64) -> f64 {
        let covered: f64 = self
            .taken
            .iter()
            .map(|(taken, weight)| (area.overlap(taken), weight))
            .filter(|(overlap, _)| *overlap > 0.0)
            .map(|(overlap, weight)| weight * overlap + if *weight >= FIRM { touch } else { 0.0 })
            .sum();
        let beside = area.grown(LINE / 2.0);
        let crossed: f64 = self
            .lines
            .iter()
            .map(|&(from, to, weight)| weight * LINE * beside.length_inside(from, to))
            .sum();
        covered + crossed + OUTSIDE * area.outside(&self.room)
    }

    /// Chooses a candidate for every label so that none covers another or what is taken; the first of equals. They are taken from then on.
    ///
    /// Labels choose in turn, and again for a few rounds, because a label that was placed first may stand better once it knows the others.
    pub(crate) fn settle<'a>(&mut self, labels: &'a [Vec<Candidate>]) -> Vec<Option<&'a Candidate>> {
        const ROUNDS: usize = 6;
        let costs: Vec<Vec<f64>> = labels
            .iter()
            .map(|candidates| {
                let cost = |candidate: &Candidate| self.cost(&candidate.area) + candidate.against;
                candidates.iter().map(cost).collect()
            })
            .collect();
        let mut chosen: Vec<Option<&Candidate>> = vec![None; labels.len()];
        for _ in 0..ROUNDS {
            let before: Vec<_> = chosen.iter().map(|c| c.map(|c| c.area)).collect();
            for (index, (candidates, costs)) in labels.iter().zip(&costs).enumerate() {
                let mut best: Option<(&Candidate, f64)> = None;
                for (candidate, cost) in candidates.iter().zip(costs) {
                    let others = chosen.iter().enumerate().filter(|(other, _)| *other != index);
                    let cost = cost
                        + others
                            .filter_map(|(_, other)| Some(covering(&candidate.area, &(*other)?.area)))
                            .sum::<f64>();
                    if best.is_none_or(|(_, least)| cost < least) {
                        best = Some((candidate, cost));
                    }
                }
                chosen[index] = best.map(|(candidate, _)| candidate);
            }
            if chosen.iter().map(|c| c.map(|c| c.area)).eq(before) {
                break;
            }
        }
        for candidate in chosen.iter().flatten() {
            self.take(candidate.area, FIRM);
        }
        chosen
    }
}

/// A place a label could have.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) area: Area,
    /// What speaks against it even where it is free.
    pub(crate) against: f64,
    /// Which way of writing the label it is for.
    pub(crate) variant: usize,
}

/// What speaks against two labels because of each other.
fn covering(area: &Area, other: &Area) -> f64 {
    // A little room between them.
    let overlap = area.overlap(&other.grown(0.75));
    if overlap > 0.0 {
        FIRM * overlap + TOUCH
    } else {
        0.0
    }
}

/// Places one label of the given size beside each anchor, near it where that is free; three rounds, because a
/// label that was placed first may stand better once it knows the others.
pub(crate) fn beside(placer: &mut Placer, anchors: &[(f64, f64)], sizes: &[(f64, f64)]) -> Vec<Area> {
    const DISTANCES: [f64; 8] = [9.0, 12.0, 16.0, 21.0, 27.0, 35.0, 46.0, 60.0];
    const DIRECTIONS: usize = 16;
    let mut placed: Vec<Option<Area>> = vec![None; anchors.len()];
    for _ in 0..3 {
        for (index, (&(x, y), &(width, height))) in anchors.iter().zip(sizes).enumerate() {
            let mut best: Option<(Area, f64)> = None;
            for distance in DISTANCES {
                for direction in 0..DIRECTIONS {
                    // Starts at the upper right, where a label is looked for first.
                    let angle = (direction as f64 / DIRECTIONS as f64 - 0.125) * std::f64::consts::TAU;
                    let reach = (distance + width / 2.0 - 3.0, distance + height / 2.0 - 5.0);
                    let center = (x + reach.0 * angle.cos(), y + reach.1 * angle.sin());
                    let area = Area::around(center, width, height);
                    let mut cost = placer.cost(&area) + 1.5 * (distance - DISTANCES[0]);
                    for (other, (&anchor, place)) in anchors.iter().zip(&placed).enumerate() {
                        if other != index {
                            cost += against_other((x, y), &area, anchor, place.as_ref());
                        }
                    }
                    // The leader is looked at last and only where the rest is good: it is the dearest to look at.
                    if best.is_none_or(|(_, least)| cost < least) {
                        cost += leader_cost(placer, (x, y), center);
                    }
                    if best.is_none_or(|(_, least)| cost < least) {
                        best = Some((area, cost));
                    }
                }
            }
            if let Some(slot) = placed.get_mut(index) {
                *slot = best.map(|(area, _)| area);
            }
        }
    }
    let areas: Vec<_> = placed.into_iter().flatten().collect();
    for area in &areas {
        placer.take(*area, FIRM);
    }
    areas
}

/// What speaks against a label because of another marker and its label.
fn against_other((x, y): (f64, f64), area: &Area, anchor: (f64, f64), place: Option<&Area>) -> f64 {
    let mut cost = 0.0;
    if let Some(place) = place {
        let room = Area::around(place.center(), place.width() + 2.0, place.height() + 1.0);
        let overlap = area.overlap(&room);
        cost += if overlap > 0.0 {
            FIRM * overlap + TOUCH
        } else {
            0.0
        };
        // A leader through another number would be read as its own.
        for crossed in [
            crosses((x, y), area.center(), place),
            crosses(anchor, place.center(), area),
        ] {
            cost += if crossed { 120.0 } else { 0.0 };
        }
    }
    let apart = (anchor.0 - x).hypot(anchor.1 - y) > 4.0;
    let through = apart && crosses((x, y), area.center(), &Area::around(anchor, 8.0, 8.0));
    cost + if through { 60.0 } else { 0.0 }
}

/// What a leader passes over, from where its marker ends.
fn leader_cost(placer: &Placer, (x0, y0): (f64, f64), (x1, y1): (f64, f64)) -> f64 {
    let length = (x1 - x0).hypot(y1 - y0);
    let places = (3..=(length / 3.0) as u32).map(|step| 3.0 * f64::from(step) / length);
    places
        .map(|along| {
            // A leader may be crossed; a text may not.
            let at = (x0 + (x1 - x0) * along, y0 + (y1 - y0) * along);
            placer.cost_touching(&Area::around(at, 1.5, 1.5), 0.0)
        })
        .sum()
}

/// Whether the way between two points enters an area.
fn crosses((x0, y0): (f64, f64), (x1, y1): (f64, f64), area: &Area) -> bool {
    (0..=12).any(|step| {
        let along = f64::from(step) / 12.0;
        area.contains((x0 + (x1 - x0) * along, y0 + (y1 - y0) * along))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Area = Area {
        left: 0.0,
        top: 0.0,
        right: 200.0,
        bottom: 200.0,
    };

    #[test]
    fn labels_of_one_crowded_spot_do_not_cover_each_other() {
        let mut placer = Placer::new(ROOM);
        let anchors = [(100.0, 100.0); 8];
        placer.take(Area::around(anchors[0], 10.0, 10.0), FIRM);
        let areas = beside(&mut placer, &anchors, &[(12.0, 10.0); 8]);
        assert_eq!(areas.len(), 8);
        for (index, area) in areas.iter().enumerate() {
            assert!(area.outside(&ROOM) < 1e-9);
            assert!(
                areas
                    .iter()
                    .skip(index + 1)
                    .all(|other| area.overlap(other) < 1e-9)
            );
        }
    }

    #[test]
    fn a_line_counts_as_far_as_it_lies_inside() {
        let area = Area::around((10.0, 10.0), 6.0, 8.0);
        // Through the middle: along its width, along its height, and a 3-4-5 triangle twice.
        assert!((area.length_inside((0.0, 10.0), (20.0, 10.0)) - 6.0).abs() < 1e-9);
        assert!((area.length_inside((10.0, 20.0), (10.0, 0.0)) - 8.0).abs() < 1e-9);
        assert!((area.length_inside((1.0, -2.0), (19.0, 22.0)) - 10.0).abs() < 1e-9);
        // It ends inside, or passes by.
        assert!((area.length_inside((0.0, 10.0), (10.0, 10.0)) - 3.0).abs() < 1e-9);
        assert!(area.length_inside((0.0, 0.0), (20.0, 0.0)).abs() < 1e-9);
        assert!(area.length_inside((0.0, 10.0), (0.0, 12.0)).abs() < 1e-9);
    }

    #[test]
    fn the_way_to_the_centre_ends_at_the_edge() {
        let area = Area::around((30.0, 40.0), 6.0, 20.0);
        // Straight from the left it is the half width that is inside, from above the half height.
        assert!((area.along((0.0, 40.0)) - 27.0).abs() < 1e-9);
        assert!((area.along((30.0, 0.0)) - 30.0).abs() < 1e-9);
        assert!(area.along((30.0, 40.0)).abs() < 1e-9);
    }

    #[test]
    fn the_first_of_equal_places_is_taken() {
        let mut placer = Placer::new(ROOM);
        let candidate = |x: f64, variant| Candidate {
            area: Area::around((x, 50.0), 10.0, 10.0),
            against: 0.0,
            variant,
        };
        let label = vec![candidate(50.0, 0), candidate(90.0, 1)];
        for expected in [0, 1] {
            let chosen = placer.settle(std::slice::from_ref(&label));
            assert_eq!(chosen[0].map(|chosen| chosen.variant), Some(expected));
        }
    }

    #[test]
    fn a_label_makes_way_for_one_that_has_no_choice() {
        let candidate = |x: f64, against| Candidate {
            area: Area::around((x, 50.0), 10.0, 10.0),
            against,
            variant: 0,
        };
        let (free, bound) = (
            vec![candidate(50.0, 0.0), candidate(90.0, 5.0)],
            vec![candidate(50.0, 0.0)],
        );
        let labels = [free, bound];
        let chosen = Placer::new(ROOM).settle(&labels);
        assert_eq!(chosen[0], Some(&labels[0][1]));
        assert_eq!(chosen[1], Some(&labels[1][0]));
    }
}
