//! What should be published, and what is kept of GPUs that cannot be read now.
//!
//! In: an inventory and the instances of administrators, and what was wanted before.
//! Out: what is wanted now. Never: a GPU that was published and is gone from one look
//! to the next: the scheduler counts what is allocated by the devices that are
//! published, and people look for a broken card where it was.

use std::collections::{BTreeMap, BTreeSet};

use gpu::{Gpu, Inventory, PciAddress};

use super::{Holding, MigPolicy, SharingKind, StaticInstance};
use crate::health::Fault;

/// What should be published.
#[derive(Debug, Clone, PartialEq)]
pub struct Wanted {
    /// The GPUs.
    pub inventory: Inventory,
    /// The MIG instances of administrators.
    pub statics: BTreeSet<StaticInstance>,
    /// Whether claims may change how the GPUs are partitioned.
    pub mig: MigPolicy,
    /// The GPUs that are shared, and how. A GPU that is not among them has no shared device.
    pub sharing: BTreeMap<PciAddress, SharingKind>,
    /// What claims hold, by the device names under which it was allocated to them. It stays
    /// published whatever else changes.
    pub held: BTreeMap<String, (PciAddress, Holding)>,
    /// Which of the GPUs are described as they were when they could last be read. Their
    /// devices stay, and their taint keeps new claims off.
    pub unreadable: BTreeSet<PciAddress>,
    /// What is wrong with them.
    pub faults: Vec<Fault>,
}

impl Wanted {
    /// What one look at the node found.
    #[must_use]
    pub fn new(inventory: Inventory, statics: BTreeSet<StaticInstance>) -> Self {
        Self {
            inventory,
            statics,
            mig: MigPolicy::default(),
            sharing: BTreeMap::new(),
            held: BTreeMap::new(),
            unreadable: BTreeSet::new(),
            faults: Vec::new(),
        }
    }

    /// The same under a policy for MIG.
    #[must_use]
    pub fn under(mut self, mig: MigPolicy) -> Self {
        self.mig = mig;
        self
    }

    /// The same with what claims hold.
    #[must_use]
    pub fn holding(mut self, held: BTreeMap<String, (PciAddress, Holding)>) -> Self {
        self.held = held;
        self
    }

    /// The same with GPUs that are shared.
    #[must_use]
    pub fn shared(mut self, sharing: BTreeMap<PciAddress, SharingKind>) -> Self {
        self.sharing = sharing;
        self
    }

    /// Adds the GPUs that were there before and that this look did not find.
    #[must_use]
    pub fn keeping(mut self, before: Option<&Self>) -> Self {
        let Some(before) = before else {
            return self;
        };
        let found: BTreeSet<PciAddress> = self.inventory.gpus.iter().map(|gpu| gpu.pci).collect();
        let lost = |pci: PciAddress| !found.contains(&pci);
        let gpus = before.inventory.gpus.iter().filter(|gpu| lost(gpu.pci));
        self.inventory.gpus.extend(gpus.cloned());
        self.inventory.gpus.sort_by_key(|gpu: &Gpu| gpu.pci);
        let statics = before.statics.iter().filter(|found| lost(found.pci));
        self.statics.extend(statics.copied());
        let sharing = before.sharing.iter().filter(|(pci, _)| lost(**pci));
        self.sharing.extend(sharing);
        let all = self.inventory.gpus.iter().map(|gpu| gpu.pci);
        self.unreadable = all.filter(|pci| lost(*pci)).collect();
        self
    }
}
