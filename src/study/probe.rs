//! Numeric probes of the state: what a mechanism remembers, what it can overwrite, and what its number formats do to it.
//!
//! The probes run the token recurrence with the state rounded after every token, as a decode kernel stores it; projections, convolution and gates are left
//! out, so that keys, values, decays and step sizes are exactly what a probe asks for. The probes are those the SLA paper names; their sizes are ours.

use ndarray::{Array1, Array2, ArrayD};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

use crate::dtype::Dtype;
use crate::graph::{Builder, Init, Precision, Role, Stage};
use crate::layer::InverseVariant;
use crate::mechanisms::append_inverse;
use crate::numerics::reference::mesa;
use crate::numerics::{Arithmetic, execute, relative_error, round_to, to_f32};
use crate::report::probe::{ProbeRow, ProbeTable, ProbeText};

/// Key and value width of the probes; a power of two for the Hadamard rotation.
const WIDTH: usize = 64;
/// Regularisation of `MesaNet`: the floor of its parameter.
const LAMBDA: f64 = 0.25;

/// A mechanism of the probes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mechanism {
    /// `S = e^g S + k^T v`.
    Mamba2,
    /// Delta rule with a decay per channel, step size 1.
    Kda,
    /// The same with keys preconditioned by the inverse of a diagonal accumulator of squared keys.
    PreconditionedDelta,
    /// `o = q (H + Lam)^-1 Z` with log decay `g` of both accumulators.
    Mesa(f64),
}

/// Mechanisms of the paper's probe table. Decays: gated about 20 tokens, aggressive about two.
const MECHANISMS: [(&str, Mechanism); 6] = [
    ("mamba2", Mechanism::Mamba2),
    ("kda", Mechanism::Kda),
    ("preconditioned_delta", Mechanism::PreconditionedDelta),
    ("mesanet, no forgetting", Mechanism::Mesa(0.0)),
    ("mesanet, gated", Mechanism::Mesa(-0.05)),
    ("mesanet, aggressive", Mechanism::Mesa(-0.7)),
];

/// Formats of the state.
const FORMATS: [(&str, Dtype); 2] = [("f32", Dtype::F32), ("bf16", Dtype::Bf16)];

/// A running memory: writes pairs, is asked for values.
struct Memory {
    mechanism: Mechanism,
    format: Dtype,
    /// `[dk, dv]`.
    state: Array2<f64>,
    /// `[dk, dk]`: second-moment accumulator of `MesaNet`, its diagonal alone for the preconditioner.
    moments: Array2<f64>,
}

impl Memory {
    fn new(mechanism: Mechanism, format: Dtype) -> Self {
        Memory {
            mechanism,
            format,
            state: Array2::zeros((WIDTH, WIDTH)),
            moments: Array2::zeros((WIDTH, WIDTH)),
        }
    }

    fn write(&mut self, key: &Array1<f64>, value: &Array1<f64>) {
        let outer = |a: &Array1<f64>, b: &Array1<f64>| {
            Array2::from_shape_fn((a.len(), b.len()), |(i, j)| a[i] * b[j])
        };
        match self.mechanism {
            Mechanism::Mamba2 => self.state += &outer(key, value),
            Mechanism::Kda => {
                let error = value - &key.dot(&self.state);
                self.state += &outer(key, &error);
            }
            Mechanism::PreconditionedDelta => {
                for (c, k) in key.iter().enumerate() {
                    self.moments[[c, c]] += k * k;
                }
                let scaled =
                    Array1::from_shape_fn(key.len(), |c| key[c] / (self.moments[[c, c]] + 1e-6).sqrt());
                // The step that makes the prediction of this key exact: the projector stays oblique, not amplifying.
                let step = scaled.dot(key).max(1e-12).recip();
                let error = value - &key.dot(&self.state);
                self.state += &(outer(&scaled, &error) * step);
            }
            Mechanism::Mesa(log_decay) => {
                let decay = log_decay.exp();
                self.moments = &self.moments * decay + outer(key, key);
                self.state = &self.state * decay + outer(key, value);
                self.moments.mapv_inplace(|x| round_to(self.format, x));
            }
        }
        self.state.mapv_inplace(|x| round_to(self.format, x));
    }

