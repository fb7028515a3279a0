//! What this node's claims take, for the metrics.
//!
//! In: the checkpoints. Out: how many there are, their size, and the devices in them.
//! Never: a lock, or a file's content where it was read before: monitoring asks often.

use super::Claims;
use super::checkpoint::Stage;
use crate::metrics::{DeviceKind, Usage};
use crate::slices::Holding;

impl Claims {
    /// What the disk holds now. An unreadable folder holds nothing that can be counted.
    pub async fn usage(&self) -> Usage {
        let core = self.core.clone();
        let counted = tokio::task::spawn_blocking(move || {
            let Ok(all) = core.checkpoints.all() else {
                return Usage::default();
            };
            let mut usage = Usage {
                records: all.records.len(),
                broken: all.unreadable.len(),
                ..Usage::default()
            };
            for record in all.records {
                let file = core.checkpoints.path(&record.claim.uid).ok();
                let file = file.and_then(|path| std::fs::metadata(path).ok());
                usage.bytes += file.map_or(0, |file| file.len());
                if record.stage != Stage::PrepareCompleted {
                    continue;
                }
                for device in &record.devices {
                    *usage
                        .devices
                        .entry(DeviceKind::of(&device.target))
                        .or_default() += 1;
                    // Administrative access holds nothing.
                    if !device.admin_access {
                        let held = usage.held.entry(device.target.pci()).or_default();
                        held.push(Holding::of(&device.target));
                    }
                }
            }
            usage
        });
        counted.await.unwrap_or_default()
    }
}
