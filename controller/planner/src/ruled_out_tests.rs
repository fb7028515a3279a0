//! What rules devices out, and how that is told: taints, nodes, pools, device
//! classes, selectors, shares.

use rstest::rstest;

use crate::fixtures::*;
use crate::*;

#[test]
fn a_tainted_device_is_used_only_by_those_who_tolerate_it() {
    let mut cluster = h100_cluster(1, 1);
    for name in H100_PROFILES
        .iter()
        .flat_map(|p| p.4.iter().map(|s| partition(0, p.0, *s)))
    {
        device_mut(&mut cluster, "node-0", &name).taints = vec![DeviceTaint {
            key: "ecc".to_owned(),
            value: String::new(),
            effect: TaintEffect::NoSchedule,
        }];
    }
    let mut demand = demand(8);
    demand.placement_types = vec![PlacementType::Partition];
    let explanation = exhausted(plan(&cluster, &demand));
    assert!(
        explanation
            .rejections
            .iter()
            .all(|r| r.reason != RejectionReason::Taken)
    );
    assert!(
        explanation.to_string().contains("are tainted"),
        "{explanation}"
    );

    demand.device_tolerations = vec![Toleration {
        key: Some("ecc".to_owned()),
        exists: true,
        ..Toleration::default()
    }];
    planned(plan(&cluster, &demand));
}

#[rstest]
#[case::cordoned(Node { unschedulable: true, ..node("node-0") })]
#[case::not_ready(Node { ready: false, ..node("node-0") })]
#[case::tainted(Node { taints: vec![NodeTaint {
    key: "maintenance".to_owned(), value: "yes".to_owned(), effect: TaintEffect::NoExecute,
}], ..node("node-0") })]
fn a_node_that_takes_no_pods_offers_nothing(#[case] node: Node) {
    let mut cluster = h100_cluster(1, 1);
    cluster.nodes = vec![node];
    let explanation = exhausted(plan(&cluster, &demand(8)));
    assert!(
        explanation
            .to_string()
            .contains("are on nodes that cannot be used"),
        "{explanation}"
    );
}

#[test]
fn a_node_selector_keeps_to_its_nodes() {
    let mut cluster = h100_cluster(2, 1);
    cluster.nodes[1]
        .labels
        .insert("zone".to_owned(), "b".to_owned());
    let mut demand = demand(8);
    demand
        .node_selector
        .insert("zone".to_owned(), "b".to_owned());
    assert_eq!(
        planned(plan(&cluster, &demand)).placements[0].node,
        "node-1"
    );
}

#[test]
fn an_incomplete_pool_gives_out_nothing() {
    let mut cluster = h100_cluster(1, 2);
    cluster.slices.pop();
    let explanation = exhausted(plan(&cluster, &demand(8)));
    assert!(
        explanation.to_string().contains("in unusable pools"),
        "{explanation}"
    );
    assert!(
        explanation.long().contains("2 of 3 slices"),
        "{}",
        explanation.long()
    );
}

#[test]
fn only_the_highest_generation_of_a_pool_counts() {
    let mut cluster = h100_cluster(1, 1);
    let mut newer = plain_slices("node-0", 1, 24 * GIB);
    newer[0].pool.generation = 2;
    cluster.slices.extend(newer);
    exhausted(plan(&cluster, &demand(60)));
    assert_eq!(planned(plan(&cluster, &demand(20))).memory_bytes, 24 * GIB);
}

