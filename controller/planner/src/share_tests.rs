//! What is planned where devices are handed out in shares.

use crate::fixtures::*;
use crate::*;

fn amounts(plan: &Plan) -> Vec<(&str, i128)> {
    let requests = plan.capacity_requests.iter();
    requests
        .map(|(key, amount)| (key.as_str(), amount.nano() / 1_000_000_000))
        .collect()
}

fn shared_only(gib: u64) -> Demand {
    let mut demand = demand(gib);
    demand.sharing_modes = vec![SharingMode::Shared];
    demand
}

/// Plans the demand for order `name` and lets it hold what was planned.
fn settle(cluster: &mut Snapshot, name: &str, mut demand: Demand) -> Plan {
    demand.order.name = name.to_owned();
    let plan = planned(plan(cluster, &demand));
    cluster
        .claims
        .push(claim_of(&plan, &demand.order, cluster.claims.len()));
    plan
}

#[test]
fn the_smallest_share_that_holds_the_model_is_requested_with_compute_in_proportion_a_034() {
    // the class names no bounds.
    let cluster = with_shares(h100_cluster(1, 1));
    let plan = planned(plan(&cluster, &demand(10)));
    assert_eq!(plan.device_class_name, SHARE_CLASS);
    assert_eq!(plan.sharing_mode, SharingMode::Shared);
    assert_eq!(plan.placement_type, PlacementType::WholeDevice);
    let memory = i128::from(10 * GIB);
    assert_eq!(amounts(&plan), [("cores", 13), ("memory", memory)]);
    assert_eq!(plan.memory_bytes, 10 * GIB);
    assert!(
        plan.selectors[0].contains("&& device.allowMultipleAllocations &&"),
        "{}",
        plan.selectors[0]
    );
}

#[test]
fn two_small_orders_share_one_device_and_a_third_opens_the_next() {
    let mut cluster = with_shares(h100_cluster(2, 2));
    let first = settle(&mut cluster, "a", shared_only(30));
    let second = settle(&mut cluster, "b", shared_only(30));
    assert_eq!(first.placements, second.placements);
    let third = settle(&mut cluster, "c", shared_only(30));
    assert_eq!(third.placements[0].node, first.placements[0].node);
    assert_ne!(third.placements, first.placements);
    // 20 GiB of memory are left on the first, and 24 of 100 cores.
    let fourth = settle(&mut cluster, "d", shared_only(19));
    assert_eq!(fourth.placements, first.placements);
}

#[test]
fn a_share_and_a_partition_never_meet_on_one_gpu() {
    let mut cluster = with_shares(h100_cluster(1, 1));
    settle(&mut cluster, "a", shared_only(4));
    let mut dedicated = demand(4);
    dedicated.sharing_modes = vec![SharingMode::Dedicated];
    dedicated.order.name = "b".to_owned();
    let explanation = exhausted(plan(&cluster, &dedicated));
    assert!(
        explanation
            .to_string()
            .contains("1 order of this namespace (a)"),
        "{explanation}"
    );

    let mut cluster = with_shares(h100_cluster(1, 1));
    settle(&mut cluster, "a", dedicated);
    exhausted(plan(&cluster, &shared_only(4)));
}

#[test]
fn a_share_does_not_break_into_an_untouched_gpu_while_a_partition_is_free_on_a_broken_one() {
    let mut cluster = with_shares(h100_cluster(1, 2));
    let mut dedicated = demand(4);
    dedicated.sharing_modes = vec![SharingMode::Dedicated];
    settle(&mut cluster, "a", dedicated);
    let second = settle(&mut cluster, "b", demand(4));
    assert_eq!(chosen(&second), (MIG_CLASS, Some("1g.10gb")));
    // And the other way round: with a share there, the next is a share too.
    let mut cluster = with_shares(h100_cluster(1, 2));
    settle(&mut cluster, "a", shared_only(4));
    let second = settle(&mut cluster, "b", demand(4));
    assert_eq!(second.device_class_name, SHARE_CLASS);
    assert_eq!(second.placements[0].devices[0].device, shared(0));
}

#[test]
fn bounds_raise_a_share_to_the_least_and_refuse_one_above_the_most_a_034() {
    //
    let cluster = with_shares(h100_cluster(1, 1));
    let mut wanted = shared_only(4);
    wanted.share_bounds.min_percent = Some(25);
    let plan_of = planned(plan(&cluster, &wanted));
    assert_eq!(plan_of.memory_bytes, 20 * GIB);
    assert_eq!(amounts(&plan_of)[0], ("cores", 25));

    wanted.memory[0].bytes_per_device = 41 * GIB;
    wanted.share_bounds.max_percent = Some(50);
    let explanation = exhausted(plan(&cluster, &wanted));
    let refused = explanation
        .rejections
        .iter()
        .find(|r| r.reason == RejectionReason::ShareTooLarge)
        .unwrap();
    // the class's bound is the administrator's.
    let words = format!("{explanation} {}", refused.message);
    assert!(
        words.contains("41.00 GiB is needed, more than the class allows")
            && !words.contains("40.00")
            && !words.contains("1.00 GiB short"),
        "{words}"
    );
    assert!(
        explanation.long().contains("40.00 GiB"),
        "{}",
        explanation.long()
    );
}

#[test]
fn replicas_on_several_devices_hold_them_alone() {
    let cluster = with_shares(h100_cluster(1, 2));
    let mut wanted = demand(30);
    wanted.memory[0].devices = 2;
    let plan_of = planned(plan(&cluster, &wanted));
    assert_eq!(plan_of.sharing_mode, SharingMode::Dedicated);
    assert!(plan_of.capacity_requests.is_empty() && plan_of.device_class_name == WHOLE_CLASS);
    wanted.sharing_modes = vec![SharingMode::Shared];
    exhausted(plan(&cluster, &wanted));
}

#[test]
fn a_share_of_everything_comes_after_the_whole_device() {
    let cluster = with_shares(h100_cluster(1, 1));
    let mut wanted = demand(79);
    wanted.share_bounds.min_percent = Some(100);
    let both = planned(plan(&cluster, &wanted));
    assert_eq!(both.device_class_name, WHOLE_CLASS);
}

#[test]
fn an_allocation_from_before_the_device_was_shared_holds_all_of_it() {
    let mut cluster = with_shares(h100_cluster(1, 1));
    cluster.claims = vec![claim(None, "node-0", &[shared(0)])];
    exhausted(plan(&cluster, &shared_only(4)));
}

#[test]
fn several_replicas_fill_one_device_before_the_next() {
    let cluster = with_shares(h100_cluster(1, 2));
    let mut wanted = shared_only(30);
    wanted.replicas = ReplicaBounds { min: 2, max: 8 };
    let plan_of = planned(plan(&cluster, &wanted));
    assert_eq!(plan_of.replicas_that_fit, 4);
    let devices: Vec<&str> = plan_of
        .placements
        .iter()
        .map(|p| p.devices[0].device.as_str())
        .collect();
    assert_eq!(devices[0], devices[1]);
    assert_ne!(devices[1], devices[2]);
}
