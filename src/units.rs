//! Quantities with units: sizes, rates, clocks and times.
//!
//! Every quantity is an `f64` in its SI unit inside a newtype, so that bytes cannot be divided by a clock by
//! mistake. In files a quantity is written with its unit (`819 GB/s`, `16 GiB`, `1.05 GHz`) and refused
//! without; in results it is a plain number in the SI unit.
//!
//! Decimal and binary prefixes differ: `16 GB` is 16 000 000 000 bytes, `16 GiB` is 17 179 869 184.
//!
//! ```
//! use tpusim::units::{Bytes, BytesPerSecond, Seconds};
//!
//! let size: Bytes = "16 GiB".parse()?;
//! let rate: BytesPerSecond = "819 GB/s".parse()?;
//! let time: Seconds = size / rate;
//! assert_eq!(time.to_string(), "20.98 ms");
//! # Ok::<(), tpusim::units::ParseQuantityError>(())
//! ```

use std::borrow::Cow;
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Why a text is not a quantity of the kind that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseQuantityError {
    /// A number without a unit.
    #[error("bare number `{number}`; write it with a unit, such as `{number} {unit}`")]
    Bare {
        /// The number as it was written.
        number: String,
        /// A unit that would do.
        unit: &'static str,
    },
    /// A unit of another kind of quantity, or none that is known.
    #[error("unit `{found}` is not a unit of {quantity}; expected one such as `{example}`")]
    WrongUnit {
        /// The unit as it was written.
        found: String,
        /// What was asked for.
        quantity: &'static str,
        /// A well-formed example.
        example: &'static str,
    },
    /// No number at the front.
    #[error("`{found}` is not a {quantity}; expected a number with a unit, such as `{example}`")]
    NotANumber {
        /// The whole text.
        found: String,
        /// What was asked for.
        quantity: &'static str,
        /// A well-formed example.
        example: &'static str,
    },
    /// Zero or less where that has no meaning.
    #[error("{quantity} `{found}` is not positive; expected more than zero, such as `{example}`")]
    NotPositive {
        /// The whole text.
        found: String,
        /// What was asked for.
        quantity: &'static str,
        /// A well-formed example.
        example: &'static str,
    },
    /// Less than zero where zero is allowed.
    #[error("{quantity} `{found}` is negative; expected zero or more, such as `{example}`")]
    Negative {
        /// The whole text.
        found: String,
        /// What was asked for.
        quantity: &'static str,
        /// A well-formed example.
        example: &'static str,
    },
    /// Infinite, not a number, or beyond the range of a double.
    #[error("{quantity} `{found}` is not finite; expected a number such as `{example}`")]
    NotFinite {
        /// The whole text.
        found: String,
        /// What was asked for.
        quantity: &'static str,
        /// A well-formed example.
        example: &'static str,
    },
}

/// What tells one kind of quantity from another in text.
struct Unit {
    /// How a person calls the quantity, with no article.
    quantity: &'static str,
    /// A well-formed example for messages.
    example: &'static str,
    /// The unit proposed for a bare number.
    proposal: &'static str,
    /// Accepted unit symbols; the first is the one printed.
    symbols: &'static [&'static str],
    /// Accepted prefixes with their factors, smallest first. The empty prefix is among them.
    prefixes: &'static [(&'static str, f64)],
    /// Whether zero means something.
    zero_allowed: bool,
}

const DECIMAL: &[(&str, f64)] = &[
    ("", 1.0),
    ("k", 1e3),
    ("M", 1e6),
    ("G", 1e9),
    ("T", 1e12),
    ("P", 1e15),
    ("E", 1e18),
];

const DECIMAL_AND_BINARY: &[(&str, f64)] = &[
    ("", 1.0),
    ("k", 1e3),
    ("Ki", 1024.0),
    ("M", 1e6),
    ("Mi", 1_048_576.0),
    ("G", 1e9),
    ("Gi", 1_073_741_824.0),
    ("T", 1e12),
    ("Ti", 1_099_511_627_776.0),
    ("P", 1e15),
    ("Pi", 1_125_899_906_842_624.0),
    ("E", 1e18),
    ("Ei", 1_152_921_504_606_846_976.0),
];

/// Both micro signs that keyboards produce are read; `u` is printed.
const SMALL: &[(&str, f64)] = &[
    ("p", 1e-12),
    ("n", 1e-9),
    ("u", 1e-6),
    ("\u{b5}", 1e-6),
    ("\u{3bc}", 1e-6),
    ("m", 1e-3),
    ("", 1.0),
];

