//! From a hardware file to a checked [`Chip`].

use super::chip::{
    Architecture, Chip, ClockState, Hbm, Interconnect, Latency, MatrixUnit, OnChipMemory, PublishedFigure,
    VectorSlots, VectorUnit, dtype_named,
};
use super::file::{ChipFile, LARGEST_ARRAY_COUNT};
use crate::coefficients::Coefficients;
use crate::config::{ConfigError, Document, listed, suggestion};
use crate::dtype::Dtype;
use crate::units::Seconds;

/// Checks every value of a document and makes a chip called `name` of it.
///
/// # Errors
/// Everything that is wrong: first what does not fit the schema, then all values out of range together.
pub(super) fn resolve(name: &str, document: &Document) -> Result<Chip, ConfigError> {
    let file: ChipFile = document.deserialize()?;
    ConfigError::collect(complaints(&file, document))?;

    let mut clock_states = Vec::new();
    for (state, entry) in &file.clock.states {
        let provenance = entry.provenance(document, &format!("clock.states.{state}"))?;
        clock_states.push(ClockState {
            name: state.clone(),
            frequency: entry.frequency,
            provenance,
        });
    }
    // The default first; the sort is stable, so the others keep the order of their names.
    clock_states.sort_by_key(|state| state.name != file.clock.default);
    let Some(clock) = clock_states.first().cloned() else {
        return Err(document.error_at("clock.states", "expected at least one clock state, found none"));
    };
    let mut published = Vec::new();
    for (index, figure) in file.published.iter().enumerate() {
        published.push(PublishedFigure {
            quantity: figure.quantity.clone(),
            value: figure.value,
            clock: figure.clock.clone(),
            provenance: figure.provenance(document, &format!("published.{index}"))?,
        });
    }
    let hbm = file.hbm.provenance(document, "hbm")?;
    let slots = &file.vector_unit.slots;
    let vector_unit = VectorUnit {
        lanes: file.vector_unit.lanes,
        sublanes: file.vector_unit.sublanes,
        registers: file.vector_unit.registers,
        slots: VectorSlots {
            alu: slots.alu,
            transcendental: slots.transcendental,
            cross_lane: slots.cross_lane,
            load: slots.load,
            store: slots.store,
        },
        flops_per_alu_op: file.vector_unit.flops_per_alu_op,
        provenance: file.vector_unit.provenance(document, "vector_unit")?,
    };
    Ok(Chip {
        name: name.to_owned(),
        title: file.title.clone(),
        architecture: file.architecture,
        cores_per_chip: file.cores.per_chip,
        cores_per_device: file.cores.per_device,
        cores_provenance: file.cores.provenance(document, "cores")?,
        clock,
        clock_states,
        matrix_unit: MatrixUnit {
            count: file.matrix_unit.count,
            rows: file.matrix_unit.rows,
            columns: file.matrix_unit.columns,
            rows_per_cycle: file.matrix_unit.rows_per_cycle.clone(),
            asynchronous: file
                .matrix_unit
                .asynchronous
                .unwrap_or(file.architecture == Architecture::Tpu),
            provenance: file.matrix_unit.provenance(document, "matrix_unit")?,
        },
        vector_unit,
        latency: Latency {
            matrix_result: file.latency.matrix_result_cycles,
            vector: file.latency.vector_cycles,
            transcendental: file.latency.transcendental_cycles,
            cross_lane: file.latency.cross_lane_cycles,
            provenance: file.latency.provenance(document, "latency")?,
        },
        on_chip: OnChipMemory {
            capacity: file.on_chip.capacity,
            scoped_limit: file.on_chip.scoped_limit,
            provenance: file.on_chip.provenance(document, "on_chip")?,
        },
        cache: match &file.cache {
            Some(cache) => Some(OnChipMemory {
                capacity: cache.capacity,
                scoped_limit: None,
                provenance: cache.provenance(document, "cache")?,
            }),
            None => None,
        },
        hbm: Hbm {
            capacity: file.hbm.capacity,
            bandwidth: file.hbm.bandwidth,
            achievable: file.hbm.achievable,
            achievable_provenance: hbm.of("achievable").clone(),
            provenance: hbm,
        },
        interconnect: match &file.interconnect {
            Some(links) => Some(Interconnect {
                bidirectional: links.bidirectional,
                provenance: links.provenance(document, "interconnect")?,
            }),
            None => None,
        },
        launch: file.launch.time,
        sustained_clock: 1.0,
        dispatch: Seconds(0.0),
        launch_provenance: file.launch.provenance(document, "launch")?,
        published,
        coefficients: Coefficients::default(),
        unknown: file.unknown,
    })
}

