//! Which MIG instances an administrator made, kept for the day a record is damaged.
//!
//! In: the instances that exist and that no claim made, as often as they are looked at.
//! Out: whether an instance was one of them. Never: a reason to destroy an instance that
//! nothing is known of.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use gpu::{PciAddress, Placement};
use serde::{Deserialize, Serialize};

use super::files::{self, Flush};
use crate::slices::StaticInstance;

/// The file of one node.
#[derive(Debug)]
pub(super) struct Statics {
    path: PathBuf,
    boot_id: String,
    /// At the last look.
    last: Mutex<Option<BTreeSet<StaticInstance>>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kept {
    /// Instances do not outlive their boot.
    boot_id: String,
    instances: Vec<KeptInstance>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct KeptInstance {
    pci: PciAddress,
    profile_id: u32,
    placement: Placement,
}

impl Statics {
    pub(super) fn new(path: PathBuf, boot_id: String) -> Self {
        Self {
            path,
            boot_id,
            last: Mutex::default(),
        }
    }

    /// Whether an administrator made an instance that exists. Where that was never noted,
    /// or the note is damaged, it counts as one's: it is left alone.
    pub(super) fn contains(&self, instance: &StaticInstance) -> bool {
        self.kept().is_none_or(|kept| kept.contains(instance))
    }

    /// Notes the instances that were there at two looks in a row: one alone may have caught
    /// a claim's that came and went between two looks at the records.
    pub(super) fn observe(&self, now: &BTreeSet<StaticInstance>) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let twice = last.replace(now.clone()).is_some_and(|last| last == *now);
        if !twice || self.kept().as_ref() == Some(now) {
            return;
        }
        let kept = Kept {
            boot_id: self.boot_id.clone(),
            instances: now
                .iter()
                .map(|instance| KeptInstance {
                    pci: instance.pci,
                    profile_id: instance.profile_id,
                    placement: instance.placement,
                })
                .collect(),
        };
        let written = serde_json::to_vec(&kept)
            .map_err(Into::into)
            .and_then(|bytes| files::replace(&self.path, &bytes, Flush::None));
        if let Err(error) = written {
            tracing::warn!(%error, path = %self.path.display(),
                "The MIG instances that no claim made cannot be noted; all that exist count as an administrator's.");
        }
    }

    fn kept(&self) -> Option<BTreeSet<StaticInstance>> {
        let kept: Kept = serde_json::from_slice(&fs::read(&self.path).ok()?).ok()?;
        let instances = kept.instances.into_iter().map(|kept| StaticInstance {
            pci: kept.pci,
            profile_id: kept.profile_id,
            placement: kept.placement,
        });
        (kept.boot_id == self.boot_id).then(|| instances.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_twice_is_known_after_a_restart_until_a_reboot_and_else_all_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("statics.json");
        let statics = Statics::new(path.clone(), "boot".into());
        let one = StaticInstance {
            pci: "0000:65:00.0".parse().unwrap(),
            profile_id: 19,
            placement: Placement { start: 6, size: 1 },
        };
        let other = StaticInstance {
            profile_id: 9,
            ..one
        };
        let now = BTreeSet::from([one]);
        assert!(statics.contains(&other), "nothing is known yet");
        statics.observe(&now);
        assert!(!path.exists());
        statics.observe(&now);
        let restarted = Statics::new(path.clone(), "boot".into());
        assert!(restarted.contains(&one) && !restarted.contains(&other));
        assert!(Statics::new(path.clone(), "next".into()).contains(&other));
        fs::write(&path, "{").unwrap();
        assert!(restarted.contains(&other));
    }
}
