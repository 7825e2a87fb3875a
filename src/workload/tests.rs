//! Readers and schemas of workloads and stacks agree.

use super::{file, load_stack, shipped, shipped_stacks, shipped_text, stack};
use crate::schema::Kind;
use crate::schema::agreement::{Reader, disagreements, other_names};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const WORKLOADS: Reader = Reader {
    kind: Kind::Workload,
    well_formed: file::check_schema,
    accepts: |document| file::resolve(document).is_ok(),
};

const STACKS: Reader = Reader {
    kind: Kind::Stack,
    well_formed: stack::well_formed,
    // Files beside it are shipped ones.
    accepts: |document| {
        let read = || -> Result<bool, Box<dyn std::error::Error>> {
            let folder = tempfile::tempdir()?;
            let path = folder.path().join("stack.yaml");
            std::fs::write(&path, document.text())?;
            Ok(load_stack::<&str>(&path.to_string_lossy(), &[])?.is_some())
        };
        read().unwrap_or(false)
    },
};

/// A delta rule, attention, a solver; packed and decoding.
const CHANGED: [&str; 3] = ["kda_packed", "softmax_gqa_decode", "spd_sla_w"];

/// Every block, and a value of most fields that have names.
const EVERY_BLOCK: &str = "
name: small
layer: { mechanism: kda, batch: 1, tokens: 512, model_width: 256, key_heads: 2, value_heads: 2, key_dim: 64, value_dim: 64, chunk: 64,
  state: f32, state_precision: high, gram: folded, pivot: first, inverse: neumann, neumann_steps: 4, inverse_precision: high, read: decayed,
  decay_gate: bounded, decay_bound: -5, output_gate: full, initial_state: zero, activations: bf16 }
plans: [fused]
pass: forward
hardware: [tpu-v6e, mine.yaml]
baseline: kda
program: { heads: 1, tokens: 64 }
numeric: { tokens: 64, key_heads: 1, seed: 7 }
published: { source: nobody, chip: tpu-v6e, unit: ms, fused: { op1: 1.5 } }
inferred: [everything]
";

#[test]
fn workloads_and_their_schema_agree() -> Outcome {
    for text in CHANGED
        .iter()
        .filter_map(|name| shipped_text(name))
        .chain([EVERY_BLOCK])
    {
        let (complaints, tried) = disagreements(&WORKLOADS, text)?;
        assert!(complaints.is_empty(), "{}", complaints.join("\n"));
        assert!(tried > 200, "only {tried}");
    }
    for text in shipped()
        .iter()
        .filter_map(|name| shipped_text(name))
        .chain([EVERY_BLOCK])
    {
        let (complaints, compared) = other_names(&WORKLOADS, text)?;
        assert!(complaints.is_empty(), "{}", complaints.join("\n"));
        assert!(compared >= 5, "only {compared}");
    }
    Ok(())
}

#[test]
fn stacks_and_their_schema_agree() -> Outcome {
    for text in ["hybrid_4L1A_kda"].iter().filter_map(|name| shipped_text(name)) {
        let (complaints, tried) = disagreements(&STACKS, text)?;
        assert!(complaints.is_empty(), "{}", complaints.join("\n"));
        assert!(tried > 50, "only {tried}");
    }
    for text in shipped_stacks().iter().filter_map(|name| shipped_text(name)) {
        let (complaints, compared) = other_names(&STACKS, text)?;
        assert!(
            complaints.is_empty() && compared >= 2,
            "{}",
            complaints.join("\n")
        );
    }
    Ok(())
}
