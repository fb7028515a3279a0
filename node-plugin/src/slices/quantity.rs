//! Byte counts and versions in the API server's canonical text.
//!
//! In: numbers. Out: text that the API server stores unchanged, so that a comparison
//! of what is wanted with what is stored finds no difference that is not one.
//! Never: rounding.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// An exact byte count: the largest binary suffix that divides it, else the largest
/// decimal one, which is what the API server's own formatter does.
#[must_use]
pub(super) fn bytes(value: u64) -> Quantity {
    let binary = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let decimal = ["", "k", "M", "G", "T", "P", "E"];
    let (base, suffixes) = if value != 0 && value.is_multiple_of(1024) {
        (1024, binary)
    } else {
        (1000, decimal)
    };
    let mut number = value;
    let mut step = 0;
    while number != 0 && number.is_multiple_of(base) && step + 1 < suffixes.len() {
        number /= base;
        step += 1;
    }
    Quantity(format!("{number}{}", suffixes[step]))
}

/// A plain count.
#[must_use]
pub(super) fn count(value: u32) -> Quantity {
    // Counts are below 1000 on every known GPU; the decimal branch covers the rest.
    if value.is_multiple_of(1024) && value != 0 {
        return Quantity(value.to_string());
    }
    bytes(u64::from(value))
}

/// A version attribute (`major.minor.patch`, semantic versioning 2.0.0, which forbids
/// leading zeros): driver `580.82.07` becomes `580.82.7`. `None` where the text has no
/// number to start with.
#[must_use]
pub(super) fn version(text: &str) -> Option<String> {
    let mut numbers = text.split('.').map(|part| {
        let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u64>().ok()
    });
    let major = numbers.next().flatten()?;
    let minor = numbers.next().flatten().unwrap_or(0);
    let patch = numbers.next().flatten().unwrap_or(0);
    Some(format!("{major}.{minor}.{patch}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_are_exact_and_canonical() {
        assert_eq!(bytes(0).0, "0");
        assert_eq!(bytes(9984 << 20).0, "9984Mi");
        assert_eq!(bytes(40 << 30).0, "40Gi");
        assert_eq!(bytes(85_520_809_984).0, "81559Mi");
        assert_eq!(bytes(85_520_809_985).0, "85520809985");
        assert_eq!(bytes(23_500_000_001_000).0, "23500000001k");
    }

    #[test]
    fn driver_versions_become_semantic_versions() {
        assert_eq!(version("580.82.07").as_deref(), Some("580.82.7"));
        assert_eq!(version("550.54").as_deref(), Some("550.54.0"));
        assert_eq!(version("beta"), None);
    }
}
