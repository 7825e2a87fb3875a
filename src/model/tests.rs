//! Reader and schema of models agree.

use super::{file, from_document, shipped, shipped_text};
use crate::schema::Kind;
use crate::schema::agreement::{Reader, disagreements, other_names};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const MODELS: Reader = Reader {
    kind: Kind::Model,
    well_formed: file::well_formed,
    accepts: |document| from_document(document).is_ok(),
};

/// Every block of a file, and a value of most fields that have names.
const EVERY_BLOCK: &str = "
name: small
source: nobody
model: { width: 256, vocabulary: 1000, tied_embeddings: true, activations: bf16, weights: fp8_e4m3 }
blocks:
  - name: KDA
    count: 3
    mixer: { mechanism: kda, key_heads: 2, value_heads: 2, key_dim: 64, value_dim: 64, chunk: 64, gram: pivot, decay_gate: bounded, decay_bound: -5 }
    feed_forward: { experts: 8, active: 2, hidden: 64, shared_hidden: 64, shared_gate: true, scores: sigmoid, bias: true, normalised: true, scale: 2.5 }
    plan: { tpu: tokamax, gpu: fla_intra }
    decode_plan: { tpu: fused, gpu: unfused }
  - name: MLA
    count: 1
    mixer: { mechanism: mla, key_heads: 2, key_dim: 96, value_dim: 64, latent_rank: 64, decoupled_dim: 32, query_rank: 48, rotary: 1 }
    feed_forward: { hidden: 512 }
prefill: { batch: 1, tokens: [512, 1024] }
decode: { batch: [1, 4], context: 512 }
hardware: [tpu-v6e, mine.yaml]
published: { source: nobody, chip: tpu-v6e, decode: [{ batch: 4, method: baseline, plan: fused, time_ms: 1.5 }] }
assumed: [everything]
";

#[test]
fn models_and_their_schema_agree() -> Outcome {
    let (complaints, tried) = disagreements(&MODELS, EVERY_BLOCK)?;
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    assert!(tried > 500, "only {tried}");
    for text in shipped()
        .iter()
        .filter_map(|name| shipped_text(name))
        .chain([EVERY_BLOCK])
    {
        let (complaints, compared) = other_names(&MODELS, text)?;
        assert!(complaints.is_empty(), "{}", complaints.join("\n"));
        assert!(compared >= 4, "only {compared}");
    }
    Ok(())
}
