//! A model source becomes [`ModelFacts`]: which files, how many bytes, how much
//! memory one token costs.
//!
//! In: a repository, a revision, optionally one file; a hub that speaks the
//! Hugging Face HTTP API. Out: plain facts, pinned to one commit. Never: a
//! decision about hardware, runtime or placement, or a download of weights
//! (headers only, by range reads with caps).

mod architecture;
mod endpoint;
mod error;
mod files;
mod gguf;
mod huggingface;
mod kv;
mod safetensors;

pub use architecture::{Architecture, parse_config};
pub use endpoint::{HubEndpoint, check_path, check_repository, check_revision};
pub use error::{HeaderError, ModelError, Rejection};
pub use gguf::{GgufHeader, parse as parse_gguf};
pub use huggingface::Hub;
pub(crate) use huggingface::{chain, transport};
pub use kv::{KvGroup, KvLayout};
pub use safetensors::parse_header as parse_safetensors_header;

use serde::{Deserialize, Serialize};

/// What an order asks a hub for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelRequest {
    /// `owner/name`, or a bare name of the hub's root namespace.
    pub repository: String,
    /// Branch, tag or commit, as the order wrote it.
    pub revision: String,
    /// One file of a GGUF repository that holds several.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub file: Option<String>,
}

/// How the weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Format {
    /// `*.safetensors` beside a `config.json`.
    Safetensors,
    /// One GGUF file, or the parts of one split GGUF file.
    #[serde(rename = "GGUF")]
    Gguf,
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Format::Safetensors => "Safetensors",
            Format::Gguf => "GGUF",
        })
    }
}

/// The checksum a hub publishes for a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Checksum {
    /// SHA-256 of the content (files kept by LFS), lower-case hex.
    Sha256(String),
    /// Git blob id: SHA-1 over `blob <size>\0<content>` (files kept by git), lower-case hex.
    GitBlob(String),
}

/// One file that a copy needs on its volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelFile {
    /// Path inside the repository, checked by [`check_path`].
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// What the content must hash to.
    pub checksum: Checksum,
}

/// What is known of a model at one commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelFacts {
    /// What was asked for; facts answer exactly this request.
    pub request: ModelRequest,
    /// The commit that the requested revision named when it was resolved.
    pub commit: String,
    /// How the weights are stored.
    pub format: Format,
    /// Everything a copy downloads.
    pub files: Vec<ModelFile>,
    /// The file a GGUF runtime opens (the first part of a split one).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub entry_file: Option<String>,
    /// The model's architecture, as its own configuration names it.
    pub architecture: String,
    /// Bytes of the tensors, of one set of weight files only.
    pub weights_bytes: u64,
    /// Transformer layers.
    pub layers: u32,
    /// Width of the hidden state, in elements.
    pub hidden_size: u64,
    /// Key and value heads of an ordinary layer; 0 where there is no cache.
    pub kv_heads: u32,
    /// Width of one head of an ordinary layer, in elements.
    pub head_dim: u32,
    /// The longest context the model was made for, in tokens.
    pub context_length: u64,
    /// What the cache of keys and values costs.
    pub kv: KvLayout,
    /// The weights' element type, where stated.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub dtype: Option<String>,
    /// Quantization method, where there is one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub quantization: Option<String>,
}

impl ModelFacts {
    /// Bytes that a copy downloads.
    pub fn download_bytes(&self) -> u64 {
        self.files
            .iter()
            .fold(0, |sum, f| sum.saturating_add(f.size))
    }
}
