//! Whether a restart of this process would help.
//!
//! In: the calls of NVML that run, and the sockets. Out: alive, or the reason why not.
//! Never: a reason that a restart does not mend: a missing driver, a broken GPU, an API
//! server out of reach or a kubelet that does not call are for readiness and events.
//!
//! A slow NVML is no reason either: making MIG instances takes seconds, and a driver that
//! recovers a GPU answers after a minute. But a call that never returns holds its GPU's
//! lock for ever, and only a new process gets a new session of the library. That helps
//! when nothing is answered any more. While other GPUs are, one broken card hangs: it is
//! tainted, and a new process would hang in its first look at all GPUs and serve none.

use std::time::Duration;

use tokio::sync::watch;

use crate::kubelet::{self, Sockets};
use crate::metrics::Calls;

/// What is looked at.
#[derive(Debug, Clone)]
pub struct Liveness {
    /// The calls of NVML.
    pub calls: Calls,
    /// The sockets that this instance serves.
    pub sockets: Sockets,
    /// How long a call of NVML may take before it counts as hung.
    pub hung: Duration,
    /// Whether NVML answers about any GPU.
    pub answered: watch::Receiver<bool>,
}

impl Liveness {
    /// `Ok` when this process works.
    ///
    /// # Errors
    /// The text for `/livez`.
    pub async fn check(&self) -> Result<(), String> {
        if let Some((call, since)) = self.calls.oldest()
            && since >= self.hung
            && !*self.answered.borrow()
        {
            return Err(format!(
                "NVML hangs: its call {} has not returned for {} s",
                call.as_str(),
                since.as_secs()
            ));
        }
        kubelet::probe(&self.sockets).await
    }
}
