//! What the cache of keys and values costs: the law per layer group, and its sum.
//!
//! Pure arithmetic, saturating: a hostile configuration can make a demand huge
//! (and so unplaceable), never wrap it around to something small.

use serde::{Deserialize, Serialize};

/// Layers that cost the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KvGroup {
    /// How many layers.
    pub layers: u64,
    /// Key and value heads of each; tensor parallelism divides them, and
    /// replicates them once it exceeds their number. 0 where the cache is not
    /// per head (latent attention), which is never divided.
    pub heads: u64,
    /// Cached elements per token and head (keys and values together), or per
    /// token where `heads` is 0.
    pub elements: u64,
    /// Tokens that the layer looks back on, where it has a sliding window.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub window: Option<u64>,
}

impl KvGroup {
    fn elements_per_token(&self, devices: u64) -> u64 {
        let per_layer = if self.heads == 0 {
            self.elements
        } else {
            let devices = devices.max(1);
            self.heads
                .div_ceil(devices)
                .max(1)
                .saturating_mul(self.elements)
        };
        self.layers.saturating_mul(per_layer)
    }
}

/// The cache of a whole model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KvLayout {
    /// Groups of layers; empty where the model keeps no cache (encoders).
    pub groups: Vec<KvGroup>,
    /// Elements of state per sequence that do not grow with its length
    /// (recurrent and linear-attention layers), of all layers together.
    #[serde(default)]
    pub state_elements: u64,
    /// Layers that only predict ahead (MTP). Runtimes load and cache them only
    /// when a recipe asks for speculation, so the sums here leave them out.
    #[serde(default)]
    pub speculative_layers: u64,
}

impl KvLayout {
    /// One group of `layers` equal layers with `heads` heads of `head_dim` elements.
    pub fn uniform(layers: u64, heads: u64, head_dim: u64) -> Self {
        KvLayout {
            groups: vec![KvGroup {
                layers,
                heads,
                elements: head_dim.saturating_mul(2),
                window: None,
            }],
            ..KvLayout::default()
        }
    }

    /// Bytes that each further token of a long sequence costs on one of
    /// `devices` devices, before any sliding window is full.
    pub fn bytes_per_token(&self, devices: u64, bytes_per_element: u64) -> u64 {
        self.groups
            .iter()
            .fold(0u64, |sum, g| {
                sum.saturating_add(g.elements_per_token(devices))
            })
            .saturating_mul(bytes_per_element)
    }

    /// Bytes that one sequence of `tokens` tokens holds on one of `devices` devices.
    pub fn bytes_per_sequence(&self, tokens: u64, devices: u64, bytes_per_element: u64) -> u64 {
        self.groups
            .iter()
            .fold(0u64, |sum, g| {
                let held = g.window.map_or(tokens, |w| w.min(tokens));
                sum.saturating_add(g.elements_per_token(devices).saturating_mul(held))
            })
            .saturating_add(self.state_elements.div_ceil(devices.max(1)))
            .saturating_mul(bytes_per_element)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_divided_and_then_replicated() {
        let kv = KvLayout::uniform(32, 8, 128);
        assert_eq!(kv.bytes_per_token(1, 2), 131_072);
        assert_eq!(kv.bytes_per_token(4, 2), 131_072 / 4);
        assert_eq!(
            kv.bytes_per_token(16, 2),
            131_072 / 8,
            "8 heads on 16 devices: one each"
        );
    }

    #[test]
    fn latent_attention_is_not_divided() {
        let kv = KvLayout {
            groups: vec![KvGroup {
                layers: 61,
                heads: 0,
                elements: 576,
                window: None,
            }],
            ..KvLayout::default()
        };
        assert_eq!(kv.bytes_per_token(1, 2), 70_272);
        assert_eq!(kv.bytes_per_token(8, 2), 70_272);
    }

    #[test]
    fn absurd_numbers_saturate_instead_of_wrapping() {
        let kv = KvLayout::uniform(u64::MAX, u64::MAX, u64::MAX);
        assert_eq!(kv.bytes_per_sequence(u64::MAX, 1, 2), u64::MAX);
    }
}
