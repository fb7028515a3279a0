//! The Hugging Face HTTP API: revision, file list, configuration and headers.
//!
//! In: a [`ModelRequest`] and, for gated models, a token. Out: [`ModelFacts`].
//! Never: more than the stated caps of any answer in memory, a token to any
//! address but the hub's, or a byte of weights beyond their headers.

use super::endpoint::{HubEndpoint, check_repository, check_revision};
use super::error::{FilesError, HeaderError, Rejection};
use super::files::{self, Chosen, Entry};
use super::{
    Architecture, Format, ModelError, ModelFacts, ModelRequest, gguf, parse_config, safetensors,
};
use reqwest::header::{ACCEPT_ENCODING, LINK, RANGE};
use reqwest::{Response, StatusCode, Url};
use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

const MAX_INFO_BYTES: u64 = 8 << 20;
const MAX_CONFIG_BYTES: u64 = 2 << 20;
/// A trillion parameters in 140,000 tensors take 16 MiB.
const MAX_INDEX_BYTES: u64 = 32 << 20;
const MAX_PAGES: usize = 40;
const MAX_ENTRIES: usize = 20_000;
/// Safetensors headers read where the index gives no credible sum.
const MAX_HEADERS: usize = 64;
/// Headers read at once: each may take a few times its header's cap of memory.
const AT_ONCE: usize = 4;
/// Most characters of a detail: it goes into a condition and quotes what others wrote.
const MAX_DETAIL: usize = 1_000;

#[derive(Deserialize)]
struct Info {
    sha: String,
}

/// A client of one hub.
#[derive(Clone, Debug)]
pub struct Hub {
    endpoint: HubEndpoint,
    client: reqwest::Client,
    turns: Arc<Semaphore>,
}

impl Hub {
    /// A client of the hub at `endpoint`.
    ///
    /// # Errors
    /// Where the system's certificates cannot be loaded.
    pub fn new(endpoint: HubEndpoint) -> Result<Self, reqwest::Error> {
        let client = endpoint.client(Duration::from_secs(30))?;
        Ok(Hub {
            endpoint,
            client,
            turns: Arc::new(Semaphore::new(AT_ONCE)),
        })
    }

    /// The hub's address.
    pub fn endpoint(&self) -> &HubEndpoint {
        &self.endpoint
    }

    /// Learns a model's facts at the commit that `at` (or else the request's
    /// revision) names now.
    ///
    /// # Errors
    /// See [`ModelError`].
    pub async fn resolve(
        &self,
        request: &ModelRequest,
        at: Option<&str>,
        token: Option<&str>,
    ) -> Result<ModelFacts, ModelError> {
        let call = Call {
            hub: self,
            request,
            token,
        };
        check_repository(&request.repository).map_err(|e| call.not_supported(e))?;
        check_revision(&request.revision).map_err(|e| call.not_supported(e))?;
        call.facts(at.unwrap_or(&request.revision)).await
    }
}

/// One resolution: what every step needs to know.
struct Call<'a> {
    hub: &'a Hub,
    request: &'a ModelRequest,
    token: Option<&'a str>,
}

