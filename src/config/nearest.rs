//! The valid name closest to a misspelt one.

/// Edit distance in which a swap of two neighbours counts once, as typing errors do.
fn distance(left: &str, right: &str) -> usize {
    let left: Vec<char> = left.chars().flat_map(char::to_lowercase).collect();
    let right: Vec<char> = right.chars().flat_map(char::to_lowercase).collect();
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=right.len()).collect();
    let mut left_before = None;
    for (i, &a) in left.iter().enumerate() {
        let mut row = Vec::with_capacity(right.len() + 1);
        row.push(i + 1);
        let mut right_before = None;
        for (j, &b) in right.iter().enumerate() {
            let at = |cells: &[usize], index: usize| cells.get(index).copied().unwrap_or(usize::MAX - 1);
            let replaced = at(&last, j) + usize::from(a != b);
            let mut best = replaced.min(at(&last, j + 1) + 1).min(at(&row, j) + 1);
            if j > 0 && left_before == Some(b) && right_before == Some(a) {
                best = best.min(at(&before_last, j - 1).saturating_add(1));
            }
            row.push(best);
            right_before = Some(b);
        }
        before_last = std::mem::replace(&mut last, row);
        left_before = Some(a);
    }
    last.last().copied().unwrap_or(0)
}

/// The candidate closest to `name`, where one is close enough to be meant: at most a third of its letters
/// differ, or one contains the other. Among equals the first wins.
#[must_use]
pub fn nearest<'a, S: AsRef<str> + ?Sized + 'a>(
    name: &str,
    candidates: impl IntoIterator<Item = &'a S>,
) -> Option<&'a str> {
    let mut best: Option<(usize, &str)> = None;
    let lower = name.to_lowercase();
    for candidate in candidates {
        let candidate = candidate.as_ref();
        let mut far = distance(name, candidate);
        let other = candidate.to_lowercase();
        let contains = lower.len() >= 3 && (other.contains(&lower) || lower.contains(&other));
        let allowed = 1.max(name.chars().count().max(candidate.chars().count()) / 3);
        if contains && other.len() >= 3 {
            far = far.min(allowed);
        }
        if far <= allowed && best.is_none_or(|(least, _)| far < least) {
            best = Some((far, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// The names in backticks, separated by commas.
#[must_use]
pub fn listed<'a, S: AsRef<str> + ?Sized + 'a>(names: impl IntoIterator<Item = &'a S>) -> String {
    names.into_iter().map(|name| format!("`{}`", name.as_ref())).collect::<Vec<_>>().join(", ")
}

/// The tail of a message about an unknown name: the nearest valid one, if any, then all of them under `heading`.
///
/// ```
/// let tail = tpusim::config::suggestion("tpu-v5", &["tpu-v5e", "h100-sxm"], "shipped");
/// assert_eq!(tail, "did you mean `tpu-v5e`? shipped: `tpu-v5e`, `h100-sxm`");
/// ```
#[must_use]
pub fn suggestion<S: AsRef<str>>(name: &str, valid: &[S], heading: &str) -> String {
    let all = listed(valid.iter().map(AsRef::as_ref));
    match nearest(name, valid.iter().map(AsRef::as_ref)) {
        Some(close) => format!("did you mean `{close}`? {heading}: {all}"),
        None => format!("{heading}: {all}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typing_errors_find_their_name() {
        let names = ["bandwidth", "capacity", "achievable", "rows", "rows_per_cycle"];
        assert_eq!(nearest("bandwidht", names), Some("bandwidth"));
        assert_eq!(nearest("rowss", names), Some("rows"));
        assert_eq!(nearest("row", names), Some("rows"));
        assert_eq!(nearest("Capacity", names), Some("capacity"));
        assert_eq!(nearest("hbm_bandwidth", names), Some("bandwidth"));
        assert_eq!(nearest("zzz", names), None);
        assert_eq!(nearest("", names), None);
    }

    #[test]
    fn a_swap_of_neighbours_counts_once() {
        assert_eq!(distance("hbm_gpbs", "hbm_gbps"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("abc", "abc"), 0);
    }
}
