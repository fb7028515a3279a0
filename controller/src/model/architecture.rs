//! A model's `config.json` becomes its shape: layers, heads, context, cache.
//!
//! In: JSON that the model's author wrote (hostile until proven otherwise). Out:
//! an [`Architecture`]. Numbers that could not belong to a model are refused;
//! what is unknown is counted as ordinary full attention, which can only make
//! the demand too large, never too small.

use super::error::HeaderError;
use super::kv::{KvGroup, KvLayout};
use serde_json::Value;

/// The part of `config.json` that sizing needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// First of `architectures`, else `model_type`.
    pub name: String,
    /// Transformer layers.
    pub layers: u32,
    /// Width of the hidden state, in elements.
    pub hidden_size: u64,
    /// Key and value heads of an ordinary layer.
    pub kv_heads: u32,
    /// Width of one head of an ordinary layer.
    pub head_dim: u32,
    /// Longest context, in tokens.
    pub context_length: u64,
    /// Law of the cache.
    pub kv: KvLayout,
    /// Element type of the weights.
    pub dtype: Option<String>,
    /// Quantization method.
    pub quantization: Option<String>,
}

/// Caps: an order of magnitude above any published model.
const MAX_LAYERS: u64 = 4_096;
const MAX_HEADS: u64 = 65_536;
const MAX_WIDTH: u64 = 1 << 24;
const MAX_CONTEXT: u64 = 1 << 32;

/// Encoders attend to their whole input at once and keep no cache between tokens.
const ENCODERS: &[&str] = &[
    "albert",
    "bert",
    "camembert",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "gte",
    "modernbert",
    "mpnet",
    "new",
    "nomic_bert",
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
];

struct Fields<'a>(&'a Value);

impl<'a> Fields<'a> {
    /// The first of `names` that holds a non-negative integer; a number over `cap` is an error.
    fn int(&self, names: &[&str], cap: u64) -> Result<Option<u64>, HeaderError> {
        for name in names {
            let Some(value) = self.0.get(name) else {
                continue;
            };
            if let Some(n) = value.as_u64() {
                if n > cap {
                    return Err(HeaderError::malformed(format!(
                        "config.json says {name} = {n}; at most {cap} is believed"
                    )));
                }
                return Ok(Some(n));
            }
        }
        Ok(None)
    }

    fn text(&self, name: &str) -> Option<&'a str> {
        self.0.get(name).and_then(Value::as_str)
    }

    fn flag(&self, name: &str) -> Option<bool> {
        self.0.get(name).and_then(Value::as_bool)
    }

    fn texts(&self, names: &[&str]) -> Option<Vec<&'a str>> {
        names.iter().find_map(|name| {
            let list = self.0.get(name)?.as_array()?;
            list.iter().map(Value::as_str).collect::<Option<Vec<_>>>()
        })
    }
}

/// Reads the shape of a model from its `config.json`.
///
/// # Errors
/// [`HeaderError::Malformed`] where a needed number is absent or absurd.
pub fn parse_config(config: &Value) -> Result<Architecture, HeaderError> {
    let root = Fields(config);
    // The language part of multimodal models is nested.
    let nested = [
        "text_config",
        "llm_config",
        "language_config",
        "thinker_config",
    ]
    .iter()
    .find_map(|n| config.get(n).filter(|v| v.is_object()));
    let nested = nested.map(|v| v.get("text_config").filter(|t| t.is_object()).unwrap_or(v));
    let text = Fields(nested.unwrap_or(config));

    let model_type = text.text("model_type").or(root.text("model_type"));
    let name = config
        .get("architectures")
        .and_then(|a| a.get(0))
        .and_then(Value::as_str)
        .or(model_type)
        .ok_or_else(|| {
            HeaderError::malformed("config.json names neither architectures nor model_type")
        })?;
    let required = |names: &[&str], cap| {
        text.int(names, cap)?.filter(|n| *n > 0).ok_or_else(|| {
            HeaderError::malformed(format!(
                "config.json of {name} has no {}",
                names.join(" or ")
            ))
        })
    };
    let layers = required(
        &["num_hidden_layers", "n_layer", "n_layers", "num_layers"],
        MAX_LAYERS,
    )?;
    let heads = required(&["num_attention_heads", "n_head", "n_heads"], MAX_HEADS)?;
    let hidden = required(&["hidden_size", "n_embd", "d_model", "dim"], MAX_WIDTH)?;
    let kv_heads = kv_heads(&text, heads)?;
    let head_dim = match text.int(&["head_dim", "attention_head_dim"], MAX_WIDTH)? {
        Some(d) if d > 0 => d,
        _ => hidden.div_ceil(heads),
    };
    let context_length = text
        .int(
            &[
                "max_position_embeddings",
                "n_positions",
                "max_sequence_length",
                "max_seq_len",
                "seq_length",
                "n_ctx",
            ],
            MAX_CONTEXT,
        )?
        .filter(|n| *n > 0)
        .unwrap_or(2_048);

    let encoder = model_type.is_some_and(|t| ENCODERS.contains(&t));
    let kv = if encoder {
        KvLayout::default()
    } else {
        layout(
            &text,
            model_type.unwrap_or(""),
            layers,
            heads,
            kv_heads,
            head_dim,
        )?
    };
    let quantization = text
        .0
        .get("quantization_config")
        .or_else(|| config.get("quantization_config"))
        .and_then(|q| q.get("quant_method"))
        .and_then(Value::as_str)
        .map(bounded);
    let dtype = ["torch_dtype", "dtype"]
        .iter()
        .find_map(|n| text.text(n).or(root.text(n)))
        .map(bounded);
    Ok(Architecture {
        name: bounded(name),
        layers: layers as u32,
        hidden_size: hidden,
        kv_heads: if encoder { 0 } else { kv_heads as u32 },
        head_dim: head_dim as u32,
        context_length,
        kv,
        dtype,
        quantization,
    })
}