/// Values that are read but mean nothing.
fn complaints(file: &ChipFile, document: &Document) -> Vec<ConfigError> {
    let mut errors = Vec::new();
    let mut positive = |path: &str, value: f64| {
        if value <= 0.0 {
            errors.push(document.error_at(path, format!("expected more than zero, found `{value}`")));
        }
    };
    positive("cores.per_chip", f64::from(file.cores.per_chip));
    positive("cores.per_device", f64::from(file.cores.per_device));
    positive("matrix_unit.count", f64::from(file.matrix_unit.count));
    positive("matrix_unit.rows", f64::from(file.matrix_unit.rows));
    positive("matrix_unit.columns", f64::from(file.matrix_unit.columns));
    for (dtype, rate) in &file.matrix_unit.rows_per_cycle {
        positive(&format!("matrix_unit.rows_per_cycle.{dtype}"), *rate);
    }
    let vector = &file.vector_unit;
    positive("vector_unit.lanes", f64::from(vector.lanes));
    positive("vector_unit.sublanes", f64::from(vector.sublanes));
    positive("vector_unit.registers", f64::from(vector.registers));
    positive("vector_unit.slots.alu", vector.slots.alu);
    positive("vector_unit.slots.transcendental", vector.slots.transcendental);
    positive("vector_unit.slots.cross_lane", vector.slots.cross_lane);
    positive("vector_unit.slots.load", vector.slots.load);
    positive("vector_unit.slots.store", vector.slots.store);
    positive("vector_unit.flops_per_alu_op", vector.flops_per_alu_op);
    positive("latency.matrix_result_cycles", file.latency.matrix_result_cycles);
    positive("latency.vector_cycles", file.latency.vector_cycles);
    positive(
        "latency.transcendental_cycles",
        file.latency.transcendental_cycles,
    );
    positive("latency.cross_lane_cycles", file.latency.cross_lane_cycles);

    let mut complain = |path: &str, message: String| errors.push(document.error_at(path, message));
    if file.matrix_unit.count > LARGEST_ARRAY_COUNT {
        let count = file.matrix_unit.count;
        complain(
            "matrix_unit.count",
            format!("expected at most {LARGEST_ARRAY_COUNT} arrays in a core, found `{count}`"),
        );
    }
    if file.cores.per_device > file.cores.per_chip {
        let (device, chip) = (file.cores.per_device, file.cores.per_chip);
        complain(
            "cores.per_device",
            format!("expected at most the {chip} cores of the chip, found `{device}`"),
        );
    }
    if file.matrix_unit.rows_per_cycle.is_empty() {
        let message = "expected a rate for at least one number format, such as `{ bf16: 1 }`, found none";
        complain("matrix_unit.rows_per_cycle", message.to_owned());
    }
    let achievable = file.hbm.achievable;
    if !(achievable > 0.0 && achievable <= 1.0) {
        let message = format!("expected a share above 0 and at most 1, such as `0.85`, found `{achievable}`");
        complain("hbm.achievable", message);
    }
    let states: Vec<&str> = file.clock.states.keys().map(String::as_str).collect();
    if states.is_empty() {
        let message =
            "expected at least one clock state, such as `default: { frequency: 1.05 GHz, ... }`, found none";
        complain("clock.states", message.to_owned());
    } else if !states.contains(&file.clock.default.as_str()) {
        let name = &file.clock.default;
        complain(
            "clock.default",
            format!(
                "unknown clock state `{name}`; {}",
                suggestion(name, &states, "states")
            ),
        );
    }
    for (index, figure) in file.published.iter().enumerate() {
        if !states.is_empty() && !states.contains(&figure.clock.as_str()) {
            let tail = suggestion(&figure.clock, &states, "states");
            complain(
                &format!("published.{index}.clock"),
                format!("unknown clock state `{}`; {tail}", figure.clock),
            );
        }
        if let Some(message) = unknown_quantity(&figure.quantity) {
            complain(&format!("published.{index}.quantity"), message);
        }
    }
    errors
}

fn unknown_quantity(quantity: &str) -> Option<String> {
    match quantity.split_once('.') {
        Some(("vector", "f32")) => None,
        Some(("matrix", name)) if dtype_named(name).is_some() => None,
        Some(("matrix", name)) => {
            let names = Dtype::ALL.map(Dtype::name);
            Some(format!(
                "unknown number format `{name}`; {}",
                suggestion(name, &names, "formats")
            ))
        }
        _ => Some(format!(
            "unknown quantity `{quantity}`; expected {} or the like",
            listed(["matrix.bf16", "vector.f32"])
        )),
    }
}
