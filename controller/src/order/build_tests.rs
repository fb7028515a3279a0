//! When a plan is kept and when it is made anew.

use super::*;
use crate::model::Format;
use crate::recipe::RecipeBook;
use crate::render::tests as fixture;
use planner::{AttributeValue, Capacity, Device, DeviceClass, Node, Pool, Quantity, Scope, Slice};
use std::collections::BTreeMap;

fn whole(name: &str, gib: u64) -> Device {
    Device {
        name: name.into(),
        attributes: BTreeMap::from([("type".to_owned(), AttributeValue::String("gpu".into()))]),
        capacity: BTreeMap::from([(
            "memory".to_owned(),
            Capacity {
                value: Quantity::from_bytes(gib << 30),
                request_policy: None,
            },
        )]),
        consumes: vec![],
        taints: vec![],
        allow_multiple_allocations: false,
        scope: None,
    }
}

fn cluster(devices: Vec<Device>, selector: &str) -> Snapshot {
    Snapshot {
        slices: vec![Slice {
            name: "s".into(),
            driver: "gpu.ai.deckhouse.io".into(),
            pool: Pool {
                name: "worker".into(),
                generation: 1,
                slice_count: 1,
            },
            scope: Scope::NodeName("worker".into()),
            counter_sets: vec![],
            devices,
        }],
        device_classes: vec![DeviceClass {
            name: "gpu.ai.deckhouse.io".into(),
            selectors: vec![selector.into()],
        }],
        claims: vec![],
        nodes: vec![Node {
            name: "worker".into(),
            ready: true,
            ..Node::default()
        }],
    }
}

const GOOD: &str = "device.driver == 'gpu.ai.deckhouse.io'";

fn demand(placement: &str) -> Demand {
    let class: InferenceServiceClass = serde_saphyr::from_str(&format!(
        "apiVersion: ai.deckhouse.io/v1alpha1\nkind: InferenceServiceClass\nmetadata: {{name: c}}\nspec: {{modelPolicy: {{allowedEndpointTypes: [Chat]}}, acceleratorPolicy: {{allowedPlacementTypes: [{placement}]}}}}\n"
    ))
    .unwrap();
    let book = RecipeBook::shipped().unwrap();
    let recipe = book
        .choose(Format::Gguf, EndpointType::Chat)
        .unwrap()
        .recipe;
    validate::demand(
        &fixture::order(""),
        &class.spec,
        recipe,
        &fixture::facts(Format::Gguf),
    )
}

fn copy(ready: bool, scheduled: bool) -> Copy {
    Copy {
        name: "support-llm-0".into(),
        ready,
        ending: false,
        scheduled,
        release: "r".into(),
        generation: 3,
        claim_template: None,
        downloading_at: None,
        secret_missing: false,
        problem: (!scheduled).then(|| (R::ReplicasUnschedulable, "no".into())),
    }
}

fn settled_on(demand: &Demand, generation: i64) -> Settled {
    Settled::new(
        validate::inputs(demand),
        generation,
        &fixture::plan(1),
        &fixture::facts(Format::Gguf),
    )
}

#[test]
fn a_new_order_is_planned_on_what_there_is() {
    let s = settle(
        &fixture::order(""),
        &demand("WholeDevice"),
        None,
        &[],
        &cluster(vec![whole("g0", 80)], GOOD),
    );
    assert!(s.replanned, "{:?}", s.refusal);
    assert_eq!(s.plan.unwrap().device_class_name, "gpu.ai.deckhouse.io");
}

#[test]
fn a_serving_order_keeps_its_plan_whatever_the_cluster_offers() {
    let demand = demand("WholeDevice");
    let standing = settled_on(&demand, 3);
    let empty = Snapshot::default();
    let s = settle(
        &fixture::order(""),
        &demand,
        Some(&standing),
        &[copy(true, true)],
        &empty,
    );
    assert!(!s.replanned && s.refusal.is_none());
    assert_eq!(s.plan, Some(standing.plan));
}

#[test]
fn a_copy_that_finds_no_node_makes_the_plan_anew() {
    let demand = demand("WholeDevice");
    let standing = settled_on(&demand, 3);
    let s = settle(
        &fixture::order(""),
        &demand,
        Some(&standing),
        &[copy(false, false)],
        &cluster(vec![whole("g0", 80)], GOOD),
    );
    assert!(s.replanned);
    assert_eq!(s.plan.unwrap().device_class_name, "gpu.ai.deckhouse.io");
}

#[test]
fn no_room_is_said_with_the_old_plan_still_standing() {
    let demand = demand("WholeDevice");
    let standing = settled_on(&demand, 3);
    let s = settle(
        &fixture::order(""),
        &demand,
        Some(&standing),
        &[copy(true, true), copy(false, false)],
        &cluster(vec![whole("g0", 1)], GOOD),
    );
    assert_eq!(s.refusal.unwrap().reason, R::ResourceClaimExhausted);
    assert_eq!(s.plan, Some(standing.plan));
}

#[test]
fn a_changed_class_is_held_while_copies_serve_and_followed_after_an_edit_a_117() {
    let (before, after) = (demand("Partition"), demand("WholeDevice"));
    let there = cluster(vec![whole("g0", 80)], GOOD);
    let held = settle(
        &fixture::order(""),
        &after,
        Some(&settled_on(&before, 3)),
        &[copy(true, true)],
        &there,
    );
    assert!(held.held.is_some() && !held.replanned);
    assert_eq!(
        held.inputs.0,
        validate::inputs(&before),
        "the hold is remembered"
    );
    let edited = settle(
        &fixture::order(""),
        &after,
        Some(&settled_on(&before, 2)),
        &[copy(true, true)],
        &there,
    );
    assert!(edited.held.is_none() && edited.replanned);
    let idle = settle(
        &fixture::order(""),
        &after,
        Some(&settled_on(&before, 3)),
        &[],
        &there,
    );
    assert!(idle.replanned, "nobody is served, so nothing is held");
}

#[test]
fn too_small_devices_and_a_broken_selector_are_told_apart_a_106() {
    let demand = demand("WholeDevice");
    let small = settle(
        &fixture::order(""),
        &demand,
        None,
        &[],
        &cluster(vec![whole("g0", 1)], GOOD),
    );
    assert_eq!(small.refusal.unwrap().reason, R::ResourceClaimExhausted);
    assert_eq!(small.plan, None);
    let broken = "device.attributes['gpu.ai.deckhouse.io'].nothing == 'x'";
    let unclear = settle(
        &fixture::order(""),
        &demand,
        None,
        &[],
        &cluster(vec![whole("g0", 80)], broken),
    );
    assert_eq!(unclear.refusal.unwrap().reason, R::PlacementUndecidable);
    let none = settle(
        &fixture::order(""),
        &demand,
        None,
        &[],
        &Snapshot::default(),
    );
    assert_eq!(none.refusal.unwrap().reason, R::NoDeviceClass);
}