#[rstest]
#[case::duplicate_device(|s: &mut Snapshot| { let d = s.slices[1].devices[0].clone(); s.slices[1].devices.push(d); })]
#[case::missing_counter_set(|s: &mut Snapshot| s.slices[1].devices[0].consumes[0].counter_set = "x".to_owned())]
#[case::missing_counter(|s: &mut Snapshot| {
    s.slices[1].devices[0].consumes[0].counters.insert("x".to_owned(), Quantity::from_units(1));
})]
fn an_invalid_pool_gives_out_nothing(#[case] spoil: impl Fn(&mut Snapshot)) {
    let mut cluster = h100_cluster(1, 1);
    spoil(&mut cluster);
    let explanation = exhausted(plan(&cluster, &demand(8)));
    let unusable = |r: &Rejection| r.reason == RejectionReason::PoolUnusable;
    assert!(
        explanation.rejections.iter().any(unusable),
        "{}",
        explanation.long()
    );
}

#[test]
fn without_device_classes_that_is_the_reason_a_014() {
    let mut cluster = h100_cluster(1, 1);
    cluster.device_classes.clear();
    assert!(matches!(
        plan(&cluster, &demand(8)),
        Outcome::NoDeviceClass(_)
    ));
    let mut demand = demand(8);
    demand.device_class_names = Some(vec!["no-such".to_owned()]);
    let Outcome::NoDeviceClass(explanation) = plan(&h100_cluster(1, 1), &demand) else {
        panic!("expected no device class");
    };
    let short = explanation.to_string();
    assert!(
        short.contains("none of the device classes") && !short.contains("no-such"),
        "what the class names is the administrator's (A-096): {short}"
    );
}

#[test]
fn only_the_allowed_device_classes_are_searched() {
    let mut demand = demand(8);
    demand.device_class_names = Some(vec![WHOLE_CLASS.to_owned()]);
    assert_eq!(
        chosen(&planned(plan(&h100_cluster(1, 1), &demand))),
        (WHOLE_CLASS, None)
    );
}

#[test]
fn the_class_selectors_rule_devices_out() {
    let mut cluster = h100_cluster(2, 1);
    for device in cluster
        .slices
        .iter_mut()
        .filter(|s| s.pool.name == "node-1")
        .flat_map(|s| &mut s.devices)
    {
        device
            .attributes
            .insert("productName".to_owned(), "NVIDIA H200".into());
    }
    let mut demand = demand(8);
    let policy = format!("device.attributes[\"{DRIVER}\"].productName.contains(\"H200\")");
    demand.selectors = vec![policy.clone()];
    let plan = planned(plan(&cluster, &demand));
    assert_eq!(plan.placements[0].node, "node-1");
    assert_eq!(plan.selectors.last(), Some(&policy));

    demand.selectors = vec!["false".to_owned()];
    let explanation = exhausted(crate::plan(&cluster, &demand));
    assert!(
        explanation
            .to_string()
            .contains("do not match the class's selectors"),
        "{explanation}"
    );
}

/// A-106: a placement that could not be judged points at the class, not at capacity.
#[rstest]
#[case::unknown_attribute(
    r#"device.attributes["gpu.ai.deckhouse.io"].nonsense == "x""#,
    "no such key: nonsense"
)]
#[case::syntax("device.driver ==", "syntax error")]
#[case::not_bool("device.driver", "must evaluate to bool")]
fn a_broken_class_selector_makes_the_placement_undecidable_a_106(
    #[case] selector: &str,
    #[case] error: &str,
) {
    let mut demand = demand(8);
    demand.selectors = vec![selector.to_owned()];
    let explanation = undecidable(plan(&h100_cluster(1, 1), &demand));
    assert_eq!(
        explanation.broken_selectors[0].holder,
        SelectorHolder::ServiceClass
    );
    assert_eq!(explanation.broken_selectors[0].expression, selector);
    let short = explanation.to_string();
    assert!(short.contains("the InferenceServiceClass"), "{short}");
    // A-096: the expression is the administrator's.
    assert!(
        !short.contains(error) && !short.contains(selector),
        "{short}"
    );
    assert!(explanation.long().contains(error), "{}", explanation.long());
    let broken = crate::broken_selectors(&h100_cluster(1, 1), None, &demand.selectors);
    assert_eq!(broken[0].expression, selector);
    assert!(broken[0].error.contains(error), "{broken:?}");
}