impl Call<'_> {
    async fn facts(&self, revision: &str) -> Result<ModelFacts, ModelError> {
        let repository = &self.request.repository;
        let segments = ["api", "models"].into_iter().chain(repository.split('/'));
        let url = self
            .hub
            .endpoint
            .url(segments.clone().chain(["revision", revision]));
        let info: Info = self
            .json(url, MAX_INFO_BYTES, "its model information")
            .await?;
        let commit = info.sha;
        let hex = commit.len() >= 40
            && commit.len() <= 64
            && commit.chars().all(|c| c.is_ascii_hexdigit());
        if !hex {
            return Err(
                self.unavailable(format!("it named {commit:?} as the commit, which is none"))
            );
        }
        let mut tree = self.hub.endpoint.url(segments.chain(["tree", &commit]));
        tree.set_query(Some("recursive=true"));
        let entries = self.tree(tree).await?;
        let chosen =
            files::choose(&entries, self.request.file.as_deref()).map_err(|e| self.rejected(e))?;
        // Taken only now, so that a hub that does not answer holds no turn. Nobody closes
        // the semaphore; without a turn the caps would still hold for each.
        let _turn = self.hub.turns.acquire().await.ok();
        match chosen.format {
            Format::Safetensors => self.safetensors_facts(commit, chosen).await,
            Format::Gguf => self.gguf_facts(commit, chosen).await,
        }
    }

    async fn tree(&self, first: Url) -> Result<Vec<Entry>, ModelError> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut next = Some(first.clone());
        for _ in 0..MAX_PAGES {
            let Some(url) = next.take() else {
                return Ok(entries);
            };
            let response = self.get(url, None).await?;
            next = next_page(&response, &first).map_err(|e| self.unavailable(e))?;
            let page: Vec<Entry> = self
                .decode(response, MAX_INFO_BYTES, "its file list")
                .await?;
            entries.extend(page);
            if entries.len() > MAX_ENTRIES {
                break;
            }
        }
        if next.is_none() && entries.len() <= MAX_ENTRIES {
            return Ok(entries);
        }
        Err(self.not_supported(format!("it holds more than {MAX_ENTRIES} files")))
    }

    async fn safetensors_facts(
        &self,
        commit: String,
        chosen: Chosen,
    ) -> Result<ModelFacts, ModelError> {
        let config = self
            .file(&commit, "config.json", 0, MAX_CONFIG_BYTES + 1)
            .await?;
        if config.len() as u64 > MAX_CONFIG_BYTES {
            return Err(self.not_supported(format!(
                "its config.json is larger than {MAX_CONFIG_BYTES} bytes"
            )));
        }
        let config = serde_json::from_slice(&config)
            .map_err(|e| self.invalid(format!("its config.json is not JSON: {e}")))?;
        let Architecture {
            name,
            layers,
            hidden_size,
            kv_heads,
            head_dim,
            context_length,
            kv,
            dtype,
            quantization,
        } = parse_config(&config).map_err(|e| self.invalid(e.to_string()))?;
        let (weights_bytes, files) = self.safetensors_weights(&commit, chosen).await?;
        Ok(ModelFacts {
            request: self.request.clone(),
            commit,
            format: Format::Safetensors,
            files,
            entry_file: None,
            architecture: name,
            weights_bytes,
            layers,
            hidden_size,
            kv_heads,
            head_dim,
            context_length,
            kv,
            dtype,
            quantization,
        })
    }

    /// Bytes of the tensors of one set of weight files, and the files to download.
    async fn safetensors_weights(
        &self,
        commit: &str,
        chosen: Chosen,
    ) -> Result<(u64, Vec<super::ModelFile>), ModelError> {
        #[derive(Deserialize)]
        struct Index {
            metadata: Option<Metadata>,
            weight_map: FileNames,
        }
        #[derive(Deserialize)]
        struct Metadata {
            // Some writers store it as a float.
            total_size: Option<f64>,
        }
        let mut chosen = chosen;
        let mut claimed = None;
        if let Some(index_path) = chosen.index.clone() {
            let bytes = self.file(commit, &index_path, 0, MAX_INDEX_BYTES).await?;
            let index: Index = serde_json::from_slice(&bytes)
                .map_err(|e| self.invalid(format!("its {index_path} is not an index: {e}")))?;
            chosen
                .keep_weights(&index.weight_map.0)
                .map_err(|e| self.rejected(e))?;
            claimed = index.metadata.and_then(|m| m.total_size).map(|n| n as u64);
        }
        let stored = chosen
            .weights
            .iter()
            .fold(0u64, |s, f| s.saturating_add(f.size));
        // The index is believed where it agrees with the files' sizes, which
        // exceed the tensors by their headers only.
        let credible =
            |n: &u64| *n <= stored && stored - *n <= (stored / 100).max(16 << 20) && *n > 0;
        let weights_bytes = match claimed.filter(credible) {
            Some(n) => n,
            None if chosen.weights.len() > MAX_HEADERS => stored,
            None => {
                let mut sum = 0u64;
                for file in &chosen.weights {
                    sum = sum.saturating_add(
                        self.safetensors_header(commit, &file.path, file.size)
                            .await?,
                    );
                }
                sum
            }
        };
        Ok((weights_bytes, chosen.into_files()))
    }

    async fn safetensors_header(
        &self,
        commit: &str,
        path: &str,
        size: u64,
    ) -> Result<u64, ModelError> {
        let refuse = |e: HeaderError| self.invalid(format!("{path}: {e}"));
        let prefix = self.file(commit, path, 0, 8).await?;
        let length = safetensors::header_length(&prefix).map_err(refuse)?;
        let json = self.file(commit, path, 8, length).await?;
        if (json.len() as u64) < length {
            return Err(self.invalid(format!("{path} ends inside its own header")));
        }
        safetensors::parse_header(&json, size).map_err(refuse)
    }

    async fn gguf_facts(&self, commit: String, chosen: Chosen) -> Result<ModelFacts, ModelError> {
        let Some(entry) = chosen.weights.first().cloned() else {
            return Err(self.not_supported("it holds no GGUF file".into()));
        };
        let header = self.gguf_header(&commit, &entry.path, entry.size).await?;
        let stored = chosen
            .weights
            .iter()
            .fold(0u64, |s, f| s.saturating_add(f.size));
        let weights_bytes = match header.tensor_bytes {
            Some(n) if chosen.weights.len() == 1 => {
                if n > entry.size {
                    return Err(self.invalid(format!(
                        "the header of {} describes {n} bytes of tensors, but the file has {}",
                        entry.path, entry.size
                    )));
                }
                n
            }
            // The other parts' headers are not read; their sizes bound their tensors.
            _ => stored,
        };
        Ok(ModelFacts {
            request: self.request.clone(),
            commit,
            format: Format::Gguf,
            files: chosen.into_files(),
            entry_file: Some(entry.path),
            architecture: header.architecture,
            weights_bytes,
            layers: header.layers,
            hidden_size: header.hidden_size,
            kv_heads: header.kv_heads,
            head_dim: header.head_dim,
            context_length: header.context_length,
            kv: header.kv,
            dtype: header.dtype.map(str::to_owned),
            quantization: header
                .dtype
                .filter(|d| !matches!(*d, "F32" | "F16" | "BF16"))
                .map(str::to_owned),
        })
    }

    async fn gguf_header(
        &self,
        commit: &str,
        path: &str,
        size: u64,
    ) -> Result<gguf::GgufHeader, ModelError> {
        let mut bytes: Vec<u8> = Vec::new();
        let mut step: u64 = 1 << 20;
        loop {
            let more = self.file(commit, path, bytes.len() as u64, step).await?;
            let ended = (more.len() as u64) < step;
            bytes.extend(more);
            match gguf::parse(&bytes) {
                Ok(header) => return Ok(header),
                Err(HeaderError::Incomplete(_)) if ended || bytes.len() as u64 >= size => {
                    return Err(self.invalid(format!("{path} ends inside its own header")));
                }
                // The reader itself refuses to go beyond its cap.
                Err(HeaderError::Incomplete(n)) => {
                    let have = bytes.len() as u64;
                    step = n
                        .saturating_sub(have)
                        .max(step * 2)
                        .min(gguf::MAX_HEADER_BYTES.saturating_sub(have))
                        .max(1);
                }
                Err(e @ HeaderError::Malformed(_)) => {
                    return Err(self.invalid(format!("{path}: {e}")));
                }
            }
        }
    }

    /// At most `length` bytes of a file, from `start` on.
    async fn file(
        &self,
        commit: &str,
        path: &str,
        start: u64,
        length: u64,
    ) -> Result<Vec<u8>, ModelError> {
        let url = self
            .hub
            .endpoint
            .file_url(&self.request.repository, commit, path);
        let end = start.saturating_add(length).saturating_sub(1);
        let response = self.get(url, Some(format!("bytes={start}-{end}"))).await?;
        // A server that ignores ranges sends the whole file; skip to the part asked for.
        let skip = if response.status() == StatusCode::PARTIAL_CONTENT {
            0
        } else {
            start
        };
        self.body(response, skip, length, path).await
    }

    async fn json<T: serde::de::DeserializeOwned>(
        &self,
        url: Url,
        cap: u64,
        what: &str,
    ) -> Result<T, ModelError> {
        let response = self.get(url, None).await?;
        self.decode(response, cap, what).await
    }

    async fn decode<T: serde::de::DeserializeOwned>(
        &self,
        response: Response,
        cap: u64,
        what: &str,
    ) -> Result<T, ModelError> {
        let bytes = self.body(response, 0, cap + 1, what).await?;
        if bytes.len() as u64 > cap {
            return Err(self.unavailable(format!("{what} is larger than {cap} bytes")));
        }
        serde_json::from_slice(&bytes).map_err(|e| {
            self.unavailable(format!(
                "{what} can't be read ({e}); is the address that of a hub?"
            ))
        })
    }

    async fn get(&self, url: Url, range: Option<String>) -> Result<Response, ModelError> {
        let mut request = self.hub.client.get(url).timeout(Duration::from_secs(120));
        // Ranges count stored bytes, so nothing may be compressed on the way.
        request = request.header(ACCEPT_ENCODING, "identity");
        if let Some(range) = range {
            request = request.header(RANGE, range);
        }
        if let Some(token) = self.token {
            request = request.bearer_auth(token);
        }
        let response = request
            .send()
            .await
            .map_err(|e| self.unavailable(transport(e)))?;
        let status = response.status();
        if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE {
            return Ok(response);
        }
        Err(self.refusal(status, &response))
    }

    fn refusal(&self, status: StatusCode, response: &Response) -> ModelError {
        let header = |name: &str| {
            response
                .headers()
                .get(name)
                .and_then(|v| v.to_str().ok())
                .unwrap_or("")
        };
        let code = header("x-error-code");
        let missing = |detail: &str| ModelError::NotFound {
            repository: self.request.repository.clone(),
            revision: self.request.revision.clone(),
            hub: self.hub.endpoint.to_string(),
            detail: detail.to_owned(),
        };
        match (status.as_u16(), code) {
            (_, "RevisionNotFound") => {
                missing("the repository has no such branch, tag or commit; check spec.model")
            }
            (_, "EntryNotFound") => {
                missing("a file that the list names is not there; try another revision")
            }
            // The public hub answers so for private repositories too.
            (401, "RepoNotFound") | (404, _) => missing(
                "there is no such repository, or it is private; check its name, or name a Secret with a token that may read it",
            ),
            (401 | 403, _) => ModelError::AccessDenied {
                repository: self.request.repository.clone(),
                revision: self.request.revision.clone(),
                hub: self.hub.endpoint.to_string(),
                detail: if self.token.is_some() {
                    "the token in the order's Secret has no access; accept the model's terms with its account, or use another token".into()
                } else {
                    "the model is gated or private; name a Secret with a token in the order's spec.model".into()
                },
            },
            (code, _) => self.unavailable(format!("it answered {code}")),
        }
    }

    async fn body(
        &self,
        mut response: Response,
        skip: u64,
        length: u64,
        what: &str,
    ) -> Result<Vec<u8>, ModelError> {
        if response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
            return Ok(Vec::new());
        }
        let mut out = Vec::new();
        let mut skip = skip;
        while (out.len() as u64) < length {
            let chunk = response
                .chunk()
                .await
                .map_err(|e| self.unavailable(format!("{what} broke off: {}", transport(e))))?;
            let Some(chunk) = chunk else { break };
            let from = skip.min(chunk.len() as u64);
            skip -= from;
            let rest = chunk.get(from as usize..).unwrap_or_default();
            let room = (length - out.len() as u64).min(rest.len() as u64) as usize;
            out.extend_from_slice(rest.get(..room).unwrap_or_default());
        }
        Ok(out)
    }

    fn rejected(&self, error: FilesError) -> ModelError {
        ModelError::Rejected {
            repository: self.request.repository.clone(),
            revision: self.request.revision.clone(),
            kind: error.kind,
            detail: shortened(error.detail),
        }
    }

    fn not_supported(&self, detail: String) -> ModelError {
        self.rejected(FilesError::new(Rejection::NotSupported, detail))
    }

    fn invalid(&self, detail: String) -> ModelError {
        self.rejected(FilesError::new(Rejection::FilesInvalid, detail))
    }

    fn unavailable(&self, detail: String) -> ModelError {
        ModelError::Unavailable {
            repository: self.request.repository.clone(),
            revision: self.request.revision.clone(),
            hub: self.hub.endpoint.to_string(),
            detail: shortened(detail),
        }
    }
}

