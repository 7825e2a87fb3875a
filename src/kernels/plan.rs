//! Fusion plans.

use crate::graph::Stage;

/// What one program of a kernel that carries a state works on at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Program {
    /// Heads whose chains interleave.
    pub heads: u64,
    /// Chunks of a head; their Gram and inverse interleave, their states follow each other.
    pub chunks: u64,
}

/// Stages that run in one launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// First stage.
    pub first: Stage,
    /// Last stage.
    pub last: Stage,
    /// An earlier stage that this launch does as well, computed where it is used.
    pub also: Option<Stage>,
    /// What a program works on, for a launch that carries a state; others take as many units as fit on chip.
    pub program: Option<Program>,
    /// What the launch does, where its stages do not say it.
    pub named: Option<&'static str>,
    /// Widest slice of the value columns a program works on, where the launch splits them over programs.
    pub value_tile: Option<u64>,
}

impl Group {
    /// A launch of the stages from `first` to `last` that carries nothing from program to program.
    pub(crate) const fn of(first: Stage, last: Stage, named: Option<&'static str>) -> Self {
        Group {
            first,
            last,
            also: None,
            program: None,
            named,
            value_tile: None,
        }
    }

    /// Whether a stage runs in this launch.
    #[must_use]
    pub fn holds(&self, stage: Stage) -> bool {
        (self.first <= stage && stage <= self.last) || self.also == Some(stage)
    }

    /// `op6`, or a span such as `op2-7a`.
    #[must_use]
    pub fn label(&self) -> String {
        let number = |stage: Stage| stage.name().trim_start_matches("op").to_owned();
        // Spans use the stage tables of the field: `op3-5`, `op7b-c`.
        match (self.first, self.last) {
            (first, last) if first == last => first.name().to_owned(),
            (first, Stage::WyFactors) => format!("{first}-5"),
            (Stage::OutputNorm, Stage::OutputProjection) => "op7b-c".to_owned(),
            (first, last) => format!("{first}-{}", number(last)),
        }
    }

    /// What the launch does.
    #[must_use]
    pub fn title(&self) -> String {
        if let Some(name) = self.named {
            return name.to_owned();
        }
        match (self.first, self.last) {
            (first, last) if first == last => first.title().to_owned(),
            (Stage::Gates, Stage::WyFactors) => "gates, Gram, inverse, WY factors".to_owned(),
            (Stage::Convolution, Stage::Output) => "convolution to output, state on chip".to_owned(),
            (Stage::StateScan, Stage::Output) => "chunk state scan, output and state readout".to_owned(),
            (Stage::Gram, Stage::Inverse) => "chunk Gram matrices and inverse".to_owned(),
            (Stage::OutputNorm, Stage::OutputProjection) => "output norm and projection".to_owned(),
            (first, last) => format!("{} to {}", first.title(), last.title()),
        }
    }
}

/// A grouping of all stages into launches, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// `unfused`, `fused`.
    pub name: String,
    /// Launches.
    pub groups: Vec<Group>,
}

