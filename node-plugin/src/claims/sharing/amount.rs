//! Amounts of consumed capacity, as the API server writes them.
//!
//! In: a Kubernetes quantity such as `8Gi` or `25`. Out: a whole number, rounded up as
//! Kubernetes does. Never: a text that is taken for zero because it was not understood.

/// The number that a quantity stands for; `None` where the text is no quantity or the
/// number has no room.
#[must_use]
pub fn parse(text: &str) -> Option<u64> {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (numerator, denominator): (u128, u128) = match suffix {
        "" => (1, 1),
        "n" => (1, 1_000_000_000),
        "u" => (1, 1_000_000),
        "m" => (1, 1_000),
        "k" => (1_000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (1_000_000_000_000, 1),
        "P" => (1_000_000_000_000_000, 1),
        "E" => (1_000_000_000_000_000_000, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        other => {
            let exponent = other.strip_prefix(['e', 'E'])?.parse::<i32>().ok()?;
            let power = 10_u128.checked_pow(exponent.unsigned_abs())?;
            if exponent < 0 { (1, power) } else { (power, 1) }
        }
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = u32::try_from(fraction.len()).ok()?;
    let value: u128 = format!("{whole}{fraction}").parse().ok()?;
    let scale = 10_u128.checked_pow(digits)?.checked_mul(denominator)?;
    u64::try_from(value.checked_mul(numerator)?.div_ceil(scale)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_whole_numbers_and_what_is_none_is_not_taken_for_zero() {
        for (text, number) in [
            ("0", 0),
            ("25", 25),
            ("8Gi", 8 << 30),
            ("81559Mi", 85_520_809_984),
            ("1.5Gi", 3 << 29),
            ("1500m", 2),
            ("1k", 1000),
            ("2e3", 2000),
            ("1E", 1_000_000_000_000_000_000),
        ] {
            assert_eq!(parse(text), Some(number), "{text}");
        }
        for text in [
            "", "Gi", "-1", "1..2", "1 Gi", "1Xi", "17Ei", "1e999", "1.2.3",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