/// Length of the number at the front of `text`: sign, digits, point, exponent.
fn number_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let digits = |from: usize| bytes.iter().skip(from).take_while(|b| b.is_ascii_digit()).count();
    let is = |at: usize, set: &[u8]| bytes.get(at).is_some_and(|b| set.contains(b));
    let mut end = usize::from(is(0, b"+-"));
    let whole = digits(end);
    end += whole;
    let mut fraction = 0;
    if is(end, b".") {
        fraction = digits(end + 1);
        if whole + fraction > 0 {
            end += 1 + fraction;
        }
    }
    if whole + fraction == 0 {
        return 0;
    }
    if is(end, b"eE") {
        let sign = usize::from(is(end + 1, b"+-"));
        let exponent = digits(end + 1 + sign);
        // `1 EB` without the blank is `1EB`: an `E` that no digit follows is a prefix, not an exponent.
        if exponent > 0 {
            end += 1 + sign + exponent;
        }
    }
    end
}

fn parse(text: &str, unit: &Unit) -> Result<f64, ParseQuantityError> {
    let text = text.trim();
    let (quantity, example) = (unit.quantity, unit.example);
    let found = || text.to_owned();
    let (number_text, rest) = text.split_at(number_length(text));
    let Ok(number) = number_text.parse::<f64>() else {
        let word = text.trim_start_matches(['+', '-', '.']).to_ascii_lowercase();
        return Err(if word.starts_with("nan") || word.starts_with("inf") {
            ParseQuantityError::NotFinite {
                found: found(),
                quantity,
                example,
            }
        } else {
            ParseQuantityError::NotANumber {
                found: found(),
                quantity,
                example,
            }
        });
    };
    let symbol = rest.trim_start();
    if symbol.is_empty() {
        return Err(ParseQuantityError::Bare {
            number: number_text.to_owned(),
            unit: unit.proposal,
        });
    }
    let factor = unit.symbols.iter().find_map(|candidate| {
        let prefix = symbol.strip_suffix(candidate)?;
        unit.prefixes
            .iter()
            .find(|(name, _)| *name == prefix)
            .map(|(_, factor)| *factor)
    });
    let Some(factor) = factor else {
        return Err(ParseQuantityError::WrongUnit {
            found: symbol.to_owned(),
            quantity,
            example,
        });
    };
    check(number * factor, unit, found)
}

fn check(value: f64, unit: &Unit, found: impl Fn() -> String) -> Result<f64, ParseQuantityError> {
    let (quantity, example) = (unit.quantity, unit.example);
    if !value.is_finite() {
        return Err(ParseQuantityError::NotFinite {
            found: found(),
            quantity,
            example,
        });
    }
    if unit.zero_allowed && value < 0.0 {
        return Err(ParseQuantityError::Negative {
            found: found(),
            quantity,
            example,
        });
    }
    if !unit.zero_allowed && value <= 0.0 {
        return Err(ParseQuantityError::NotPositive {
            found: found(),
            quantity,
            example,
        });
    }
    Ok(value)
}

/// Regular expression of the texts that are read as a quantity. Whether a number is beyond the range of a double, it does not tell.
fn pattern(unit: &Unit) -> String {
    let prefixes: Vec<&str> = unit.prefixes.iter().map(|(prefix, _)| *prefix).collect();
    // Zero where it means nothing: somewhere before the exponent stands another digit.
    let more_than_zero = if unit.zero_allowed { "" } else { "(?=[0-9.]*[1-9])" };
    format!(
        r"^\s*\+?{more_than_zero}([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*({})({})\s*$",
        prefixes.join("|"),
        unit.symbols.join("|")
    )
}

