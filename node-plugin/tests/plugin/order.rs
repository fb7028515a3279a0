//! What the order of devices is for: small claims leave room for large ones.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::Device;
use node_plugin::slices::{Holding, MigPolicy, SharingKind, View, Wanted, largest_placeable, pool};

use crate::first_fit::{FirstFit, text};
use crate::golden::{shared_by, with_statics};
use crate::node::TestNode;

/// So many GPUs of a topology, shared by MPS.
fn scheduler(topology: &str, gpus: usize) -> FirstFit {
    let mut inventory = TestNode::new(topology).inventory();
    inventory.gpus.truncate(gpus);
    let sharing = shared_by(SharingKind::Mps, &inventory);
    let wanted = Wanted::new(inventory, BTreeSet::new()).shared(sharing);
    FirstFit::new(&pool(&wanted, View::FULL))
}

fn is_whole(device: &Device) -> bool {
    text(device, "type") == "gpu"
}

/// Every order of claims of one and of two slices that leaves four compute slices of seven.
const SMALL: [&[usize]; 6] = [&[1], &[1, 1], &[1, 1, 1], &[2], &[1, 2], &[2, 1]];

#[test]
fn small_claims_leave_room_for_the_large_profiles_where_the_order_of_names_would_not() {
    let seven_slices = [
        ("h100-80gb-8", ["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb"]),
        ("h200-141gb-8", ["1g.18gb", "2g.35gb", "3g.71gb", "4g.71gb"]),
        ("b200-180gb-8", ["1g.23gb", "2g.45gb", "3g.90gb", "4g.90gb"]),
    ];
    for (topology, [one, two, three, four]) in seven_slices {
        let published = scheduler(topology, 1);
        let by_name = published.clone().by_name();
        for small in SMALL {
            let run = |mut scheduler: FirstFit| {
                for slices in small {
                    let profile = if *slices == 1 { one } else { two };
                    scheduler.take_profile(profile).unwrap();
                }
                (scheduler.has_profile(three), scheduler.has_profile(four))
            };
            assert_eq!(run(published.clone()), (true, true), "{topology} {small:?}");
            let (_, four) = run(by_name.clone());
            assert!(
                !four,
                "{topology} {small:?}: the order of names does as well"
            );
        }
    }
}

#[test]
fn on_four_slices_small_claims_fill_one_half_before_they_touch_the_other() {
    let mut scheduler = scheduler("a30-2", 1);
    for left in [true, true, false] {
        scheduler.take_profile("1g.6gb").unwrap();
        assert_eq!(scheduler.has_profile("2g.12gb"), left);
    }
}

#[test]
fn small_claims_break_up_one_gpu_before_the_next_and_whole_claims_come_from_the_other_end() {
    let mut scheduler = scheduler("h100-80gb-8", 8);
    let node = TestNode::new("h100-80gb-8");
    for index in (4..8).rev() {
        assert_eq!(scheduler.take(is_whole), Some(node.device(index, "")));
    }
    for gpu in 0..4 {
        for start in (0..7).rev() {
            let got = scheduler.take_profile("1g.10gb").unwrap();
            assert_eq!(got, node.device(gpu, &format!("1g10gb-{start}")));
        }
    }
    assert_eq!(scheduler.take_profile("1g.10gb"), None);
    assert!(scheduler.left().all(|left| left >= 0));
}

#[test]
fn shares_gather_on_one_gpu_and_leave_the_others_whole() {
    let mut scheduler = scheduler("h100-80gb-8", 4);
    let node = TestNode::new("h100-80gb-8");
    let shared = |gpu| Some(format!("{}-shared", node.device(gpu, "")));
    // One GPU is broken up already.
    assert_eq!(
        scheduler.take_profile("1g.10gb"),
        Some(node.device(0, "1g10gb-6"))
    );
    for _ in 0..4 {
        assert_eq!(scheduler.take_share(20_000), shared(1));
    }
    assert_eq!(scheduler.take_share(20_000), shared(2));
    // What is left of a shared GPU is filled before another is begun.
    assert_eq!(scheduler.take_share(1_000), shared(1));
    // The counters of a shared GPU are charged once, and nothing else fits it.
    assert!(scheduler.left().all(|left| left >= 0));
    assert_eq!(scheduler.take(is_whole), Some(node.device(3, "")));
    assert_eq!(scheduler.take(is_whole), None);
    assert_eq!(scheduler.take_profile("7g.80gb"), None);
    // Back on the GPU that partitions broke up.
    assert_eq!(
        scheduler.take_profile("4g.40gb"),
        Some(node.device(0, "4g40gb-0"))
    );
}

#[test]
fn a_claim_that_leaves_everything_open_gets_the_smallest_partition_and_no_share_while_there_is_another()
 {
    let h100 = TestNode::new("h100-80gb-8");
    let got = scheduler("h100-80gb-8", 1).take(|_| true);
    assert_eq!(got, Some(h100.device(0, "1g10gb-6")));
    let t4 = TestNode::new("t4-1");
    let got = scheduler("t4-1", 1).take(|_| true);
    assert_eq!(got, Some(t4.device(0, "")));
}

#[test]
fn the_largest_partition_that_still_fits_shrinks_as_claims_come_and_grows_as_they_go() {
    let node = TestNode::new("h100-80gb-8");
    let mut gpu = node.inventory().gpus.remove(0);
    let holding = |profile: &str, start: u32| {
        let profile = gpu.profiles.iter().find(|p| p.name == profile).unwrap();
        let placement = profile.placements.iter().find(|at| at.start == start);
        Holding::Partition {
            profile_id: profile.id,
            placement: *placement.unwrap(),
        }
    };
    let all = [
        holding("1g.10gb", 6),
        holding("2g.20gb", 4),
        holding("1g.10gb", 3),
        holding("2g.20gb", 0),
        holding("1g.10gb+me", 2),
    ];
    let placeable = |held: &[Holding]| {
        let profile = largest_placeable(&gpu, held, MigPolicy::Dynamic);
        profile.map_or("none", |profile| profile.name.as_str())
    };
    let seen: Vec<&str> = (0..=all.len()).map(|n| placeable(&all[..n])).collect();
    assert_eq!(
        seen,
        [
            "7g.80gb", "4g.40gb", "4g.40gb", "2g.20gb", "1g.10gb", "none"
        ]
    );
    assert_eq!(placeable(&[all[2]]), "3g.40gb");
    assert_eq!(placeable(&[Holding::Whole]), "none");
    // Nothing is created under the static policy; what exists and nobody has is there.
    let fixed = |gpu: &gpu::Gpu, held: &[Holding]| {
        let profile = largest_placeable(gpu, held, MigPolicy::Static);
        profile.map(|profile| profile.name.clone())
    };
    assert_eq!(fixed(&gpu, &[]), None);
    gpu = with_statics("h100-80gb-8", &[("2g.20gb", 4)])
        .inventory
        .gpus
        .remove(0);
    assert_eq!(fixed(&gpu, &[]).as_deref(), Some("2g.20gb"));
    assert_eq!(fixed(&gpu, &[all[1]]), None);
    let t4 = TestNode::new("t4-1").inventory().gpus.remove(0);
    assert_eq!(largest_placeable(&t4, &[], MigPolicy::Dynamic), None);
}
