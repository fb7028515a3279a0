//! Devices that claims hold and that would not be published any more.
//!
//! In: what is published of a GPU, and what claims hold of it. Out: the same with the missing
//! ones, under the names by which they were allocated. Never: a new claim on one of them.
//!
//! The scheduler counts what a GPU has left by its published devices that are allocated. A
//! device that disappears under its claim (another name of a profile after a driver upgrade,
//! another policy for MIG or sharing) would be charged to nobody, and its hardware given away
//! again under another name.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{Device, DeviceTaint};

use super::devices::{Of, Offer, Published};
use super::{Holding, SharingKind, View, Wanted, names, shares};

/// The taint on what is published for its claims alone.
const WITHDRAWN: &str = "gpu.ai.deckhouse.io/withdrawn";

/// Adds what claims hold of the GPU and what is not there.
pub(super) fn keep(published: &mut Published, of: &Of<'_>, wanted: &Wanted, view: View) {
    let there: BTreeSet<String> = published.devices_mut().map(|d| d.name.clone()).collect();
    for (name, (pci, holding)) in &wanted.held {
        if *pci != of.gpu.pci || there.contains(name) {
            continue;
        }
        let kind = wanted.sharing.get(pci).copied();
        let Some(mut device) = device(of, name, *holding, kind) else {
            tracing::warn!(
                device = name,
                "A claim holds a device that cannot be described any more: it is not published."
            );
            continue;
        };
        device.name.clone_from(name);
        if view.taints {
            let taint = DeviceTaint {
                key: WITHDRAWN.to_owned(),
                effect: "NoSchedule".to_owned(),
                ..DeviceTaint::default()
            };
            device.taints = Some(vec![taint]);
        }
        match holding {
            Holding::Whole if names::is_shared(name) => published.shared = Some(device),
            Holding::Whole => published.whole = Some(device),
            Holding::Partition { .. } if names::is_shared(name) => {
                published.shared_partitions.push(device);
            }
            Holding::Partition { .. } => published.partitions.push(device),
        }
    }
}

fn device(of: &Of<'_>, name: &str, held: Holding, kind: Option<SharingKind>) -> Option<Device> {
    let (alone, memory_bytes) = match held {
        Holding::Whole => (of.whole(), of.gpu.memory_bytes),
        Holding::Partition {
            profile_id,
            placement,
        } => {
            let profile = of.gpu.profiles.iter().find(|p| p.id == profile_id)?;
            let offer = Offer {
                profile,
                at: placement,
                is_static: names::is_shared(name),
            };
            (of.partition(&offer), profile.memory_bytes)
        }
    };
    if names::is_shared(name) {
        return shares::of(alone, of.gpu, kind, memory_bytes);
    }
    Some(alone)
}