    fn read(&self, query: &Array1<f64>) -> Array1<f64> {
        match self.mechanism {
            Mechanism::Mesa(_) => {
                let operator = &self.moments + &(Array2::<f64>::eye(WIDTH) * LAMBDA);
                Array1::from(mesa::solve(operator, query.as_slice().unwrap_or(&[]))).dot(&self.state)
            }
            _ => query.dot(&self.state),
        }
    }
}

/// Relative recall error over pairs: `sqrt(sum |o - v|^2 / sum |v|^2)`.
fn recall(memory: &Memory, keys: &[Array1<f64>], values: &[Array1<f64>]) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (key, value) in keys.iter().zip(values) {
        let apart = memory.read(key) - value;
        error += apart.dot(&apart);
        size += value.dot(value);
    }
    (error / size).sqrt()
}

fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let (u, v): (f64, f64) = (rng.random::<f64>().max(1e-300), rng.random());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

fn vector(rng: &mut ChaCha8Rng) -> Array1<f64> {
    Array1::from_shape_fn(WIDTH, |_| normal(rng))
}

fn unit(vector: Array1<f64>) -> Array1<f64> {
    let length = vector.dot(&vector).sqrt();
    vector / length
}

/// Runs all probes.
#[must_use]
pub fn probe(seed: u64) -> ProbeTable {
    let mut rows = Vec::new();
    write_once(seed, &mut rows);
    overwrite(seed, &mut rows);
    rotated_keys(seed, &mut rows);
    modulus(seed, &mut rows);
    tiles(seed, &mut rows);
    growth(seed, &mut rows);
    inverses(seed, &mut rows);
    ProbeTable {
        seed,
        texts: TEXTS.to_vec(),
        rows,
    }
}

const TEXTS: [ProbeText; 7] = [
    ProbeText {
        probe: "write_once",
        question: "random unit keys of 64 channels, each written once, all asked for at the end; recall error",
        expected: "an outer-product state adds crosstalk sqrt((n-1)/64); the delta rule removes it for the last keys; mesanet solves for all keys at once \
                   up to its regularisation and forgets as it decays. bf16 adds its rounding, 2^-9 per token, which the solve amplifies",
    },
    ProbeText {
        probe: "overwrite",
        question: "16 orthogonal keys, each written 32 times with new values; the last values are asked for",
        expected: "mamba2 returns the sum of all values: error near sqrt(31); the delta rule replaces: rounding only; mesanet averages what it has not \
                   forgotten, so only aggressive forgetting comes near the last value",
    },
    ProbeText {
        probe: "keys",
        question: "unit keys whose channels have scales from 1 to 0.02, along the axes or after a Hadamard rotation; 32 written once; recall error",
        expected: "a diagonal preconditioner evens out channels only where the scales lie along them: rotated keys look white to it. mesanet, whose second \
                   moment is a full matrix, does not care; neither do mamba2 and kda, which have no preconditioner",
    },
    ProbeText {
        probe: "modulus",
        question: "count bits modulo m with one head: a set bit multiplies the state by the best transition the mechanism has; share of 512 steps right",
        expected: "parity (m = 2) needs the eigenvalue -1, a step size of 2. m > 2 needs a rotation by 2 pi / m: the product of two reflections, so \
                   two Householder writes per token. Without them the count is a guess",
    },
    ProbeText {
        probe: "tiles",
        question: "log decays of 256 channels as a KDA gate draws them, replaced by the mean of their tile; spread inside a tile, in nats",
        expected: "one decay per channel loses nothing; fewer tiles average channels that want different memories. Channels sorted by their time \
                   constant lose far less, which is what training can arrange",
    },
    ProbeText {
        probe: "growth",
        question: "the delta rule over 4096 tokens with decays like a trained gate's, the state rounded after every token; error of the state against f64",
        expected: "a rounding error decays with the state and along every key that is written again, so it grows until as much is forgotten as is added \
                   and then stays: near 2^-9 sqrt(memory) for bf16, several times that for FP8 with a scale per row",
    },
    ProbeText {
        probe: "inverses",
        question: "the chunk inverse of 64 random and of 64 correlated keys (pairwise cosine about 0.85), step size 1.9, products in three bf16 passes; \
                   error against substitution in f64",
        expected: "powers of the matrix grow binomially for correlated keys and must cancel, so product and Newton forms fail; block doubling and \
                   substitution never form them. A truncated series is good for random keys after 8 terms and useless for correlated ones",
    },
];

