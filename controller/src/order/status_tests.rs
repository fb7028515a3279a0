//! Statuses of decisions in each state.

use super::*;
use crate::model::Format;
use crate::recipe::RecipeBook;
use crate::render::tests as fixture;
use std::sync::Arc;

fn seen() -> Seen {
    Seen {
        class: None,
        statefulset: None,
        service: None,
        budget: None,
        pods: vec![],
        volumes: vec![],
        templates: vec![],
        settled: None,
        facts: None,
        snapshot: Arc::default(),
    }
}

fn decided() -> Decision {
    let book = RecipeBook::shipped().unwrap();
    let choice = book
        .choose(Format::Gguf, inference_api::EndpointType::Chat)
        .unwrap();
    Decision {
        class: Some(("default-llm".into(), Some(1))),
        contract: Some(inference_api::EndpointType::Chat),
        facts: Some(fixture::facts(Format::Gguf)),
        recipe: Some((choice.recipe.clone(), choice.reason.clone())),
        plan: Some(fixture::plan(1)),
        token: true,
        external: true,
        replicas: 1,
        ..Decision::default()
    }
}

fn copy(ready: bool, release: &str, problem: Option<(R, &str)>) -> Copy {
    Copy {
        name: "support-llm-0".into(),
        ready,
        scheduled: true,
        release: release.into(),
        generation: 3,
        problem: problem.map(|(r, m)| (r, m.to_owned())),
        ..Copy::default()
    }
}

fn status(decision: &Decision, copies: Vec<Copy>, stands: bool) -> InferenceServiceStatus {
    let statefulset = stands.then(|| {
        serde_saphyr::from_str(
            "metadata: {name: support-llm}\nspec: {replicas: 1, selector: {}, template: {}}",
        )
        .unwrap()
    });
    let applied = Applied {
        copies,
        statefulset,
        refused: None,
    };
    compute(&fixture::order(""), &seen(), decision, &applied, &[])
}

fn condition(status: &InferenceServiceStatus, c: C) -> (String, String) {
    let c = c.find(&status.conditions).unwrap();
    (c.status.clone(), c.reason.clone())
}

fn is(status: &str, reason: R) -> (String, String) {
    (status.to_owned(), reason.as_str().to_owned())
}

#[test]
fn a_healthy_order_has_all_six_conditions_and_says_what_this_version_does_not_do() {
    let s = status(&decided(), vec![copy(true, "llama-cpp-b10434", None)], true);
    assert_eq!(s.conditions.len(), 6);
    assert!(
        s.conditions.iter().all(|c| c.status == "True"),
        "{:?}",
        s.conditions
    );
    assert_eq!(s.phase, Some(Phase::Ready));
    let ready = C::Ready.find(&s.conditions).unwrap();
    assert!(
        ready.message.contains("not published outside the cluster"),
        "{}",
        ready.message
    );
    let endpoint = s.endpoint.unwrap();
    assert_eq!(endpoint.address, "http://support-llm.my-namespace.svc");
    assert_eq!(
        endpoint.token_secret_name.as_deref(),
        Some("support-llm-token")
    );
    assert_eq!(
        s.model.unwrap().endpoint_type,
        Some(inference_api::EndpointType::Chat),
        "A-059"
    );
}

#[test]
fn a_refused_class_leaves_the_rest_unknown_and_nothing_made() {
    let refusal = Refusal::new(C::ClassResolved, R::ClassNotFound, "there is none");
    let s = status(
        &Decision {
            stopped: Some(refusal),
            ..Decision::default()
        },
        vec![],
        false,
    );
    assert_eq!(
        condition(&s, C::ClassResolved),
        is("False", R::ClassNotFound)
    );
    assert_eq!(
        condition(&s, C::ModelResolved),
        is("Unknown", R::WaitingForClass)
    );
    assert_eq!(condition(&s, C::Planned), is("Unknown", R::WaitingForClass));
    assert_eq!(
        condition(&s, C::RuntimeCurrent),
        is("False", R::WorkloadNotCreated)
    );
    assert_eq!(condition(&s, C::Ready), is("False", R::ClassNotFound));
    assert_eq!(s.phase, Some(Phase::Failed));
}

#[test]
fn an_order_that_loses_its_class_keeps_serving_and_reports_it_a_038() {
    let refusal = Refusal::new(C::ClassResolved, R::NamespaceNotAllowed, "not admitted");
    let s = status(
        &Decision {
            stopped: Some(refusal),
            ..Decision::default()
        },
        vec![copy(true, "r", None)],
        true,
    );
    assert_eq!(
        condition(&s, C::ClassResolved),
        is("False", R::NamespaceNotAllowed)
    );
    assert_eq!(condition(&s, C::Ready), is("True", R::Ready));
    assert_eq!(s.phase, Some(Phase::Degraded));
}

