//! Transfers against compute: one queue at the device memory, flags that transfers set and programs wait for.

use std::collections::{HashMap, VecDeque};

use super::chip::Machine;
use super::value::Value;

/// Cycles until a transfer within the chip sets its flag. Order of magnitude; no kernel in which it matters
/// has been measured.
const LOCAL_LATENCY_CYCLES: f64 = 50.0;
/// Bytes per cycle of a transfer within the chip. As [`LOCAL_LATENCY_CYCLES`].
const LOCAL_BYTES_PER_CYCLE: f64 = 256.0;

/// The state of all transfers of a program.
#[derive(Debug)]
pub(super) struct Queues {
    bytes_per_cycle: f64,
    /// Multiple of a core's even share of the memory that transfers get.
    share: f64,
    latency: f64,
    /// When the memory has served everything that was asked for.
    busy_until: f64,
    flags: HashMap<Value, VecDeque<Pending>>,
    /// Bytes between device memory and chip.
    pub(super) hbm_bytes: f64,
    /// Cycles the memory was busy.
    pub(super) hbm_busy: f64,
    /// Bytes within the chip.
    pub(super) local_bytes: f64,
    /// Number of transfers.
    pub(super) transfers: u64,
    /// Waits for a flag that no transfer had been told to set.
    pub(super) idle_waits: u64,
}

#[derive(Debug, Clone, Copy)]
struct Pending {
    ready: f64,
    /// What is left of it to be waited for.
    left: f64,
}

impl Queues {
    /// No transfer yet.
    pub(super) fn new(machine: &Machine) -> Self {
        Self {
            bytes_per_cycle: machine.bytes_per_cycle(),
            share: 1.0,
            latency: machine.transfer_latency_s * machine.clock_hz,
            busy_until: 0.0,
            flags: HashMap::new(),
            hbm_bytes: 0.0,
            hbm_busy: 0.0,
            local_bytes: 0.0,
            transfers: 0,
            idle_waits: 0,
        }
    }

    /// Lets transfers from now on run at this multiple of one core's even share of the memory.
    pub(super) fn set_share(&mut self, share: f64) {
        self.share = share;
    }

    /// A transfer between device memory and chip is asked for at cycle `now`; `amount` is what a wait for it
    /// will count.
    pub(super) fn with_hbm(&mut self, now: f64, flag: Value, bytes: f64, amount: f64) {
        self.transfers += 1;
        let busy = bytes / (self.bytes_per_cycle * self.share);
        self.busy_until = self.busy_until.max(now) + busy;
        self.hbm_busy += busy;
        self.hbm_bytes += bytes;
        let ready = self.busy_until + self.latency;
        self.flags
            .entry(flag)
            .or_default()
            .push_back(Pending { ready, left: amount });
    }

    /// A transfer within the chip.
    pub(super) fn local(&mut self, now: f64, flag: Value, bytes: f64, amount: f64) {
        self.transfers += 1;
        self.local_bytes += bytes;
        let ready = now + LOCAL_LATENCY_CYCLES + bytes / LOCAL_BYTES_PER_CYCLE;
        self.flags
            .entry(flag)
            .or_default()
            .push_back(Pending { ready, left: amount });
    }

    /// The cycle at which a wait that starts at `now` ends. Without an amount it is for the oldest transfer.
    pub(super) fn wait(&mut self, now: f64, flag: Value, amount: Option<f64>) -> f64 {
        let queue = self.flags.entry(flag).or_default();
        if queue.is_empty() && amount != Some(0.0) {
            self.idle_waits += 1;
        }
        let mut needed = amount.unwrap_or(0.0);
        let mut end = now;
        while let Some(first) = queue.front_mut() {
            if needed <= 0.0 && amount.is_some() {
                break;
            }
            end = end.max(first.ready);
            let taken = if amount.is_some() {
                needed.min(first.left)
            } else {
                first.left
            };
            needed -= taken;
            first.left -= taken;
            if first.left <= 0.0 {
                queue.pop_front();
            }
            if amount.is_none() {
                break;
            }
        }
        end
    }

    /// Waits for everything that a flag still stands for.
    pub(super) fn drain(&mut self, now: f64, flag: Value) -> f64 {
        let queue = self.flags.remove(&flag).unwrap_or_default();
        queue.iter().fold(now, |end, pending| end.max(pending.ready))
    }

    /// Forgets the flags of a kernel that has ended. What it asked of the memory stays in the queue.
    pub(super) fn forget_flags(&mut self, keep: impl Fn(Value) -> bool) {
        self.flags.retain(|flag, _| keep(*flag));
    }
}
