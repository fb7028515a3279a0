//! When a decision is kept and when another one is made.

use super::*;
use crate::model::{Format, ModelFacts};
use crate::order::settled::{VERSION, stripped};
use crate::recipe::RecipeBook;
use crate::render::tests as fixture;
use inference_api::InferenceServiceClass;
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

fn class(spec: &str) -> InferenceServiceClassSpec {
    let class: InferenceServiceClass = serde_saphyr::from_str(&format!(
        "apiVersion: ai.deckhouse.io/v1alpha1\nkind: InferenceServiceClass\nmetadata: {{name: c}}\nspec: {{{spec}}}\n"
    ))
    .unwrap();
    class.spec
}

fn placed(placement: &str) -> InferenceServiceClassSpec {
    class(&format!(
        "modelPolicy: {{allowedEndpointTypes: [Chat]}}, acceleratorPolicy: {{allowedPlacementTypes: [{placement}]}}"
    ))
}

fn recipe() -> Recipe {
    let book = RecipeBook::shipped().unwrap();
    book.choose(Format::Gguf, EndpointType::Chat)
        .unwrap()
        .recipe
        .clone()
}

/// An order of generation 3 under a class, with a release.
struct Case {
    order: InferenceService,
    demand: Demand,
    inputs: Inputs,
    terms: Terms,
    facts: ModelFacts,
    recipe: Recipe,
}

fn case(spec: &InferenceServiceClassSpec, recipe: Recipe) -> Case {
    let order = fixture::order("");
    let facts = fixture::facts(Format::Gguf);
    let contract = spec.model_policy.allowed_endpoint_types[0];
    let terms = Terms::of(spec, contract);
    let demand = validate::demand(&order, spec, &recipe, &facts);
    Case {
        inputs: Inputs::of(&demand, &terms, &recipe, &facts),
        order,
        demand,
        terms,
        facts,
        recipe,
    }
}

impl Case {
    fn settled(&self, generation: i64, stage: Stage) -> Settled {
        Settled {
            version: VERSION,
            inputs: self.inputs.whole.clone(),
            parts: Some(self.inputs.parts.clone()),
            generation,
            contract: Some(self.terms.contract),
            token: Some(self.terms.token),
            stage,
            roll: None,
            plan: stripped(&fixture::plan(1)),
            facts: self.facts.clone(),
        }
    }

    fn settle(
        &self,
        settled: Option<&Settled>,
        copies: &[Copy],
        snapshot: &Snapshot,
    ) -> Settlement {
        let (terms, held) = self.terms.clone().in_force(&self.order, settled, copies);
        settle(&Ask {
            order: &self.order,
            demand: &self.demand,
            inputs: &Inputs::of(&self.demand, &terms, &self.recipe, &self.facts),
            settled,
            held: held.is_some(),
            copies,
            replicas: 1,
            snapshot,
        })
    }
}

fn copy(ready: bool, scheduled: bool) -> Copy {
    Copy {
        name: "support-llm-0".into(),
        ready,
        scheduled,
        generation: 3,
        problem: (!scheduled).then(|| (R::ReplicasUnschedulable, "no".into())),
        ..Copy::default()
    }
}

fn room() -> Snapshot {
    cluster(vec![whole("g0", 80)], GOOD)
}

#[test]
fn a_new_order_is_planned_on_what_there_is() {
    let s = case(&placed("WholeDevice"), recipe()).settle(None, &[], &room());
    assert!(s.replanned && !s.moved, "{:?}", s.refusal);
    assert_eq!(s.plan.unwrap().device_class_name, "gpu.ai.deckhouse.io");
}

#[test]
fn a_serving_order_keeps_its_plan_whatever_the_cluster_offers() {
    let case = case(&placed("WholeDevice"), recipe());
    let standing = case.settled(3, Stage::Serving);
    let s = case.settle(Some(&standing), &[copy(true, true)], &Snapshot::default());
    assert!(!s.replanned && s.refusal.is_none());
    assert_eq!(s.plan, Some(standing.plan));
    assert_eq!(s.inputs, case.inputs);
}

