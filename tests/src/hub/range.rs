//! HTTP byte ranges of one file (RFC 9110, section 14). Pure.

use std::ops::Range;

/// What a `Range` header asks of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// The whole file: no header, or one that may be ignored.
    Whole,
    /// These bytes, for a 206.
    Bytes(Range<u64>),
    /// Nothing that the file has, for a 416.
    Unsatisfiable,
}

/// The part of a file of `size` bytes that `header` asks for. Several ranges at once are answered
/// with the whole file, which the RFC allows.
pub fn requested_part(header: Option<&str>, size: u64) -> Part {
    let Some((first, last)) = header
        .and_then(|value| value.trim().strip_prefix("bytes="))
        .and_then(|range| range.split_once('-'))
    else {
        return Part::Whole;
    };
    let range = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) if first <= last => first..last.saturating_add(1).min(size),
        (Ok(first), Err(_)) if last.is_empty() => first..size,
        (Err(_), Ok(suffix)) if first.is_empty() => size.saturating_sub(suffix)..size,
        _ => return Part::Whole,
    };
    if range.start >= size {
        Part::Unsatisfiable
    } else {
        Part::Bytes(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::none(None, Part::Whole)]
    #[case::closed(Some("bytes=2-4"), Part::Bytes(2..5))]
    #[case::open(Some("bytes=4-"), Part::Bytes(4..10))]
    #[case::suffix(Some("bytes=-3"), Part::Bytes(7..10))]
    #[case::longer_than_the_file(Some("bytes=8-99"), Part::Bytes(8..10))]
    #[case::past_the_end(Some("bytes=10-"), Part::Unsatisfiable)]
    #[case::several(Some("bytes=0-1,3-4"), Part::Whole)]
    #[case::backwards(Some("bytes=5-2"), Part::Whole)]
    #[case::other_unit(Some("items=0-1"), Part::Whole)]
    fn a_range_header_selects_bytes_of_a_ten_byte_file(
        #[case] header: Option<&str>,
        #[case] expected: Part,
    ) {
        assert_eq!(requested_part(header, 10), expected);
    }
}
