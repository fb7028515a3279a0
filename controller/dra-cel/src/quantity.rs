//! Kubernetes quantities, exactly.
//!
//! In: text such as `80Gi`, `1500m`, `12e6` (apimachinery's
//! `resource.ParseQuantity` grammar). Out: an exact number of nano-units and
//! the canonical text. Never a floating point number.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// Nano-units in one unit: the finest step that a quantity can hold.
const NANO: i128 = 1_000_000_000;

/// Binary quantities are capped here, as Kubernetes does (2^63 − 1 units).
const BINARY_CAP: i128 = i64::MAX as i128 * NANO;

/// Why a text is not a quantity, or a number not representable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// The text does not have the form number + suffix.
    #[error("{0:?} is not a quantity: expected a number and a suffix, such as 512Mi or 1.5")]
    Format(String),
    /// The number is well formed but its suffix is unknown.
    #[error("{text:?} is not a quantity: unknown suffix {suffix:?}")]
    Suffix {
        /// The whole text.
        text: String,
        /// The part that is no suffix.
        suffix: String,
    },
    /// Beyond ±1.7·10^29 units, which no capacity of a device reaches.
    #[error("quantity {0:?} is too large")]
    TooLarge(String),
}

/// How a quantity was written, and is written again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Format {
    #[default]
    DecimalSi,
    DecimalExponent,
    BinarySi,
}

/// An exact Kubernetes quantity: nano-units plus the notation it came in.
///
/// Equality and order compare the number only: `1024Mi == 1Gi`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quantity {
    nano: i128,
    format: Format,
}

impl Quantity {
    /// Zero.
    pub const ZERO: Self = Self {
        nano: 0,
        format: Format::DecimalSi,
    };

    /// A whole number of units, printed in decimal notation.
    pub const fn from_units(units: i64) -> Self {
        Self {
            nano: units as i128 * NANO,
            format: Format::DecimalSi,
        }
    }

    /// A number of bytes, printed in binary notation (`Ki`, `Mi`, …).
    pub const fn from_bytes(bytes: u64) -> Self {
        Self {
            nano: bytes as i128 * NANO,
            format: Format::BinarySi,
        }
    }

    /// A number of nano-units in decimal notation.
    pub const fn from_nano(nano: i128) -> Self {
        Self {
            nano,
            format: Format::DecimalSi,
        }
    }

    /// The exact number, in nano-units.
    pub const fn nano(self) -> i128 {
        self.nano
    }

    /// Whole bytes (units), rounded down; `None` when negative or above
    /// `u64::MAX`.
    pub fn to_bytes(self) -> Option<u64> {
        u64::try_from(self.nano.div_euclid(NANO)).ok()
    }

    /// The number of whole units when it is one and fits 64 bits.
    pub fn as_i64(self) -> Option<i64> {
        if self.nano % NANO != 0 {
            return None;
        }
        i64::try_from(self.nano / NANO).ok()
    }

    /// The nearest floating point number; only for showing to people and for
    /// CEL's `asApproximateFloat()`.
    #[allow(clippy::cast_precision_loss)]
    pub fn approximate(self) -> f64 {
        self.nano as f64 / NANO as f64
    }

    /// −1, 0 or 1.
    pub const fn sign(self) -> i64 {
        self.nano.signum() as i64
    }

    /// The sum in this quantity's notation; `None` on overflow.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        Some(Self {
            nano: self.nano.checked_add(other.nano)?,
            ..self
        })
    }

    /// The difference in this quantity's notation; `None` on overflow.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        Some(Self {
            nano: self.nano.checked_sub(other.nano)?,
            ..self
        })
    }

    /// The smallest `from + n·step` that is not below `self`: how a scheduler
    /// rounds a request up to a capacity's step. A step of zero or less leaves
    /// the larger of `self` and `from`.
    pub fn round_up(self, from: Self, step: Self) -> Self {
        if self.nano <= from.nano {
            return from;
        }
        if step.nano <= 0 {
            return self;
        }
        let over = self.nano - from.nano;
        let steps = over.div_euclid(step.nano) + i128::from(over % step.nano != 0);
        Self {
            nano: from.nano.saturating_add(steps.saturating_mul(step.nano)),
            ..self
        }
    }

    /// The canonical text split in number and suffix.
    fn canonical(self) -> (i128, String) {
        if self.nano == 0 {
            return (0, String::new());
        }
        let whole = self.nano % NANO == 0;
        if self.format == Format::BinarySi && whole && (self.nano / NANO).abs() >= 1024 {
            let mut number = self.nano / NANO;
            let mut step = 0;
            while number % 1024 == 0 && step + 1 < BINARY.len() {
                number /= 1024;
                step += 1;
            }
            return (number, BINARY[step].to_owned());
        }
        let mut number = self.nano;
        let mut exponent = -9;
        while number % 1000 == 0 && (exponent < 18 || self.format == Format::DecimalExponent) {
            number /= 1000;
            exponent += 3;
        }
        let suffix = match self.format {
            Format::DecimalExponent if exponent == 0 => String::new(),
            Format::DecimalExponent => format!("e{exponent}"),
            Format::DecimalSi | Format::BinarySi => DECIMAL
                .iter()
                .find(|(_, e)| *e == exponent)
                .map_or_else(String::new, |(s, _)| (*s).to_owned()),
        };
        (number, suffix)
    }
}

