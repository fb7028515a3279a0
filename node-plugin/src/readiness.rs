//! What this instance still lacks before it can be counted on.
//!
//! In: each part's last state. Out: ready, or the reasons why not, for people. Never: a
//! reason to restart the process: that is liveness, and nothing here helps by dying.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A part that can be ready or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// NVML and the GPUs behind it.
    Gpus,
    /// Registration with the kubelet.
    Kubelet,
    /// The slices at the API server.
    Slices,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Gpus => "gpus",
            Self::Kubelet => "kubelet",
            Self::Slices => "slices",
        }
    }
}

/// The readiness of all parts. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct Readiness {
    reasons: Arc<Mutex<BTreeMap<Part, String>>>,
}

impl Readiness {
    /// A part works.
    pub fn ready(&self, part: Part) {
        self.reasons
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&part);
    }

    /// A part does not work, and why.
    pub fn not_ready(&self, part: Part, reason: &str) {
        let mut reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        reasons.insert(part, reason.to_owned());
    }

    /// `Ok` when every part is ready, else one line for each that is not.
    ///
    /// # Errors
    /// The text for `/readyz`.
    pub fn check(&self) -> Result<(), String> {
        let reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        if reasons.is_empty() {
            return Ok(());
        }
        let line = |(part, reason): (&Part, &String)| format!("{}: {reason}\n", part.name());
        Err(reasons.iter().map(line).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_missing_part_is_named_with_its_reason() {
        let readiness = Readiness::default();
        readiness.not_ready(Part::Kubelet, "not registered");
        readiness.not_ready(Part::Gpus, "no NVML");
        assert_eq!(
            readiness.check().unwrap_err(),
            "gpus: no NVML\nkubelet: not registered\n"
        );
        readiness.ready(Part::Gpus);
        readiness.ready(Part::Kubelet);
        assert_eq!(readiness.check(), Ok(()));
    }
}