fn write_once(seed: u64, rows: &mut Vec<ProbeRow>) {
    for count in [16, 64, 128] {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let keys: Vec<Array1<f64>> = (0..count).map(|_| unit(vector(&mut rng))).collect();
        let values: Vec<Array1<f64>> = (0..count).map(|_| vector(&mut rng)).collect();
        for (name, mechanism) in MECHANISMS {
            for (state, format) in FORMATS {
                let mut memory = Memory::new(mechanism, format);
                keys.iter().zip(&values).for_each(|(k, v)| memory.write(k, v));
                let value = recall(&memory, &keys, &values);
                let condition = format!("{count} keys");
                rows.push(ProbeRow {
                    probe: "write_once",
                    mechanism: name,
                    condition,
                    state,
                    measure: "recall error",
                    value,
                });
            }
        }
    }
}

fn overwrite(seed: u64, rows: &mut Vec<ProbeRow>) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(1));
    // Columns of a Hadamard matrix: orthogonal, and no key is an axis.
    let keys: Vec<Array1<f64>> = (0..16).map(hadamard_row).collect();
    let rounds: Vec<Vec<Array1<f64>>> = (0..32)
        .map(|_| (0..16).map(|_| vector(&mut rng)).collect())
        .collect();
    for (name, mechanism) in MECHANISMS {
        for (state, format) in FORMATS {
            let mut memory = Memory::new(mechanism, format);
            for values in &rounds {
                keys.iter().zip(values).for_each(|(k, v)| memory.write(k, v));
            }
            let value = rounds.last().map_or(0.0, |last| recall(&memory, &keys, last));
            let condition = "16 keys x 32".to_owned();
            rows.push(ProbeRow {
                probe: "overwrite",
                mechanism: name,
                condition,
                state,
                measure: "recall error",
                value,
            });
        }
    }
}

/// Row `i` of the Hadamard matrix of `WIDTH`, of unit length.
fn hadamard_row(i: usize) -> Array1<f64> {
    let scale = (WIDTH as f64).sqrt().recip();
    Array1::from_shape_fn(WIDTH, |j| {
        if (i & j).count_ones().is_multiple_of(2) {
            scale
        } else {
            -scale
        }
    })
}

fn rotated_keys(seed: u64, rows: &mut Vec<ProbeRow>) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(2));
    let scales = Array1::from_shape_fn(WIDTH, |c| 0.02_f64.powf(c as f64 / (WIDTH - 1) as f64));
    let axis: Vec<Array1<f64>> = (0..32).map(|_| unit(vector(&mut rng) * &scales)).collect();
    let values: Vec<Array1<f64>> = (0..32).map(|_| vector(&mut rng)).collect();
    let rotation = Array2::from_shape_fn((WIDTH, WIDTH), |(i, j)| hadamard_row(i)[j]);
    let rotated: Vec<Array1<f64>> = axis.iter().map(|k| k.dot(&rotation)).collect();
    for (condition, keys) in [("axis-aligned", &axis), ("rotated", &rotated)] {
        for (name, mechanism) in MECHANISMS {
            for (state, format) in FORMATS {
                let mut memory = Memory::new(mechanism, format);
                keys.iter().zip(&values).for_each(|(k, v)| memory.write(k, v));
                let value = recall(&memory, keys, &values);
                let condition = condition.to_owned();
                rows.push(ProbeRow {
                    probe: "keys",
                    mechanism: name,
                    condition,
                    state,
                    measure: "recall error",
                    value,
                });
            }
        }
    }
}

/// What a set bit can do to a state of two channels.
#[derive(Clone, Copy)]
enum Transition {
    /// Eigenvalues in [0, 1]: step sizes up to 1.
    Shrink,
    /// One reflection: step size 2.
    Reflect,
    /// Two reflections at half the angle: a rotation.
    Rotate,
}

fn modulus(seed: u64, rows: &mut Vec<ProbeRow>) {
    let mechanisms = [
        ("kda, step up to 1", Transition::Shrink),
        ("sla, step up to 2", Transition::Reflect),
        ("deltaproduct, two writes", Transition::Rotate),
    ];
    for m in [2_u32, 3, 5] {
        let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(3));
        let bits: Vec<bool> = (0..512).map(|_| rng.random::<f64>() < 0.5).collect();
        for (name, transition) in mechanisms {
            for (state, format) in FORMATS {
                let value = count_right(&bits, m, transition, format);
                let condition = format!("mod {m}");
                rows.push(ProbeRow {
                    probe: "modulus",
                    mechanism: name,
                    condition,
                    state,
                    measure: "share right",
                    value,
                });
            }
        }
    }
}

