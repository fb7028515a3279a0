//! Bytes of a safetensors file's tensors, from its header alone.
//!
//! In: the first bytes of a file somebody else wrote. Out: a sum. Every length
//! is checked against a cap before it is believed.
//! Format: 8 bytes little-endian header length, then that many bytes of JSON,
//! then the tensors.

use super::error::HeaderError;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

/// A header longer than this is refused (the reference implementation's own cap is 100 MB).
pub(crate) const MAX_HEADER_BYTES: u64 = 32 << 20;

#[derive(serde::Deserialize)]
struct Tensor {
    data_offsets: (u64, u64),
}

/// Length of the JSON header, from the file's first 8 bytes.
pub(crate) fn header_length(prefix: &[u8]) -> Result<u64, HeaderError> {
    let bytes: [u8; 8] = prefix
        .get(..8)
        .and_then(|p| p.try_into().ok())
        .ok_or(HeaderError::Incomplete(8))?;
    let length = u64::from_le_bytes(bytes);
    if length == 0 || length > MAX_HEADER_BYTES {
        return Err(HeaderError::malformed(format!(
            "its safetensors header claims {length} bytes; at most {MAX_HEADER_BYTES} are read"
        )));
    }
    Ok(length)
}

/// Sum of the tensors' bytes, from the JSON header (without the 8 bytes before
/// it) of a file of `file_size` bytes.
///
/// # Errors
/// [`HeaderError::Malformed`] where the header is not JSON of that shape, or its
/// tensors lie outside the file.
pub fn parse_header(json: &[u8], file_size: u64) -> Result<u64, HeaderError> {
    let room = file_size
        .saturating_sub(8)
        .saturating_sub(json.len() as u64);
    let fault = |e| HeaderError::malformed(format!("its safetensors header can't be read: {e}"));
    let mut reader = serde_json::Deserializer::from_slice(json);
    let sum = reader.deserialize_map(Tensors { room }).map_err(fault)?;
    reader.end().map_err(fault)?;
    if sum > room {
        return Err(HeaderError::malformed("its safetensors tensors overlap"));
    }
    Ok(sum)
}

/// Sums tensors as they are read: a header is never held as values, which take
/// many times the bytes of their text.
struct Tensors {
    room: u64,
}

impl<'de> Visitor<'de> for Tensors {
    type Value = u64;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a map of names to tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<u64, A::Error> {
        let mut sum = 0u64;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let (start, end) = map.next_value::<Tensor>()?.data_offsets;
            if start > end || end > self.room {
                return Err(serde::de::Error::custom(format!(
                    "a tensor is at {start}..{end} of {} bytes",
                    self.room
                )));
            }
            sum = sum.saturating_add(end - start);
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tensors_are_summed_and_metadata_is_not() {
        let json = br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[3],"data_offsets":[8,20]}}"#;
        assert_eq!(parse_header(json, 8 + json.len() as u64 + 20), Ok(20));
    }

    #[test]
    fn a_tensor_outside_the_file_is_refused() {
        let json =
            br#"{"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,18446744073709551615]}}"#;
        assert!(matches!(
            parse_header(json, 1000),
            Err(HeaderError::Malformed(_))
        ));
    }

    #[test]
    fn a_header_over_the_cap_is_refused_before_it_is_read() {
        assert!(matches!(
            header_length(&u64::MAX.to_le_bytes()),
            Err(HeaderError::Malformed(_))
        ));
        assert_eq!(header_length(&[1, 2, 3]), Err(HeaderError::Incomplete(8)));
    }

    #[test]
    fn a_header_is_not_held_as_values_and_must_end_where_it_ends() {
        // Half a million empty lists would be values of 16 MiB and more.
        let lists = vec!["[]"; 500_000].join(",");
        let json = format!(
            r#"{{"__metadata__":[{lists}],"a":{{"data_offsets":[0,8],"other":[{lists}]}}}}"#
        );
        let size = 8 + json.len() as u64 + 8;
        assert_eq!(parse_header(json.as_bytes(), size), Ok(8));
        let trailing = format!("{json}{{}}");
        assert!(parse_header(trailing.as_bytes(), size).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..256), size in any::<u64>()) {
            let _ = header_length(&bytes);
            if let Ok(sum) = parse_header(&bytes, size) {
                prop_assert!(sum <= size);
            }
        }
    }
}