#[test]
fn standing_copies_keep_their_plan_in_the_status_when_the_class_goes() {
    let served = status(&decided(), vec![copy(true, "llama-cpp-b10434", None)], true);
    assert!(served.plan.is_some());
    let mut order = fixture::order("");
    let lost = Decision {
        stopped: Some(Refusal::new(C::ClassResolved, R::ClassNotFound, "gone")),
        ..Decision::default()
    };
    let mut applied = Applied {
        copies: vec![copy(true, "llama-cpp-b10434", None)],
        statefulset: serde_saphyr::from_str(
            "metadata: {name: support-llm}\nspec: {replicas: 1, selector: {}, template: {}}",
        )
        .unwrap(),
        refused: None,
    };
    order.status = Some(served.clone());
    let now = compute(&order, &seen(), &lost, &applied, &[]);
    assert_eq!(now.plan, served.plan);
    applied.statefulset = None;
    assert_eq!(compute(&order, &seen(), &lost, &applied, &[]).plan, None);
}

#[test]
fn no_room_is_pending_and_a_broken_selector_failed() {
    for (reason, phase) in [
        (R::ResourceClaimExhausted, Phase::Pending),
        (R::PlacementUndecidable, Phase::Failed),
    ] {
        let stopped = Some(Refusal::new(C::Planned, reason, "x"));
        let s = status(
            &Decision {
                stopped,
                plan: None,
                ..decided()
            },
            vec![],
            false,
        );
        assert_eq!(condition(&s, C::Planned), is("False", reason));
        assert_eq!(condition(&s, C::Ready), is("False", reason));
        assert_eq!(s.phase, Some(phase));
    }
}

#[test]
fn a_crashing_runtime_is_not_ready_with_its_last_words() {
    let s = status(
        &decided(),
        vec![copy(
            false,
            "llama-cpp-b10434",
            Some((R::RuntimeCrashing, "exit code 1: no memory")),
        )],
        true,
    );
    assert_eq!(
        condition(&s, C::WorkloadReady),
        is("False", R::RuntimeCrashing)
    );
    assert_eq!(condition(&s, C::Ready), is("False", R::RuntimeCrashing));
    assert!(
        C::Ready
            .find(&s.conditions)
            .unwrap()
            .message
            .contains("exit code 1: no memory")
    );
    assert_eq!(s.phase, Some(Phase::Failed));
}

#[test]
fn a_status_that_is_computed_again_is_the_same() {
    let (decision, copies) = (decided(), vec![copy(true, "llama-cpp-b10434", None)]);
    let first = status(&decision, copies.clone(), true);
    let mut order = fixture::order("");
    order.status = Some(first.clone());
    let statefulset = serde_saphyr::from_str(
        "metadata: {name: support-llm}\nspec: {replicas: 1, selector: {}, template: {}}",
    )
    .unwrap();
    let applied = Applied {
        copies,
        statefulset: Some(statefulset),
        refused: None,
    };
    assert_eq!(compute(&order, &seen(), &decision, &applied, &[]), first);
}

#[test]
fn a_share_is_told_as_a_part_of_its_device() {
    let mut plan = fixture::plan(1);
    assert_eq!(
        plan_words(&plan),
        "each copy gets 1 × partition 1g.10gb of mig.ai.deckhouse.io"
    );
    plan.device_class_name = "share.ai.deckhouse.io".into();
    plan.sharing_mode = planner::SharingMode::Shared;
    plan.placement_type = planner::PlacementType::WholeDevice;
    plan.profile = None;
    plan.device_memory_bytes = 80 << 30;
    plan.memory_bytes = 12 << 30;
    assert_eq!(
        plan_words(&plan),
        "each copy gets a share of 15 % of a whole device of share.ai.deckhouse.io"
    );
}

#[test]
fn a_deletion_that_something_holds_is_told_with_what_holds_it_a_123() {
    let mut order = fixture::order("");
    order.status = Some(status(
        &decided(),
        vec![copy(true, "llama-cpp-b10434", None)],
        true,
    ));
    order.metadata.finalizers = Some(vec!["example.com/hold".into()]);
    let s = deleting(&order, &[copy(true, "llama-cpp-b10434", None)]);
    assert_eq!(s.phase, Some(Phase::Deleting));
    assert_eq!(condition(&s, C::Ready), is("False", R::Deleting));
    let words = &C::Ready.find(&s.conditions).unwrap().message;
    assert!(
        words.contains("example.com/hold") && words.contains("1 of them answer"),
        "{words}"
    );
    assert!(s.endpoint.is_some(), "it still answers");
    let gone = deleting(&order, &[]);
    assert_eq!(condition(&gone, C::WorkloadReady), is("False", R::Deleting));
    assert!(gone.endpoint.is_none());
    order.status = Some(gone.clone());
    assert_eq!(deleting(&order, &[]), gone, "told once");
}

