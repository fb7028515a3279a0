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
    const ALL: [Self; 3] = [Self::Gpus, Self::Kubelet, Self::Slices];

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

    /// One line for each part: `ok`, or what it lacks.
    ///
    /// # Errors
    /// The same text when a part is not ready.
    pub fn check(&self) -> Result<String, String> {
        let reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        let line = |part: &Part| {
            let reason = reasons.get(part).map_or("ok", String::as_str);
            format!("{}: {reason}\n", part.name())
        };
        let text = Part::ALL.iter().map(line).collect();
        if reasons.is_empty() {
            Ok(text)
        } else {
            Err(text)
        }
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
            "gpus: no NVML\nkubelet: not registered\nslices: ok\n"
        );
        readiness.ready(Part::Gpus);
        readiness.ready(Part::Kubelet);
        assert_eq!(
            readiness.check().unwrap(),
            "gpus: ok\nkubelet: ok\nslices: ok\n"
        );
    }
}