/// A name that goes into a status: short, and printable.
fn bounded(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(100).collect()
}

fn kv_heads(text: &Fields<'_>, heads: u64) -> Result<u64, HeaderError> {
    // Falcon and BigCode share one head among all queries by a flag; Falcon's
    // newer models say how many there are and leave the flag standing.
    let new_falcon = text.flag("new_decoder_architecture") == Some(true);
    if text.flag("multi_query") == Some(true) && !new_falcon {
        return Ok(1);
    }
    Ok(text
        .int(
            &[
                "num_key_value_heads",
                "num_kv_heads",
                "n_kv_heads",
                "n_head_kv",
                "multi_query_group_num",
            ],
            MAX_HEADS,
        )?
        .filter(|n| *n > 0)
        .unwrap_or(heads))
}

/// What one layer does with its past.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LayerKind {
    Full,
    Sliding,
    Linear,
    Mamba,
    /// No attention at all (a layer that is only a feed-forward network).
    None,
}

fn layer_kinds(
    text: &Fields<'_>,
    model_type: &str,
    layers: u64,
) -> Result<Vec<LayerKind>, HeaderError> {
    let count = layers as usize;
    if let Some(types) = text.texts(&["layer_types", "layers_block_type"]) {
        let kind = |t: &&str| match *t {
            "sliding_attention" | "chunked_attention" | "local_attention" => LayerKind::Sliding,
            "linear_attention" => LayerKind::Linear,
            "mamba" | "mamba2" | "recurrent" => LayerKind::Mamba,
            _ => LayerKind::Full,
        };
        let mut kinds: Vec<_> = types.iter().take(count).map(kind).collect();
        kinds.resize(count, LayerKind::Full);
        return Ok(kinds);
    }
    if let Some(pattern) = text.text("hybrid_override_pattern") {
        let kind = |c| match c {
            'M' => LayerKind::Mamba,
            '*' => LayerKind::Full,
            _ => LayerKind::None,
        };
        let mut kinds: Vec<_> = pattern.chars().take(count).map(kind).collect();
        kinds.resize(count, LayerKind::Full);
        return Ok(kinds);
    }
    if let (Some(every), Some(_)) = (
        text.int(&["full_attention_interval"], MAX_LAYERS)?
            .filter(|n| *n > 0),
        text.int(&["linear_num_value_heads"], MAX_HEADS)?,
    ) {
        return Ok((1..=layers)
            .map(|i| {
                if i % every == 0 {
                    LayerKind::Full
                } else {
                    LayerKind::Linear
                }
            })
            .collect());
    }
    if let (Some(period), Some(offset)) = (
        text.int(&["attn_layer_period"], MAX_LAYERS)?
            .filter(|n| *n > 0),
        text.int(&["attn_layer_offset"], MAX_LAYERS)?,
    ) {
        return Ok((0..layers)
            .map(|i| {
                if i % period == offset {
                    LayerKind::Full
                } else {
                    LayerKind::Mamba
                }
            })
            .collect());
    }
    let windowed = text
        .int(&["sliding_window"], MAX_CONTEXT)?
        .is_some_and(|w| w > 0);
    if !windowed || text.flag("use_sliding_window") == Some(false) {
        return Ok(vec![LayerKind::Full; count]);
    }
    // Before `layer_types`, families had rules of their own for which layers slide.
    let pattern = text
        .int(
            &["sliding_window_pattern", "_sliding_window_pattern"],
            MAX_LAYERS,
        )?
        .or(match model_type {
            "gemma2" => Some(2),
            "gemma3" | "gemma3_text" => Some(6),
            "cohere2" => Some(4),
            _ => None,
        });
    Ok(match (pattern, model_type) {
        (Some(n), _) if n > 0 => (1..=layers)
            .map(|i| {
                if i % n == 0 {
                    LayerKind::Full
                } else {
                    LayerKind::Sliding
                }
            })
            .collect(),
        (_, "qwen2" | "qwen3" | "qwen2_moe" | "qwen3_moe") => {
            let full = text
                .int(&["max_window_layers"], MAX_LAYERS)?
                .unwrap_or(layers);
            (0..layers)
                .map(|i| {
                    if i < full {
                        LayerKind::Full
                    } else {
                        LayerKind::Sliding
                    }
                })
                .collect()
        }
        (_, "mistral" | "mixtral" | "phi3" | "starcoder2") => vec![LayerKind::Sliding; count],
        _ => vec![LayerKind::Full; count],
    })
}