#[test]
fn an_edit_that_needs_the_same_keeps_the_placement_whatever_else_would_fit_a_113() {
    let case = case(&placed("WholeDevice"), recipe());
    let standing = case.settled(2, Stage::Serving);
    let s = case.settle(Some(&standing), &[copy(true, true)], &room());
    assert!(s.follows && !s.replanned && !s.moved);
    assert_eq!(s.plan, Some(standing.plan));
}

#[test]
fn a_copy_that_finds_no_node_makes_the_plan_anew() {
    let case = case(&placed("WholeDevice"), recipe());
    let standing = case.settled(3, Stage::Serving);
    let s = case.settle(Some(&standing), &[copy(false, false)], &room());
    assert!(s.replanned && !s.moved, "the others stay where they are");
    assert_eq!(s.plan.unwrap().device_class_name, "gpu.ai.deckhouse.io");
    let mut beside = copy(false, false);
    beside.ordinal = 1;
    let s = case.settle(Some(&standing), &[copy(true, true), beside], &room());
    assert!(
        !s.replanned,
        "one that a move raised beside the others asks for nothing"
    );
}

#[test]
fn no_room_is_said_with_the_old_plan_still_standing() {
    let case = case(&placed("WholeDevice"), recipe());
    let standing = case.settled(3, Stage::Serving);
    let s = case.settle(
        Some(&standing),
        &[copy(true, true), copy(false, false)],
        &cluster(vec![whole("g0", 1)], GOOD),
    );
    assert_eq!(s.refusal.unwrap().reason, R::ResourceClaimExhausted);
    assert_eq!(s.plan, Some(standing.plan));
}

#[test]
fn an_edit_without_room_leaves_no_plan_and_so_the_workload_as_it_is() {
    let before = case(&placed("Partition"), recipe());
    let s = case(&placed("WholeDevice"), recipe()).settle(
        Some(&before.settled(2, Stage::Serving)),
        &[copy(true, true)],
        &cluster(vec![whole("g0", 1)], GOOD),
    );
    assert_eq!(s.refusal.unwrap().reason, R::ResourceClaimExhausted);
    assert_eq!(s.plan, None);
}

#[test]
fn a_changed_class_is_held_once_a_copy_answered_and_followed_after_an_edit_a_117() {
    let (before, after) = (
        case(&placed("Partition"), recipe()),
        case(&placed("WholeDevice"), recipe()),
    );
    for (stage, copies) in [
        (Stage::Serving, vec![copy(true, true)]),
        (Stage::Serving, vec![copy(false, true)]),
        (Stage::Serving, vec![copy(false, false)]),
        (Stage::Serving, vec![]),
        (Stage::New, vec![copy(true, true)]),
    ] {
        let standing = before.settled(3, stage);
        let held = after.settle(Some(&standing), &copies, &room());
        assert!(!held.replanned && !held.follows, "{stage:?} {copies:?}");
        assert_eq!(held.plan, Some(standing.plan));
        assert_eq!(
            held.inputs.parts.class, before.inputs.parts.class,
            "the hold is remembered"
        );
    }
    for (generation, stage, why) in [
        (2, Stage::Serving, "edited"),
        (3, Stage::New, "nobody was served"),
        (3, Stage::Rebuilding, "nobody was served since"),
    ] {
        let standing = before.settled(generation, stage);
        let s = after.settle(Some(&standing), &[copy(false, true)], &room());
        assert!(s.replanned && s.follows && s.moved, "{why}");
        assert_eq!(s.inputs.parts.class, after.inputs.parts.class);
    }
}

