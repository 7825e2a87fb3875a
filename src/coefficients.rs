//! Coefficients of the timing model: the few numbers that neither a datasheet nor the arithmetic of a kernel implies.
//!
//! Each has a unit, a meaning, a range outside which it would mean nothing, and a starting value with its source. They are shared by all chips;
//! what differs between chips stands in `hw/*.yaml`. A [`Chip`](crate::hardware::Chip) carries the set it is timed with.

use std::fmt;

/// What a coefficient belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Every kernel of a TPU.
    Tpu,
    /// Every kernel of a GPU.
    Gpu,
    /// One implementation of a kernel.
    Kernel,
}

impl Scope {
    /// The word of tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Scope::Tpu => "tpu",
            Scope::Gpu => "gpu",
            Scope::Kernel => "kernel",
        }
    }
}

/// What is known about a coefficient before any fit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Definition {
    /// Name in files and tables.
    pub name: &'static str,
    /// Unit.
    pub unit: &'static str,
    /// What it belongs to.
    pub scope: Scope,
    /// Starting value.
    pub prior: f64,
    /// Smallest value that means something.
    pub low: f64,
    /// Largest value that means something.
    pub high: f64,
    /// What it is, and where the starting value comes from.
    pub meaning: &'static str,
}

macro_rules! coefficients {
    ($($variant:ident = $name:literal, $unit:literal, $scope:ident, $prior:literal in $low:literal..=$high:literal, $meaning:literal;)+) => {
        /// A coefficient of the timing model.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(usize)]
        pub enum Coefficient {
            $(#[doc = $meaning] $variant,)+
        }

        impl Coefficient {
            /// Every coefficient, in the order of tables.
            pub const ALL: &'static [Coefficient] = &[$(Coefficient::$variant),+];

            /// What is known about it before any fit.
            #[must_use]
            pub const fn definition(self) -> Definition {
                match self {
                    $(Coefficient::$variant => Definition {
                        name: $name,
                        unit: $unit,
                        scope: Scope::$scope,
                        prior: $prior,
                        low: $low,
                        high: $high,
                        meaning: $meaning,
                    },)+
                }
            }
        }
    };
}

coefficients! {
    WeightLoadFloor = "weight_load_floor", "share of the array side", Tpu, 0.2 in 0.05..=0.25,
        "Cycles of the load of a stationary tile that a short stream cannot hide, as a share of the side of the array. Starting value: measured grouped products and one KDA kernel, 0.15 to 0.35; schedules of the TPU compiler stream 64 rows per tile of 256-wide arrays without a gap, so it is no more than a quarter.";
    AccumulateOps = "accumulate_ops", "ALU operations per register and pop or add", Tpu, 1.0 in 0.2..=2.0,
        "A partial sum is popped from the array, and added where the contraction is deeper than the array. Starting value: one operation each.";
    IssueEfficiency = "issue_efficiency", "share", Tpu, 0.95 in 0.6..=1.0,
        "Cycles of a schedule over the cycles its program takes: what bundles lose to hazards, alignment, instruction fetch and throttling. Starting value: matrix units of large Pallas tiles, 0.95.";
    GpuIssueEfficiency = "gpu_issue_efficiency", "share", Gpu, 0.8 in 0.4..=1.0,
        "Cycles of a schedule over the cycles its program takes on a multiprocessor: what warps lose to barriers, throttling and address arithmetic. Starting value: large matrix products reach 0.7 to 0.8.";
    GpuVectorEfficiency = "gpu_vector_efficiency", "share", Gpu, 0.95 in 0.6..=1.0,
        "The same for a kernel of a GPU without matrix products, which has no barriers between groups of warps and does not throttle. Starting value: chains of multiply-adds and of exponentials on H200 take 0.93 to 0.97 of the slots at the clock they ran at.";
    GridStep = "grid_step", "cycles", Tpu, 27.0 in 0.0..=2000.0,
        "Scalar work and DMA issue of a program. Starting value: 27 cycles per grid step in measured flash attention kernels.";
    DmaLatency = "dma_latency", "us", Tpu, 0.5 in 0.05..=2.0,
        "From the start of a DMA to its first byte. Starting value: simulated schedules of Pallas kernels fit 0.5 to 0.8 us.";
    GpuGridStep = "gpu_grid_step", "cycles", Gpu, 27.0 in 0.0..=500.0,
        "Start and end of a program (thread block) of a GPU. Starting value: that of a TPU.";
    GpuDmaLatency = "gpu_dma_latency", "us", Gpu, 0.37 in 0.25..=0.45,
        "From the issue of a load of a GPU to its first byte. Starting value: 0.37 us per load that nothing fetches ahead in measured state scans, some 700 cycles; a load that waits longer is more than one load.";
    GpuRunBytes = "gpu_run_bytes", "bytes per contiguous run", Gpu, 16.0 in 0.0..=64.0,
        "What a run of contiguous bytes in device memory costs a GPU beyond its bytes, where a kernel moves tiles that are narrower than the rows: activates and sectors that neighbours share. Starting value: measured decode steps move runs of 32 bytes at 0.70 and of 128 bytes at 0.90 of the rate of long streams.";
    GpuCacheRate = "gpu_cache_rate", "bytes per cycle and multiprocessor", Gpu, 44.0 in 16.0..=64.0,
        "What a multiprocessor draws from the last-level cache while all of them do. Starting value: grouped products of H100 in tiles of 128 by 64 draw 44 to 51; 64 is the width of the port.";
    GpuWriteShare = "gpu_write_share", "share of the published bandwidth", Gpu, 0.71 in 0.5..=1.0,
        "Rate of a GPU that only writes, over its bandwidth; streams that read as well are not held back. Starting value: measured fills of H200, 3.4 of 4.8 TB/s.";
    SubstitutionStep = "substitution_step", "vector latencies per row", Tpu, 6.0 in 1.0..=30.0,
        "Chain of one row of a forward substitution: multiply, subtract, and the row's way through on-chip memory to be read back on all sublanes. Starting value: two operations and four latencies for the way.";
    FlashSoftmaxOps = "flash_softmax_ops", "ALU operations per score", Kernel, 5.0 in 1.0..=12.0,
        "Softmax of a TPU flash attention kernel: running maximum, difference, scale into the base of the exponential, running sum, rounding. Starting value: those five.";
    FlashMaskOps = "flash_mask_ops", "ALU operations per score of a cut block", Kernel, 5.0 in 0.0..=12.0,
        "Two positions, a comparison, a select, and the load that comes with them. Starting value: 5.3 in measured TPU kernels.";
    FlashRescaleOps = "flash_rescale_ops", "ALU operations per accumulator element and block", Kernel, 2.0 in 0.0..=6.0,
        "Rescale and add of the accumulator of a flash attention kernel. Starting value: those two.";
    FlashStep = "flash_step", "cycles per pair of blocks", Kernel, 0.0 in 0.0..=3000.0,
        "Work of a step of a TPU flash attention kernel that does not grow with its block: loop control, statistics, alignment of partial lanes. Starting value: none.";
    ResidentShare = "resident_share", "share of the room", Tpu, 0.5 in 0.1..=0.9,
        "Share of the VMEM in which XLA keeps results between kernels that an intermediate may take to stay there as a whole; of one that takes all of that room nothing stays. Starting value: half, beside what the kernel that reads it needs.";
    CrossEntropyOps = "cross_entropy_ops", "ALU operations per logit", Kernel, 14.0 in 4.0..=30.0,
        "Maximum, difference, exponential, sum, the position of the label against every column, and what the padding of the vocabulary masks. Starting value: 14 in measured Pallas kernels.";
    CrossEntropyStep = "cross_entropy_step", "cycles per block of logits and depth", Kernel, 0.0 in 0.0..=5000.0,
        "Work of a step of the cross entropy kernel that does not grow with its block. Starting value: none.";
    GroupedStoreOps = "grouped_store_ops", "ALU operations per output element and step", Kernel, 5.0 in 0.0..=12.0,
        "A grouped product masks the rows of other groups, reads, adds and stores its sum. Starting value: measured grouped products.";
    GroupedVisit = "grouped_visit", "cycles per visit of a row tile", Kernel, 0.0 in 0.0..=10000.0,
        "Scalar work of a grouped product that finds its group and its rows. Starting value: none.";
    EmptyProgram = "empty_program", "cycles per 128 elements of the tile", Gpu, 1.8 in 0.5..=6.0,
        "A program of a GPU that finds no row of its group still clears its sums and passes its masked stores, an instruction of four warps at a time. Starting value: Triton calls whose time is that of `groups * row blocks * column blocks` programs, 1.4 to 1.6 on H100, 2.1 on A100, 2.7 on B200.";
    StateOps = "state_ops", "ALU operations per state element and token", Kernel, 7.6 in 3.0..=16.0,
        "Decay, product with the key and its sum, outer product and sum, product with the query and its sum. Starting value: 7.6 in measured decode kernels of v7x.";
    LoopKernel = "loop_kernel", "us per kernel and further core", Kernel, 1.2 in 0.0..=3.0,
        "A small kernel inside a loop of XLA on a device of several cores, which meet before and after it. Starting value: loops over tokens, three times as long on v5p as on v6e.";
    DecodeSequence = "decode_sequence", "cycles per sequence", Kernel, 346.0 in 0.0..=4000.0,
        "Scalar work of the fused convolution and GDN kernel per sequence when it decodes. Starting value: measured calls on v7x.";
    DecodeHead = "decode_head", "cycles per head and token", Kernel, 24.0 in 0.0..=400.0,
        "Scalar work of the fused convolution and GDN kernel per head and token when it decodes. Starting value: measured calls on v7x.";
    PrefillSequence = "prefill_sequence", "cycles per sequence", Kernel, 7000.0 in 0.0..=30000.0,
        "Prologue and epilogue of a sequence in the fused convolution and GDN kernel when it prefills: transfers of its states and of its first and last tiles, one after the other. Starting value: measured calls on v7x whose sequences are one to three chunks long.";
    GpuFlashEfficiency = "gpu_flash_efficiency", "share", Kernel, 0.9 in 0.3..=1.0,
        "What is left of the issue efficiency in a GPU flash attention kernel, whose two halves wait for each other at barriers. Starting value: little is lost.";
    GpuFlashOps = "gpu_flash_ops", "ALU operations per score", Kernel, 2.5 in 0.5..=10.0,
        "Softmax of a GPU flash attention kernel: scale and difference in one fused operation, sum, half of a packed rounding. Starting value: those.";
}

impl Coefficient {
    /// The coefficient called `name`.
    #[must_use]
    pub fn named(name: &str) -> Option<Coefficient> {
        Self::ALL.iter().copied().find(|c| c.definition().name == name)
    }
}

impl fmt::Display for Coefficient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.definition().name)
    }
}

/// A value for every coefficient.
#[derive(Debug, Clone, PartialEq)]
pub struct Coefficients {
    values: Vec<f64>,
}

impl Default for Coefficients {
    /// The starting values.
    fn default() -> Self {
        Coefficients {
            values: Coefficient::ALL.iter().map(|c| c.definition().prior).collect(),
        }
    }
}

impl Coefficients {
    /// The value of one, in its unit.
    #[must_use]
    pub fn get(&self, coefficient: Coefficient) -> f64 {
        self.values[coefficient as usize]
    }

    /// Sets one, held to the range in which it means something.
    pub fn set(&mut self, coefficient: Coefficient, value: f64) {
        let Definition { low, high, .. } = coefficient.definition();
        self.values[coefficient as usize] = value.clamp(low, high);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_starting_value_lies_in_its_range_and_every_name_is_its_own() {
        for (i, &coefficient) in Coefficient::ALL.iter().enumerate() {
            let Definition {
                name,
                low,
                high,
                prior,
                ..
            } = coefficient.definition();
            assert!(0.0 <= low && low <= prior && prior <= high, "{name}");
            assert_eq!(coefficient as usize, i);
            assert_eq!(Coefficient::named(name), Some(coefficient));
        }
    }
}
