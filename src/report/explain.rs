//! One row of a stage table taken apart, from counts to the result.

use std::fmt::Write as _;

use super::timeline;
use crate::coefficients::Coefficient;
use crate::hardware::{self, Architecture, Chip};
use crate::kernels::{Kernel, OpKind};
use crate::report::table::{Cell, Column, Table};
use crate::timing::unit::occupancy;
use crate::timing::{KernelTime, memory};

/// The whole explanation, for a terminal.
///
/// # Errors
/// Where writing a table into the string fails.
pub fn render(kernel: &Kernel, time: &KernelTime, chip: &Chip) -> std::io::Result<String> {
    let mut out = String::new();
    let clock = chip.clock().get();
    let micros = |cycles: f64| cycles / clock * 1e6;
    let _ = writeln!(
        out,
        "{} ({}) on {}, one core at {:.2} GHz: {:.2} us, bound by {}, next by {}",
        kernel.label,
        kernel.title,
        chip.name,
        clock / 1e9,
        time.total_us,
        time.bound,
        time.next_bound
    );
    let cut = time.cut;
    let _ = writeln!(
        out,
        "\n1. Programs\n   grid {} parallel x {} sequential steps; a program takes {} units and {} chunks{}; {} programs on each of {} cores, working set {:.2} of {:.2} MiB",
        time.grid_parallel,
        kernel.grid.sequential,
        cut.units,
        cut.chunks,
        if cut.value_parts > 1 {
            format!(", value columns split over {}", cut.value_parts)
        } else {
            String::new()
        },
        time.programs_per_core,
        time.cores_used,
        time.working_set as f64 / f64::from(1 << 20),
        chip.on_chip.capacity.get() / f64::from(1 << 20),
    );

    let _ = writeln!(out, "\n2. Operations of one program, in cycles of each lane");
    let mut table = Table::new([
        Column::text("operation", "operation"),
        Column::text("stage", "stage"),
        Column::text("shape", "shape"),
        Column::number("instances", "instances"),
        Column::number("MXU", "mxu_cycles"),
        Column::number("VPU", "vpu_cycles"),
        Column::number("EUP", "eup_cycles"),
        Column::number("XLU", "xlu_cycles"),
        Column::number("VMEM", "vmem_cycles"),
        Column::number("latency", "latency_cycles"),
    ]);
    let programs = ((time.grid_parallel * kernel.grid.sequential.next_multiple_of(cut.chunks.max(1))) as f64
        * cut.value_parts as f64
        / (cut.units * cut.chunks) as f64)
        .max(1.0);
    for op in &kernel.ops {
        let cost = occupancy(chip, &op.kind, op.value_columns, cut.value_parts);
        let instances = op.count as f64 * cut.value_parts as f64 / programs;
        let mut cells = vec![
            Cell::from(op.name.as_str()),
            Cell::from(op.stage.name()),
            Cell::from(shape(&op.kind)),
            Cell::number(instances, 2),
            Cell::number(cost.matrix * instances / f64::from(chip.matrix_unit.count), 0),
        ];
        cells.extend(cost.vector.map(|cycles| Cell::number(cycles * instances, 0)));
        cells.push(Cell::number(cost.latency, 0));
        table.row(cells);
    }
    let mut text = Vec::new();
    table.write_text(&mut text)?;
    out.push_str(&String::from_utf8_lossy(&text));

    let _ = writeln!(out, "\n3. Schedule of one program");
    out.push_str(&timeline::render(kernel, &time.program, chip, 100));
    for (lane, busy) in &time.program.busy {
        if *busy > 0.0 {
            let _ = writeln!(
                out,
                "   {:>5} busy {busy:>9.0} of {:.0} cycles, {:.0} %",
                lane.name(),
                time.program.makespan,
                100.0 * busy / time.program.makespan
            );
        }
    }

    let bandwidth = memory::bytes_per_cycle(chip, time.cores_used);
    let _ = writeln!(
        out,
        "\n4. Device memory, at {bandwidth:.0} achievable bytes a cycle and core"
    );
    for (direction, transfers) in [("reads", &kernel.reads), ("writes", &kernel.writes)] {
        for transfer in transfers {
            let _ = writeln!(
                out,
                "   {direction:<6} {:<22} {:>12.3} MB {}",
                transfer.name,
                transfer.bytes as f64 / 1e6,
                transfer.dtype
            );
        }
    }

    let implementation = &kernel.implementation;
    if let Some(columns) = implementation.tile_columns {
        let _ = writeln!(
            out,
            "   in tiles of {columns} columns, {:.0} bytes more for every run",
            chip.coefficient(Coefficient::GpuRunBytes)
        );
    }
    if implementation.cache_bytes > 0.0 {
        let _ = writeln!(
            out,
            "   last-level cache {:>25.3} MB more, at {:.0} bytes a cycle and core",
            implementation.cache_bytes / 1e6,
            chip.coefficient(Coefficient::GpuCacheRate)
        );
    }

    let rounds = time.programs_per_core as f64;
    let _ = writeln!(out, "\n5. Result");
    let line = |out: &mut String, what: &str, cycles: f64| {
        let _ = writeln!(
            out,
            "   {what:<46} {cycles:>14.0} cycles {:>12.2} us",
            micros(cycles)
        );
    };
    line(&mut out, "schedule of a program", time.program.makespan);
    line(
        &mut out,
        &format!("at an issue efficiency of {:.2}", time.issue_efficiency),
        time.program.makespan / time.issue_efficiency,
    );
    line(&mut out, "grid step", chip.grid_step_cycles());
    let exposed = kernel.implementation.exposed_loads;
    if exposed > 0.0 && chip.architecture == Architecture::Gpu {
        line(
            &mut out,
            &format!("{exposed:.2} loads that nothing fetches ahead"),
            exposed * chip.dma_latency().get() * clock,
        );
    }
    line(
        &mut out,
        "transfers of a program",
        time.hbm_us / 1e6 * clock / rounds,
    );
    line(
        &mut out,
        "latency of a transfer",
        chip.dma_latency().get() * clock,
    );
    line(&mut out, "period of the pipeline", time.pipeline.period);
    line(
        &mut out,
        &format!("pipeline of {} programs", time.programs_per_core),
        time.pipeline.total,
    );
    let _ = writeln!(
        out,
        "   {:<46} {:>14} {:>19.2} us",
        "launch",
        "",
        chip.launch.micros()
    );
    let _ = writeln!(out, "   {:<46} {:>14} {:>19.2} us", "sum", "", time.total_us);

    let _ = writeln!(out, "\n6. Sources");
    let _ = writeln!(
        out,
        "   coefficients: calibration {}",
        hardware::shipped_calibration().digest()
    );
    for (what, provenance) in [
        ("clock", &chip.clock.provenance),
        ("matrix unit", &chip.matrix_unit.provenance),
        ("vector unit", &chip.vector_unit.provenance),
        ("latencies", &chip.latency.provenance),
        ("on-chip memory", &chip.on_chip.provenance),
        ("HBM", &chip.hbm.provenance),
        ("achievable bandwidth", &chip.hbm.achievable_provenance),
        ("launch", &chip.launch_provenance),
    ] {
        let kind = format!("{:?}", provenance.kind).to_lowercase();
        let _ = writeln!(out, "   {what}: {kind}, {}", provenance.source);
    }
    Ok(out)
}

fn shape(kind: &OpKind) -> String {
    match kind {
        OpKind::Product {
            m,
            k,
            n,
            dtype,
            passes,
        } => {
            let passes = if *passes > 1 {
                format!(" {passes} passes")
            } else {
                String::new()
            };
            format!("[{m},{k}]x[{k},{n}] {dtype}{passes}")
        }
        OpKind::Vector { dims, .. } => dims.to_string(),
        OpKind::Cholesky { rows } => format!("Cholesky factor of {rows} rows"),
        OpKind::Substitution {
            rows,
            columns,
            systems: 1,
        } => format!("solve {rows} rows, {columns} columns"),
        OpKind::Substitution {
            rows,
            columns,
            systems,
        } => format!("solve {rows} rows, {columns} columns of {systems} systems"),
    }
}
