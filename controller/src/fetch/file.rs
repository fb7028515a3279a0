//! One file: resume, stream, check, rename.

use super::{FetchError, FetchSpec, Patience, Progress};
use crate::model::{Checksum, HubEndpoint, ModelFile, transport};
use reqwest::header::{ACCEPT_ENCODING, CONTENT_RANGE, ETAG, IF_RANGE, RANGE};
use reqwest::{Response, StatusCode};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tracing::{info, warn};

/// Where files come from.
pub(super) struct Source<'a> {
    pub(super) client: reqwest::Client,
    pub(super) endpoint: HubEndpoint,
    pub(super) spec: &'a FetchSpec,
    pub(super) token: Option<&'a str>,
    pub(super) patience: Patience,
}

/// Where a file grows until it is whole and checked.
pub(super) fn partial(folder: &Path, path: &str) -> PathBuf {
    folder.join(format!("{path}.partial"))
}

/// The entity tag that a partial file began with.
fn tag_path(folder: &Path, path: &str) -> PathBuf {
    folder.join(format!("{path}.partial.etag"))
}

pub(super) async fn write_synced(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let mut file = tokio::fs::File::create(path).await?;
    file.write_all(content).await?;
    file.sync_all().await
}

pub(super) async fn sync_folder(folder: &Path) -> std::io::Result<()> {
    tokio::fs::File::open(folder).await?.sync_all().await
}

/// A checksum under way.
enum Hash {
    Sha256(Sha256),
    GitBlob(Sha1),
}

impl Hash {
    fn of(file: &ModelFile) -> Self {
        match file.checksum {
            Checksum::Sha256(_) => Hash::Sha256(Sha256::new()),
            Checksum::GitBlob(_) => {
                let mut hash = Sha1::new();
                hash.update(format!("blob {}\0", file.size));
                Hash::GitBlob(hash)
            }
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hash::Sha256(h) => h.update(bytes),
            Hash::GitBlob(h) => h.update(bytes),
        }
    }

    fn matches(self, checksum: &Checksum) -> Result<(), String> {
        let (got, wanted) = match (self, checksum) {
            (Hash::Sha256(h), Checksum::Sha256(w)) => (hex(&h.finalize()), w),
            (Hash::GitBlob(h), Checksum::GitBlob(w)) => (hex(&h.finalize()), w),
            _ => return Err("its checksum is of another kind".into()),
        };
        if got == *wanted {
            Ok(())
        } else {
            Err(format!(
                "its checksum is {got}, and the hub's list says {wanted}"
            ))
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}

/// How one attempt ended.
enum Attempt {
    Whole,
    /// Try again; the number is how many bytes this attempt brought.
    Broken {
        brought: u64,
        why: String,
    },
    /// What is there cannot be continued.
    Restart {
        why: String,
    },
}

/// Brings one file, unless it is there.
pub(super) async fn bring(
    source: &Source<'_>,
    folder: &Path,
    wanted: &ModelFile,
    progress: &Progress,
) -> Result<(), FetchError> {
    let target = folder.join(&wanted.path);
    // A file gets its name only once it is checked.
    if let Ok(meta) = tokio::fs::metadata(&target).await
        && meta.len() == wanted.size
    {
        progress.add(wanted.size);
        return Ok(());
    }
    if let Some(parent) = target.parent() {
        tokio::fs::create_dir_all(parent)
            .await
            .map_err(|e| FetchError::disk(parent, e))?;
    }
    let mut fruitless = 0;
    let mut restarts = 0;
    progress.say(format!("downloading {}", wanted.path));
    loop {
        match attempt(source, folder, wanted, progress).await? {
            Attempt::Whole => break,
            Attempt::Broken { brought, why } => {
                fruitless = if brought > 0 { 1 } else { fruitless + 1 };
                if fruitless >= source.patience.attempts {
                    return Err(FetchError::GivenUp {
                        path: wanted.path.clone(),
                        attempts: fruitless,
                        last: why,
                    });
                }
                warn!(
                    file = wanted.path,
                    why, "The download broke off and will be resumed."
                );
                progress.say(format!("{} broke off ({why}), resuming", wanted.path));
                let pause = source
                    .patience
                    .pause
                    .saturating_mul(1 << (fruitless - 1).min(5));
                tokio::time::sleep(pause.min(Duration::from_secs(30))).await;
                progress.say(format!("downloading {}", wanted.path));
            }
            Attempt::Restart { why } => {
                restarts += 1;
                if restarts > 1 {
                    return Err(FetchError::Damaged {
                        path: wanted.path.clone(),
                        detail: why,
                    });
                }
                warn!(
                    file = wanted.path,
                    why, "The file is downloaded again from its beginning."
                );
            }
        }
    }
    let part = partial(folder, &wanted.path);
    tokio::fs::rename(&part, &target)
        .await
        .map_err(|e| FetchError::disk(&target, e))?;
    let _ = tokio::fs::remove_file(tag_path(folder, &wanted.path)).await;
    let parent = target.parent().unwrap_or(folder);
    sync_folder(parent)
        .await
        .map_err(|e| FetchError::disk(parent, e))?;
    info!(
        file = wanted.path,
        bytes = wanted.size,
        "A file is complete and checked."
    );
    Ok(())
}

async fn attempt(
    source: &Source<'_>,
    folder: &Path,
    wanted: &ModelFile,
    progress: &Progress,
) -> Result<Attempt, FetchError> {
    let part = partial(folder, &wanted.path);
    let disk = |e| FetchError::disk(&part, e);
    let mut file = tokio::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&part)
        .await
        .map_err(disk)?;
    let mut hash = Hash::of(wanted);
    let mut have = rehash(&mut file, &mut hash, wanted.size)
        .await
        .map_err(disk)?;
    progress.add(have);
    let restart = async |file: &mut tokio::fs::File, counted: u64| {
        progress.lose(counted);
        file.set_len(0).await?;
        tokio::io::AsyncSeekExt::rewind(file).await.map(|_| ())
    };
    let mut brought = 0u64;
    if have < wanted.size || wanted.size == 0 {
        let tag = tokio::fs::read_to_string(tag_path(folder, &wanted.path))
            .await
            .ok();
        let mut response = match request(source, wanted, have, tag).await? {
            Ok(response) => response,
            Err(why) => {
                progress.lose(have);
                return Ok(Attempt::Broken { brought: 0, why });
            }
        };
        if have > 0 && !continues(&response, have) {
            restart(&mut file, have).await.map_err(disk)?;
            if response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
                return Ok(Attempt::Restart {
                    why: "the hub has fewer bytes than are here".into(),
                });
            }
            hash = Hash::of(wanted);
            have = 0;
        }
        remember_tag(folder, wanted, &response)
            .await
            .map_err(disk)?;
        loop {
            let chunk = match tokio::time::timeout(source.patience.stall, response.chunk()).await {
                Ok(Ok(Some(chunk))) => chunk,
                Ok(Ok(None)) => break,
                Ok(Err(e)) => {
                    return broken(&mut file, progress, have, brought, transport(e))
                        .await
                        .map_err(disk);
                }
                Err(_) => {
                    let why = format!("nothing came for {} s", source.patience.stall.as_secs_f32());
                    return broken(&mut file, progress, have, brought, why)
                        .await
                        .map_err(disk);
                }
            };
            if have + chunk.len() as u64 > wanted.size {
                restart(&mut file, have).await.map_err(disk)?;
                return Ok(Attempt::Restart {
                    why: format!("it is larger than {} bytes", wanted.size),
                });
            }
            file.write_all(&chunk).await.map_err(disk)?;
            hash.update(&chunk);
            have += chunk.len() as u64;
            brought += chunk.len() as u64;
            progress.add(chunk.len() as u64);
        }
    }
    if have < wanted.size {
        let why = format!("it ended after {have} of {} bytes", wanted.size);
        return broken(&mut file, progress, have, brought, why)
            .await
            .map_err(disk);
    }
    if let Err(why) = hash.matches(&wanted.checksum) {
        restart(&mut file, have).await.map_err(disk)?;
        return Ok(Attempt::Restart { why });
    }
    file.flush().await.map_err(disk)?;
    file.sync_all().await.map_err(disk)?;
    Ok(Attempt::Whole)
}

