//! `controller fetch`: brings the files of a pinned model to a volume, before the
//! runtime starts.
//!
//! In: a [`FetchSpec`] (from the rendered pod), a folder, perhaps a token. Out: a
//! folder that holds the whole model, each file checked, or an error that says
//! what to do. Never: a partial model that a runtime could open (files get their
//! names only when checked, the marker comes last), memory that grows with a
//! file's size, or a token in a log.

mod error;
mod file;
mod progress;

pub use error::FetchError;
pub use progress::{Progress, Report, serve as serve_progress};

use crate::model::{HubEndpoint, ModelFile, check_path, check_repository};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tracing::{info, warn};

/// Written last: the folder holds the whole model.
pub const MARKER: &str = ".complete.json";

/// What to fetch. Travels in the pod's environment as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FetchSpec {
    /// The hub's address.
    pub endpoint: String,
    /// Repository.
    pub repository: String,
    /// Commit; a branch could move between two copies.
    pub commit: String,
    /// Files with their sizes and checksums.
    pub files: Vec<ModelFile>,
}

/// How patient the download is.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// A body that brings nothing for so long is given up and resumed.
    pub stall: Duration,
    /// Attempts in a row that brought nothing, after which the fetch fails.
    pub attempts: u32,
    /// First pause between attempts; it doubles up to 30 s.
    pub pause: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience {
            stall: Duration::from_secs(60),
            attempts: 8,
            pause: Duration::from_secs(1),
        }
    }
}

/// The folder of one commit below the volume's root.
pub fn model_folder(root: &Path, commit: &str) -> PathBuf {
    root.join(short(commit))
}

/// Enough of a commit to tell it from any other on a volume.
pub fn short(commit: &str) -> &str {
    commit.get(..12).unwrap_or(commit)
}

/// Fetches everything that is not there yet.
///
/// # Errors
/// See [`FetchError`]; a second call goes on from where this one stopped.
pub async fn fetch(
    spec: &FetchSpec,
    root: &Path,
    token: Option<&str>,
    patience: Patience,
    progress: &Progress,
) -> Result<PathBuf, FetchError> {
    check_repository(&spec.repository).map_err(FetchError::Spec)?;
    let hex = !spec.commit.is_empty() && spec.commit.chars().all(|c| c.is_ascii_hexdigit());
    if !hex {
        return Err(FetchError::Spec(format!("{:?} is no commit", spec.commit)));
    }
    for f in &spec.files {
        check_path(&f.path).map_err(FetchError::Spec)?;
    }
    let endpoint: HubEndpoint = spec.endpoint.parse().map_err(FetchError::Spec)?;
    let client = endpoint
        .client(patience.stall)
        .map_err(|e| FetchError::Client(crate::model::chain(&e)))?;
    let folder = model_folder(root, &spec.commit);
    if is_complete(spec, &folder).await {
        progress.skip(&spec.files);
        info!(folder = %folder.display(), "The model is already here.");
        return Ok(folder);
    }
    remove_others(root, &folder).await?;
    tokio::fs::create_dir_all(&folder)
        .await
        .map_err(|e| FetchError::disk(&folder, e))?;
    check_room(spec, root, &folder).await?;
    let source = file::Source {
        client,
        endpoint,
        spec,
        token,
        patience,
    };
    for wanted in &spec.files {
        file::bring(&source, &folder, wanted, progress).await?;
    }
    finish(spec, &folder).await?;
    progress.done();
    info!(folder = %folder.display(), files = spec.files.len(), "The model is complete.");
    Ok(folder)
}

/// Whether the marker and every file with its size are there.
async fn is_complete(spec: &FetchSpec, folder: &Path) -> bool {
    let Ok(marker) = tokio::fs::read(folder.join(MARKER)).await else {
        return false;
    };
    let Ok(marked) = serde_json::from_slice::<FetchSpec>(&marker) else {
        return false;
    };
    // The hub's address may change without a byte of the model doing so.
    if (&marked.repository, &marked.commit, &marked.files)
        != (&spec.repository, &spec.commit, &spec.files)
    {
        return false;
    }
    for f in &spec.files {
        match tokio::fs::metadata(folder.join(&f.path)).await {
            Ok(meta) if meta.len() == f.size => {}
            _ => return false,
        }
    }
    true
}

/// An older commit's folder would only take the room the new one needs: the
/// volume belongs to one copy, whose runtime is not running now.
async fn remove_others(root: &Path, keep: &Path) -> Result<(), FetchError> {
    tokio::fs::create_dir_all(root)
        .await
        .map_err(|e| FetchError::disk(root, e))?;
    let mut entries = tokio::fs::read_dir(root)
        .await
        .map_err(|e| FetchError::disk(root, e))?;
    loop {
        let entry = entries
            .next_entry()
            .await
            .map_err(|e| FetchError::disk(root, e))?;
        let Some(entry) = entry else { return Ok(()) };
        let path = entry.path();
        // Only what this program names so: 12 hex digits.
        let ours = entry
            .file_name()
            .to_str()
            .is_some_and(|n| n.len() == 12 && n.chars().all(|c| c.is_ascii_hexdigit()));
        if ours && path != keep {
            match tokio::fs::remove_dir_all(&path).await {
                Ok(()) => info!(folder = %path.display(), "Removed another revision."),
                Err(error) => {
                    warn!(folder = %path.display(), %error, "Could not remove another revision.")
                }
            }
        }
    }
}

/// Refuses at once what could only fail after hours.
async fn check_room(spec: &FetchSpec, root: &Path, folder: &Path) -> Result<(), FetchError> {
    let mut needed = 0u64;
    for f in &spec.files {
        let have = match tokio::fs::metadata(folder.join(&f.path)).await {
            Ok(m) => m.len(),
            Err(_) => match tokio::fs::metadata(file::partial(folder, &f.path)).await {
                Ok(m) => m.len(),
                Err(_) => 0,
            },
        };
        needed = needed.saturating_add(f.size.saturating_sub(have));
    }
    let free = match rustix::fs::statvfs(root) {
        Ok(stat) => stat.f_bavail.saturating_mul(stat.f_frsize),
        Err(e) => return Err(FetchError::disk(root, e.into())),
    };
    if needed > free {
        return Err(FetchError::NoRoom {
            folder: root.to_owned(),
            needed,
            free,
        });
    }
    Ok(())
}

async fn finish(spec: &FetchSpec, folder: &Path) -> Result<(), FetchError> {
    let path = folder.join(MARKER);
    let json = serde_json::to_vec(spec).map_err(|e| FetchError::Spec(e.to_string()))?;
    let temporary = folder.join(".complete.json.new");
    file::write_synced(&temporary, &json)
        .await
        .map_err(|e| FetchError::disk(&temporary, e))?;
    tokio::fs::rename(&temporary, &path)
        .await
        .map_err(|e| FetchError::disk(&path, e))?;
    file::sync_folder(folder)
        .await
        .map_err(|e| FetchError::disk(folder, e))
}

#[cfg(test)]
mod tests;
