//! GPUs that reach each other, as attributes that a claim can match on.

use std::collections::{BTreeMap, BTreeSet};

use gpu::{Gpu, Inventory, NvLink, NvLinkRemote};
use node_plugin::slices::{SharingKind, View, Wanted, pool};

use crate::first_fit::{FirstFit, text};
use crate::golden::{shared_by, with_statics};
use crate::node::TestNode;
use crate::shares::devices;

const CLIQUE: &str = "nvlinkClique";

/// Four GPUs without any link.
fn four() -> Inventory {
    let mut inventory = TestNode::new("a100-80gb-4").inventory();
    for gpu in &mut inventory.gpus {
        gpu.nvlinks.clear();
        gpu.fabric_clique = None;
        // Whole devices only.
        gpu.mig = gpu::MigMode::Unsupported;
    }
    inventory
}

fn link(gpus: &mut [Gpu], a: usize, b: usize) {
    for (from, to) in [(a, b), (b, a)] {
        let remote = NvLinkRemote::Gpu(gpus[to].pci);
        let link = u32::try_from(gpus[from].nvlinks.len()).unwrap();
        gpus[from].nvlinks.push(NvLink {
            link,
            version: Some(3),
            remote,
            mbps: 25_000,
        });
    }
}

fn wanted(inventory: &Inventory) -> Wanted {
    Wanted::new(inventory.clone(), BTreeSet::new())
}

/// The GPUs by clique, each as its place among the GPUs; those without one are not there.
fn cliques(inventory: &Inventory) -> BTreeSet<Vec<usize>> {
    let mut cliques: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for device in devices(&wanted(inventory), View::FULL) {
        let place = |gpu: &Gpu| text(&device, "pciAddress") == gpu.pci.to_string();
        let index = inventory.gpus.iter().position(place).unwrap();
        let clique = text(&device, CLIQUE);
        if !clique.is_empty() {
            cliques.entry(clique.to_owned()).or_default().push(index);
        }
    }
    for members in cliques.values_mut() {
        members.sort_unstable();
    }
    cliques.into_values().collect()
}

#[test]
fn a_claim_that_matches_on_the_clique_stays_in_one_of_two_islands() {
    let mut inventory = four();
    link(&mut inventory.gpus, 0, 1);
    link(&mut inventory.gpus, 2, 3);
    assert_eq!(
        cliques(&inventory),
        BTreeSet::from([vec![0, 1], vec![2, 3]])
    );
    let name = |index: usize| format!("gpu-{}", inventory.gpus[index].pci.dns_label());
    let mut scheduler = FirstFit::new(&pool(&wanted(&inventory), View::FULL));
    let is_whole = |device: &_| text(device, "type") == "gpu";
    // One GPU of the second island goes.
    assert_eq!(scheduler.take(is_whole), Some(name(3)));
    let anywhere = scheduler.clone().take_together(2, "type", is_whole);
    assert_eq!(anywhere, Some(vec![name(2), name(1)]), "two islands");
    let together = scheduler.take_together(2, CLIQUE, is_whole);
    assert_eq!(together, Some(vec![name(1), name(0)]), "one island");
    assert_eq!(scheduler.take_together(2, CLIQUE, is_whole), None);
}

#[test]
fn gpus_of_a_clique_are_all_linked_to_each_other() {
    // A ring: neighbours are linked, opposite GPUs are not.
    let mut inventory = four();
    for (a, b) in [(0, 1), (1, 2), (2, 3), (3, 0)] {
        link(&mut inventory.gpus, a, b);
    }
    assert_eq!(
        cliques(&inventory),
        BTreeSet::from([vec![0, 1], vec![2, 3]])
    );
    for device in devices(&wanted(&inventory), View::FULL) {
        let attributes = device.attributes.unwrap();
        assert_eq!(attributes["nvlinkPeers"].int, Some(2));
        assert_eq!(attributes["nvlinkBandwidth"].int, Some(50_000));
    }
    link(&mut inventory.gpus, 0, 2);
    link(&mut inventory.gpus, 1, 3);
    assert_eq!(cliques(&inventory), BTreeSet::from([vec![0, 1, 2, 3]]));
}

#[test]
fn gpus_behind_switches_are_one_clique_unless_their_fabric_divides_them() {
    let mut inventory = four();
    for gpu in &mut inventory.gpus {
        gpu.nvlinks.push(NvLink {
            link: 0,
            version: Some(3),
            remote: NvLinkRemote::Switch,
            mbps: 25_000,
        });
    }
    assert_eq!(cliques(&inventory), BTreeSet::from([vec![0, 1, 2, 3]]));
    // No other node has a clique of this name.
    let first = inventory.gpus[0].uuid.clone();
    let devices_of = |inventory: &Inventory| devices(&wanted(inventory), View::FULL);
    assert!(
        devices_of(&inventory)
            .iter()
            .all(|d| text(d, CLIQUE) == first)
    );

    let cluster = "3c8f1d4e-7a52-4c39-9a0b-0d6c5f1e2a7b";
    for (index, gpu) in inventory.gpus.iter_mut().enumerate() {
        gpu.fabric_clique = Some((cluster.to_owned(), u32::try_from(index / 2).unwrap()));
    }
    assert_eq!(
        cliques(&inventory),
        BTreeSet::from([vec![0, 1], vec![2, 3]])
    );
    assert_eq!(
        text(&devices_of(&inventory)[0], CLIQUE),
        format!("{cluster}/1")
    );
    // Every node without a fabric manager of several nodes has the cluster of zeros.
    for gpu in &mut inventory.gpus {
        gpu.fabric_clique = Some(("00000000-0000-0000-0000-000000000000".to_owned(), 0));
    }
    assert!(
        devices_of(&inventory)
            .iter()
            .all(|d| text(d, CLIQUE) == first)
    );
}

#[test]
fn a_gpu_without_links_and_a_partition_have_no_clique() {
    assert_eq!(cliques(&four()), BTreeSet::new());
    let wanted = with_statics("h100-80gb-8", &[("2g.20gb", 0)]);
    let all = devices(&wanted, View::FULL);
    assert!(all.iter().any(|device| !text(device, CLIQUE).is_empty()));
    for device in all.iter().filter(|device| device.name.contains("-mig-")) {
        let attributes = device.attributes.as_ref().unwrap();
        assert!(
            !attributes.keys().any(|name| name.starts_with("nvlink")),
            "{}",
            device.name
        );
        assert!(!attributes.contains_key("memoryBandwidth"));
    }
}

#[test]
fn every_device_leaves_room_below_the_limit_of_attributes() {
    let inventory = TestNode::new("h100-80gb-8").inventory();
    let sharing = shared_by(SharingKind::Mps, &inventory);
    let wanted = wanted(&inventory).shared(sharing);
    for device in devices(&wanted, View::FULL) {
        let count = device.attributes.unwrap().len() + device.capacity.unwrap().len();
        assert!(count <= 28, "{}: {count}", device.name);
    }
}
