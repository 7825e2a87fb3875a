//! The numbers of a chip by the names they have in its file, to be changed one by one.

use super::chip::{Chip, dtype_named};
use crate::dtype::Dtype;
use crate::units::{Bytes, BytesPerSecond, Hertz, Seconds};

/// Which values a number can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Whole numbers above zero.
    Whole,
    /// Any number above zero.
    Continuous,
    /// Shares above zero and up to one.
    Share,
}

/// A number of a chip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    /// Cores of one device.
    CoresPerDevice,
    /// Frequency of the clock state in use, in hertz.
    Clock,
    /// Matrix arrays of a core.
    MatrixCount,
    /// Stationary rows of an array.
    MatrixRows,
    /// Columns of an array.
    MatrixColumns,
    /// Rows streamed through an array per cycle, of one format.
    RowsPerCycle(Dtype),
    /// Lanes of a register.
    Lanes,
    /// Sublanes of a register.
    Sublanes,
    /// Registers.
    Registers,
    /// ALU slots.
    AluSlots,
    /// Transcendental slots.
    TranscendentalSlots,
    /// Cross-lane slots.
    CrossLaneSlots,
    /// Load slots.
    LoadSlots,
    /// Store slots.
    StoreSlots,
    /// Latency of a matrix product, in cycles.
    MatrixLatency,
    /// Latency of a vector operation, in cycles.
    VectorLatency,
    /// Latency of a transcendental operation, in cycles.
    TranscendentalLatency,
    /// Latency of a cross-lane operation, in cycles.
    CrossLaneLatency,
    /// Capacity of on-chip memory, in bytes.
    OnChipCapacity,
    /// Bandwidth of device memory, in bytes per second.
    HbmBandwidth,
    /// Share of it that a long stream reaches.
    HbmAchievable,
    /// Time of a launch, in seconds.
    LaunchTime,
}

impl Field {
    /// All of them but the rates of the matrix unit, of which every chip has its own.
    const FIXED: [Field; 21] = [
        Field::CoresPerDevice,
        Field::Clock,
        Field::MatrixCount,
        Field::MatrixRows,
        Field::MatrixColumns,
        Field::Lanes,
        Field::Sublanes,
        Field::Registers,
        Field::AluSlots,
        Field::TranscendentalSlots,
        Field::CrossLaneSlots,
        Field::LoadSlots,
        Field::StoreSlots,
        Field::MatrixLatency,
        Field::VectorLatency,
        Field::TranscendentalLatency,
        Field::CrossLaneLatency,
        Field::OnChipCapacity,
        Field::HbmBandwidth,
        Field::HbmAchievable,
        Field::LaunchTime,
    ];

    /// The numbers that a chip has.
    #[must_use]
    pub fn of(chip: &Chip) -> Vec<Field> {
        let rates = chip.matrix_unit.rows_per_cycle.keys().copied();
        let rates = rates.map(Field::RowsPerCycle);
        Field::FIXED.into_iter().chain(rates).collect()
    }

    /// The number of `chip` that stands at a dotted path of its file, such as `hbm.bandwidth`; `None` where a change of that path is more than the change
    /// of one number.
    #[must_use]
    pub fn named(path: &str, chip: &Chip) -> Option<Field> {
        if let Some(format) = path.strip_prefix("matrix_unit.rows_per_cycle.") {
            return dtype_named(format).map(Field::RowsPerCycle);
        }
        Field::FIXED.into_iter().find(|field| field.path(chip) == path)
    }

    /// Its dotted path in the file of the chip.
    #[must_use]
    pub fn path(self, chip: &Chip) -> String {
        let fixed = match self {
            Field::CoresPerDevice => "cores.per_device",
            Field::Clock => return format!("clock.states.{}.frequency", chip.clock.name),
            Field::MatrixCount => "matrix_unit.count",
            Field::MatrixRows => "matrix_unit.rows",
            Field::MatrixColumns => "matrix_unit.columns",
            Field::RowsPerCycle(dtype) => return format!("matrix_unit.rows_per_cycle.{dtype}"),
            Field::Lanes => "vector_unit.lanes",
            Field::Sublanes => "vector_unit.sublanes",
            Field::Registers => "vector_unit.registers",
            Field::AluSlots => "vector_unit.slots.alu",
            Field::TranscendentalSlots => "vector_unit.slots.transcendental",
            Field::CrossLaneSlots => "vector_unit.slots.cross_lane",
            Field::LoadSlots => "vector_unit.slots.load",
            Field::StoreSlots => "vector_unit.slots.store",
            Field::MatrixLatency => "latency.matrix_result_cycles",
            Field::VectorLatency => "latency.vector_cycles",
            Field::TranscendentalLatency => "latency.transcendental_cycles",
            Field::CrossLaneLatency => "latency.cross_lane_cycles",
            Field::OnChipCapacity => "on_chip.capacity",
            Field::HbmBandwidth => "hbm.bandwidth",
            Field::HbmAchievable => "hbm.achievable",
            Field::LaunchTime => "launch.time",
        };
        fixed.to_owned()
    }

