//! What the execution of the layers of a sweep found, as a table and as JSON lines.

use std::io::{self, Write};

use crate::report::table::{Cell, Column, Table};
use crate::study::whatif::LayerNumerics;

/// One JSON line for every layer.
///
/// # Errors
/// What `out` reports.
pub fn write_json(out: &mut impl Write, layers: &[LayerNumerics]) -> io::Result<()> {
    for layer in layers {
        serde_json::to_writer(&mut *out, layer)?;
        writeln!(out)?;
    }
    Ok(())
}

/// For people: what was executed, then errors and overflow of every layer.
///
/// # Errors
/// What `out` reports.
pub fn write_text(out: &mut impl Write, layers: &[LayerNumerics]) -> io::Result<()> {
    if let Some(found) = layers.iter().find_map(|layer| layer.found.as_ref()) {
        let tokens = layers
            .iter()
            .filter_map(|layer| Some(layer.found.as_ref()?.tokens));
        let (least, most) = (tokens.clone().min(), tokens.max());
        let tokens = match (least, most) {
            (Some(least), Some(most)) if least < most => format!("{least} to {most}"),
            _ => found.tokens.to_string(),
        };
        writeln!(
            out,
            "numerics: {tokens} tokens, {} key head{}, seed {}, against the token recurrence in f64; decays in nats per token",
            found.heads,
            if found.heads == 1 { "" } else { "s" },
            found.seed
        )?;
    }
    let mut table = Table::new([
        Column::text("layer", "set"),
        Column::number("output error", "output_rel_error"),
        Column::number("RMS", "output_rms_error"),
        Column::number("state error", "state_rel_error"),
        Column::number("strongest decay met", "strongest_decay"),
        Column::number("Gram overflows from", "decay_limit"),
        Column::number("overflowed with a gate bound of", "overflowing_bound"),
    ]);
    for layer in layers {
        let set = Cell::from(layer.set.join(" "));
        let Some(found) = &layer.found else {
            let reason = layer.reason.clone().unwrap_or_default();
            let rest = (0..5).map(|_| Cell::none());
            table.row(
                [set, Cell::from(reason)]
                    .into_iter()
                    .chain(rest)
                    .collect::<Vec<_>>(),
            );
            continue;
        };
        let error = |error: Option<f64>| {
            error.map_or_else(|| Cell::from("overflow"), |e| Cell::from(format!("{e:.2e}")))
        };
        table.row([
            set,
            error(found.output_rel_error),
            error(found.output_rms_error),
            found
                .state_rel_error
                .map_or_else(Cell::none, |e| Cell::from(format!("{e:.2e}"))),
            Cell::number(found.strongest_decay, 3),
            Cell::optional(found.decay_limit, 3),
            Cell::optional(found.overflowing_bound, 3),
        ]);
    }
    table.write_text(out)
}
