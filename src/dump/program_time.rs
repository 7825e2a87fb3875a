//! How long a program takes of which only the compact schedule is at hand, and what its core does meanwhile.

use std::collections::BTreeMap;

use serde::Serialize;

use super::chip::Machine;
use super::error::DumpError;
use super::report::{Parts, SlotUse, Spills, binds};
use super::schedule::Schedule;
use crate::hardware::ScheduleConstants;

/// Word of the `schema` field.
pub const SCHEMA: &str = "tpusim.program_time/1";

/// The time of a schedule on a machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProgramTime {
    /// Always [`SCHEMA`].
    pub schema: &'static str,
    /// Name of the schedule.
    pub name: String,
    /// Name of the compiled module.
    pub program: String,
    /// What its times are, where the schedule says it.
    pub label: Option<String>,
    /// The command that compiled it, where it is recorded.
    pub command: Option<String>,
    /// Options that the program was made with.
    pub options: BTreeMap<String, serde_json::Value>,
    /// Family of kernels, where it is recorded.
    pub family: Option<String>,
    /// Chip that it was compiled for.
    pub chip: &'static str,
    /// Cores of the device.
    pub cores: u32,
    /// Most cores that a kernel of it works on, where it is recorded.
    pub cores_used: Option<u32>,
    /// Clock that the chip sustains, in GHz.
    pub clock_ghz: f64,
    /// Predicted time, in microseconds.
    pub time_us: f64,
    /// Lower end of the 80 % interval, in microseconds.
    pub low_us: f64,
    /// Upper end of the 80 % interval, in microseconds.
    pub high_us: f64,
    /// Measured time, in microseconds, where the schedule has one.
    pub measured_us: Option<f64>,
    /// What binds it, in words.
    pub binds: String,
    /// Bundles that are issued, in microseconds.
    pub issue_us: f64,
    /// Empty cycles of the schedule, in microseconds.
    pub empty_us: f64,
    /// Waits for transfers and for work off the core, in microseconds.
    pub wait_us: f64,
    /// Launches, in microseconds.
    pub launch_us: f64,
    /// Bytes between device memory and all cores, those of kernels.
    pub hbm_bytes: f64,
    /// Share of the time that the device memory needs for them at the rate that it reaches.
    pub hbm_busy: f64,
    /// Most bytes of vector memory that a kernel takes on one core, where the compiler says them.
    pub vmem_bytes: Option<u64>,
    /// Kernels.
    pub kernels: usize,
    /// Slots over the kernels that have a table of them; empty where none has.
    pub slots: Vec<SlotUse>,
    /// Register spills over all kernels that have a table of slots; none where none has.
    pub spills: Option<Spills>,
    /// Branches that could not be decided.
    pub unknown_branches: u64,
}

impl ProgramTime {
    /// Share of the slots of a kind that are used.
    #[must_use]
    pub fn slot_share(&self, name: &str) -> Option<f64> {
        let slot = self.slots.iter().find(|slot| slot.name == name);
        slot.map(|slot| slot.share)
    }
}

/// Times a schedule on a machine, with the interval of a calibration. `place` says where the schedule comes from.
///
/// # Errors
/// A schedule that cannot be read, see [`Schedule::timed`].
pub fn program_time(
    schedule: &Schedule,
    place: &str,
    machine: &Machine,
    constants: &ScheduleConstants,
) -> Result<ProgramTime, DumpError> {
    let timed = schedule.timed(place)?;
    let us = |cycles: f64| cycles / machine.clock_hz * 1e6;
    let time_us = us(timed.cycles(machine));
    let kernels = &schedule.kernels;
    let issue_us = us(schedule.issue_cycles());
    let empty_us = us(schedule.schedule_cycles() - schedule.issue_cycles());
    let launch_us = kernels.iter().map(|k| k.count).sum::<f64>() * machine.launch_s * 1e6;
    // Sides of a branch that do not count are kernels all the same.
    let wait_us = (time_us - issue_us - empty_us - launch_us).max(0.0);
    let hbm_bytes: f64 = kernels.iter().map(|k| k.hbm_bytes * k.count).sum();
    let bytes_per_us = machine.bytes_per_cycle() * f64::from(machine.cores) * machine.clock_hz / 1e6;
    let hbm_busy = (hbm_bytes / bytes_per_us / time_us.max(f64::MIN_POSITIVE)).min(1.0);
    let slots = slots(schedule);
    let parts = Parts {
        issue_us,
        empty_us,
        wait_us,
        launch_us,
        other_us: 0.0,
    };
    Ok(ProgramTime {
        schema: SCHEMA,
        name: schedule.name.clone(),
        program: schedule.program.clone(),
        label: schedule.label.clone(),
        command: schedule.command.clone(),
        options: schedule.options.clone(),
        family: schedule.family.clone(),
        chip: timed.generation().chip(),
        cores: machine.cores,
        cores_used: kernels.iter().filter_map(|k| k.cores_used).max(),
        clock_ghz: machine.clock_hz / 1e9,
        time_us,
        low_us: time_us * constants.low,
        high_us: time_us * constants.high,
        measured_us: schedule.measured_us,
        binds: binds(&parts, &slots, hbm_busy),
        issue_us,
        empty_us,
        wait_us,
        launch_us,
        hbm_bytes,
        hbm_busy,
        vmem_bytes: kernels.iter().filter_map(|k| k.vmem_bytes).max(),
        kernels: kernels.len(),
        slots,
        spills: spills(schedule),
        unknown_branches: schedule.unknown_branches,
    })
}

/// Slots over all kernels, in the order in which kinds first appear.
fn slots(schedule: &Schedule) -> Vec<SlotUse> {
    let mut found: Vec<SlotUse> = Vec::new();
    let mut available: Vec<f64> = Vec::new();
    for kernel in &schedule.kernels {
        for slot in &kernel.slots {
            let known = found.iter().position(|known| known.name == slot.name);
            let at = known.unwrap_or(found.len());
            if known.is_none() {
                found.push(SlotUse {
                    name: slot.name.clone(),
                    used: 0.0,
                    share: 0.0,
                });
                available.push(0.0);
            }
            found[at].used += slot.used * kernel.count;
            available[at] += kernel.all_cycles() * f64::from(slot.per_bundle);
        }
    }
    for (slot, available) in found.iter_mut().zip(available) {
        slot.share = slot.used / available.max(1.0);
    }
    found
}

/// Spills over all kernels.
fn spills(schedule: &Schedule) -> Option<Spills> {
    let of_kernels = schedule.kernels.iter();
    of_kernels
        .filter_map(|kernel| Some((kernel.spills?, kernel.count)))
        .map(|(spills, count)| Spills {
            stores: spills.stores * count,
            loads: spills.loads * count,
            cycles_alone: spills.cycles_alone * count,
            cycles_of_slots: spills.cycles_of_slots * count,
        })
        .reduce(|a, b| Spills {
            stores: a.stores + b.stores,
            loads: a.loads + b.loads,
            cycles_alone: a.cycles_alone + b.cycles_alone,
            cycles_of_slots: a.cycles_of_slots + b.cycles_of_slots,
        })
}
