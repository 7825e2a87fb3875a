//! How the rows of a grouped product are spread over its groups, and what row tiles make of it.

use statrs::distribution::{Binomial, DiscreteCDF};

use super::case::{Case, CaseError};

/// Rows of every group.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum GroupSizes {
    /// Each row goes to one of the groups, all equally likely: what an untrained router does. All counts are expected values.
    Random {
        /// Rows of all groups.
        rows: u64,
        /// Groups.
        groups: u64,
    },
    /// Rows of each group in turn.
    Listed(Vec<u64>),
}

impl GroupSizes {
    /// What parameter `sizes` says: `even`, a list such as `300+0+212`, or, where it is absent, rows that choose at random.
    ///
    /// # Errors
    /// Where a list has another number of groups or another sum than the case.
    pub(super) fn of(case: &Case<'_>, rows: u64, groups: u64) -> Result<Self, CaseError> {
        const NAME: &str = "sizes";
        let Some(text) = case.text(NAME) else {
            return Ok(Self::Random { rows, groups });
        };
        if text == "even" {
            let (each, rest) = (rows / groups, rows % groups);
            return Ok(Self::Listed(
                (0..groups).map(|group| each + u64::from(group < rest)).collect(),
            ));
        }
        let sizes: Option<Vec<u64>> = text.split('+').map(|part| part.parse().ok()).collect();
        let fits = |sizes: &Vec<u64>| {
            let sum = sizes.iter().try_fold(0_u64, |sum, &size| sum.checked_add(size));
            sizes.len() as u64 == groups && sum == Some(rows)
        };
        match sizes.filter(fits) {
            Some(sizes) => Ok(Self::Listed(sizes)),
            None => Err(CaseError::Value {
                parameter: NAME.to_owned(),
                expected: format!(
                    "`even`, or {groups} numbers of rows such as `3+0+5` that add up to {rows}"
                ),
                found: text.to_owned(),
            }),
        }
    }

    /// Groups with a row.
    pub(super) fn occupied(&self) -> f64 {
        match self {
            &Self::Random { rows, groups } => groups as f64 * more_than(rows, groups, 0),
            Self::Listed(sizes) => sizes.iter().filter(|&&size| size > 0).count() as f64,
        }
    }

    /// Pairs of a tile of `tile` rows and a group that meet, where tiles lie side by side over all rows and groups share them.
    ///
    /// A boundary between two groups adds a pair unless it is also one between tiles, which at random happens once in `tile` times.
    pub(super) fn shared_tiles(&self, tile: u64) -> f64 {
        match self {
            &Self::Random { rows, .. } => {
                let boundaries = (self.occupied() - 1.0).max(0.0);
                rows.div_ceil(tile) as f64 + boundaries * (1.0 - 1.0 / tile as f64)
            }
            Self::Listed(sizes) => {
                let mut start = 0;
                let mut pairs = 0;
                for &size in sizes.iter().filter(|&&size| size > 0) {
                    let end = start + size;
                    pairs += end.div_ceil(tile) - start / tile;
                    start = end;
                }
                pairs as f64
            }
        }
    }

    /// Tiles of `tile` rows where every group begins its own.
    pub(super) fn own_tiles(&self, tile: u64) -> f64 {
        match self {
            // The mean of ceil(size / tile) is the sum over i of the probability that a group has more than i tiles.
            &Self::Random { rows, groups } => {
                let mut mean = 0.0;
                for full in (0..rows).step_by(tile.try_into().unwrap_or(usize::MAX)) {
                    let share = more_than(rows, groups, full);
                    mean += share;
                    if share < 1e-9 {
                        break;
                    }
                }
                groups as f64 * mean
            }
            Self::Listed(sizes) => sizes.iter().map(|size| size.div_ceil(tile)).sum::<u64>() as f64,
        }
    }
}

/// Probability that a group has more than `size` of the rows, each of which chooses one of the groups.
fn more_than(rows: u64, groups: u64, size: u64) -> f64 {
    match Binomial::new(1.0 / groups as f64, rows) {
        Ok(binomial) => binomial.sf(size),
        // Rows and groups are at least 1, so that the share is a probability.
        Err(_) => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::GroupSizes;

    const RANDOM: GroupSizes = GroupSizes::Random { rows: 8, groups: 8 };

    fn close(found: f64, expected: f64) {
        assert!(
            (found - expected).abs() < 1e-9 * expected,
            "{found} is not {expected}"
        );
    }

    /// The mean number of occupied boxes is n (1 - (1 - 1/n)^m).
    #[test]
    fn occupied_groups_follow_the_law_of_boxes_and_balls() {
        close(RANDOM.occupied(), 8.0 * (1.0 - (7.0_f64 / 8.0).powi(8)));
        let many = GroupSizes::Random {
            rows: 131_072,
            groups: 256,
        };
        close(many.occupied(), 256.0);
        close(GroupSizes::Listed(vec![4096, 0, 0]).occupied(), 1.0);
    }

    /// By hand: groups 5, 0, 3 and tiles of 4 rows. Shared: rows 0..5 touch tiles 0 and 1, rows 5..8 tile 1. Own: 2 and 1.
    #[test]
    fn tiles_of_listed_groups_are_counted_by_hand() {
        let sizes = GroupSizes::Listed(vec![5, 0, 3]);
        close(sizes.shared_tiles(4), 3.0);
        close(sizes.own_tiles(4), 3.0);
        let aligned = GroupSizes::Listed(vec![4, 8]);
        close(aligned.shared_tiles(4), 3.0);
        close(aligned.own_tiles(8), 2.0);
    }

    /// All assignments of 4 rows to 3 groups, counted one by one, against the expected values.
    #[test]
    fn random_groups_agree_with_all_assignments() {
        let (rows, groups, tile) = (4_u32, 3_u64, 2);
        let (mut occupied, mut own) = (0.0, 0.0);
        let all = groups.pow(rows);
        for assignment in 0..all {
            let mut sizes = vec![0; groups as usize];
            for row in 0..rows {
                sizes[(assignment / groups.pow(row) % groups) as usize] += 1;
            }
            let listed = GroupSizes::Listed(sizes);
            occupied += listed.occupied() / all as f64;
            own += listed.own_tiles(tile) / all as f64;
        }
        let random = GroupSizes::Random {
            rows: u64::from(rows),
            groups,
        };
        close(random.occupied(), occupied);
        close(random.own_tiles(tile), own);
    }

    /// 131072 rows that `NumPy` 2 draws over 256 groups (`default_rng(0).choice`), as Tokamax 0.0.17 spreads rows in its benchmarks: pairs with shared tiles and own tiles
    /// of 64 to 1024 rows.
    #[test]
    fn expected_tiles_agree_with_a_draw() {
        let random = GroupSizes::Random {
            rows: 131_072,
            groups: 256,
        };
        for (tile, shared, own) in [
            (64, 2300.0, 2165.0),
            (128, 1276.0, 1140.0),
            (256, 766.0, 628.0),
            (512, 510.0, 372.0),
            (1024, 383.0, 256.0),
        ] {
            for (found, drawn) in [(random.shared_tiles(tile), shared), (random.own_tiles(tile), own)] {
                let error: f64 = found / drawn - 1.0;
                assert!(error.abs() < 0.05, "tiles of {tile} rows: {found}, drawn {drawn}");
            }
        }
    }
}