/// `value` with at most four significant digits and no trailing zeros, for `value` in `[1, 1000)`.
fn four_digits(value: f64) -> String {
    let decimals = if value >= 999.95 {
        0
    } else if value >= 99.995 {
        1
    } else if value >= 9.9995 {
        2
    } else {
        3
    };
    let text = format!("{value:.decimals$}");
    if text.contains('.') {
        return text.trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    text
}

fn format(value: f64, unit: &Unit) -> String {
    let symbol = unit.symbols.first().copied().unwrap_or_default();
    if value == 0.0 || !value.is_finite() {
        return format!("{value} {symbol}");
    }
    // Memory sizes that are whole in a binary unit were meant in it.
    let binary = unit
        .prefixes
        .iter()
        .rev()
        .filter(|(name, _)| name.ends_with('i'))
        .map(|(name, factor)| (name, value / factor))
        .find(|(_, scaled)| *scaled >= 1.0);
    if let Some((name, scaled)) = binary
        && scaled.fract() == 0.0
        && scaled < 1024.0
    {
        return format!("{scaled} {name}{symbol}");
    }
    let magnitude = value.abs();
    let decimal = |name: &str| !name.ends_with('i') && name.is_ascii();
    // A value that rounds up to 1000 of a prefix is 1 of the next.
    let best = unit
        .prefixes
        .iter()
        .filter(|(name, _)| decimal(name))
        .rev()
        .find(|(_, factor)| magnitude / factor >= 0.999_95)
        .or_else(|| unit.prefixes.first());
    let (name, factor) = best.copied().unwrap_or(("", 1.0));
    let scaled = magnitude / factor;
    let digits = if (0.999..100_000.0).contains(&scaled) {
        four_digits(scaled)
    } else {
        format!("{scaled:.3e}")
    };
    let sign = if value < 0.0 { "-" } else { "" };
    format!("{sign}{digits} {name}{symbol}")
}

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident, $unit:ident = $spec:expr) => {
        const $unit: Unit = $spec;

        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
        pub struct $name(pub f64);

        impl $name {
            /// The value in the SI unit.
            #[must_use]
            pub const fn get(self) -> f64 {
                self.0
            }

            /// The smaller of two.
            #[must_use]
            pub fn min(self, other: Self) -> Self {
                Self(self.0.min(other.0))
            }

            /// The larger of two.
            #[must_use]
            pub fn max(self, other: Self) -> Self {
                Self(self.0.max(other.0))
            }
        }

        impl FromStr for $name {
            type Err = ParseQuantityError;

            /// Reads a number with a unit.
            ///
            /// # Errors
            /// [`ParseQuantityError`] where the number, the unit or the range is not that of this quantity.
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                parse(text, &$unit).map(Self)
            }
        }

        /// For people: four significant digits and a fitting prefix.
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&format(self.0, &$unit))
            }
        }

        /// A plain number in the SI unit.
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_f64(self.0)
            }
        }

        /// A text with a unit; a bare number is refused.
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Text;

                impl Visitor<'_> for Text {
                    type Value = $name;

                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        write!(f, "a {} with a unit, such as `{}`", $unit.quantity, $unit.example)
                    }

                    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                        text.parse().map_err(E::custom)
                    }

                    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
                        number.to_string().parse().map_err(E::custom)
                    }

                    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
                        number.to_string().parse().map_err(E::custom)
                    }

                    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Self::Value, E> {
                        number.to_string().parse().map_err(E::custom)
                    }
                }

                deserializer.deserialize_str(Text)
            }
        }

        /// A text with a unit, as a pattern of the same numbers, prefixes and symbols that are read.
        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                Cow::Borrowed(stringify!($name))
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "pattern": pattern(&$unit), "examples": [$unit.example] })
            }
        }

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }

        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }

        impl Mul<f64> for $name {
            type Output = Self;
            fn mul(self, factor: f64) -> Self {
                Self(self.0 * factor)
            }
        }

        impl Mul<$name> for f64 {
            type Output = $name;
            fn mul(self, quantity: $name) -> $name {
                $name(self * quantity.0)
            }
        }

        impl Div<f64> for $name {
            type Output = Self;
            fn div(self, divisor: f64) -> Self {
                Self(self.0 / divisor)
            }
        }

        /// A ratio of two quantities of one kind has no unit.
        impl Div for $name {
            type Output = f64;
            fn div(self, other: Self) -> f64 {
                self.0 / other.0
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(items: I) -> Self {
                // Adding to positive zero keeps an empty sum from printing as `-0`.
                items.fold(Self(0.0), Add::add)
            }
        }
    };
}

quantity!(
    /// An amount of memory or traffic, in bytes.
    Bytes,
    BYTES = Unit {
        quantity: "size",
        example: "16 GiB",
        proposal: "GiB",
        symbols: &["B"],
        prefixes: DECIMAL_AND_BINARY,
        zero_allowed: false,
    }
);

quantity!(
    /// A memory or link rate, in bytes per second.
    BytesPerSecond,
    BYTES_PER_SECOND = Unit {
        quantity: "bandwidth",
        example: "819 GB/s",
        proposal: "GB/s",
        symbols: &["B/s"],
        prefixes: DECIMAL_AND_BINARY,
        zero_allowed: false,
    }
);