/// The next page of a list. It must be on the same host: a token is sent nowhere
/// else, and a list that is taken for whole when it is not would hide files.
fn next_page(response: &Response, first: &Url) -> Result<Option<Url>, String> {
    let header = response.headers().get(LINK).and_then(|v| v.to_str().ok());
    // A comma also stands inside of addresses, so entries are told by their brackets.
    let next = header
        .into_iter()
        .flat_map(|h| h.split('<').skip(1))
        .find_map(|entry| {
            let (target, parameters) = entry.split_once('>')?;
            parameters.contains("rel=\"next\"").then_some(target)
        });
    let Some(target) = next else {
        return Ok(None);
    };
    match first.join(target) {
        Ok(url) if url.origin() == first.origin() => Ok(Some(url)),
        _ => Err("its file list goes on at another address than the hub's, which is not followed; correct the address of the hub".into()),
    }
}

/// The files that an index names, each once: there may be 100,000 tensors in a hundred files.
struct FileNames(BTreeSet<String>);

impl<'de> Deserialize<'de> for FileNames {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = FileNames;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a map of tensors to files")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FileNames, A::Error> {
                let mut names = BTreeSet::new();
                while let Some((IgnoredAny, name)) = map.next_entry::<IgnoredAny, String>()? {
                    names.insert(name);
                    if names.len() > files::MAX_FILES {
                        return Err(serde::de::Error::custom(format!(
                            "it names more than {} files",
                            files::MAX_FILES
                        )));
                    }
                }
                Ok(FileNames(names))
            }
        }
        from.deserialize_map(Visitor)
    }
}

fn shortened(detail: String) -> String {
    match detail.char_indices().nth(MAX_DETAIL) {
        Some((end, _)) => format!("{}…", detail.get(..end).unwrap_or_default()),
        None => detail,
    }
}

/// Why a request failed, without its address: one that a hub redirected to may be
/// signed, and whoever reads a status could use it.
pub(crate) fn transport(error: reqwest::Error) -> String {
    chain(&error.without_url())
}

/// An error with its causes: reqwest's own text leaves them out.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

#[cfg(test)]
#[path = "huggingface_tests.rs"]
mod tests;
