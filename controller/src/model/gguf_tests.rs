//! Headers written by hand, cut short, and shaken.

use super::*;
use proptest::prelude::*;

/// Writes headers as the format says.
#[derive(Default)]
struct Writer {
    pairs: Vec<u8>,
    pair_count: u64,
    tensors: Vec<u8>,
    tensor_count: u64,
}

impl Writer {
    fn key(&mut self, key: &str, kind: u32) {
        self.pair_count += 1;
        self.pairs.extend((key.len() as u64).to_le_bytes());
        self.pairs.extend(key.as_bytes());
        self.pairs.extend(kind.to_le_bytes());
    }
    fn text(mut self, key: &str, value: &str) -> Self {
        self.key(key, 8);
        self.pairs.extend((value.len() as u64).to_le_bytes());
        self.pairs.extend(value.as_bytes());
        self
    }
    fn int(mut self, key: &str, value: u32) -> Self {
        self.key(key, 4);
        self.pairs.extend(value.to_le_bytes());
        self
    }
    fn ints(mut self, key: &str, values: &[i32]) -> Self {
        self.key(key, 9);
        self.pairs.extend(5u32.to_le_bytes());
        self.pairs.extend((values.len() as u64).to_le_bytes());
        for v in values {
            self.pairs.extend(v.to_le_bytes());
        }
        self
    }
    fn texts(mut self, key: &str, values: &[&str]) -> Self {
        self.key(key, 9);
        self.pairs.extend(8u32.to_le_bytes());
        self.pairs.extend((values.len() as u64).to_le_bytes());
        for v in values {
            self.pairs.extend((v.len() as u64).to_le_bytes());
            self.pairs.extend(v.as_bytes());
        }
        self
    }
    fn tensor(mut self, name: &str, dims: &[u64], kind: u32) -> Self {
        self.tensor_count += 1;
        self.tensors.extend((name.len() as u64).to_le_bytes());
        self.tensors.extend(name.as_bytes());
        self.tensors.extend((dims.len() as u32).to_le_bytes());
        for d in dims {
            self.tensors.extend(d.to_le_bytes());
        }
        self.tensors.extend(kind.to_le_bytes());
        self.tensors.extend(0u64.to_le_bytes());
        self
    }
    fn done(self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.tensor_count.to_le_bytes());
        out.extend(self.pair_count.to_le_bytes());
        out.extend(self.pairs);
        out.extend(self.tensors);
        out
    }
}

fn smollm2() -> Writer {
    Writer::default()
        .text("general.architecture", "llama")
        .int("llama.block_count", 30)
        .int("llama.embedding_length", 576)
        .int("llama.attention.head_count", 9)
        .int("llama.attention.head_count_kv", 3)
        .int("llama.context_length", 8192)
        .texts("tokenizer.ggml.tokens", &["<s>", "</s>", "a"])
        .tensor("token_embd.weight", &[576, 49152], 8)
        .tensor("output_norm.weight", &[576], 0)
}

#[test]
fn a_small_llama_is_read() {
    let h = parse(&smollm2().done()).unwrap();
    assert_eq!(
        (h.architecture.as_str(), h.layers, h.kv_heads, h.head_dim),
        ("llama", 30, 3, 64)
    );
    assert_eq!(h.context_length, 8_192);
    assert_eq!(h.kv.bytes_per_token(1, 2), 30 * 3 * 128 * 2);
    assert_eq!(h.tensor_bytes, Some(576 * 49_152 / 32 * 34 + 576 * 4));
    assert_eq!(h.dtype, Some("Q8_0"));
}

#[test]
fn every_cut_asks_for_more_and_never_goes_wrong() {
    let whole = smollm2().done();
    for cut in 0..whole.len() {
        match parse(&whole[..cut]) {
            Err(HeaderError::Incomplete(n)) => {
                assert!(n > cut as u64, "asked for {n} having {cut}")
            }
            other => panic!("{cut}: {other:?}"),
        }
    }
}

#[test]
fn heads_given_per_layer_are_summed() {
    let bytes = Writer::default()
        .text("general.architecture", "openelm")
        .int("openelm.block_count", 3)
        .int("openelm.embedding_length", 1280)
        .int("openelm.attention.head_count", 20)
        .ints("openelm.attention.head_count_kv", &[3, 4, 5])
        .int("openelm.attention.key_length", 64)
        .done();
    assert_eq!(
        parse(&bytes).unwrap().kv.bytes_per_token(1, 2),
        12 * 128 * 2
    );
}

#[test]
fn an_unknown_tensor_type_leaves_the_sum_open() {
    let h = parse(&smollm2().tensor("x", &[32], 4_000).done()).unwrap();
    assert_eq!(h.tensor_bytes, None);
}

#[test]
fn lengths_over_a_cap_are_refused_at_once() {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(u64::MAX.to_le_bytes());
    bytes.extend(1u64.to_le_bytes());
    assert!(matches!(parse(&bytes), Err(HeaderError::Malformed(m)) if m.contains("tensors")));
    let huge_string = {
        let mut b = b"GGUF".to_vec();
        b.extend(3u32.to_le_bytes());
        b.extend(0u64.to_le_bytes());
        b.extend(1u64.to_le_bytes());
        b.extend(u64::MAX.to_le_bytes());
        b
    };
    assert!(matches!(
        parse(&huge_string),
        Err(HeaderError::Malformed(_))
    ));
}

#[test]
fn something_else_is_named_as_such() {
    assert_eq!(
        parse(b"PK\x03\x04"),
        Err(HeaderError::malformed("it does not begin with GGUF"))
    );
}

proptest! {
    #[test]
    fn any_bytes_are_answered_without_a_panic(tail in proptest::collection::vec(any::<u8>(), 0..512)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tail);
        let _ = parse(&bytes);
    }

    #[test]
    fn a_flipped_byte_never_panics(at in 0usize..400, with in any::<u8>()) {
        let mut bytes = smollm2().done();
        let at = at % bytes.len();
        bytes[at] = with;
        if let Ok(h) = parse(&bytes) {
            prop_assert!(u64::from(h.layers) <= MAX_LAYERS);
        }
    }
}
