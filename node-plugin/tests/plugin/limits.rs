//! What the API and the hardware allow, held against what is published.

use std::collections::{BTreeMap, BTreeSet};

use gpu::{Inventory, PciAddress};
use k8s_openapi::api::resource::v1::{CounterSet, Device};
use node_plugin::claims::hardware::Hardware;
use node_plugin::slices::names::{Named, resolve};
use node_plugin::slices::{SharingKind, SliceContent, StaticInstance, View, Wanted, pool};

use crate::golden::shared_by;
use crate::node::{TestNode, topologies};

fn split(content: &[SliceContent]) -> (Vec<&[CounterSet]>, Vec<&[Device]>) {
    let (mut counters, mut devices) = (Vec::new(), Vec::new());
    for slice in content {
        match slice {
            SliceContent::Counters(sets) => counters.push(sets.as_slice()),
            SliceContent::Devices(list) => devices.push(list.as_slice()),
        }
    }
    (counters, devices)
}

fn unclaimed(inventory: Inventory) -> Wanted {
    Wanted::new(inventory, BTreeSet::new())
}

/// The same with shared devices.
fn shared(inventory: Inventory) -> Wanted {
    let sharing = shared_by(SharingKind::Mps, &inventory);
    unclaimed(inventory).shared(sharing)
}

fn published(inventory: &Inventory) -> Vec<SliceContent> {
    pool(&unclaimed(inventory.clone()), View::FULL)
}

fn is_dns_label(name: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let outer = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    name.len() <= 63
        && name.chars().all(inner)
        && outer(name.chars().next())
        && outer(name.chars().last())
}

/// Everything that the API server checks on a slice, and what makes a pool invalid.
pub(crate) fn assert_within_limits(content: &[SliceContent]) {
    let (counters, devices) = split(content);
    let mut sets: BTreeMap<&str, &CounterSet> = BTreeMap::new();
    for slice in counters {
        assert!(slice.len() <= 8, "{} counter sets in a slice", slice.len());
        for set in slice {
            assert!(is_dns_label(&set.name) && set.counters.len() <= 32);
            assert!(sets.insert(&set.name, set).is_none(), "{} twice", set.name);
        }
    }
    let mut names = BTreeSet::new();
    for slice in devices {
        let advanced = slice
            .iter()
            .any(|d| d.consumes_counters.is_some() || d.taints.is_some());
        assert!(
            slice.len() <= if advanced { 64 } else { 128 },
            "{}",
            slice.len()
        );
        for device in slice {
            assert!(is_dns_label(&device.name), "{}", device.name);
            assert!(names.insert(&device.name), "{} twice", device.name);
            let attributes = device.attributes.iter().flatten();
            let capacity = device.capacity.iter().flatten();
            assert!(attributes.clone().count() + capacity.clone().count() <= 32);
            for (name, value) in attributes {
                let id = name.rsplit('/').next().unwrap();
                assert!(id.len() <= 32, "{name}");
                let text = value.string.as_ref().or(value.version.as_ref());
                assert!(
                    text.is_none_or(|text| text.len() <= 64 && !text.is_empty()),
                    "{name}"
                );
            }
            let consumed = device.consumes_counters.as_deref().unwrap_or_default();
            assert!(consumed.len() <= 2);
            for consumption in consumed {
                let set = sets[consumption.counter_set.as_str()];
                for counter in consumption.counters.keys() {
                    assert!(set.counters.contains_key(counter), "{counter}");
                }
            }
        }
    }
}

#[test]
fn every_topology_is_within_the_limits_of_the_api() {
    for topology in topologies() {
        let inventory = TestNode::new(&topology).inventory();
        assert_within_limits(&published(&inventory));
        assert_within_limits(&pool(&shared(inventory), View::FULL));
    }
}

#[test]
fn sixteen_gpus_take_two_counter_slices_and_no_slice_splits_a_gpu() {
    let mut inventory = TestNode::new("h100-80gb-8").inventory();
    let more: Vec<_> = inventory
        .gpus
        .iter()
        .map(|gpu| {
            let mut gpu = gpu.clone();
            gpu.pci = PciAddress {
                domain: 1,
                ..gpu.pci
            };
            gpu.uuid.push_str("-second");
            gpu
        })
        .collect();
    inventory.gpus.extend(more);
    let content = published(&inventory);
    assert_within_limits(&content);
    let (counters, devices) = split(&content);
    assert_eq!(
        counters.iter().map(|slice| slice.len()).collect::<Vec<_>>(),
        [8, 8]
    );
    // 25 partitions a GPU: two GPUs fit a slice, three do not; then the whole devices.
    let sizes: Vec<usize> = devices.iter().map(|slice| slice.len()).collect();
    assert_eq!(sizes, [50, 50, 50, 50, 50, 50, 50, 50, 16]);
}

