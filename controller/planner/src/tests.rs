//! What the planner decides, situation by situation.

use rstest::rstest;

use crate::fixtures::*;
use crate::*;

/// the plan assigns the smallest placement that holds the model.
#[rstest]
#[case::small_model(8, MIG_CLASS, Some("1g.10gb"))]
#[case::between_the_sizes_least_is_stranded(12, MIG_CLASS, Some("1g.20gb"))]
#[case::two_slices_of_memory(19, MIG_CLASS, Some("1g.20gb"))]
#[case::half_a_card(30, MIG_CLASS, Some("3g.40gb"))]
#[case::a_partition_of_the_whole_card_is_no_gain(60, WHOLE_CLASS, None)]
#[case::above_the_largest_partition(79, WHOLE_CLASS, None)]
fn the_smallest_sufficient_placement_is_chosen_a_070(
    #[case] gib: u64,
    #[case] class: &str,
    #[case] profile: Option<&str>,
) {
    let plan = planned(plan(&h100_cluster(1, 8), &demand(gib)));
    assert_eq!(chosen(&plan), (class, profile));
    assert!(plan.memory_bytes >= gib * GIB);
    assert_eq!((plan.devices_per_replica, plan.replicas_that_fit), (1, 1));
    assert_eq!(plan.sharing_mode, SharingMode::Dedicated);
}

#[test]
fn only_partitions_allowed_means_the_partition_of_the_whole_card() {
    let mut demand = demand(60);
    demand.placement_types = vec![PlacementType::Partition];
    let plan = planned(plan(&h100_cluster(1, 1), &demand));
    assert_eq!(chosen(&plan), (MIG_CLASS, Some("7g.80gb")));
}

#[test]
fn only_whole_devices_allowed_means_a_whole_device_for_a_small_model() {
    let mut demand = demand(8);
    demand.placement_types = vec![PlacementType::WholeDevice];
    let plan = planned(plan(&h100_cluster(1, 1), &demand));
    assert_eq!(chosen(&plan), (WHOLE_CLASS, None));
    let refused = |r: &Rejection| r.reason == RejectionReason::PlacementTypeNotAllowed;
    assert!(plan.rejections().iter().any(refused));
}

#[test]
fn a_model_larger_than_every_device_never_fits_and_the_lack_is_named() {
    let explanation = exhausted(plan(&h100_cluster(1, 8), &demand(100)));
    assert_eq!(
        explanation.to_string(),
        "Fits no device of the allowed device classes: the largest, gpu.ai.deckhouse.io whole \
         device (79.65 GiB), is 20.35 GiB short of the 100.00 GiB needed."
    );
}

/// `maxAcceleratorCount` counts devices per copy.
#[test]
fn a_model_larger_than_every_device_is_split_when_the_class_allows_more_devices_a_035() {
    let mut demand = demand(100);
    demand.memory.push(MemoryNeed {
        devices: 2,
        bytes_per_device: 52 * GIB,
    });
    demand.replicas = ReplicaBounds { min: 1, max: 9 };
    let plan = planned(plan(&h100_cluster(2, 8), &demand));
    assert_eq!(
        (chosen(&plan), plan.devices_per_replica),
        ((WHOLE_CLASS, None), 2)
    );
    assert_eq!(plan.replicas_that_fit, 8);
    for placement in &plan.placements {
        assert_eq!(placement.devices.len(), 2);
        assert!(
            placement
                .devices
                .iter()
                .all(|device| device.pool == placement.node)
        );
    }
}

#[test]
fn a_replica_of_several_devices_does_not_span_nodes() {
    let mut demand = demand(100);
    demand.memory = vec![MemoryNeed {
        devices: 2,
        bytes_per_device: 52 * GIB,
    }];
    let explanation = exhausted(plan(&h100_cluster(4, 1), &demand));
    let per_node = |r: &Rejection| r.reason == RejectionReason::TooFewPerNode;
    assert!(
        explanation.rejections.iter().any(per_node),
        "{}",
        explanation.long()
    );
}

