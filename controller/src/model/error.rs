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
    /// What is there is not a model that a runtime of this version can serve.
    #[error("{repository} at revision {revision} can't be served: {detail}")]
    NotSupported {
        /// Repository asked for.
        repository: String,
        /// Revision asked for.
        revision: String,
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