#[test]
fn an_order_that_serves_and_finds_no_room_for_more_is_degraded_a_102() {
    let blocked = Some((R::ReplicasUnschedulable, "support-llm-1: 0/3 nodes"));
    let statefulset = serde_saphyr::from_str(
        "metadata: {name: support-llm}\nspec: {replicas: 2, selector: {}, template: {}}",
    )
    .unwrap();
    let applied = Applied {
        copies: vec![
            copy(true, "llama-cpp-b10434", None),
            copy(false, "llama-cpp-b10434", blocked),
        ],
        statefulset: Some(statefulset),
        refused: None,
    };
    let two = Decision {
        replicas: 2,
        ..decided()
    };
    let s = compute(&fixture::order(""), &seen(), &two, &applied, &[]);
    assert_eq!(
        condition(&s, C::WorkloadReady),
        is("False", R::ScaleUpBlocked)
    );
    assert_eq!(condition(&s, C::Ready), is("True", R::Ready));
    assert_eq!(s.phase, Some(Phase::Degraded));
}

#[test]
fn the_bounds_that_hold_are_told_and_what_this_version_does_not_do_with_them_a_062() {
    let decision = Decision {
        bounds: Some((1, 4)),
        ..decided()
    };
    let copies = || vec![copy(true, "llama-cpp-b10434", None)];
    let s = status(&decision, copies(), true);
    let replicas = s.replicas.clone().unwrap();
    assert_eq!((replicas.minimum, replicas.maximum), (Some(1), Some(4)));
    let words = |s: &InferenceServiceStatus| C::Ready.find(&s.conditions).unwrap().message.clone();
    assert!(words(&s).contains("keeps 1 of at most 4"), "{}", words(&s));
    let fixed = Decision {
        bounds: Some((1, 1)),
        ..decided()
    };
    assert!(!words(&status(&fixed, copies(), true)).contains("growing"));
    // With the class out of reach, what held last still does.
    let mut order = fixture::order("");
    order.status = Some(s);
    let lost = Decision {
        stopped: Some(Refusal::new(C::ClassResolved, R::ClassNotFound, "gone")),
        ..Decision::default()
    };
    let applied = Applied {
        copies: copies(),
        statefulset: None,
        refused: None,
    };
    let now = compute(&order, &seen(), &lost, &applied, &[]);
    assert_eq!(now.replicas.unwrap().maximum, Some(4));
}

#[test]
fn a_divergence_is_remembered_while_the_class_is_out_of_reach_a_043() {
    let standing: k8s_openapi::api::apps::v1::StatefulSet = serde_saphyr::from_str(
        r#"
metadata: {name: support-llm, ownerReferences: [{apiVersion: a, kind: InferenceService, name: support-llm, uid: 8f0c}]}
spec:
  selector: {}
  template: {}
  volumeClaimTemplates: [{metadata: {name: storage}, spec: {storageClassName: slow, resources: {requests: {storage: 1Gi}}}}]
"#,
    )
    .unwrap();
    let mut seen = seen();
    seen.statefulset = Some(Arc::new(standing.clone()));
    let applied = Applied {
        copies: vec![],
        statefulset: Some(standing.clone()),
        refused: None,
    };
    let mut order = fixture::order("");
    let kept = |order: &InferenceService, seen: &Seen, decision: &Decision| {
        let status = compute(order, seen, decision, &applied, &[]);
        (
            status.storage.clone().and_then(|s| s.kept_in_spite_of),
            status,
        )
    };
    let diverges = Decision {
        kept_in_spite_of: Some("fast".into()),
        ..decided()
    };
    let (told, status) = kept(&order, &seen, &diverges);
    assert_eq!(told.as_deref(), Some("fast"));
    order.status = Some(status);
    let (remembered, _) = kept(&order, &seen, &Decision::default());
    assert_eq!(
        remembered.as_deref(),
        Some("fast"),
        "the class is out of reach"
    );
    assert_eq!(kept(&order, &seen, &decided()).0, None, "they agree again");
    let mut foreign = standing;
    foreign.metadata.owner_references = None;
    seen.statefulset = Some(Arc::new(foreign));
    let (_, status) = kept(&order, &seen, &diverges);
    assert!(
        status.storage.is_none(),
        "somebody else's volumes are not the order's"
    );
}

#[test]
fn a_workload_that_is_raised_anew_is_pending_and_not_ready_at_once_a_115() {
    let announced = Decision {
        rebuild: Some("copies get more".into()),
        ..decided()
    };
    let s = status(&announced, vec![copy(true, "llama-cpp-b10434", None)], true);
    assert_eq!(
        condition(&s, C::RuntimeCurrent),
        is("False", R::WorkloadRebuilding)
    );
    assert_eq!(condition(&s, C::Ready), is("False", R::WorkloadRebuilding));
    assert_eq!(s.phase, Some(Phase::Pending));
}