#[test]
fn partitions_are_never_combined_for_one_replica() {
    let mut demand = demand(0);
    demand.memory = vec![MemoryNeed {
        devices: 2,
        bytes_per_device: 30 * GIB,
    }];
    demand.placement_types = vec![PlacementType::Partition];
    let explanation = exhausted(plan(&h100_cluster(1, 8), &demand));
    let combined = |r: &Rejection| r.reason == RejectionReason::PartitionsNotCombined;
    assert!(
        explanation.rejections.iter().any(combined),
        "{}",
        explanation.long()
    );
}

/// exhaustion is about capacity, after a search of every allowed class.
#[test]
fn taken_devices_are_told_apart_from_devices_that_are_too_small_a_096_a_106() {
    let mut cluster = h100_cluster(1, 3);
    for (gpu, order) in [("team", "mine"), ("rival", "secret"), ("rival", "other")]
        .iter()
        .enumerate()
    {
        let gpu = u32::try_from(gpu).unwrap();
        cluster
            .claims
            .push(claim(Some(*order), "node-0", &[whole(gpu)]));
    }
    let explanation = exhausted(plan(&cluster, &demand(60)));
    let short = explanation.to_string();
    assert!(
        short.contains("None of the 3 accelerators")
            && short.contains("taken by 1 order of this namespace (mine)"),
        "{short}"
    );
    assert!(short.contains("2 orders of other namespaces"), "{short}");
    assert!(
        !short.contains("secret") && !short.contains("rival"),
        "{short}"
    );
    assert!(
        explanation.long().contains("order rival/secret"),
        "{}",
        explanation.long()
    );
    let taken = explanation
        .rejections
        .iter()
        .find(|r| r.reason == RejectionReason::Taken)
        .unwrap();
    assert!(
        taken.message.contains("2 orders of other namespaces")
            && !taken.message.contains("secret")
            && !taken.message.contains("rival"),
        "the message of a rejection is in the order's status, which tenants read: {taken:?}"
    );
}

#[test]
fn a_rejection_names_its_class_kind_and_profile_apart() {
    let mut demand = demand(60);
    demand.memory = vec![MemoryNeed {
        devices: 2,
        bytes_per_device: 60 << 30,
    }];
    let mut cluster = h100_cluster(1, 2);
    cluster
        .claims
        .push(claim(Some(("team", "mine")), "node-0", &[whole(0)]));
    let explanation = exhausted(plan(&cluster, &demand));
    let taken = explanation
        .rejections
        .iter()
        .find(|r| r.reason == RejectionReason::Taken)
        .unwrap();
    assert!(taken.candidate.starts_with("2 × "), "{taken:?}");
    let class = cluster
        .device_classes
        .iter()
        .find(|c| c.name == taken.device_class_name);
    assert!(class.is_some(), "{taken:?}");
    assert_eq!(
        (taken.placement_type, taken.profile.as_deref()),
        (Some(PlacementType::WholeDevice), None)
    );
}

#[test]
fn an_order_may_keep_what_it_holds() {
    let mut cluster = h100_cluster(1, 1);
    cluster.claims = vec![claim(Some(("team", "chat")), "node-0", &[whole(0)])];
    let plan = planned(plan(&cluster, &demand(60)));
    assert_eq!(plan.replicas_that_fit, 1);
}

#[test]
fn counters_block_the_whole_device_while_a_partition_is_allocated() {
    let mut cluster = h100_cluster(1, 1);
    cluster.claims = vec![claim(None, "node-0", &[partition(0, "1g.10gb", 3)])];
    let explanation = exhausted(plan(&cluster, &demand(60)));
    assert!(
        explanation.to_string().contains("1 other claim"),
        "{explanation}"
    );
    let small = planned(plan(&cluster, &demand(8)));
    assert_eq!(chosen(&small), (MIG_CLASS, Some("1g.10gb")));
}

#[test]
fn a_whole_device_blocks_its_partitions() {
    let mut cluster = h100_cluster(1, 1);
    cluster.claims = vec![claim(None, "node-0", &[whole(0)])];
    exhausted(plan(&cluster, &demand(8)));
}