/// Share of steps at which the direction of a two-channel state says the count modulo `m`.
fn count_right(bits: &[bool], m: u32, transition: Transition, format: Dtype) -> f64 {
    let tau = std::f64::consts::TAU;
    let angle = tau / f64::from(m);
    // `S <- S - beta k (k . S)` for a unit key at `at`.
    let householder = |s: [f64; 2], at: f64, beta: f64| {
        let k = [at.cos(), at.sin()];
        let along = beta * (k[0] * s[0] + k[1] * s[1]);
        [s[0] - along * k[0], s[1] - along * k[1]]
    };
    let (mut state, mut count, mut right) = ([1.0, 0.0], 0_u32, 0_usize);
    for &bit in bits {
        if bit {
            count = (count + 1) % m;
            state = match transition {
                Transition::Shrink => householder(state, 0.0, 1.0),
                Transition::Reflect => householder(state, 0.0, 2.0),
                // Reflections across lines half the angle apart turn by the angle.
                Transition::Rotate => {
                    householder(householder(state, tau / 4.0, 2.0), tau / 4.0 + angle / 2.0, 2.0)
                }
            };
            state = state.map(|x| round_to(format, x));
        }
        let turned = state[1].atan2(state[0]).rem_euclid(tau);
        let read = ((turned / angle).round() as u32) % m;
        let lost = state[0].hypot(state[1]) < 1e-3;
        right += usize::from(!lost && read == count || lost && count == 0);
    }
    right as f64 / bits.len() as f64
}

fn tiles(seed: u64, rows: &mut Vec<ProbeRow>) {
    let channels = 256;
    let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(4));
    // A KDA gate at the start of training: rate uniform in [1, 16], time step log-uniform in [1e-3, 1e-1] per channel.
    let rate = 1.0 + 15.0 * rng.random::<f64>();
    let mut decays: Vec<f64> = (0..channels)
        .map(|_| -rate * (1e-3_f64.ln() + rng.random::<f64>() * 100.0_f64.ln()).exp())
        .collect();
    for (name, sorted) in [("channels as drawn", false), ("channels sorted", true)] {
        if sorted {
            decays.sort_by(f64::total_cmp);
        }
        for count in [1, 4, 16, 64, 256] {
            let width = channels / count;
            let squares: f64 = decays
                .chunks(width)
                .map(|tile| {
                    let mean = tile.iter().sum::<f64>() / width as f64;
                    tile.iter().map(|l| (l - mean).powi(2)).sum::<f64>()
                })
                .sum();
            rows.push(ProbeRow {
                probe: "tiles",
                mechanism: name,
                condition: format!("{count} tiles"),
                state: "f32",
                measure: "spread",
                value: (squares / channels as f64).sqrt(),
            });
        }
    }
}

fn growth(seed: u64, rows: &mut Vec<ProbeRow>) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(5));
    // Memories from 10 to 1000 tokens.
    let decay = Array1::from_shape_fn(WIDTH, |_| (-(0.1 * 0.01_f64.powf(rng.random::<f64>()))).exp());
    let formats = [
        ("f32", Some(Dtype::F32)),
        ("bf16", Some(Dtype::Bf16)),
        ("row_fp8", None),
    ];
    let zero = || Array2::<f64>::zeros((WIDTH, WIDTH));
    let (mut exact, mut stored) = (zero(), formats.map(|_| zero()));
    for token in 1..=4096_usize {
        let (key, value, step) = (unit(vector(&mut rng)), vector(&mut rng), rng.random::<f64>());
        let advance = |state: &mut Array2<f64>| {
            state
                .rows_mut()
                .into_iter()
                .zip(&decay)
                .for_each(|(mut row, &d)| row *= d);
            let error = (&value - &key.dot(state)) * step;
            for (mut row, &k) in state.rows_mut().into_iter().zip(&key) {
                row.scaled_add(k, &error);
            }
        };
        advance(&mut exact);
        for (state, (_, format)) in stored.iter_mut().zip(formats) {
            advance(state);
            match format {
                Some(format) => state.mapv_inplace(|x| round_to(format, x)),
                None => state.rows_mut().into_iter().for_each(|mut row| {
                    let largest = row.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
                    let scale = if largest > 0.0 { largest / 448.0 } else { 1.0 };
                    row.mapv_inplace(|x| round_to(Dtype::Fp8E4m3, x / scale) * scale);
                }),
            }
        }
        if [16, 64, 256, 1024, 4096].contains(&token) {
            let size = exact.iter().map(|x| x * x).sum::<f64>();
            for (state, (name, _)) in stored.iter().zip(formats) {
                let error = (state - &exact).iter().map(|x| x * x).sum::<f64>();
                rows.push(ProbeRow {
                    probe: "growth",
                    mechanism: "kda",
                    condition: format!("{token} tokens"),
                    state: name,
                    measure: "state error",
                    value: (error / size).sqrt(),
                });
            }
        }
    }
}

