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

    pub(crate) fn contains(&self, (x, y): (f64, f64)) -> bool {
        x >= self.left && x <= self.right && y >= self.top && y <= self.bottom
    }
}

/// What is already drawn, and how bad it would be to cover it.
pub(crate) struct Placer {
    room: Area,
    taken: Vec<(Area, f64)>,
}

/// Weight of text and markers, which must stay readable.
pub(crate) const FIRM: f64 = 20.0;
/// Weight of a line, which may pass under a label if nothing else is free.
pub(crate) const SOFT: f64 = 3.0;
/// Weight of leaving the room.
const OUTSIDE: f64 = 100.0;

impl Placer {
    /// A placer of labels inside `room`.
    pub(crate) fn new(room: Area) -> Self {
        Self {
            room,
            taken: Vec::new(),
        }
    }

    /// Says that an area is taken.
    pub(crate) fn take(&mut self, area: Area, weight: f64) {
        self.taken.push((area, weight));
    }

    /// Says that a line is drawn.
    pub(crate) fn take_line(&mut self, (x0, y0): (f64, f64), (x1, y1): (f64, f64), weight: f64) {
        let steps = ((x1 - x0).hypot(y1 - y0) / 3.0).clamp(1.0, 2000.0) as usize;
        for step in 0..=steps {
            let along = step as f64 / steps as f64;
            self.take(
                Area::around((x0 + (x1 - x0) * along, y0 + (y1 - y0) * along), 3.0, 3.0),
                weight,
            );
        }
    }

    /// How bad a place is.
    pub(crate) fn cost(&self, area: &Area) -> f64 {
        let covered: f64 = self
            .taken
            .iter()
            .map(|(taken, weight)| weight * area.overlap(taken))
            .sum();
        covered + OUTSIDE * area.outside(&self.room)
    }

    /// The best of the candidates, each with what speaks against it; the first of equals. It is taken from
    /// then on.
    pub(crate) fn place(&mut self, candidates: impl IntoIterator<Item = (Area, f64)>) -> Option<Area> {
        let mut best: Option<(Area, f64)> = None;
        for (area, against) in candidates {
            let cost = self.cost(&area) + against;
            if best.is_none_or(|(_, least)| cost < least) {
                best = Some((area, cost));
            }
        }
        let (area, _) = best?;
        self.take(area, FIRM);
        Some(area)
    }
}

/// Places one label of the given size beside each anchor, near it where that is free; three rounds, because a
/// label that was placed first may stand better once it knows the others.
pub(crate) fn beside(placer: &mut Placer, anchors: &[(f64, f64)], sizes: &[(f64, f64)]) -> Vec<Area> {
    const DISTANCES: [f64; 7] = [9.0, 12.0, 16.0, 21.0, 27.0, 35.0, 46.0];
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
        cost += FIRM * area.overlap(&room);
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
            placer.cost(&Area::around(
                (x0 + (x1 - x0) * along, y0 + (y1 - y0) * along),
                1.5,
                1.5,
            ))
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
    fn the_first_of_equal_places_is_taken() {
        let mut placer = Placer::new(ROOM);
        let (first, second) = (
            Area::around((50.0, 50.0), 10.0, 10.0),
            Area::around((90.0, 50.0), 10.0, 10.0),
        );
        assert_eq!(placer.place([(first, 0.0), (second, 0.0)]), Some(first));
        assert_eq!(placer.place([(first, 0.0), (second, 0.0)]), Some(second));
    }
}
