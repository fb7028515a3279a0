//! The slices of each topology, as people can read them and as the API server took them.

use std::collections::{BTreeMap, BTreeSet};

use gpu::{Inventory, PciAddress};
use k8s_openapi::api::resource::v1::ResourceSlice;
use node_plugin::claims::hardware::Hardware;
use node_plugin::slices::{SharingKind, StaticInstance, View, Wanted, pool, resource_slice};

use crate::node::{NODE, TestNode, repository, topologies};

/// How the GPUs of a test are shared: all by one means.
pub(crate) fn shared_by(
    kind: SharingKind,
    inventory: &Inventory,
) -> BTreeMap<PciAddress, SharingKind> {
    inventory.gpus.iter().map(|gpu| (gpu.pci, kind)).collect()
}

/// What is written down, by the name of its file: every topology as it is at first, and one
/// whose administrator made instances.
fn scenes() -> BTreeMap<String, Wanted> {
    let mut scenes: BTreeMap<String, Wanted> = topologies()
        .into_iter()
        .map(|topology| {
            let inventory = TestNode::new(&topology).inventory();
            let kind = if topology == "t4-1" {
                SharingKind::TimeSlicing
            } else {
                SharingKind::Mps
            };
            let sharing = shared_by(kind, &inventory);
            let wanted = Wanted::new(inventory, BTreeSet::new()).shared(sharing);
            (topology, wanted)
        })
        .collect();
    scenes.insert(
        "a30-2-static".to_owned(),
        with_statics("a30-2", &[("2g.12gb", 0), ("1g.6gb", 3)]),
    );
    scenes
}

/// A node with instances of an administrator on its first GPU.
pub(crate) fn with_statics(topology: &str, instances: &[(&str, u32)]) -> Wanted {
    let node = TestNode::new(topology);
    let hardware = node.hardware();
    let gpu = &hardware.inventory().unwrap().gpus[0];
    let mut statics = BTreeSet::new();
    for (name, start) in instances {
        let profile = gpu.profiles.iter().find(|p| p.name == *name).unwrap();
        let at = profile.placements.iter().find(|at| at.start == *start);
        let made = hardware.create_instance(gpu.pci, profile.id, *at.unwrap());
        statics.insert(StaticInstance {
            pci: gpu.pci,
            profile_id: profile.id,
            placement: made.unwrap().placement,
        });
    }
    let inventory = hardware.inventory().unwrap();
    let sharing = shared_by(SharingKind::Mps, &inventory);
    Wanted::new(inventory, statics).shared(sharing)
}

/// The slices of every scene as objects of the API.
pub(crate) fn all() -> BTreeMap<String, Vec<ResourceSlice>> {
    let slices = |wanted: &Wanted| {
        let content = pool(wanted, View::FULL);
        let slices = content.iter().enumerate();
        slices
            .map(|(index, slice)| resource_slice(slice, NODE, None, index, content.len(), 1))
            .collect()
    };
    scenes()
        .iter()
        .map(|(name, wanted)| (name.clone(), slices(wanted)))
        .collect()
}

/// `UPDATE_GOLDEN=1` writes the files anew; then look at the difference.
#[test]
fn the_slices_of_every_topology_are_the_golden_ones() {
    let folder = repository().join("tests/golden/slices");
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    let all = all();
    assert!(all.len() > 1);
    for (scene, slices) in all {
        let documents = slices.into_iter().map(|slice| {
            let yaml = serde_saphyr::to_string(&slice).unwrap();
            format!("---\n{}\n", yaml.trim_end())
        });
        let head = "# Written by UPDATE_GOLDEN=1 cargo test -p node-plugin golden; do not edit.\n";
        let text = head.to_owned() + &documents.collect::<String>();
        let path = folder.join(&scene).with_extension("yaml");
        if update {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, text).unwrap();
            continue;
        }
        let golden = std::fs::read_to_string(&path).unwrap_or_default();
        let difference = golden.lines().zip(text.lines()).position(|(a, b)| a != b);
        assert!(
            golden == text,
            "{} is stale, first at line {:?}; see UPDATE_GOLDEN",
            path.display(),
            difference.map(|line| line + 1)
        );
    }
}
