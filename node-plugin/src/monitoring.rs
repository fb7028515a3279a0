//! What the metrics cannot be told as it happens: what the disk holds, and how broken up
//! the GPUs are.
//!
//! In: the claims on the disk and the GPUs as they were last read. Out: the text of
//! `/metrics`. Never: a call of NVML, and never a lock: monitoring asks often, and has to
//! be answered when a GPU hangs.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpu::Gpu;
use tokio::sync::watch;

use crate::claims::Claims;
use crate::metrics::{Metrics, Usage};
use crate::slices::{Holding, MigPolicy, Wanted, largest_placeable};

/// What is asked at each look.
#[derive(Clone)]
pub struct Monitoring {
    /// Where it is counted.
    pub metrics: Metrics,
    /// What the disk holds.
    pub claims: Claims,
    /// The GPUs.
    pub wanted: watch::Receiver<Option<Arc<Wanted>>>,
}

impl Monitoring {
    /// The metrics as they are now, as OpenMetrics text.
    pub async fn text(&self) -> String {
        let usage = self.claims.usage().await;
        self.metrics.usage(&usage);
        let wanted = self.wanted.borrow().clone();
        if let Some(wanted) = wanted {
            self.metrics.placeable(&placeable(&wanted, &usage));
        }
        self.metrics.text()
    }
}

/// The memory of the largest device that each GPU has room for.
fn placeable(wanted: &Wanted, usage: &Usage) -> BTreeMap<String, u64> {
    let gpus = wanted.inventory.gpus.iter();
    let of = |gpu: &Gpu| {
        let held = usage.held.get(&gpu.pci).map_or(&[][..], Vec::as_slice);
        room(gpu, held, wanted.mig)
    };
    gpus.map(|gpu| (gpu.pci.to_string(), of(gpu))).collect()
}

fn room(gpu: &Gpu, held: &[Holding], policy: MigPolicy) -> u64 {
    match largest_placeable(gpu, held, policy) {
        // An empty GPU can be had whole, which is more than its largest partition.
        _ if held.is_empty() && gpu.instances.is_empty() => gpu.memory_bytes,
        Some(profile) => profile.memory_bytes,
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use gpu::{ComputeMode, MigMode};

    use super::*;

    #[test]
    fn a_gpu_without_partitions_has_room_for_all_or_nothing() {
        let gpu = Gpu {
            pci: "0000:65:00.0".parse().unwrap(),
            index: 0,
            minor: 0,
            uuid: "GPU-1".to_owned(),
            product_name: "Tesla T4".to_owned(),
            architecture: "Turing".to_owned(),
            brand: "Tesla".to_owned(),
            compute_capability: (7, 5),
            memory_bytes: 16 << 30,
            numa_node: None,
            pcie_root: None,
            pcie: None,
            memory_bandwidth_mbps: None,
            nvlinks: Vec::new(),
            fabric_clique: None,
            compute_mode: ComputeMode::Default,
            mig: MigMode::Unsupported,
            profiles: Vec::new(),
            instances: Vec::new(),
        };
        assert_eq!(room(&gpu, &[], MigPolicy::Dynamic), 16 << 30);
        assert_eq!(room(&gpu, &[Holding::Whole], MigPolicy::Dynamic), 0);
    }
}