impl Plan {
    /// Names of the plans every linear-attention layer has.
    pub const NAMES: [&'static str; 6] = ["unfused", "fused", "tokamax", "fla", "fla_intra", "fla_output"];
    /// The plan of a decode step that computes the coefficients of its log in a launch of their own.
    pub const SPLIT: &'static str = "split";
    /// Names of the plans of a decode step.
    pub const DECODE_NAMES: [&'static str; 3] = ["unfused", "fused", Plan::SPLIT];
    /// Names of the plans of the verification of a tree.
    pub const VERIFY_NAMES: [&'static str; 2] = ["unfused", "fused"];
    /// Columns of a value tile of split replay: four programs per state of 128 columns, the fastest split of the Triton kernels in tools/gpu/deltalog.
    pub const SPLIT_VALUE_TILE: u64 = 32;
    /// Columns of a value tile of the state scan of flash-linear-attention (its kernels are called `blockdim64`).
    const FLA_VALUE_TILE: u64 = 64;

    /// A plan by name.
    ///
    /// `unfused`: a launch per row of the field's stage table, with HBM round trips between them. `fused`: ops 2 to 7a in one launch with the
    /// state in on-chip memory. Softmax attention is a launch of its own in both: what its keys go through (norm, rotation) would otherwise be done
    /// again for every query block. `tokamax`: the two kernels of Tokamax KDA, gates to WY factors and scan with output. `fla`: the kernels of
    /// flash-linear-attention, cumulative sum, Gram with inverse, WY factors, state scan in value tiles, output; `fla_intra` has a launch of its own
    /// for the Gram, as its kernels with a decay per channel do; `fla_output` has neither solve nor Gram of its own. Without a decay per channel the products of queries and keys are computed in the launch of the output. `program` says what a program of the launches with a state works on.
    #[must_use]
    pub fn named(name: &str, program: Program) -> Option<Plan> {
        use Stage::{
            Attention, Convolution, Gates, Gram, Inverse, Output, OutputNorm, OutputProjection, Projections,
            StateScan, Whitening, WyFactors,
        };
        let span = |first, last| Group::of(first, last, None);
        let scan = |first, last| Group {
            program: Some(program),
            ..span(first, last)
        };
        let tiled_scan = Group {
            value_tile: Some(Self::FLA_VALUE_TILE),
            ..scan(StateScan, StateScan)
        };
        let groups = match name {
            "unfused" => vec![
                span(Projections, Projections),
                span(Convolution, Convolution),
                scan(Whitening, Whitening),
                span(Gates, WyFactors),
                scan(StateScan, StateScan),
                span(Output, Output),
                span(Attention, Attention),
                span(OutputNorm, OutputProjection),
            ],
            "fused" => vec![
                span(Projections, Projections),
                scan(Convolution, Output),
                span(Attention, Attention),
                span(OutputNorm, OutputProjection),
            ],
            "tokamax" => vec![
                span(Projections, Projections),
                span(Convolution, Convolution),
                span(Gates, WyFactors),
                scan(StateScan, Output),
                span(OutputNorm, OutputProjection),
            ],
            "fla_output" => vec![
                span(Projections, Projections),
                span(Convolution, Convolution),
                span(Gates, Gates),
                tiled_scan,
                Group {
                    also: Some(Gram),
                    ..span(Output, Output)
                },
                span(OutputNorm, OutputProjection),
            ],
            "fla" | "fla_intra" => {
                let mut groups = vec![
                    span(Projections, Projections),
                    span(Convolution, Convolution),
                    span(Gates, Gates),
                ];
                if name == "fla" {
                    groups.push(span(Gram, Inverse));
                } else {
                    groups.extend([span(Gram, Gram), span(Inverse, Inverse)]);
                }
                groups.extend([
                    span(WyFactors, WyFactors),
                    tiled_scan,
                    Group {
                        // Queries meet keys where the output is made; only with a decay per channel are their products kept from before.
                        also: (name == "fla").then_some(Gram),
                        ..span(Output, Output)
                    },
                    span(OutputNorm, OutputProjection),
                ]);
                groups
            }
            _ => return None,
        };
        Some(Plan {
            name: name.to_owned(),
            groups,
        })
    }

    /// A plan of the verification of a tree by name.
    ///
    /// `unfused`: a launch per row of the stage table. `fused`: ops 2 to 7a in one launch. The accepted path is known only after the tokens were
    /// sampled, so the commit is a launch of its own in both.
    #[must_use]
    pub fn verify(name: &str) -> Option<Plan> {
        use Stage::{
            Commit, Convolution, Gates, Output, OutputNorm, OutputProjection, Projections, StateScan,
            WyFactors,
        };
        let groups = match name {
            "unfused" => vec![
                Group::of(Projections, Projections, None),
                Group::of(Convolution, Convolution, None),
                Group::of(Gates, WyFactors, None),
                Group::of(StateScan, StateScan, Some("predictions from the state")),
                Group::of(Output, Output, None),
                Group::of(OutputNorm, OutputProjection, None),
                Group::of(Commit, Commit, None),
            ],
            "fused" => vec![
                Group::of(Projections, Projections, None),
                Group::of(Convolution, Output, Some("convolution to output of a tree")),
                Group::of(OutputNorm, OutputProjection, None),
                Group::of(Commit, Commit, None),
            ],
            _ => return None,
        };
        Some(Plan {
            name: name.to_owned(),
            groups,
        })
    }

    /// A plan of a decode step by name.
    ///
    /// `unfused`: a launch per stage. `fused`: ops 2 to 7a in one launch, so that the state crosses HBM once in each direction. Softmax
    /// attention is a launch of its own in both. `split`, of steps with a log: ops 2 to 4 in one launch, which computes the coefficients of the log once per state
    /// and appends what all value columns share, then the replay in tiles of value columns.
    #[must_use]
    pub fn decode(name: &str) -> Option<Plan> {
        use Stage::{
            Attention, Convolution, Gates, Gram, Output, OutputNorm, OutputProjection, Projections,
            StateScan, Whitening,
        };
        let groups = match name {
            "unfused" => vec![
                Group::of(Projections, Projections, None),
                Group::of(Convolution, Convolution, None),
                Group::of(Whitening, Whitening, None),
                Group::of(Gates, Gates, Some("decay and step-size gates")),
                Group::of(Gram, Gram, Some("coefficients of the log")),
                Group::of(StateScan, StateScan, Some("state update")),
                Group::of(Output, Output, Some("state readout")),
                Group::of(Attention, Attention, Some("attention to the cache")),
                Group::of(OutputNorm, OutputProjection, None),
            ],
            "fused" => vec![
                Group::of(Projections, Projections, None),
                Group::of(Convolution, Output, Some("convolution to output, one token")),
                Group::of(Attention, Attention, Some("attention to the cache")),
                Group::of(OutputNorm, OutputProjection, None),
            ],
            Self::SPLIT => vec![
                Group::of(Projections, Projections, None),
                Group::of(Convolution, Gram, Some("convolution to coefficients of the log")),
                Group {
                    value_tile: Some(Self::SPLIT_VALUE_TILE),
                    ..Group::of(StateScan, Output, Some("replay in value tiles"))
                },
                Group::of(OutputNorm, OutputProjection, None),
            ],
            _ => return None,
        };
        Some(Plan {
            name: name.to_owned(),
            groups,
        })
    }
}
