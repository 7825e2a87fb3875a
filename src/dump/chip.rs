//! What the analysis has to know of a chip.

use serde::Serialize;

use super::constants;

/// Generation of a TPU, as far as its listings differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Generation {
    /// TPU v4.
    V4,
    /// TPU v5e.
    V5e,
    /// TPU v5p.
    V5p,
    /// TPU v6e.
    V6e,
    /// TPU v7x.
    V7x,
}

impl Generation {
    /// All of them.
    pub const ALL: [Generation; 5] = [Self::V4, Self::V5e, Self::V5p, Self::V6e, Self::V7x];

    /// Name of the shipped hardware file.
    #[must_use]
    pub const fn chip(self) -> &'static str {
        match self {
            Self::V4 => "tpu-v4",
            Self::V5e => "tpu-v5e",
            Self::V5p => "tpu-v5p",
            Self::V6e => "tpu-v6e",
            Self::V7x => "tpu-v7x",
        }
    }

    /// Finds the generation by the name that JAX, XLA or this project gives it, such as `TPU v6 lite`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let plain: String = name
            .chars()
            .filter(char::is_ascii_alphanumeric)
            .map(|c| c.to_ascii_lowercase())
            .collect();
        let plain = plain.strip_prefix("tpu").unwrap_or(&plain);
        match plain {
            "v4" => Some(Self::V4),
            "v5e" | "v5lite" | "v5litepod" => Some(Self::V5e),
            "v5" | "v5p" => Some(Self::V5p),
            "v6e" | "v6lite" => Some(Self::V6e),
            "7x" | "v7x" | "v7" => Some(Self::V7x),
            _ => None,
        }
    }

    /// Bundles behind a branch that run before it takes effect, read off listings of libtpu 0.0.50.1: the
    /// bundles that only make sense on both paths.
    #[must_use]
    pub const fn branch_delay_slots(self) -> usize {
        match self {
            Self::V4 | Self::V7x => 1,
            Self::V5e | Self::V5p | Self::V6e => 4,
        }
    }

    /// Bytes of the unit in which transfers count, where a listing does not give it away.
    #[must_use]
    pub const fn granule_bytes(self) -> f64 {
        match self {
            Self::V4 => 512.0,
            _ => 32.0,
        }
    }
}

/// The chip that a dump is timed on, one core of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Machine {
    /// Generation, for the quirks of its listings.
    pub generation: Generation,
    /// Clock that the core sustains, in Hz.
    pub clock_hz: f64,
    /// Published device memory bandwidth of one core's share, in bytes/s.
    pub hbm_bytes_per_s: f64,
    /// Share of it that transfers reach.
    pub hbm_achievable: f64,
    /// Time from the end of a transfer's turn at the memory until its flag is set, in seconds.
    pub transfer_latency_s: f64,
    /// Time between one kernel and the next, in seconds.
    pub launch_s: f64,
    /// Cores that work on the program together.
    pub cores: u32,
}

impl Machine {
    /// Achieved bytes per cycle of one core.
    #[must_use]
    pub fn bytes_per_cycle(&self) -> f64 {
        self.hbm_bytes_per_s * self.hbm_achievable / self.clock_hz
    }
}

impl Machine {
    /// The machine of a generation: its published clock, and the published bandwidth of one core's share of the
    /// device memory, with the constants of the method.
    #[must_use]
    pub fn of(generation: Generation, clock_hz: f64, hbm_bytes_per_s: f64, cores: u32) -> Self {
        let [achievable, latency, launch, clock] = constants::of(generation);
        Self {
            generation,
            clock_hz: clock_hz * clock.value,
            hbm_bytes_per_s,
            hbm_achievable: achievable.value,
            transfer_latency_s: latency.value * 1e-6,
            launch_s: launch.value * 1e-6,
            cores: cores.max(1),
        }
    }
}
