//! Values of the scalar unit: 32-bit numbers, addresses and what is unknown.
//!
//! An address is the number of what it points into times 2^44 plus an offset, so that adding to it works like
//! adding to a number. What is unknown carries where it came from, so that a branch that depends on it can
//! name what is missing.

/// A value.
pub(super) type Value = i64;

/// Bits of an address below the number of what it points into.
const OFFSET_BITS: u32 = 44;
/// From here on a value is an address: numbers have 32 bits.
const FIRST_ADDRESS: Value = 1 << 40;
/// Unknown values lie below this.
const UNKNOWN_END: Value = Value::MIN + (1 << 32);
/// Largest 32-bit number.
const MASK: Value = 0xffff_ffff;

/// An unknown value from origin `origin`.
pub(super) fn unknown(origin: u32) -> Value {
    Value::MIN + Value::from(origin)
}

/// Where an unknown value comes from; `None` for a known one.
pub(super) fn origin(value: Value) -> Option<u32> {
    (value < UNKNOWN_END).then(|| (value - Value::MIN) as u32)
}

/// Address of the start of an object.
pub(super) fn address(object: u32) -> Value {
    (Value::from(object) + 1) << OFFSET_BITS
}

/// The object that an address points into, and the offset there; `None` for a number.
pub(super) fn target(value: Value) -> Option<(u32, i64)> {
    if value < FIRST_ADDRESS {
        return None;
    }
    // Offsets may be negative.
    let object = value.saturating_add(1 << (OFFSET_BITS - 1)) >> OFFSET_BITS;
    (object > 0).then(|| ((object - 1) as u32, value - (object << OFFSET_BITS)))
}

/// A number as the signed number that a register holds; an address stays what it is.
fn signed(value: Value) -> Value {
    if value > MASK {
        value
    } else {
        Value::from((value as u32).cast_signed())
    }
}

/// Keeps 32 bits of a number; an address stays what it is.
fn wrap(value: Value) -> Value {
    if value > FIRST_ADDRESS {
        value
    } else {
        value & MASK
    }
}

/// Operations of two values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Binary {
    Add,
    Subtract,
    Multiply,
    ShiftLeft,
    ShiftRight,
    ShiftRightSigned,
    /// Ones below a bit: shifts left and fills with ones.
    ShiftLeftOnes,
    And,
    Or,
    Xor,
    Minimum,
    Maximum,
    MinimumUnsigned,
    MaximumUnsigned,
    Divide,
    Remainder,
    Equal,
    Unequal,
    Less(bool),
    LessEqual(bool),
    Greater(bool),
    GreaterEqual(bool),
    EitherFalse,
    NeitherTrue,
    /// Predicates: or, and.
    Either,
    Both,
}

/// Applies an operation. The result is unknown where an operand is, unless the other one decides it.
pub(super) fn apply(operation: Binary, a: Value, b: Value) -> Value {
    let unknown_operand = if a < UNKNOWN_END {
        Some(a)
    } else if b < UNKNOWN_END {
        Some(b)
    } else {
        None
    };
    if let Some(unknown) = unknown_operand {
        let decided_by = |value: Value| a == value || b == value;
        return match operation {
            Binary::Both | Binary::And | Binary::Multiply if decided_by(0) => 0,
            Binary::NeitherTrue if decided_by(1) => 0,
            Binary::Either if decided_by(1) => 1,
            Binary::EitherFalse if decided_by(0) => 1,
            _ => unknown,
        };
    }
    let ordered = |is_signed: bool| if is_signed { (signed(a), signed(b)) } else { (a, b) };
    let truth = Value::from;
    // Shift counts beyond a register's width leave nothing.
    let shift = (b & 63) as u32;
    match operation {
        Binary::Add => match (a > MASK, b > MASK) {
            (false, false) => (signed(a) + signed(b)) & MASK,
            (true, false) => a.wrapping_add(signed(b)),
            (_, true) => signed(a).wrapping_add(b),
        },
        Binary::Subtract => match (a > MASK, b > MASK) {
            (false, false) => (signed(a) - signed(b)) & MASK,
            (true, false) => a.wrapping_sub(signed(b)),
            (_, true) => wrap(a.wrapping_sub(b)),
        },
        Binary::Multiply => wrap(a.wrapping_mul(b)),
        // The compiler shifts addresses to the unit of another memory: the offset counts in what it was.
        Binary::ShiftLeft | Binary::ShiftRight | Binary::ShiftRightSigned if a > MASK => a,
        Binary::ShiftLeft => {
            if shift > 31 {
                0
            } else {
                (a << shift) & MASK
            }
        }
        Binary::ShiftRight => {
            if shift > 31 {
                0
            } else {
                a >> shift
            }
        }
        Binary::ShiftRightSigned => (signed(a) >> shift.min(31)) & MASK,
        Binary::ShiftLeftOnes => {
            if shift > 31 {
                MASK
            } else {
                ((a << shift) | ((1 << shift) - 1)) & MASK
            }
        }
        Binary::And => a & b,
        Binary::Or => a | b,
        Binary::Xor => a ^ b,
        Binary::Minimum => signed(a).min(signed(b)) & MASK,
        Binary::Maximum => signed(a).max(signed(b)) & MASK,
        Binary::MinimumUnsigned => a.min(b),
        Binary::MaximumUnsigned => a.max(b),
        Binary::Divide => a.checked_div(b).unwrap_or(MASK),
        Binary::Remainder => a.checked_rem(b).unwrap_or(a),
        Binary::Equal => truth(a == b),
        Binary::Unequal => truth(a != b),
        Binary::Less(is_signed) => {
            let (a, b) = ordered(is_signed);
            truth(a < b)
        }
        Binary::LessEqual(is_signed) => {
            let (a, b) = ordered(is_signed);
            truth(a <= b)
        }
        Binary::Greater(is_signed) => {
            let (a, b) = ordered(is_signed);
            truth(a > b)
        }
        Binary::GreaterEqual(is_signed) => {
            let (a, b) = ordered(is_signed);
            truth(a >= b)
        }
        Binary::Either => truth(a != 0 || b != 0),
        Binary::Both => truth(a != 0 && b != 0),
        Binary::EitherFalse => truth(a == 0 || b == 0),
        Binary::NeitherTrue => truth(a == 0 && b == 0),
    }
}