#[test]
fn what_serves_is_what_was_settled_and_not_what_the_class_says_now_a_117_a_059() {
    let chat = case(
        &class("modelPolicy: {allowedEndpointTypes: [Chat]}"),
        recipe(),
    );
    let settled = chat.settled(3, Stage::Serving);
    let order = fixture::order("");
    let in_force = |spec: &str, settled: &Settled| {
        let spec = class(spec);
        let contract = spec.model_policy.allowed_endpoint_types[0];
        Terms::of(&spec, contract).in_force(&order, Some(settled), &[])
    };
    let embeddings = "modelPolicy: {allowedEndpointTypes: [Embeddings]}";
    let (terms, held) = in_force(embeddings, &settled);
    assert_eq!(terms, chat.terms);
    assert!(
        held.unwrap()
            .contains("the contract Embeddings instead of Chat")
    );
    let open = "modelPolicy: {allowedEndpointTypes: [Chat]}, exposurePolicy: {type: ClusterLocal, authentication: None}";
    let (terms, held) = in_force(open, &settled);
    assert!(terms.token && held.unwrap().contains("no token"));
    let (_, held) = in_force(
        "modelPolicy: {allowedEndpointTypes: [Chat]}, acceleratorPolicy: {maxAcceleratorCount: 4}",
        &settled,
    );
    let held = held.unwrap();
    assert!(
        held.contains("other accelerators") && !held.contains('4'),
        "A-096: {held}"
    );
    // What bounds or admits restarts nothing and is no part of the terms.
    for bound in [
        "scalingPolicy: {minReplicas: 2, maxReplicas: 3}",
        "admissionPolicy: {allowedNamespaces: []}",
        "updatePolicy: {strategy: Recreate}",
        "modelStorageClassName: fast",
    ] {
        let spec = format!("modelPolicy: {{allowedEndpointTypes: [Chat, Rerank]}}, {bound}");
        assert_eq!(
            in_force(&spec, &settled),
            (chat.terms.clone(), None),
            "{bound}"
        );
    }
    let edited = chat.settled(2, Stage::Serving);
    let (terms, held) = in_force(embeddings, &edited);
    assert_eq!((terms.contract, held), (EndpointType::Embeddings, None));
}

#[test]
fn the_first_version_of_the_record_is_held_by_what_the_status_says() {
    let chat = case(
        &class("modelPolicy: {allowedEndpointTypes: [Chat]}"),
        recipe(),
    );
    let mut first = chat.settled(3, Stage::Serving);
    (first.version, first.parts) = (1, None);
    let same = chat.settle(Some(&first), &[copy(true, true)], &room());
    assert!(
        !same.replanned && same.inputs == chat.inputs,
        "nothing changed"
    );
    let embeddings = case(
        &class("modelPolicy: {allowedEndpointTypes: [Embeddings]}"),
        recipe(),
    );
    let (terms, held) = embeddings
        .terms
        .clone()
        .in_force(&chat.order, Some(&first), &[]);
    assert_eq!(terms.contract, EndpointType::Chat);
    assert!(held.is_some() && terms.hash.is_empty());
    let s = embeddings.settle(Some(&first), &[copy(true, true)], &room());
    let mut second = first;
    second.parts = Some(s.inputs.parts);
    let (_, held) = embeddings
        .terms
        .clone()
        .in_force(&chat.order, Some(&second), &[]);
    assert!(
        held.is_some(),
        "it is held until an edit, whatever was written since"
    );
}

/// A release that needs so much more.
fn hungrier(bytes: u64) -> Recipe {
    let mut recipe = recipe();
    recipe.release = "next".into();
    recipe.memory.fixed.0 += bytes;
    recipe
}