#[test]
fn a_third_order_takes_a_whole_device_while_two_share_a_gpu_by_partitions() {
    let mut cluster = h100_cluster(1, 2);
    cluster.claims = vec![
        claim(Some(("team", "a")), "node-0", &[partition(0, "1g.10gb", 6)]),
        claim(Some(("team", "b")), "node-0", &[partition(0, "1g.10gb", 5)]),
    ];
    let plan = planned(plan(&cluster, &demand(60)));
    assert_eq!(chosen(&plan), (WHOLE_CLASS, None));
    assert_eq!(plan.placements[0].devices[0].device, whole(1));
}

#[test]
fn the_gpu_that_is_already_broken_up_is_preferred() {
    let mut cluster = h100_cluster(2, 4);
    cluster.claims = vec![claim(None, "node-1", &[partition(2, "3g.40gb", 4)])];
    let plan = planned(plan(&cluster, &demand(8)));
    let device = &plan.placements[0].devices[0];
    assert_eq!(
        (device.pool.as_str(), device.device.starts_with("gpu-2-mig")),
        ("node-1", true)
    );
}

#[test]
fn a_partition_goes_where_it_blocks_least() {
    let plan = planned(plan(&h100_cluster(1, 1), &demand(8)));
    assert_eq!(
        plan.placements[0].devices[0].device,
        partition(0, "1g.10gb", 6)
    );
}

#[rstest]
#[case::seven_small_ones(8, 7)]
#[case::four_double_ones(12, 4)]
#[case::two_halves(30, 2)]
#[case::one_whole(60, 1)]
fn a_card_holds_as_many_replicas_as_its_counters_allow(#[case] gib: u64, #[case] fit: u32) {
    let mut demand = demand(gib);
    demand.replicas = ReplicaBounds { min: 1, max: 20 };
    assert_eq!(
        planned(plan(&h100_cluster(1, 1), &demand)).replicas_that_fit,
        fit
    );
}

#[test]
fn no_more_replicas_are_counted_than_the_order_may_have() {
    let mut demand = demand(8);
    demand.replicas = ReplicaBounds { min: 1, max: 3 };
    let plan = planned(plan(&h100_cluster(1, 8), &demand));
    assert_eq!((plan.replicas_that_fit, plan.placements.len()), (3, 3));
}

#[test]
fn a_larger_placement_is_taken_when_only_it_holds_the_minimum() {
    let mut demand = demand(30);
    demand.replicas = ReplicaBounds { min: 2, max: 2 };
    let mut cluster = h100_cluster(1, 2);
    // A slice of the first card: one half is left there, the second is whole.
    cluster.claims = vec![claim(None, "node-0", &[partition(0, "1g.10gb", 0)])];
    let plan = planned(plan(&cluster, &demand));
    assert_eq!(
        (chosen(&plan), plan.replicas_that_fit),
        ((MIG_CLASS, Some("3g.40gb")), 2)
    );
    assert!(!plan.below_minimum);
}

#[test]
fn kinds_are_combined_when_none_alone_holds_the_minimum() {
    let mut cluster = h100_cluster(0, 0);
    for (name, bytes) in [("node-0", 24 * GIB), ("node-1", 48 * GIB)] {
        cluster.slices.extend(plain_slices(name, 1, bytes));
        cluster.nodes.push(node(name));
    }
    let mut demand = demand(20);
    demand.replicas = ReplicaBounds { min: 2, max: 2 };
    let plan = planned(plan(&cluster, &demand));
    assert_eq!((plan.replicas_that_fit, plan.memory_bytes), (2, 24 * GIB));
}

#[test]
fn fewer_than_the_minimum_is_still_a_plan_and_says_so() {
    let mut demand = demand(60);
    demand.replicas = ReplicaBounds { min: 4, max: 4 };
    let plan = planned(plan(&h100_cluster(1, 2), &demand));
    assert_eq!((plan.replicas_that_fit, plan.below_minimum), (2, true));
    assert!(
        plan.explanation
            .to_string()
            .contains("fewer than the minimum of 4")
    );
}

