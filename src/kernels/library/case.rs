//! What a library call is asked for: parameters, formats, chip; and why one cannot be built.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use crate::coefficients::Coefficient;
use crate::dtype::Dtype;
use crate::hardware::{Architecture, Chip};

/// Largest extent, and largest product of extents, that a case may have; counts stay exact below it.
pub(super) const LARGEST: u64 = 1 << 52;

/// Why a case has no kernels.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CaseError {
    /// No such operation.
    #[error("unknown op `{op}`; {hint}")]
    Op {
        /// What was asked for.
        op: String,
        /// What there is.
        hint: String,
    },
    /// A parameter is missing.
    #[error("`{op}` needs the parameter `{parameter}`")]
    Missing {
        /// Operation.
        op: String,
        /// Parameter.
        parameter: String,
    },
    /// A parameter that the operation does not know.
    #[error("`{op}` does not know the parameter `{parameter}`")]
    Parameter {
        /// Operation.
        op: String,
        /// Parameter.
        parameter: String,
    },
    /// A value that does not fit.
    #[error("parameter `{parameter}`: expected {expected}, found `{found}`")]
    Value {
        /// Parameter.
        parameter: String,
        /// What fits.
        expected: String,
        /// What stands there.
        found: String,
    },
    /// Text that is no list of `name=value`.
    #[error("expected parameters such as `m=1024;k=512`, found `{0}`")]
    Malformed(String),
    /// A format nobody knows.
    #[error(
        "unknown dtype `{0}`; expected `bf16`, `f16`, `f32`, `s8`, `f8_e4m3fn`, a mix such as `bf16xs8`, `f32-highest`, or `tf32`"
    )]
    Format(String),
    /// Counts beyond what can be added up.
    #[error("too large: {0}")]
    TooLarge(String),
    /// Nothing describes this operation on this chip.
    #[error("{0}")]
    Unsupported(String),
}

/// The parameters of a measured case: `name=value` pairs joined by `;`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Params(BTreeMap<String, String>);

impl Params {
    /// Reads `m=1024;k=512`. Empty text has no parameters.
    ///
    /// # Errors
    /// [`CaseError::Malformed`] where a piece has no `=`, and where a name stands twice.
    pub fn parse(text: &str) -> Result<Self, CaseError> {
        let mut params = BTreeMap::new();
        for piece in text.split(';').map(str::trim).filter(|piece| !piece.is_empty()) {
            let Some((name, value)) = piece.split_once('=') else {
                return Err(CaseError::Malformed(piece.to_owned()));
            };
            if params
                .insert(name.trim().to_owned(), value.trim().to_owned())
                .is_some()
            {
                return Err(CaseError::Malformed(format!("{name} twice")));
            }
        }
        Ok(Params(params))
    }

    /// Takes a parameter out.
    pub fn take(&mut self, name: &str) -> Option<String> {
        self.0.remove(name)
    }
}

/// Formats of the operands of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Formats {
    /// First operand, and everything a call of one format reads and writes.
    pub a: Dtype,
    /// Second operand of a mixed product.
    pub b: Dtype,
    /// Whether f32 products take all six bf16 passes (`f32-highest`).
    pub highest: bool,
    /// Whether f32 products run in TF32 on a GPU (`tf32`), where `f32` alone asks the libraries for full precision.
    pub tf32: bool,
}

impl Formats {
    /// Reads a dtype as the measurement files write it: `bf16`, `s8`, `bf16xf8_e4m3fn`, `f32-highest`.
    ///
    /// # Errors
    /// [`CaseError::Format`].
    pub fn parse(text: &str) -> Result<Self, CaseError> {
        let unknown = || CaseError::Format(text.to_owned());
        let (names, highest) = match text.strip_suffix("-highest") {
            Some(names) => (names, true),
            None => (text, false),
        };
        let (names, tf32) = if names == "tf32" {
            ("f32", true)
        } else {
            (names, false)
        };
        let one = |name: &str| {
            Some(match name {
                "bf16" => Dtype::Bf16,
                "f16" => Dtype::F16,
                "f32" => Dtype::F32,
                "s8" | "int8" => Dtype::Int8,
                "f8_e4m3fn" | "f8e4m3" | "fp8_e4m3" => Dtype::Fp8E4m3,
                "f8_e5m2" | "fp8_e5m2" => Dtype::Fp8E5m2,
                _ => return None,
            })
        };
        let (a, b) = match one(names) {
            Some(dtype) => (dtype, dtype),
            None => match names.split_once('x') {
                Some((a, b)) => (one(a).ok_or_else(unknown)?, one(b).ok_or_else(unknown)?),
                None => return Err(unknown()),
            },
        };
        Ok(Formats { a, b, highest, tf32 })
    }

    /// Format the operands of a product are multiplied in.
    #[must_use]
    pub fn product(self) -> Dtype {
        crate::graph::matmul_dtype(self.a, self.b)
    }
}

/// One case, with the parameters that a builder has read so far.
pub struct Case<'a> {
    /// Operation.
    pub op: &'a str,
    /// Formats of the operands.
    pub formats: Formats,
    /// Chip the implementation was made for.
    pub chip: &'a Chip,
    params: &'a Params,
    read: RefCell<BTreeSet<String>>,
}

