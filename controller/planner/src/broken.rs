//! Selectors that cannot be judged, for whoever may read them.
//!
//! In: a snapshot, and what a class allows. Out: the broken selectors with their
//! expressions and errors. An order's answer names their holders alone: what a
//! class says is its administrator's.

use std::collections::BTreeMap;

use crate::demand::{Demand, MemoryNeed, PlacementType, ReplicaBounds, ShareBounds, SharingMode};
use crate::explanation::BrokenSelector;
use crate::inventory::Inventory;
use crate::kinds::{self, SelectorCache};
use crate::search::allowed_classes;
use crate::snapshot::{OrderRef, Snapshot};

/// The selectors of a class, and of the device classes that it allows, that do not
/// compile or fail on a device that no other device class vouches for.
pub fn broken_selectors(
    snapshot: &Snapshot,
    device_class_names: Option<&[String]>,
    selectors: &[String],
) -> Vec<BrokenSelector> {
    let demand = Demand {
        order: OrderRef {
            namespace: String::new(),
            name: String::new(),
        },
        memory: vec![MemoryNeed {
            devices: 1,
            bytes_per_device: 0,
        }],
        sharing_modes: vec![SharingMode::Dedicated, SharingMode::Shared],
        placement_types: vec![PlacementType::Partition, PlacementType::WholeDevice],
        device_class_names: device_class_names.map(<[String]>::to_vec),
        selectors: selectors.to_vec(),
        share_bounds: ShareBounds::default(),
        replicas: ReplicaBounds { min: 1, max: 1 },
        device_tolerations: vec![],
        node_tolerations: vec![],
        node_selector: BTreeMap::new(),
    };
    let usable = vec![true; snapshot.nodes.len()];
    let inventory = Inventory::new(snapshot, &usable);
    let classes = allowed_classes(snapshot, &demand);
    let mut cache = SelectorCache::new();
    let kinds = kinds::sort(&inventory, &classes, &demand, &mut cache);
    let unjudged = kinds.unjudged.iter().map(|(broken, _)| broken);
    distinct(kinds.uncompiled.iter().chain(unjudged))
}

/// One of each expression and holder.
pub(crate) fn distinct<'b>(all: impl Iterator<Item = &'b BrokenSelector>) -> Vec<BrokenSelector> {
    let mut distinct: Vec<BrokenSelector> = Vec::new();
    for broken in all {
        let known =
            |b: &BrokenSelector| b.holder == broken.holder && b.expression == broken.expression;
        if !distinct.iter().any(known) {
            distinct.push(broken.clone());
        }
    }
    distinct
}