#[test]
fn a_node_without_gpus_has_one_empty_slice() {
    let mut inventory = TestNode::new("t4-1").inventory();
    inventory.gpus.clear();
    assert_eq!(published(&inventory), [SliceContent::Devices(Vec::new())]);
}

#[test]
fn a_gpu_without_mig_is_one_device_without_counters() {
    let content = published(&TestNode::new("t4-1").inventory());
    let (counters, devices) = split(&content);
    assert!(counters.is_empty());
    assert_eq!(devices.len(), 1);
    assert_eq!(devices[0].len(), 1);
    assert_eq!(devices[0][0].consumes_counters, None);
}

#[test]
fn small_partitions_come_first_and_fill_a_gpu_from_the_top() {
    let node = TestNode::new("h100-80gb-8");
    let content = published(&node.inventory());
    let (_, devices) = split(&content);
    let first: Vec<&str> = devices[0]
        .iter()
        .map(|d| d.name.split_once("-mig-").map_or("", |(_, name)| name))
        .take(25)
        .collect();
    let want = "1g10gb-6 1g10gb-5 1g10gb-4 1g10gb-3 1g10gb-2 1g10gb-1 1g10gb-0 1g10gb-me-6 \
                1g10gb-me-5 1g10gb-me-4 1g10gb-me-3 1g10gb-me-2 1g10gb-me-1 1g10gb-me-0 \
                1g20gb-6 1g20gb-4 1g20gb-2 1g20gb-0 2g20gb-4 2g20gb-2 2g20gb-0 3g40gb-4 \
                3g40gb-0 4g40gb-0 7g80gb-0";
    assert_eq!(first, want.split_whitespace().collect::<Vec<_>>());
    let wholes = devices[devices.len() - 1];
    assert_eq!(wholes[0].name, node.device(7, ""));
    assert_eq!(wholes[7].name, node.device(0, ""));
}

/// The counters are the scheduler's picture of the hardware. For many orders of
/// asking, what the counters allow and what the (fake) hardware does must be the same:
/// more would fail in prepare, less would strand a GPU.
#[test]
fn counters_allow_exactly_the_layouts_that_the_hardware_takes() {
    for topology in topologies() {
        let node = TestNode::new(&topology);
        let hardware = node.hardware();
        let inventory = hardware.inventory().unwrap();
        let content = published(&inventory);
        let (counters, devices) = split(&content);
        let Some(gpu) = inventory
            .gpus
            .first()
            .filter(|gpu| !gpu.profiles.is_empty())
        else {
            continue;
        };
        let Some(set) = counters.iter().flat_map(|s| s.iter()).next() else {
            continue;
        };
        let own: Vec<&Device> = devices
            .iter()
            .flat_map(|slice| slice.iter())
            .filter(|d| d.name.starts_with(&format!("{}-mig", set.name)))
            .collect();
        let number = |q: &k8s_openapi::apimachinery::pkg::api::resource::Quantity| {
            q.0.parse::<u32>().unwrap()
        };
        for seed in 0..12_usize {
            let mut left: BTreeMap<&str, u32> = set
                .counters
                .iter()
                .map(|(name, c)| (name.as_str(), number(&c.value)))
                .collect();
            let mut order = own.clone();
            // A fixed shuffle of its own for each seed; seed 0 is the published order.
            order.sort_by_key(|d| {
                let index = own.iter().position(|o| o.name == d.name).unwrap();
                (seed * (index + 7) * 7919) % 101
            });
            let mut made = Vec::new();
            for device in order {
                let consumed = &device.consumes_counters.as_ref().unwrap()[0].counters;
                let short: Vec<&str> = consumed
                    .iter()
                    .filter(|(name, c)| left[name.as_str()] < number(&c.value))
                    .map(|(name, _)| name.as_str())
                    .collect();
                if short == ["media-extensions"] {
                    continue; // The fake does not count engines across profiles.
                }
                let allowed = short.is_empty();
                let Some(Named::Partition(_, profile, at)) = resolve(&inventory.gpus, &device.name)
                else {
                    panic!("{} stands for nothing", device.name)
                };
                let result = hardware.create_instance(gpu.pci, profile.id, at);
                assert_eq!(
                    allowed,
                    result.is_ok(),
                    "{topology}: {} after {made:?}: {result:?}",
                    device.name
                );
                if let Ok(instance) = result {
                    made.push((device.name.clone(), instance.gpu_instance_id));
                    for (name, c) in consumed {
                        *left.get_mut(name.as_str()).unwrap() -= number(&c.value);
                    }
                }
            }
            assert!(!made.is_empty());
            for (_, id) in made {
                hardware.destroy_instance(gpu.pci, id).unwrap();
            }
        }
    }
}