fn layout(
    text: &Fields<'_>,
    model_type: &str,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
) -> Result<KvLayout, HeaderError> {
    let speculative_layers = text
        .int(
            &["num_nextn_predict_layers", "mtp_num_hidden_layers"],
            MAX_LAYERS,
        )?
        .unwrap_or(0);
    // Latent attention caches one compressed vector per token, whatever the heads.
    if let Some(rank) = text.int(&["kv_lora_rank"], MAX_WIDTH)?.filter(|n| *n > 0) {
        let rope = text.int(&["qk_rope_head_dim"], MAX_WIDTH)?.unwrap_or(0);
        return Ok(KvLayout {
            groups: vec![KvGroup {
                layers,
                heads: 0,
                elements: rank + rope,
                window: None,
            }],
            state_elements: 0,
            speculative_layers,
        });
    }
    let mut kinds = layer_kinds(text, model_type, layers)?;
    // The last layers of some models read an earlier layer's cache.
    let shared = text
        .int(&["num_kv_shared_layers"], MAX_LAYERS)?
        .unwrap_or(0);
    kinds.truncate(layers.saturating_sub(shared) as usize);
    let count = |kind| kinds.iter().filter(|k| **k == kind).count() as u64;

    let (sliding, full) = (count(LayerKind::Sliding), count(LayerKind::Full));
    // Gemma's newest models give their full layers other heads than their sliding ones.
    let mixed = sliding > 0;
    let full_heads = match text.int(&["num_global_key_value_heads"], MAX_HEADS)? {
        Some(n) if mixed && n > 0 => n,
        _ => kv_heads,
    };
    let full_dim = match text.int(&["global_head_dim"], MAX_WIDTH)? {
        Some(n) if mixed && n > 0 => n,
        _ => head_dim,
    };
    let value_dim = text.int(&["v_head_dim"], MAX_WIDTH)?.filter(|n| *n > 0);
    let window = text
        .int(&["sliding_window", "attention_chunk_size"], MAX_CONTEXT)?
        .filter(|w| *w > 0);
    let mut groups = Vec::new();
    if full > 0 {
        let elements = full_dim + value_dim.unwrap_or(full_dim);
        groups.push(KvGroup {
            layers: full,
            heads: full_heads,
            elements,
            window: None,
        });
    }
    if sliding > 0 {
        let elements = head_dim + value_dim.unwrap_or(head_dim);
        groups.push(KvGroup {
            layers: sliding,
            heads: kv_heads,
            elements,
            window,
        });
    }
    let state_elements = linear_state(text)?
        .saturating_mul(count(LayerKind::Linear))
        .saturating_add(
            mamba_state(text, heads, head_dim)?.saturating_mul(count(LayerKind::Mamba)),
        );
    Ok(KvLayout {
        groups,
        state_elements,
        speculative_layers,
    })
}

/// Elements of one linear-attention layer's state: the matrix of each value
/// head, and the convolution's tail.
fn linear_state(text: &Fields<'_>) -> Result<u64, HeaderError> {
    let read = |name: &str| Ok::<u64, HeaderError>(text.int(&[name], MAX_WIDTH)?.unwrap_or(0));
    let (vh, vd) = (
        read("linear_num_value_heads")?,
        read("linear_value_head_dim")?,
    );
    let (kh, kd) = (read("linear_num_key_heads")?, read("linear_key_head_dim")?);
    let matrix = vh.saturating_mul(vd).saturating_mul(kd);
    let width = kh
        .saturating_mul(kd)
        .saturating_mul(2)
        .saturating_add(vh.saturating_mul(vd));
    Ok(matrix.saturating_add(width.saturating_mul(read("linear_conv_kernel_dim")?)))
}

/// Elements of one Mamba layer's state.
fn mamba_state(text: &Fields<'_>, heads: u64, head_dim: u64) -> Result<u64, HeaderError> {
    let inner = match (
        text.int(&["mamba_n_heads", "mamba_num_heads"], MAX_HEADS)?,
        text.int(&["mamba_d_head", "mamba_head_dim"], MAX_WIDTH)?,
    ) {
        (Some(n), Some(d)) => n.saturating_mul(d),
        _ => text
            .int(&["mamba_expand"], MAX_WIDTH)?
            .unwrap_or(2)
            .saturating_mul(heads.saturating_mul(head_dim)),
    };
    let state = text
        .int(&["mamba_d_state", "ssm_state_size"], MAX_WIDTH)?
        .unwrap_or(128);
    let tail = text
        .int(&["mamba_d_conv", "conv_kernel"], MAX_WIDTH)?
        .unwrap_or(4);
    Ok(inner
        .saturating_mul(state)
        .saturating_add(inner.saturating_mul(2).saturating_mul(tail)))
}

#[cfg(test)]
#[path = "architecture_tests.rs"]
mod tests;
