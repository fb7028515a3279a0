//! Why a model could not be brought to its volume.

use std::path::{Path, PathBuf};

/// A failure that retries did not mend.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The pod's own specification is wrong.
    #[error("the download's specification can't be used: {0}")]
    Spec(String),
    /// No HTTP client can be made.
    #[error("no connection can be made: {0}; does the image hold certificates (SSL_CERT_FILE)?")]
    Client(String),
    /// The hub has no such file at this commit.
    #[error(
        "{url} was not found: the pinned revision may have been removed; edit the order's revision"
    )]
    NotFound {
        /// Address asked for.
        url: String,
    },
    /// The hub refused.
    #[error(
        "{url} was refused ({status}): the token in the order's Secret is missing or has no access"
    )]
    AccessDenied {
        /// Address asked for.
        url: String,
        /// HTTP status.
        status: u16,
    },
    /// The content differs from what the hub's own list says, twice.
    #[error(
        "{path}: {detail}; the source is damaged, publish the model anew or order another revision"
    )]
    Damaged {
        /// File.
        path: String,
        /// How it differs.
        detail: String,
    },
    /// The hub stopped answering.
    #[error("{path}: nothing came in {attempts} attempts, the last one: {last}")]
    GivenUp {
        /// File.
        path: String,
        /// Attempts in a row.
        attempts: u32,
        /// What the last one met.
        last: String,
    },
    /// The volume cannot hold what is missing.
    #[error("the volume at {} has {free} bytes free, and {needed} are still to come; it needs to be larger", .folder.display())]
    NoRoom {
        /// Where.
        folder: PathBuf,
        /// Bytes to come.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// The volume failed.
    #[error("{}: {source}", .path.display())]
    Disk {
        /// Where.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

impl FetchError {
    pub(crate) fn disk(path: &Path, source: std::io::Error) -> Self {
        FetchError::Disk {
            path: path.to_owned(),
            source,
        }
    }

    /// The condition reason that fits, as the controller reads it from the
    /// container's termination message.
    pub fn reason(&self) -> inference_api::OrderReason {
        use inference_api::OrderReason as R;
        match self {
            FetchError::Spec(_) | FetchError::Client(_) | FetchError::GivenUp { .. } => {
                R::DownloadFailed
            }
            FetchError::NotFound { .. } => R::ModelSourceNotFound,
            FetchError::AccessDenied { .. } => R::AccessDenied,
            FetchError::Damaged { .. } => R::ModelFilesInvalid,
            FetchError::NoRoom { .. } => R::InsufficientStorage,
            FetchError::Disk { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
                R::InsufficientStorage
            }
            FetchError::Disk { .. } => R::DownloadFailed,
        }
    }
}