quantity!(
    /// A compute rate, in floating-point operations per second. Integer rates (`TOP/s`) are read as well: one
    /// multiply-add counts as two operations in either.
    FlopsPerSecond,
    FLOPS_PER_SECOND = Unit {
        quantity: "compute rate",
        example: "275 TFLOP/s",
        proposal: "TFLOP/s",
        symbols: &["FLOP/s", "OP/s"],
        prefixes: DECIMAL,
        zero_allowed: false,
    }
);

quantity!(
    /// A clock, in cycles per second.
    Hertz,
    HERTZ = Unit {
        quantity: "clock",
        example: "1.05 GHz",
        proposal: "GHz",
        symbols: &["Hz"],
        prefixes: DECIMAL,
        zero_allowed: false,
    }
);

quantity!(
    /// A time, in seconds. The only quantity that may be zero.
    Seconds,
    SECONDS = Unit {
        quantity: "time",
        example: "0.9 us",
        proposal: "us",
        symbols: &["s"],
        prefixes: SMALL,
        zero_allowed: true,
    }
);

impl Seconds {
    /// From microseconds.
    #[must_use]
    pub fn from_micros(micros: f64) -> Self {
        Self(micros * 1e-6)
    }

    /// In microseconds.
    #[must_use]
    pub fn micros(self) -> f64 {
        self.0 * 1e6
    }
}

impl Div<BytesPerSecond> for Bytes {
    type Output = Seconds;
    fn div(self, rate: BytesPerSecond) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}

impl Div<Seconds> for Bytes {
    type Output = BytesPerSecond;
    fn div(self, time: Seconds) -> BytesPerSecond {
        BytesPerSecond(self.0 / time.0)
    }
}

impl Mul<Seconds> for BytesPerSecond {
    type Output = Bytes;
    fn mul(self, time: Seconds) -> Bytes {
        Bytes(self.0 * time.0)
    }
}

/// Ridge point: operations per byte at which compute and memory take equally long.
impl Div<BytesPerSecond> for FlopsPerSecond {
    type Output = f64;
    fn div(self, rate: BytesPerSecond) -> f64 {
        self.0 / rate.0
    }
}

/// Cycles in a time.
impl Mul<Hertz> for Seconds {
    type Output = f64;
    fn mul(self, clock: Hertz) -> f64 {
        self.0 * clock.0
    }
}

