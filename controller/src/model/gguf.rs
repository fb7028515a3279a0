//! The header of a GGUF file: its architecture, and the bytes of its tensors.
//!
//! In: the first bytes of a file that somebody else wrote. Out: a
//! [`GgufHeader`], or how many bytes more are needed. Nothing is allocated by a
//! length that the file claims; every count and length has a cap.
//! Format: magic, version, tensor count, key-value pairs, tensor descriptions.

use super::error::HeaderError;
use super::kv::{KvGroup, KvLayout};
use std::collections::BTreeMap;

/// No header is read beyond this (vocabularies of 256,000 tokens take 10 MiB).
pub(crate) const MAX_HEADER_BYTES: u64 = 32 << 20;
const MAX_PAIRS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 18;
const MAX_KEY: u64 = 1 << 16;
const MAX_STRING: u64 = 8 << 20;
const MAX_NUMBERS: u64 = MAX_LAYERS;
const MAX_LAYERS: u64 = 4_096;
const MAX_WIDTH: u64 = 1 << 24;
const MAX_CONTEXT: u64 = 1 << 32;

/// What sizing needs of a GGUF header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufHeader {
    /// `general.architecture`.
    pub architecture: String,
    /// Transformer layers.
    pub layers: u32,
    /// Width of the hidden state.
    pub hidden_size: u64,
    /// Key and value heads (the most that a layer has).
    pub kv_heads: u32,
    /// Width of a key.
    pub head_dim: u32,
    /// Longest context, in tokens.
    pub context_length: u64,
    /// Law of the cache.
    pub kv: KvLayout,
    /// Bytes of the tensors described here; none where one has a type that this
    /// version does not know (the file's size is the bound then).
    pub tensor_bytes: Option<u64>,
    /// The element type that holds the most bytes.
    pub dtype: Option<&'static str>,
    /// Tensors described.
    pub tensors: u64,
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: u64) -> Result<&'a [u8], HeaderError> {
        let end = (self.at as u64).saturating_add(n);
        if end > MAX_HEADER_BYTES {
            return Err(HeaderError::malformed(format!(
                "its GGUF header goes on after {MAX_HEADER_BYTES} bytes"
            )));
        }
        let slice = self
            .bytes
            .get(self.at..end as usize)
            .ok_or(HeaderError::Incomplete(end))?;
        self.at = end as usize;
        Ok(slice)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], HeaderError> {
        let slice = self.take(N as u64)?;
        slice
            .try_into()
            .map_err(|_| HeaderError::malformed("a number is cut short"))
    }

    fn u32(&mut self) -> Result<u32, HeaderError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, HeaderError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn count(&mut self, what: &str, cap: u64) -> Result<u64, HeaderError> {
        let n = self.u64()?;
        if n > cap {
            return Err(HeaderError::malformed(format!(
                "its GGUF header claims {n} {what}; at most {cap} are read"
            )));
        }
        Ok(n)
    }

    fn string(&mut self, cap: u64) -> Result<&'a [u8], HeaderError> {
        let n = self.count("bytes in one string", cap)?;
        self.take(n)
    }
}

/// A value worth keeping: numbers, short text, and what matters of a list of
/// numbers. A list itself could take eight times the bytes that it was read from.
enum Kept {
    Int(u64),
    Text(String),
    Ints { count: u64, max: u64, sum: u64 },
    Other,
}

/// Whether the value of a key is used at all.
fn wanted(key: &[u8]) -> bool {
    const SUFFIXES: [&[u8]; 10] = [
        b".block_count",
        b".embedding_length",
        b".attention.head_count",
        b".attention.head_count_kv",
        b".attention.key_length",
        b".attention.value_length",
        b".attention.kv_lora_rank",
        b".rope.dimension_count",
        b".context_length",
        b"general.architecture",
    ];
    key.len() <= 256 && SUFFIXES.iter().any(|s| key.ends_with(s))
}