impl<'a> Case<'a> {
    /// A case of which nothing has been read.
    #[must_use]
    pub fn new(op: &'a str, params: &'a Params, formats: Formats, chip: &'a Chip) -> Self {
        Case {
            op,
            formats,
            chip,
            params,
            read: RefCell::new(BTreeSet::new()),
        }
    }

    /// Whether the chip is a TPU.
    #[must_use]
    pub fn tpu(&self) -> bool {
        self.chip.architecture == Architecture::Tpu
    }

    /// bf16 passes of an f32 product: one on a TPU at default precision, six at the highest; a GPU runs f32 as TF32 at half its bf16 rate.
    #[must_use]
    pub fn passes(&self) -> u32 {
        match (self.formats.highest, self.tpu()) {
            (true, _) => 6,
            (false, true) => 1,
            (false, false) => 2,
        }
    }

    /// A coefficient of the timing model.
    #[must_use]
    pub fn coefficient(&self, coefficient: Coefficient) -> f64 {
        self.chip.coefficient(coefficient)
    }

    /// Bytes of an element of the first operand's format.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.formats.a.bytes()
    }

    /// The text of a parameter, if it is there.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&'a str> {
        self.read.borrow_mut().insert(name.to_owned());
        self.params.0.get(name).map(String::as_str)
    }

    fn wrong(name: &str, expected: &str, found: &str) -> CaseError {
        CaseError::Value {
            parameter: name.to_owned(),
            expected: expected.to_owned(),
            found: found.to_owned(),
        }
    }

    fn number(name: &str, text: &str) -> Result<u64, CaseError> {
        match text.parse::<u64>() {
            Ok(size) if (1..=LARGEST).contains(&size) => Ok(size),
            _ => Err(Self::wrong(name, "a whole number of at least 1", text)),
        }
    }

    /// A size of at least 1.
    ///
    /// # Errors
    /// Where it is missing or no such number.
    pub fn size(&self, name: &str) -> Result<u64, CaseError> {
        match self.optional(name)? {
            Some(size) => Ok(size),
            None => Err(CaseError::Missing {
                op: self.op.to_owned(),
                parameter: name.to_owned(),
            }),
        }
    }

    /// A count, which may be 0.
    ///
    /// # Errors
    /// Where it is missing or no such number.
    pub fn count(&self, name: &str) -> Result<u64, CaseError> {
        match self.text(name) {
            Some("0") => Ok(0),
            _ => self.size(name),
        }
    }

    /// A size that may be absent.
    ///
    /// # Errors
    /// Where it is no such number.
    pub fn optional(&self, name: &str) -> Result<Option<u64>, CaseError> {
        self.text(name).map(|text| Self::number(name, text)).transpose()
    }

    /// A size under one of several names.
    ///
    /// # Errors
    /// Where all are missing or the one that is there is no such number.
    pub fn any(&self, names: &[&str]) -> Result<u64, CaseError> {
        for name in names {
            if let Some(size) = self.optional(name)? {
                return Ok(size);
            }
        }
        self.size(names.first().copied().unwrap_or_default())
    }

    /// `0` or `1`; absent is `0`.
    ///
    /// # Errors
    /// For anything else.
    pub fn flag(&self, name: &str) -> Result<bool, CaseError> {
        match self.text(name) {
            None | Some("0") => Ok(false),
            Some("1") => Ok(true),
            Some(other) => Err(Self::wrong(name, "`0` or `1`", other)),
        }
    }

    /// Extents such as `8x32x128`, if they are there.
    ///
    /// # Errors
    /// Where a part is no size.
    pub fn dims(&self, name: &str) -> Result<Option<Vec<usize>>, CaseError> {
        let Some(text) = self.text(name) else {
            return Ok(None);
        };
        let parts: Result<Vec<u64>, CaseError> =
            text.split('x').map(|part| Self::number(name, part)).collect();
        let parts = parts.map_err(|_| Self::wrong(name, "extents such as `8x32x128`", text))?;
        size(&parts)?;
        Ok(Some(parts.into_iter().map(|d| d as usize).collect()))
    }

    /// One of several words; the first where it is absent.
    ///
    /// # Errors
    /// For any other word.
    pub fn word(&self, name: &str, words: &[&'static str]) -> Result<&'static str, CaseError> {
        match self.text(name) {
            None => Ok(words.first().copied().unwrap_or_default()),
            Some(text) => words
                .iter()
                .copied()
                .find(|word| *word == text)
                .ok_or_else(|| Self::wrong(name, &crate::config::listed(words), text)),
        }
    }

    /// Every parameter has been read.
    ///
    /// # Errors
    /// For the first that has not.
    pub fn finish(&self) -> Result<(), CaseError> {
        let read = self.read.borrow();
        match self.params.0.keys().find(|name| !read.contains(*name)) {
            Some(name) => Err(CaseError::Parameter {
                op: self.op.to_owned(),
                parameter: name.clone(),
            }),
            None => Ok(()),
        }
    }
}

/// Product of extents.
///
/// # Errors
/// Where it is too large to count with.
pub(super) fn size(extents: &[u64]) -> Result<u64, CaseError> {
    extents
        .iter()
        .try_fold(1_u64, |product, &extent| product.checked_mul(extent))
        .filter(|product| *product <= LARGEST)
        .ok_or_else(|| {
            let text: Vec<String> = extents.iter().map(u64::to_string).collect();
            CaseError::TooLarge(format!("{} elements", text.join(" x ")))
        })
}