/// Keeps what came, for the next attempt, which counts it anew.
async fn broken(
    file: &mut tokio::fs::File,
    progress: &Progress,
    counted: u64,
    brought: u64,
    why: String,
) -> std::io::Result<Attempt> {
    file.flush().await?;
    progress.lose(counted);
    Ok(Attempt::Broken { brought, why })
}

/// Hashes what is already there, leaving the file positioned at its end.
async fn rehash(file: &mut tokio::fs::File, hash: &mut Hash, size: u64) -> std::io::Result<u64> {
    if file.metadata().await?.len() > size {
        file.set_len(0).await?;
    }
    let mut buffer = vec![0u8; 256 << 10];
    let mut have = 0u64;
    loop {
        let n = file.read(&mut buffer).await?;
        if n == 0 {
            return Ok(have);
        }
        hash.update(buffer.get(..n).unwrap_or_default());
        have += n as u64;
    }
}

/// Asks for the file from byte `have` on. The inner error is worth another attempt.
async fn request(
    source: &Source<'_>,
    wanted: &ModelFile,
    have: u64,
    tag: Option<String>,
) -> Result<Result<Response, String>, FetchError> {
    let url = source
        .endpoint
        .file_url(&source.spec.repository, &source.spec.commit, &wanted.path);
    let mut request = source
        .client
        .get(url.clone())
        .header(ACCEPT_ENCODING, "identity");
    if let Some(token) = source.token {
        request = request.bearer_auth(token);
    }
    if have > 0 {
        request = request.header(RANGE, format!("bytes={have}-"));
        if let Some(tag) = tag {
            request = request.header(IF_RANGE, tag);
        }
    }
    let response = match request.send().await {
        Ok(response) => response,
        Err(e) => return Ok(Err(transport(e))),
    };
    match response.status() {
        StatusCode::NOT_FOUND | StatusCode::GONE => Err(FetchError::NotFound {
            url: url.to_string(),
        }),
        status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
            Err(FetchError::AccessDenied {
                url: url.to_string(),
                status: status.as_u16(),
            })
        }
        status if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE => {
            Ok(Ok(response))
        }
        status => Ok(Err(format!("the hub answered {status}"))),
    }
}

/// Whether the answer goes on at byte `have`.
fn continues(response: &Response, have: u64) -> bool {
    response.status() == StatusCode::PARTIAL_CONTENT
        && response
            .headers()
            .get(CONTENT_RANGE)
            .and_then(|v| v.to_str().ok())
            .is_some_and(|v| v.starts_with(&format!("bytes {have}-")))
}

/// Only strong tags may guard a range.
async fn remember_tag(
    folder: &Path,
    wanted: &ModelFile,
    response: &Response,
) -> std::io::Result<()> {
    let path = tag_path(folder, &wanted.path);
    match response.headers().get(ETAG).and_then(|v| v.to_str().ok()) {
        Some(tag) if !tag.starts_with("W/") => tokio::fs::write(&path, tag).await,
        _ => match tokio::fs::remove_file(&path).await {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        },
    }
}