#[test]
fn a_release_changes_no_plan_before_the_order_is_edited_a_110_a_112() {
    let (before, after) = (
        case(&placed("WholeDevice"), recipe()),
        case(&placed("WholeDevice"), hungrier(1 << 30)),
    );
    assert_eq!(before.inputs.parts.class, after.inputs.parts.class);
    assert_ne!(before.inputs.parts.release, after.inputs.parts.release);
    for stage in [Stage::New, Stage::Serving] {
        let standing = before.settled(3, stage);
        let s = after.settle(Some(&standing), &[copy(true, true)], &room());
        assert!(!s.replanned && !s.follows && s.refusal.is_none());
        assert_eq!(s.plan, Some(standing.plan));
        assert_eq!(s.inputs, before.inputs, "what it was made from stays");
    }
    let edited = before.settled(2, Stage::Serving);
    let s = after.settle(Some(&edited), &[copy(true, true)], &room());
    assert!(s.replanned && s.follows && s.moved);
    assert_eq!(s.inputs, after.inputs);
}

#[test]
fn a_release_that_does_not_fit_where_the_copies_are_is_told_a_115() {
    let (plan, facts) = (fixture::plan(1), fixture::facts(Format::Gguf));
    let volume = memory::volume(&recipe(), &facts);
    assert_eq!(too_small(&plan, &recipe(), &facts, Some(volume)), None);
    assert_eq!(
        too_small(&plan, &hungrier(1 << 30), &facts, None),
        None,
        "there is room left"
    );
    let why = too_small(&plan, &hungrier(20 << 30), &facts, Some(volume)).unwrap();
    assert!(why.contains("of each device"), "{why}");
    let mut bulky = recipe();
    bulky.storage_extra.0 += 5 << 30;
    let why = too_small(&plan, &bulky, &facts, Some(volume)).unwrap();
    assert!(why.contains("a volume of"), "{why}");
    let mut single = recipe();
    single.max_devices = 1;
    assert!(
        too_small(&fixture::plan(2), &single, &facts, None)
            .unwrap()
            .contains("2 devices")
    );
}

#[test]
fn room_for_one_more_is_room_on_the_same_placement_a_037() {
    let case = case(&placed("WholeDevice"), recipe());
    let two = cluster(vec![whole("g0", 80), whole("g1", 80)], GOOD);
    let plan = case.settle(None, &[], &two).plan.unwrap();
    assert_eq!(fit(&two, &case.demand, &plan, 1), 2);
    assert_eq!(fit(&two, &case.demand, &plan, 3), 2);
    assert_eq!(fit(&room(), &case.demand, &plan, 1), 1);
    assert_eq!(fit(&Snapshot::default(), &case.demand, &plan, 1), 0);
}

#[test]
fn too_small_devices_and_a_broken_selector_are_told_apart_a_106() {
    let case = case(&placed("WholeDevice"), recipe());
    let refused = |snapshot: &Snapshot| {
        let s = case.settle(None, &[], snapshot);
        assert_eq!(s.plan, None);
        s.refusal.unwrap().reason
    };
    let small = cluster(vec![whole("g0", 1)], GOOD);
    assert_eq!(refused(&small), R::ResourceClaimExhausted);
    let broken = "device.attributes['gpu.ai.deckhouse.io'].nothing == 'x'";
    let unclear = cluster(vec![whole("g0", 80)], broken);
    assert_eq!(refused(&unclear), R::PlacementUndecidable);
    assert_eq!(refused(&Snapshot::default()), R::NoDeviceClass);
}

/// A hash that another version of the platform computes differently would be told as a
/// changed class on every order there is.
#[test]
fn the_terms_of_a_class_keep_their_hash_over_versions_a_117() {
    let hash = |spec: &str| Terms::of(&class(spec), EndpointType::Chat).hash;
    let open = "modelPolicy: {allowedEndpointTypes: [Chat]}";
    assert_eq!(hash(open), "ca6f715daf");
    let full = format!(
        "{open}, acceleratorPolicy: {{allowedSharingModes: [Shared], allowedPlacementTypes: [WholeDevice], deviceClassNames: [a], maxAcceleratorCount: 2, minSharePercent: 10, maxSharePercent: 90, selectors: [{{cel: {{expression: 'true'}}}}]}}"
    );
    assert_eq!(hash(&full), "1d710397cb");
}
