//! The shared devices: which there are, what they hold and what they leave to others.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::Device;
use node_plugin::slices::names::{Named, Shared, resolve};
use node_plugin::slices::{SharingKind, SliceContent, View, Wanted, pool};

use crate::first_fit::text;
use crate::golden::{shared_by, with_statics};
use crate::node::TestNode;

/// The devices in the order in which the scheduler tries them.
pub(crate) fn devices(wanted: &Wanted, view: View) -> Vec<Device> {
    let devices = pool(wanted, view).into_iter().map(|slice| match slice {
        SliceContent::Devices(devices) => devices,
        SliceContent::Counters(_) => Vec::new(),
    });
    devices.flatten().collect()
}

fn shared_node(topology: &str, kind: SharingKind) -> (TestNode, Wanted) {
    let node = TestNode::new(topology);
    let inventory = node.inventory();
    let sharing = shared_by(kind, &inventory);
    (
        node,
        Wanted::new(inventory, BTreeSet::new()).shared(sharing),
    )
}

#[test]
fn every_gpu_has_a_shared_device_that_takes_the_whole_gpu_once_and_stands_last() {
    for (topology, kind) in [
        ("h100-80gb-8", SharingKind::Mps),
        ("t4-1", SharingKind::TimeSlicing),
    ] {
        let (node, wanted) = shared_node(topology, kind);
        let all = devices(&wanted, View::FULL);
        let count = wanted.inventory.gpus.len();
        let (rest, shares) = all.split_at(all.len() - count);
        assert!(rest.iter().all(|d| d.allow_multiple_allocations.is_none()));
        for (index, share) in shares.iter().enumerate() {
            // From the first GPU upwards; the whole devices run the other way.
            assert_eq!(share.name, format!("{}-shared", node.device(index, "")));
            let gpu = &wanted.inventory.gpus[index];
            assert_eq!(
                resolve(&wanted.inventory.gpus, &share.name),
                Some(Named::Share(Shared::Whole(gpu)))
            );
            assert_eq!(share.allow_multiple_allocations, Some(true));
            assert_eq!(
                (text(share, "type"), text(share, "sharing")),
                ("share", kind.as_str())
            );
            assert_eq!(text(share, "parentUUID"), gpu.uuid);
            assert_eq!(text(share, "uuid"), "");
            let whole = rest
                .iter()
                .find(|d| d.name == node.device(index, ""))
                .unwrap();
            assert!(whole.consumes_counters.is_some());
            assert_eq!(share.consumes_counters, whole.consumes_counters);
        }
    }
}

#[test]
fn a_share_that_names_no_amount_is_all_of_the_device_in_whole_mebibytes() {
    let (_, mut wanted) = shared_node("t4-1", SharingKind::Mps);
    wanted.inventory.gpus[0].memory_bytes = (15 << 30) + (1 << 20) + 4097;
    let share = devices(&wanted, View::FULL).pop().unwrap();
    let capacity = share.capacity.unwrap();
    assert_eq!(capacity.keys().collect::<Vec<_>>(), ["cores", "memory"]);
    for (name, all, step) in [("memory", "15361Mi", "1Mi"), ("cores", "100", "1")] {
        let policy = capacity[name].request_policy.as_ref().unwrap();
        let range = policy.valid_range.as_ref().unwrap();
        let all = Some(all);
        assert_eq!(Some(capacity[name].value.0.as_str()), all);
        assert_eq!(policy.default.as_ref().map(|q| q.0.as_str()), all);
        assert_eq!(range.max.as_ref().map(|q| q.0.as_str()), all);
        assert_eq!(range.min.0, step);
        assert_eq!(range.step.as_ref().map(|q| q.0.as_str()), Some(step));
    }
    // Too little to share out: the GPU is offered whole only, and needs no counters then.
    wanted.inventory.gpus[0].memory_bytes = 4097;
    assert_eq!(devices(&wanted, View::FULL).len(), 1);
}

#[test]
fn an_administrators_partition_is_shared_too_and_takes_what_the_partition_takes() {
    let wanted = with_statics("h100-80gb-8", &[("3g.40gb", 4)]);
    let gpus = &wanted.inventory.gpus;
    let all = devices(&wanted, View::FULL);
    let by_name: BTreeMap<&str, &Device> = all.iter().map(|d| (d.name.as_str(), d)).collect();
    let name = format!("gpu-{}-mig-3g40gb-4", gpus[0].pci.dns_label());
    let share = by_name[format!("{name}-shared").as_str()];
    let partition = by_name[name.as_str()];
    assert_eq!(share.consumes_counters, partition.consumes_counters);
    assert_eq!(text(share, "profile"), "3g.40gb");
    assert_eq!(
        share.capacity.as_ref().unwrap()["memory"].value.0,
        "40448Mi"
    );
    assert!(
        !share
            .capacity
            .as_ref()
            .unwrap()
            .contains_key("multiprocessors")
    );
    let Some(Named::Share(Shared::Partition(gpu, profile, at))) = resolve(gpus, &share.name) else {
        panic!("{} is no share of a partition", share.name)
    };
    assert_eq!(
        (gpu.pci, profile.name.as_str(), at.start),
        (gpus[0].pci, "3g.40gb", 4)
    );
    // Its GPU is not whole any more, and no partition made on demand is shared.
    let shared = all
        .iter()
        .filter(|d| d.allow_multiple_allocations == Some(true));
    let shared: Vec<&str> = shared.map(|d| d.name.as_str()).collect();
    assert_eq!(shared.len(), 8);
    assert_eq!(shared[0], share.name);
    assert!(shared[1..].iter().all(|name| !name.contains("-mig-")));
}

#[test]
fn shared_devices_are_offered_only_where_counters_keep_them_from_their_gpu() {
    let (_, wanted) = shared_node("t4-1", SharingKind::Mps);
    let shares = |view| {
        devices(&wanted, view)
            .iter()
            .filter(|d| d.name.ends_with("-shared"))
            .count()
    };
    assert_eq!(shares(View::FULL), 1);
    assert_eq!(
        shares(View {
            counters: false,
            ..View::FULL
        }),
        0
    );
    assert_eq!(
        shares(View {
            shares: false,
            ..View::FULL
        }),
        0
    );
    assert_eq!(shares(View::REDUCED), 0);
}