/// The time of a number of cycles.
impl Div<Hertz> for f64 {
    type Output = Seconds;
    fn div(self, clock: Hertz) -> Seconds {
        Seconds(self / clock.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message<T: FromStr<Err = ParseQuantityError> + fmt::Debug>(text: &str) -> String {
        match text.parse::<T>() {
            Ok(value) => format!("read as {value:?}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn units_and_prefixes_are_read_exactly() {
        assert_eq!("819 GB/s".parse(), Ok(BytesPerSecond(819e9)));
        assert_eq!("819GB/s".parse(), Ok(BytesPerSecond(819e9)));
        assert_eq!(
            "1525.5 GiB/s".parse(),
            Ok(BytesPerSecond(1525.5 * 1_073_741_824.0))
        );
        assert_eq!("16 GiB".parse(), Ok(Bytes(17_179_869_184.0)));
        assert_eq!("16 GB".parse(), Ok(Bytes(16e9)));
        assert_eq!("232448 B".parse(), Ok(Bytes(232_448.0)));
        assert_eq!("1EB".parse(), Ok(Bytes(1e18)));
        assert_eq!("1.5e3 B".parse(), Ok(Bytes(1500.0)));
        assert_eq!("1.05 GHz".parse(), Ok(Hertz(1.05e9)));
        assert_eq!("275 TFLOP/s".parse(), Ok(FlopsPerSecond(275e12)));
        assert_eq!("1836 TOP/s".parse(), Ok(FlopsPerSecond(1836e12)));
        assert_eq!("0 s".parse(), Ok(Seconds(0.0)));
        for text in ["0.9 us", "0.9 \u{b5}s", "0.9 \u{3bc}s"] {
            assert!(
                (text.parse::<Seconds>().map_or(0.0, Seconds::get) - 0.9e-6).abs() < 1e-18,
                "{text}"
            );
        }
    }

    #[test]
    fn bad_quantities_say_what_was_found_and_what_would_do() {
        assert_eq!(
            message::<BytesPerSecond>("819"),
            "bare number `819`; write it with a unit, such as `819 GB/s`"
        );
        assert_eq!(
            message::<BytesPerSecond>("819 GHz"),
            "unit `GHz` is not a unit of bandwidth; expected one such as `819 GB/s`"
        );
        assert_eq!(
            message::<FlopsPerSecond>("1 GiFLOP/s"),
            "unit `GiFLOP/s` is not a unit of compute rate; expected one such as `275 TFLOP/s`"
        );
        assert_eq!(
            message::<Hertz>("0 GHz"),
            "clock `0 GHz` is not positive; expected more than zero, such as `1.05 GHz`"
        );
        assert_eq!(
            message::<Bytes>("-16 GiB"),
            "size `-16 GiB` is not positive; expected more than zero, such as `16 GiB`"
        );
        assert_eq!(
            message::<Seconds>("-1 us"),
            "time `-1 us` is negative; expected zero or more, such as `0.9 us`"
        );
        for text in ["nan GB/s", ".inf GB/s", "-inf GB/s", "1e300 PB/s"] {
            let expected = format!("bandwidth `{text}` is not finite; expected a number such as `819 GB/s`");
            assert_eq!(message::<BytesPerSecond>(text), expected);
        }
        assert_eq!(
            message::<Bytes>("plenty"),
            "`plenty` is not a size; expected a number with a unit, such as `16 GiB`"
        );
    }

    #[test]
    fn people_see_four_digits() {
        assert_eq!(BytesPerSecond(819e9).to_string(), "819 GB/s");
        assert_eq!(BytesPerSecond(1_638_032_937_123.0).to_string(), "1.638 TB/s");
        assert_eq!(FlopsPerSecond(275.251_2e12).to_string(), "275.3 TFLOP/s");
        assert_eq!(FlopsPerSecond(999.96e12).to_string(), "1 PFLOP/s");
        assert_eq!(Bytes(17_179_869_184.0).to_string(), "16 GiB");
        assert_eq!(Bytes(80e9).to_string(), "80 GB");
        assert_eq!(Bytes(232_448.0).to_string(), "227 KiB");
        assert_eq!(Seconds(0.9e-6).to_string(), "900 ns");
        assert_eq!(Seconds(0.0).to_string(), "0 s");
        assert_eq!(Seconds(-1.5e-3).to_string(), "-1.5 ms");
        assert_eq!(format!("{:>10}", Hertz(1.05e9)), "  1.05 GHz");
    }

    proptest! {
        #[test]
        fn printed_quantities_read_back(mantissa in 1.0..1000.0f64, exponent in -11i32..18) {
            let value = mantissa * 10f64.powi(exponent);
            let close = |read: f64| (read / value - 1.0).abs() < 6e-4;
            prop_assert!(close(Seconds(value).to_string().parse::<Seconds>()?.get()));
            if exponent >= 0 {
                prop_assert!(close(Bytes(value).to_string().parse::<Bytes>()?.get()));
                prop_assert!(close(BytesPerSecond(value).to_string().parse::<BytesPerSecond>()?.get()));
                prop_assert!(close(FlopsPerSecond(value).to_string().parse::<FlopsPerSecond>()?.get()));
                prop_assert!(close(Hertz(value).to_string().parse::<Hertz>()?.get()));
            }
        }

        #[test]
        fn the_pattern_of_a_schema_is_what_is_read(
            sign in "[+-]?", whole in "[0-9]{0,3}", rest in "(\\.[0-9]{0,2})?(e-?[0-9])?", prefix in "( ?[kKMGTPEmunp]i?)?",
            symbol in "(B|B/s|s|Hz|FLOP/s|OP/s|GB)?",
        ) {
            let text = format!("{sign}{whole}{rest}{prefix}{symbol}");
            let matches = |unit: &Unit| {
                let schema = serde_json::json!({ "pattern": pattern(unit) });
                jsonschema::is_valid(&schema, &serde_json::json!(text))
            };
            for (unit, read) in [
                (&BYTES, parse(&text, &BYTES)),
                (&BYTES_PER_SECOND, parse(&text, &BYTES_PER_SECOND)),
                (&FLOPS_PER_SECOND, parse(&text, &FLOPS_PER_SECOND)),
                (&HERTZ, parse(&text, &HERTZ)),
                (&SECONDS, parse(&text, &SECONDS)),
            ] {
                // Minus zero is read as zero, which nobody writes.
                let written = read.is_ok() && !text.starts_with('-');
                prop_assert_eq!(written, matches(unit), "`{}` as {}: {:?}", text, unit.quantity, read);
            }
        }

        #[test]
        fn any_text_is_answered(text in ".*") {
            let _ = text.parse::<Bytes>();
            let _ = text.parse::<Seconds>();
        }
    }
}