/// Bytes of a value of a fixed-width type; none for strings and arrays.
fn width(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn integer(kind: u32, bytes: &[u8]) -> Option<u64> {
    let mut wide = [0u8; 8];
    wide.get_mut(..bytes.len())?.copy_from_slice(bytes);
    let n = u64::from_le_bytes(wide);
    match kind {
        0 | 2 | 4 | 10 => Some(n),
        // Signed ones are lengths too; a negative one is no length.
        1 => (n as u8 as i8).try_into().ok(),
        3 => (n as u16 as i16).try_into().ok(),
        5 => (n as u32 as i32).try_into().ok(),
        11 => (n as i64).try_into().ok(),
        _ => None,
    }
}

fn value(r: &mut Reader<'_>, kind: u32) -> Result<Kept, HeaderError> {
    if let Some(w) = width(kind) {
        return Ok(integer(kind, r.take(w)?).map_or(Kept::Other, Kept::Int));
    }
    match kind {
        8 => {
            let s = r.string(MAX_STRING)?;
            Ok(if s.len() <= 256 {
                Kept::Text(String::from_utf8_lossy(s).into_owned())
            } else {
                Kept::Other
            })
        }
        9 => {
            let element = r.u32()?;
            let n = r.count("elements of an array", MAX_HEADER_BYTES)?;
            match (width(element), element) {
                (Some(w), _) => {
                    let bytes = r.take(n.saturating_mul(w))?;
                    if n > MAX_NUMBERS {
                        return Ok(Kept::Other);
                    }
                    let (mut max, mut sum) = (0u64, 0u64);
                    for chunk in bytes.chunks_exact(w as usize) {
                        let Some(n) = integer(element, chunk) else {
                            return Ok(Kept::Other);
                        };
                        max = max.max(n);
                        sum = sum.saturating_add(n);
                    }
                    Ok(Kept::Ints { count: n, max, sum })
                }
                (None, 8) => {
                    for _ in 0..n {
                        r.string(MAX_STRING)?;
                    }
                    Ok(Kept::Other)
                }
                _ => Err(HeaderError::malformed("its GGUF header nests arrays")),
            }
        }
        other => Err(HeaderError::malformed(format!(
            "its GGUF header has a value of type {other}"
        ))),
    }
}

/// Name, elements per block, bytes per block of a ggml tensor type.
fn tensor_type(kind: u32) -> Option<(&'static str, u64, u64)> {
    Some(match kind {
        0 => ("F32", 1, 4),
        1 => ("F16", 1, 2),
        2 => ("Q4_0", 32, 18),
        3 => ("Q4_1", 32, 20),
        6 => ("Q5_0", 32, 22),
        7 => ("Q5_1", 32, 24),
        8 => ("Q8_0", 32, 34),
        9 => ("Q8_1", 32, 36),
        10 => ("Q2_K", 256, 84),
        11 => ("Q3_K", 256, 110),
        12 => ("Q4_K", 256, 144),
        13 => ("Q5_K", 256, 176),
        14 => ("Q6_K", 256, 210),
        15 => ("Q8_K", 256, 292),
        16 => ("IQ2_XXS", 256, 66),
        17 => ("IQ2_XS", 256, 74),
        18 => ("IQ3_XXS", 256, 98),
        19 => ("IQ1_S", 256, 50),
        20 => ("IQ4_NL", 32, 18),
        21 => ("IQ3_S", 256, 110),
        22 => ("IQ2_S", 256, 82),
        23 => ("IQ4_XS", 256, 136),
        24 => ("I8", 1, 1),
        25 => ("I16", 1, 2),
        26 => ("I32", 1, 4),
        27 => ("I64", 1, 8),
        28 => ("F64", 1, 8),
        29 => ("IQ1_M", 256, 56),
        30 => ("BF16", 1, 2),
        34 => ("TQ1_0", 256, 54),
        35 => ("TQ2_0", 256, 66),
        39 => ("MXFP4", 32, 17),
        _ => return None,
    })
}

/// Reads a GGUF header from the first bytes of a file.
///
/// # Errors
/// [`HeaderError::Incomplete`] with the length that would get further;
/// [`HeaderError::Malformed`] where no more bytes would help.
pub fn parse(bytes: &[u8]) -> Result<GgufHeader, HeaderError> {
    let mut r = Reader { bytes, at: 0 };
    if r.take(4)? != b"GGUF" {
        return Err(HeaderError::malformed("it does not begin with GGUF"));
    }
    let version = r.u32()?;
    if !(2..=3).contains(&version) {
        return Err(HeaderError::malformed(format!(
            "its GGUF version is {version}; versions 2 and 3 (little-endian) are read"
        )));
    }
    let tensors = r.count("tensors", MAX_TENSORS)?;
    let pairs = r.count("key-value pairs", MAX_PAIRS)?;
    let mut kept = BTreeMap::new();
    for _ in 0..pairs {
        let key = r.string(MAX_KEY)?;
        let kind = r.u32()?;
        match value(&mut r, kind)? {
            Kept::Other => {}
            v if wanted(key) => {
                kept.insert(String::from_utf8_lossy(key).into_owned(), v);
            }
            _ => {}
        }
    }
    let mut sum = Some(0u64);
    let mut by_type: BTreeMap<&'static str, u64> = BTreeMap::new();
    for _ in 0..tensors {
        r.string(MAX_KEY)?;
        let dimensions = r.u32()?;
        if dimensions > 8 {
            return Err(HeaderError::malformed(format!(
                "a tensor has {dimensions} dimensions"
            )));
        }
        let mut elements = 1u64;
        for _ in 0..dimensions {
            elements = elements.saturating_mul(r.u64()?);
        }
        let kind = r.u32()?;
        r.u64()?;
        match tensor_type(kind) {
            Some((name, block, size)) => {
                let bytes = elements.div_ceil(block).saturating_mul(size);
                sum = sum.map(|s| s.saturating_add(bytes));
                let total = by_type.entry(name).or_default();
                *total = total.saturating_add(bytes);
            }
            None => sum = None,
        }
    }
    let dtype = by_type
        .into_iter()
        .max_by_key(|(_, b)| *b)
        .map(|(name, _)| name);
    shape(&kept, sum, dtype, tensors)
}

fn shape(
    kept: &BTreeMap<String, Kept>,
    tensor_bytes: Option<u64>,
    dtype: Option<&'static str>,
    tensors: u64,
) -> Result<GgufHeader, HeaderError> {
    let Some(Kept::Text(architecture)) = kept.get("general.architecture") else {
        return Err(HeaderError::malformed(
            "its GGUF header has no general.architecture",
        ));
    };
    let int = |name: &str, cap: u64| -> Result<Option<u64>, HeaderError> {
        let n = match kept.get(&format!("{architecture}.{name}")) {
            Some(Kept::Int(n)) => *n,
            Some(Kept::Ints {
                count: 1.., max, ..
            }) => *max,
            _ => return Ok(None),
        };
        if n > cap {
            return Err(HeaderError::malformed(format!(
                "its GGUF header says {architecture}.{name} = {n}; at most {cap} is believed"
            )));
        }
        Ok(Some(n))
    };
    let required = |name: &str, cap: u64| {
        int(name, cap)?.filter(|n| *n > 0).ok_or_else(|| {
            HeaderError::malformed(format!("its GGUF header has no {architecture}.{name}"))
        })
    };
    let layers = required("block_count", MAX_LAYERS)?;
    let hidden = required("embedding_length", MAX_WIDTH)?;
    let heads = required("attention.head_count", MAX_WIDTH)?;
    let kv_heads = int("attention.head_count_kv", MAX_WIDTH)?.unwrap_or(heads);
    let key = int("attention.key_length", MAX_WIDTH)?
        .filter(|n| *n > 0)
        .unwrap_or(hidden.div_ceil(heads));
    let value = int("attention.value_length", MAX_WIDTH)?
        .filter(|n| *n > 0)
        .unwrap_or(key);
    let context_length = int("context_length", MAX_CONTEXT)?
        .filter(|n| *n > 0)
        .unwrap_or(2_048);

    // Encoders (bert and its kin) attend both ways and keep no cache.
    let causal = !matches!(
        architecture.as_str(),
        "bert" | "nomic-bert" | "jina-bert-v2" | "modern-bert"
    );
    let groups = if !causal {
        vec![]
    } else if let Some(rank) = int("attention.kv_lora_rank", MAX_WIDTH)?.filter(|n| *n > 0) {
        let rope = int("rope.dimension_count", MAX_WIDTH)?.unwrap_or(0);
        vec![KvGroup {
            layers,
            heads: 0,
            elements: rank + rope,
            window: None,
        }]
    } else {
        // Sliding windows are counted in full: the runtime keeps a whole cache for
        // every layer unless told otherwise.
        let (layers, heads) = match kept.get(&format!("{architecture}.attention.head_count_kv")) {
            // Layers with their own number of heads; 0 is a layer without attention.
            Some(Kept::Ints {
                count: 2.., sum, ..
            }) => (*sum, 1),
            _ => (layers, kv_heads),
        };
        vec![KvGroup {
            layers,
            heads,
            elements: key + value,
            window: None,
        }]
    };
    Ok(GgufHeader {
        architecture: architecture
            .chars()
            .filter(|c| !c.is_control())
            .take(100)
            .collect(),
        layers: layers as u32,
        hidden_size: hidden,
        kv_heads: if causal { kv_heads as u32 } else { 0 },
        head_dim: key as u32,
        context_length,
        kv: KvLayout {
            groups,
            ..KvLayout::default()
        },
        tensor_bytes,
        dtype,
        tensors,
    })
}

#[cfg(test)]
#[path = "gguf_tests.rs"]
mod tests;