#[test]
fn a_broken_device_class_is_named_when_nothing_else_has_room() {
    let mut cluster = h100_cluster(1, 1);
    cluster.device_classes[1].selectors = vec!["device.nonsense".to_owned()];
    let mut demand = demand(8);
    demand.placement_types = vec![PlacementType::Partition];
    let explanation = undecidable(plan(&cluster, &demand));
    assert!(
        explanation
            .to_string()
            .contains("DeviceClass mig.ai.deckhouse.io"),
        "{explanation}"
    );
}

#[test]
fn a_broken_selector_matters_not_while_another_device_class_has_room() {
    let mut cluster = h100_cluster(1, 1);
    cluster.device_classes[1].selectors = vec!["device.nonsense".to_owned()];
    let plan = planned(plan(&cluster, &demand(8)));
    assert_eq!(chosen(&plan), (WHOLE_CLASS, None));
    assert_eq!(plan.explanation.broken_selectors.len(), 1);
}

#[test]
fn a_device_class_that_cannot_judge_devices_of_another_class_does_not_hide_exhaustion() {
    let mut cluster = h100_cluster(1, 1);
    cluster.device_classes.push(DeviceClass {
        name: "nic".to_owned(),
        selectors: vec![r#"device.attributes["nic.example.com"].speed > 10"#.to_owned()],
    });
    cluster.claims = vec![claim(None, "node-0", &[whole(0)])];
    exhausted(plan(&cluster, &demand(8)));
}

#[test]
fn a_class_that_allows_only_shares_gets_no_device_alone() {
    let mut demand = demand(8);
    demand.sharing_modes = vec![SharingMode::Shared];
    let explanation = exhausted(plan(&h100_cluster(1, 1), &demand));
    assert!(
        explanation
            .rejections
            .iter()
            .all(|r| r.reason == RejectionReason::SharingModeNotAllowed),
        "{}",
        explanation.long()
    );
    assert!(explanation.to_string().contains("allows only shares"));
}

#[test]
fn a_shared_device_is_never_given_to_a_dedicated_claim() {
    let mut cluster = h100_cluster(1, 0);
    cluster.slices = plain_slices("node-0", 1, 80 * GIB);
    cluster.slices[0].devices[0].allow_multiple_allocations = true;
    let mut demand = demand(8);
    demand.sharing_modes = vec![SharingMode::Dedicated];
    let explanation = exhausted(plan(&cluster, &demand));
    let shared = |r: &Rejection| r.reason == RejectionReason::SharingModeNotAllowed;
    assert!(
        explanation.rejections.iter().any(shared),
        "{}",
        explanation.long()
    );
}

#[test]
fn a_shared_device_charges_its_counters_once() {
    let mut cluster = h100_cluster(1, 1);
    device_mut(&mut cluster, "node-0", &partition(0, "3g.40gb", 0)).allow_multiple_allocations =
        true;
    let mut share = claim(
        None,
        "node-0",
        &[partition(0, "3g.40gb", 0), partition(0, "3g.40gb", 0)],
    );
    for (n, device) in share.devices.iter_mut().enumerate() {
        device.share_id = Some(n.to_string());
    }
    cluster.claims = vec![share];
    let mut demand = demand(8);
    demand.sharing_modes = vec![SharingMode::Dedicated];
    demand.replicas.max = 20;
    // Four compute slices and three usable memory slices are left.
    assert_eq!(planned(plan(&cluster, &demand)).replicas_that_fit, 3);
}

#[test]
fn access_of_administrators_takes_nothing_away() {
    let mut cluster = h100_cluster(1, 1);
    let mut monitor = claim(None, "node-0", &[whole(0)]);
    monitor.devices[0].admin_access = true;
    cluster.claims = vec![monitor];
    planned(plan(&cluster, &demand(60)));
}