const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

const DECIMAL: [(&str, i32); 10] = [
    ("n", -9),
    ("u", -6),
    ("m", -3),
    ("", 0),
    ("k", 3),
    ("M", 6),
    ("G", 9),
    ("T", 12),
    ("P", 15),
    ("E", 18),
];

/// Multiplier of a suffix: a power of ten, or of two.
enum Scale {
    Ten(i32, Format),
    Two(u32),
}

fn scale(suffix: &str) -> Option<Scale> {
    if let Some((_, exponent)) = DECIMAL.iter().find(|(s, _)| *s == suffix) {
        return Some(Scale::Ten(*exponent, Format::DecimalSi));
    }
    if let Some(power) = BINARY.iter().skip(1).position(|s| *s == suffix) {
        return Some(Scale::Two(10 * (u32::try_from(power).ok()? + 1)));
    }
    let digits = suffix.strip_prefix(['e', 'E'])?;
    digits
        .parse()
        .ok()
        .map(|exponent| Scale::Ten(exponent, Format::DecimalExponent))
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || QuantityError::Format(text.to_owned());
        let too_large = || QuantityError::TooLarge(text.to_owned());

        let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
        let end = unsigned
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.len() + fraction.len() == 0 || fraction.contains('.') {
            return Err(malformed());
        }
        let scale = scale(suffix).ok_or_else(|| QuantityError::Suffix {
            text: text.to_owned(),
            suffix: suffix.to_owned(),
        })?;

        // Leading and trailing zeros cost range and carry nothing.
        let fraction = fraction.trim_end_matches('0');
        let digits = format!("{whole}{fraction}");
        let digits = digits.trim_start_matches('0');
        let mantissa: i128 = if digits.is_empty() {
            0
        } else {
            digits.parse().map_err(|_| too_large())?
        };
        let places = i32::try_from(fraction.len()).map_err(|_| too_large())?;

        let (nano, format) = match scale {
            Scale::Ten(exponent, format) => {
                let power = exponent.saturating_sub(places).saturating_add(9);
                (times_ten_to(mantissa, power).ok_or_else(too_large)?, format)
            }
            Scale::Two(exponent) => {
                let scaled = mantissa.checked_mul(1_i128 << exponent);
                let nano = scaled.and_then(|n| times_ten_to(n, 9 - places));
                // Kubernetes caps binary quantities instead of refusing them.
                let nano = nano.unwrap_or(BINARY_CAP).min(BINARY_CAP);
                let format = if nano > 0 && nano < NANO {
                    Format::DecimalSi
                } else {
                    Format::BinarySi
                };
                (nano, format)
            }
        };
        let nano = if text.starts_with('-') { -nano } else { nano };
        Ok(Self { nano, format })
    }
}

/// `mantissa · 10^power`, rounded away from zero; `None` on overflow.
fn times_ten_to(mantissa: i128, power: i32) -> Option<i128> {
    if mantissa == 0 {
        return Some(0);
    }
    if power >= 0 {
        return 10_i128
            .checked_pow(power.unsigned_abs())?
            .checked_mul(mantissa);
    }
    match 10_i128.checked_pow(power.unsigned_abs()) {
        Some(divisor) => Some(mantissa / divisor + i128::from(mantissa % divisor != 0)),
        None => Some(1),
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, suffix) = self.canonical();
        write!(f, "{number}{suffix}")
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nano == other.nano
    }
}

impl Eq for Quantity {}

impl std::hash::Hash for Quantity {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.nano.hash(state);
    }
}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nano.cmp(&other.nano)
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Quantity;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity as text or a whole number")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Quantity, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, units: i64) -> Result<Quantity, E> {
                Ok(Quantity::from_units(units))
            }

            fn visit_u64<E: de::Error>(self, units: u64) -> Result<Quantity, E> {
                Ok(Quantity::from_nano(i128::from(units) * NANO))
            }
        }
        deserializer.deserialize_any(Text)
    }
}
