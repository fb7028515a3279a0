//! Why a model's facts could not be had. Each variant names the repository, the
//! revision and what to do.

/// A failure to learn a model's facts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// The hub has no such repository, revision or file.
    #[error("{repository} at revision {revision} was not found on {hub}: {detail}")]
    NotFound {
        /// Repository asked for.
        repository: String,
        /// Revision asked for.
        revision: String,
        /// The hub's address.
        hub: String,
        /// What exactly is missing, and what to do.
        detail: String,
    },
    /// The hub refused, for want of a token or of the model owner's consent.
    #[error("{hub} refused access to {repository} at revision {revision}: {detail}")]
    AccessDenied {
        /// Repository asked for.
        repository: String,
        /// Revision asked for.
        revision: String,
        /// The hub's address.
        hub: String,
        /// What to do.
        detail: String,
    },
    /// What is there is not one model that can be served.
    #[error("{repository} at revision {revision} can't be served: {detail}")]
    Rejected {
        /// Repository asked for.
        repository: String,
        /// Revision asked for.
        revision: String,
        /// What kind of fault it is.
        kind: Rejection,
        /// What is wrong with it, and what to do.
        detail: String,
    },
    /// The hub did not answer, or not sensibly. Worth another try.
    #[error("{hub} did not give {repository} at revision {revision}: {detail}")]
    Unavailable {
        /// Repository asked for.
        repository: String,
        /// Revision asked for.
        revision: String,
        /// The hub's address.
        hub: String,
        /// What happened.
        detail: String,
    },
}

/// What is wrong with the content of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rejection {
    /// It holds no model that a runtime serves.
    NotSupported,
    /// It does not hold the file that the order names.
    FileNotFound,
    /// It holds several variants and the order names none.
    FileAmbiguous,
    /// Its files contradict themselves or each other.
    FilesInvalid,
}

/// Why files were rejected, before the repository's name is added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub(crate) struct FilesError {
    pub(crate) kind: Rejection,
    pub(crate) detail: String,
}

impl FilesError {
    pub(crate) fn new(kind: Rejection, detail: impl Into<String>) -> Self {
        FilesError {
            kind,
            detail: detail.into(),
        }
    }
}

impl From<HeaderError> for FilesError {
    fn from(error: HeaderError) -> Self {
        FilesError::new(Rejection::FilesInvalid, error.to_string())
    }
}

impl ModelError {
    /// Whether trying again without any change may help.
    pub fn is_transient(&self) -> bool {
        matches!(self, ModelError::Unavailable { .. })
    }
}

/// Why the content of a header or a configuration was rejected. The caller adds
/// the repository and the revision.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// More bytes are needed; the argument is how many would do, at the least.
    #[error("the header goes on after {0} bytes")]
    Incomplete(u64),
    /// It is not what it claims to be, or goes over a cap.
    #[error("{0}")]
    Malformed(String),
}

impl HeaderError {
    pub(crate) fn malformed(detail: impl Into<String>) -> Self {
        HeaderError::Malformed(detail.into())
    }
}
