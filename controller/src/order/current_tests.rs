//! What is said of copies on several descriptions and releases.

use super::*;
use crate::model::Format;
use crate::order::build::Objects;
use crate::order::moves::{Roll, Step};
use crate::recipe::RecipeBook;
use crate::render::tests as fixture;
use k8s_openapi::api::apps::v1::StatefulSet;

const SHIPPED: &str = "llama-cpp-b10434";

fn decided(replicas: i32) -> Decision {
    let book = RecipeBook::shipped().unwrap();
    let choice = book
        .choose(Format::Gguf, inference_api::EndpointType::Chat)
        .unwrap();
    Decision {
        class: Some(("default-llm".into(), Some(1))),
        facts: Some(fixture::facts(Format::Gguf)),
        recipe: Some((choice.recipe.clone(), choice.reason.clone())),
        plan: Some(fixture::plan(1)),
        objects: Some(Objects {
            template: Default::default(),
            statefulset: Default::default(),
            service: Default::default(),
            budget: None,
        }),
        replicas,
        now: 1000,
        ..Decision::default()
    }
}

fn copy(ordinal: i32, release: &str, generation: i64) -> Copy {
    Copy {
        name: format!("support-llm-{ordinal}"),
        ordinal,
        ready: true,
        scheduled: true,
        release: release.into(),
        generation,
        ..Copy::default()
    }
}

fn said(decision: &Decision, copies: Vec<Copy>) -> (String, String) {
    let applied = Applied {
        copies,
        statefulset: Some(StatefulSet::default()),
        refused: None,
    };
    let update = runtime_current(&fixture::order(""), decision, &applied);
    (update.reason.to_owned(), update.message)
}

#[test]
fn copies_on_an_older_release_are_held_and_both_releases_are_named_a_112() {
    let copies = vec![copy(0, "llama-cpp-b10000", 3), copy(1, SHIPPED, 3)];
    let (reason, message) = said(&decided(2), copies);
    assert_eq!(reason, R::ReplicasHeldOnPreviousRuntime.as_str());
    for word in ["1 of 2", SHIPPED, "1 on llama-cpp-b10000", "delete a copy"] {
        assert!(message.contains(word), "{word} in {message}");
    }
    let (reason, _) = said(&decided(1), vec![copy(0, SHIPPED, 3)]);
    assert_eq!(reason, R::RuntimeCurrent.as_str());
}

#[test]
fn every_release_that_copies_are_on_is_counted_a_112() {
    let copies = vec![
        copy(0, "a", 3),
        copy(1, "b", 3),
        copy(2, "a", 3),
        copy(3, SHIPPED, 3),
    ];
    let (_, message) = said(&decided(4), copies);
    assert!(
        message.contains("1 of 4") && message.contains("2 on a, 1 on b"),
        "{message}"
    );
}

#[test]
fn the_limits_of_both_releases_are_told_where_they_differ_a_114() {
    let limits = |context| {
        Some(Limits {
            context,
            sequences: 4,
        })
    };
    let mut older = copy(0, "older", 3);
    older.limits = limits(8192);
    let (_, message) = said(&decided(1), vec![older.clone()]);
    let said_so = format!(
        "{SHIPPED} accepts contexts of 4096 tokens and 4 requests at once, older accepts contexts of 8192 tokens and 4 requests at once"
    );
    assert!(message.contains(&said_so), "{message}");
    older.limits = limits(4096);
    let (_, message) = said(&decided(1), vec![older.clone()]);
    assert!(
        message.contains("all of them accept contexts of 4096 tokens"),
        "the same: {message}"
    );
    older.limits = None;
    let (_, message) = said(&decided(1), vec![older]);
    assert!(!message.contains("accept"), "not known: {message}");
}

#[test]
fn a_release_that_does_not_fit_where_the_copies_are_is_held_whole_a_112_a_115() {
    let mut decision = decided(1);
    decision.too_small = Some("it needs 2 bytes of each device and a copy has 1".into());
    let (reason, message) = said(&decision, vec![copy(0, "older", 3)]);
    assert_eq!(reason, R::ReplicasHeldOnPreviousRuntime.as_str());
    assert!(
        message.contains("0 of 1")
            && message.contains("none can move alone")
            && message.contains("2 bytes"),
        "{message}"
    );
}

#[test]
fn a_release_is_told_before_a_class_that_is_held_and_with_it_a_112_a_117() {
    let mut decision = decided(1);
    decision.held = Some("the class was changed".into());
    let (reason, message) = said(&decision, vec![copy(0, "older", 3)]);
    assert_eq!(reason, R::ReplicasHeldOnPreviousRuntime.as_str());
    assert!(
        message.ends_with("also, the class was changed"),
        "{message}"
    );
    let (reason, _) = said(&decision, vec![copy(0, SHIPPED, 3)]);
    assert_eq!(reason, R::ClassChangeHeld.as_str());
}

fn moving(replicas: i32, surge_since: Option<i64>, waits_for: &[&str]) -> Decision {
    Decision {
        step: Step {
            replicas: replicas + i32::from(surge_since.is_some()),
            roll: Some(Roll {
                generation: 3,
                surge_since,
            }),
            waits_for: waits_for.iter().map(|w| (*w).to_owned()).collect(),
            ..Step::default()
        },
        ..decided(replicas)
    }
}