#[test]
fn an_administrators_instance_is_published_and_what_overlaps_it_is_not() {
    let node = TestNode::new("h100-80gb-8");
    let hardware = node.hardware();
    let inventory = hardware.inventory().unwrap();
    let gpu = &inventory.gpus[0];
    let profile = gpu.profiles.iter().find(|p| p.name == "2g.20gb").unwrap();
    let made = hardware
        .create_instance(gpu.pci, profile.id, profile.placements[0])
        .unwrap();
    let statics = BTreeSet::from([StaticInstance {
        pci: gpu.pci,
        profile_id: profile.id,
        placement: made.placement,
    }]);
    let inventory = hardware.inventory().unwrap();
    let content = pool(&Wanted::new(inventory, statics), View::FULL);
    assert_within_limits(&content);
    let (_, devices) = split(&content);
    let names: BTreeSet<&str> = devices
        .iter()
        .flat_map(|s| s.iter())
        .map(|d| d.name.as_str())
        .collect();
    assert!(names.contains(node.device(0, "2g20gb-0").as_str()));
    assert!(names.contains(node.device(0, "1g10gb-6").as_str()));
    for gone in [
        "", "1g10gb-0", "1g10gb-1", "1g20gb-0", "3g40gb-0", "4g40gb-0", "7g80gb-0",
    ] {
        assert!(!names.contains(node.device(0, gone).as_str()), "{gone}");
    }
    assert!(names.contains(node.device(1, "").as_str()));
}

#[test]
fn without_counters_only_devices_that_cannot_overlap_are_offered() {
    let node = TestNode::new("h100-80gb-8");
    let content = pool(&unclaimed(node.inventory()), View::REDUCED);
    assert_within_limits(&content);
    let (counters, devices) = split(&content);
    assert!(counters.is_empty());
    let names: Vec<&str> = devices
        .iter()
        .flat_map(|s| s.iter())
        .map(|d| d.name.as_str())
        .collect();
    assert_eq!(names.len(), 8);
    assert!(names.iter().all(|name| !name.contains("-mig-")));
}

#[test]
fn preparing_changes_nothing_that_is_published() {
    let node = TestNode::new("h100-80gb-8");
    let hardware = node.hardware();
    let before = hardware.inventory().unwrap();
    let gpu = &before.gpus[0];
    let profile = &gpu.profiles[0];
    hardware
        .create_instance(gpu.pci, profile.id, profile.placements[0])
        .unwrap();
    let after = hardware.inventory().unwrap();
    assert_ne!(before, after);
    assert_eq!(published(&before), published(&after));
}

#[test]
fn a_gpu_that_becomes_unreadable_keeps_its_devices_under_a_taint_until_it_is_read_again() {
    for topology in ["h100-80gb-8", "t4-1"] {
        let before = unclaimed(TestNode::new(topology).inventory());
        let mut inventory = before.inventory.clone();
        let lost = inventory.gpus.remove(0);
        let after = unclaimed(inventory.clone()).keeping(Some(&before));
        // Also the second time: what was kept is kept on.
        let after = unclaimed(inventory).keeping(Some(&after));
        let content = pool(&after, View::FULL);
        assert_within_limits(&content);
        let (counters, devices) = split(&content);
        let whole = pool(&before, View::FULL);
        let (counters_before, devices_before) = split(&whole);
        assert_eq!(counters, counters_before);
        let pairs = devices.concat().into_iter().zip(devices_before.concat());
        let name = format!("gpu-{}", lost.pci.dns_label());
        for (mut device, was) in pairs {
            let taints = device.taints.take().unwrap_or_default();
            let keys: Vec<&str> = taints.iter().map(|taint| taint.key.as_str()).collect();
            if device.name.starts_with(&name) {
                assert_eq!(keys, ["gpu.ai.deckhouse.io/unreadable"], "{}", device.name);
                assert_eq!(taints[0].effect, "NoSchedule");
            } else {
                assert!(keys.is_empty(), "{}", device.name);
            }
            assert_eq!(device, was);
        }
        assert_eq!(before.clone().keeping(Some(&after)), before);
    }
}

#[test]
fn an_administrators_instance_on_an_unreadable_gpu_keeps_its_place() {
    let inventory = TestNode::new("h100-80gb-8").inventory();
    let gpu = &inventory.gpus[0];
    let statics = BTreeSet::from([StaticInstance {
        pci: gpu.pci,
        profile_id: gpu.profiles[0].id,
        placement: gpu.profiles[0].placements[0],
    }]);
    let before = Wanted::new(inventory.clone(), statics.clone());
    let mut rest = inventory;
    rest.gpus.remove(0);
    let after = unclaimed(rest).keeping(Some(&before));
    assert_eq!(after.statics, statics);
    let names = |wanted| -> Vec<String> {
        let content = pool(wanted, View::FULL);
        let (_, devices) = split(&content);
        devices.concat().into_iter().map(|d| d.name).collect()
    };
    assert_eq!(names(&after), names(&before));
}