    /// Which values it can take.
    #[must_use]
    pub const fn kind(self) -> Kind {
        match self {
            Field::CoresPerDevice
            | Field::MatrixCount
            | Field::MatrixRows
            | Field::MatrixColumns
            | Field::Lanes
            | Field::Sublanes
            | Field::Registers => Kind::Whole,
            Field::HbmAchievable => Kind::Share,
            _ => Kind::Continuous,
        }
    }

    /// Whether the schedule of a program on one core depends on it.
    #[must_use]
    pub const fn of_core(self) -> bool {
        !matches!(
            self,
            Field::CoresPerDevice
                | Field::Clock
                | Field::OnChipCapacity
                | Field::HbmBandwidth
                | Field::HbmAchievable
                | Field::LaunchTime
        )
    }

    /// Its value, in the SI unit where it has one; 0 for a rate that the chip does not have.
    #[must_use]
    pub fn get(self, chip: &Chip) -> f64 {
        let (vector, slots) = (&chip.vector_unit, &chip.vector_unit.slots);
        match self {
            Field::CoresPerDevice => f64::from(chip.cores_per_device),
            Field::Clock => chip.clock.frequency.get(),
            Field::MatrixCount => f64::from(chip.matrix_unit.count),
            Field::MatrixRows => f64::from(chip.matrix_unit.rows),
            Field::MatrixColumns => f64::from(chip.matrix_unit.columns),
            Field::RowsPerCycle(dtype) => {
                let rates = &chip.matrix_unit.rows_per_cycle;
                rates.get(&dtype).copied().unwrap_or_default()
            }
            Field::Lanes => f64::from(vector.lanes),
            Field::Sublanes => f64::from(vector.sublanes),
            Field::Registers => f64::from(vector.registers),
            Field::AluSlots => slots.alu,
            Field::TranscendentalSlots => slots.transcendental,
            Field::CrossLaneSlots => slots.cross_lane,
            Field::LoadSlots => slots.load,
            Field::StoreSlots => slots.store,
            Field::MatrixLatency => chip.latency.matrix_result,
            Field::VectorLatency => chip.latency.vector,
            Field::TranscendentalLatency => chip.latency.transcendental,
            Field::CrossLaneLatency => chip.latency.cross_lane,
            Field::OnChipCapacity => chip.on_chip.capacity.get(),
            Field::HbmBandwidth => chip.hbm.bandwidth.get(),
            Field::HbmAchievable => chip.hbm.achievable,
            Field::LaunchTime => chip.launch.get(),
        }
    }

    /// Changes it. `value` is one that [`Field::kind`] allows; a whole number is rounded down.
    pub fn set(self, chip: &mut Chip, value: f64) {
        let (vector, whole) = (&mut chip.vector_unit, value as u32);
        match self {
            Field::CoresPerDevice => chip.cores_per_device = whole,
            Field::Clock => chip.clock.frequency = Hertz(value),
            Field::MatrixCount => chip.matrix_unit.count = whole,
            Field::MatrixRows => chip.matrix_unit.rows = whole,
            Field::MatrixColumns => chip.matrix_unit.columns = whole,
            Field::RowsPerCycle(dtype) => {
                chip.matrix_unit.rows_per_cycle.insert(dtype, value);
            }
            Field::Lanes => vector.lanes = whole,
            Field::Sublanes => vector.sublanes = whole,
            Field::Registers => vector.registers = whole,
            Field::AluSlots => vector.slots.alu = value,
            Field::TranscendentalSlots => vector.slots.transcendental = value,
            Field::CrossLaneSlots => vector.slots.cross_lane = value,
            Field::LoadSlots => vector.slots.load = value,
            Field::StoreSlots => vector.slots.store = value,
            Field::MatrixLatency => chip.latency.matrix_result = value,
            Field::VectorLatency => chip.latency.vector = value,
            Field::TranscendentalLatency => chip.latency.transcendental = value,
            Field::CrossLaneLatency => chip.latency.cross_lane = value,
            Field::OnChipCapacity => chip.on_chip.capacity = Bytes(value),
            Field::HbmBandwidth => chip.hbm.bandwidth = BytesPerSecond(value),
            Field::HbmAchievable => chip.hbm.achievable = value,
            Field::LaunchTime => chip.launch = Seconds(value),
        }
    }
}