#[test]
fn a_move_counts_the_copies_that_stay_and_not_the_one_beside_them_a_113() {
    let copies = vec![copy(0, SHIPPED, 2), copy(1, SHIPPED, 3)];
    let (reason, message) = said(&moving(1, Some(990), &[]), copies);
    assert_eq!(reason, R::ReplicasMoving.as_str());
    assert!(
        message.starts_with("0 of 1 copies") && message.contains("room for one more"),
        "{message}"
    );
    let copies = vec![copy(0, SHIPPED, 2), copy(1, SHIPPED, 3)];
    let (_, message) = said(&moving(2, None, &[]), copies);
    assert_eq!(message, "1 of 2 copies are on the current description");
}

#[test]
fn a_move_is_stopped_by_whatever_keeps_its_new_copy_from_answering_a_118() {
    for reason in [
        R::RuntimeCrashing,
        R::DownloadFailed,
        R::InsufficientStorage,
        R::VolumePending,
        R::ReplicasUnschedulable,
        R::ContainerNotStarted,
    ] {
        let mut fresh = copy(1, SHIPPED, 3);
        fresh.ready = false;
        fresh.problem = Some((reason, "support-llm-1: why".into()));
        let copies = vec![copy(0, SHIPPED, 2), fresh];
        let (got, message) = said(&moving(2, None, &["support-llm-1"]), copies);
        assert_eq!(got, R::MoveStopped.as_str(), "{reason}");
        assert!(
            message.contains("1 of 2") && message.ends_with("support-llm-1: why"),
            "{message}"
        );
    }
    let mut hangs = copy(1, SHIPPED, 3);
    hangs.ready = false;
    hangs.problem = Some((R::ReplicasStarting, "support-llm-1 waits".into()));
    hangs.idle_since = Some(1000 - super::super::copies::STALLED_AFTER);
    let stopped = |copy: Copy| {
        said(
            &moving(2, None, &["support-llm-1"]),
            vec![self::copy(0, SHIPPED, 2), copy],
        )
        .0
    };
    assert_eq!(stopped(hangs.clone()), R::MoveStopped.as_str());
    hangs.idle_since = Some(999);
    assert_eq!(
        stopped(hangs),
        R::ReplicasMoving.as_str(),
        "it has only just begun"
    );
}

#[test]
fn a_copy_beside_the_others_without_a_node_stops_nothing_yet() {
    let mut beside = copy(1, SHIPPED, 3);
    (beside.ready, beside.scheduled) = (false, false);
    beside.problem = Some((R::ReplicasUnschedulable, "support-llm-1: no room".into()));
    let copies = vec![copy(0, SHIPPED, 2), beside];
    let (reason, _) = said(&moving(1, Some(990), &["support-llm-1"]), copies);
    assert_eq!(reason, R::ReplicasMoving.as_str());
}

#[test]
fn an_edit_that_cannot_be_followed_leaves_the_copies_and_says_so_a_118() {
    let mut refused = decided(1);
    refused.objects = None;
    let (reason, message) = said(&refused, vec![copy(0, SHIPPED, 2)]);
    assert_eq!(reason, R::MoveStopped.as_str());
    assert!(
        message.contains("0 of 1") && message.contains("its other conditions"),
        "{message}"
    );
}

#[test]
fn a_workload_that_is_raised_anew_says_so_until_a_copy_answers_a_115() {
    let mut decision = decided(1);
    decision.rebuild = Some("copies get more".into());
    let (reason, message) = said(&decision, vec![copy(0, SHIPPED, 2)]);
    assert_eq!(reason, R::WorkloadRebuilding.as_str());
    assert!(message.starts_with("copies get more"), "{message}");
    decision.rebuild = None;
    decision.stage = Some(Stage::Rebuilding);
    assert_eq!(said(&decision, vec![]).0, R::WorkloadRebuilding.as_str());
    decision.stage = Some(Stage::Serving);
    assert_eq!(
        said(&decision, vec![copy(0, SHIPPED, 3)]).0,
        R::RuntimeCurrent.as_str()
    );
    // Between the two there is no workload; what the order's status says carries over.
    let gone = Applied {
        copies: vec![],
        statefulset: None,
        refused: None,
    };
    let mut order = fixture::order("");
    decision.stage = None;
    let reason = |order: &InferenceService, d: &Decision| runtime_current(order, d, &gone);
    assert_eq!(
        reason(&order, &decision).reason,
        R::WorkloadNotCreated.as_str()
    );
    let mut status = inference_api::InferenceServiceStatus::default();
    let now =
        k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(k8s_openapi::jiff::Timestamp::now());
    inference_api::set_condition(
        &mut status.conditions,
        C::RuntimeCurrent.unmet(R::WorkloadRebuilding, "x"),
        Some(3),
        &now,
    );
    order.status = Some(status);
    decision.leftovers = vec!["Pod support-llm-0".into()];
    let update = reason(&order, &decision);
    assert_eq!(update.reason, R::WorkloadRebuilding.as_str());
    assert!(
        update.message.ends_with("Pod support-llm-0"),
        "{}",
        update.message
    );
}