#[test]
fn a_device_without_type_is_classified_by_what_it_takes_of_its_counters() {
    let mut cluster = h100_cluster(1, 1);
    cluster.device_classes = vec![DeviceClass {
        name: "any".to_owned(),
        selectors: Vec::new(),
    }];
    for device in cluster.slices.iter_mut().flat_map(|s| &mut s.devices) {
        device.attributes.clear();
    }
    assert_eq!(
        planned(plan(&cluster, &demand(8))).placement_type,
        PlacementType::Partition
    );
    assert_eq!(
        planned(plan(&cluster, &demand(79))).placement_type,
        PlacementType::WholeDevice
    );
}

#[test]
fn memory_of_any_domain_is_understood() {
    let mut cluster = h100_cluster(1, 0);
    cluster.slices = plain_slices("node-0", 1, 80 * GIB);
    let memory = cluster.slices[0].devices[0]
        .capacity
        .remove("memory")
        .unwrap();
    cluster.slices[0].devices[0]
        .capacity
        .insert("other.example.com/memory".to_owned(), memory);
    let plan = planned(plan(&cluster, &demand(8)));
    assert!(
        plan.selectors[0].contains("other.example.com"),
        "{}",
        plan.selectors[0]
    );
}

/// The claim's own selectors, judged on every device, admit exactly devices of
/// the planned kind: the scheduler's first fit cannot land elsewhere.
#[rstest]
#[case(8)]
#[case(12)]
#[case(30)]
#[case(60)]
fn the_claim_is_narrowed_to_the_planned_kind(#[case] gib: u64) {
    let mut cluster = h100_cluster(1, 2);
    cluster.slices.extend(plain_slices("node-1", 1, 141 * GIB));
    cluster.device_classes = vec![DeviceClass {
        name: "any".to_owned(),
        selectors: Vec::new(),
    }];
    cluster.nodes.push(node("node-1"));
    let plan = planned(plan(&cluster, &demand(gib)));
    let selectors: Vec<dra_cel::Selector> = plan
        .selectors
        .iter()
        .map(|s| dra_cel::Selector::compile(s).unwrap())
        .collect();
    let mut admitted = 0;
    for device in cluster.slices.iter().flat_map(|s| &s.devices) {
        let facts = dra_cel::DeviceFacts::new(
            DRIVER,
            false,
            device.attributes.iter().map(|(n, v)| (n.as_str(), v)),
            device.capacity.iter().map(|(n, c)| (n.as_str(), c.value)),
        );
        if selectors.iter().all(|s| s.matches(&facts) == Ok(true)) {
            admitted += 1;
            assert_eq!(
                device.attributes.get("profile").and_then(|p| p.as_str()),
                plan.profile.as_deref()
            );
            assert_eq!(
                device.capacity["memory"].value,
                Quantity::from_bytes(plan.memory_bytes)
            );
        }
    }
    assert!(admitted >= 2);
}

#[test]
fn every_reason_is_given() {
    let plan = planned(plan(&h100_cluster(1, 1), &demand(12)));
    let long = plan.explanation.long();
    for part in [
        "1g.10gb (9.75 GiB): 9.75 GiB of 12.00 GiB needed",
        "2g.20gb",
        "strands more",
        "whole device",
    ] {
        assert!(long.contains(part), "{long}");
    }
}

#[test]
fn a_snapshot_survives_json() {
    let mut cluster = h100_cluster(2, 2);
    cluster.claims = vec![claim(Some(("a", "b")), "node-0", &[whole(0)])];
    let json = serde_json::to_string(&cluster).unwrap();
    assert_eq!(serde_json::from_str::<Snapshot>(&json).unwrap(), cluster);
    let demand = demand(8);
    let json = serde_json::to_string(&demand).unwrap();
    assert_eq!(serde_json::from_str::<Demand>(&json).unwrap(), demand);
}

#[test]
fn a_planner_that_keeps_selectors_answers_as_a_fresh_one() {
    let cluster = h100_cluster(1, 2);
    let mut planner = Planner::default();
    for gib in [8, 12, 100, 60, 8] {
        assert_eq!(
            planner.plan(&cluster, &demand(gib)),
            plan(&cluster, &demand(gib))
        );
    }
}