fn inverses(seed: u64, rows: &mut Vec<ProbeRow>) {
    const CHUNK: usize = 64;
    let mut variants: Vec<(&'static str, InverseVariant, usize)> = [
        ("row_substitution", InverseVariant::RowSubstitution),
        ("blocked16", InverseVariant::Blocked16),
        ("block_doubling", InverseVariant::BlockDoubling),
        ("two_level", InverseVariant::TwoLevel),
        ("product", InverseVariant::Product),
        ("newton", InverseVariant::Newton),
    ]
    .map(|(name, variant)| (name, variant, 0))
    .to_vec();
    variants.extend(
        [
            ("neumann, 1 term", 1),
            ("neumann, 2 terms", 2),
            ("neumann, 4 terms", 4),
            ("neumann, 8 terms", 8),
        ]
        .map(|(name, terms)| (name, InverseVariant::Neumann, terms)),
    );
    for (condition, spread) in [("random keys", 1e3), ("correlated keys", 0.05)] {
        let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(6));
        let base = unit(vector(&mut rng));
        let keys: Vec<Array1<f64>> = (0..CHUNK)
            .map(|_| unit(&base + &(vector(&mut rng) * spread)))
            .collect();
        let l = Array2::from_shape_fn((CHUNK, CHUNK), |(i, j)| {
            if j < i { 1.9 * keys[i].dot(&keys[j]) } else { 0.0 }
        });
        let reference = run_inverse(InverseVariant::RowSubstitution, 0, &l, Arithmetic::Exact);
        for &(name, variant, terms) in &variants {
            let found = run_inverse(variant, terms, &l, Arithmetic::Declared);
            let value = match (&found, &reference) {
                (Some(found), Some(reference)) => {
                    relative_error(found, reference).map_or(f64::INFINITY, |e| e.max)
                }
                _ => f64::INFINITY,
            };
            // What overflowed is as wrong as the largest number says.
            let value = value.min(f64::MAX);
            let condition = condition.to_owned();
            rows.push(ProbeRow {
                probe: "inverses",
                mechanism: name,
                condition,
                state: "f32",
                measure: "inverse error",
                value,
            });
        }
    }
}

/// The inverse by the graph of a variant; `None` where it cannot be executed.
fn run_inverse(
    variant: InverseVariant,
    terms: usize,
    l: &Array2<f64>,
    arithmetic: Arithmetic,
) -> Option<ArrayD<f64>> {
    let mut b = Builder::new(Stage::Inverse);
    let input = b.input(
        "L",
        [l.nrows(), l.ncols()],
        Dtype::F32,
        Role::Activation,
        Init::Zeros,
    );
    let t = append_inverse(&mut b, variant, Precision::High, terms, input);
    let graph = b.finish().ok()?;
    let inputs = [(input.node, l.clone().into_dyn().into_shared())].into();
    match arithmetic {
        Arithmetic::Exact => execute(&graph, &inputs, &[t], arithmetic)
            .ok()?
            .values
            .get(&t)
            .map(ndarray::ArrayBase::to_owned),
        Arithmetic::Declared => {
            let run = execute(&graph, &to_f32(&inputs), &[t], arithmetic).ok()?;
            run.values.get(&t).map(|x| x.mapv(f64::from))
        }
    }
}
