//! Orders and classes in, verdicts out.

use super::*;
use crate::model::Format;
use crate::recipe::RecipeBook;
use crate::render::tests as fixture;
use rstest::rstest;

fn class_of(spec: &str) -> InferenceServiceClass {
    serde_saphyr::from_str(&format!(
        "apiVersion: ai.deckhouse.io/v1alpha1\nkind: InferenceServiceClass\nmetadata: {{name: default-llm}}\nspec: {{modelPolicy: {{allowedEndpointTypes: [Chat]}}, {spec}}}\n"
    ))
    .unwrap()
}

#[test]
fn a_class_that_there_is_not_is_named() {
    let refusal = class(&fixture::order(""), None).unwrap_err();
    assert_eq!(refusal.reason, R::ClassNotFound);
    assert!(refusal.message.contains("default-llm"));
}

#[rstest]
#[case("", true)]
#[case("admissionPolicy: {allowedNamespaces: [my-namespace]}", true)]
#[case("admissionPolicy: {allowedNamespaces: [other]}", false)]
#[case("admissionPolicy: {allowedNamespaces: []}", false)]
fn a_class_admits_the_namespaces_it_lists_a_038(#[case] spec: &str, #[case] admitted: bool) {
    let standing = class_of(spec);
    let verdict = class(&fixture::order(""), Some(&standing))
        .map(|_| ())
        .map_err(|r| r.reason);
    assert_eq!(
        verdict,
        if admitted {
            Ok(())
        } else {
            Err(R::NamespaceNotAllowed)
        }
    );
}

#[test]
fn a_class_that_did_not_pass_validation_serves_nothing_new() {
    let mut standing = class_of("");
    let mut judged = |generation: i64, status: &str| {
        standing.metadata.generation = Some(2);
        let condition = format!(
            "{{conditions: [{{type: Validated, status: '{status}', reason: SelectorInvalid, message: 'zebra ==', observedGeneration: {generation}, lastTransitionTime: 2026-01-01T00:00:00Z}}]}}"
        );
        standing.status = Some(serde_saphyr::from_str(&condition).unwrap());
        class(&fixture::order(""), Some(&standing)).map(|_| ())
    };
    let refusal = judged(2, "False").unwrap_err();
    assert_eq!(refusal.reason, R::ClassNotReady);
    assert!(
        refusal.message.contains("default-llm") && !refusal.message.contains("zebra"),
        "A-096: {}",
        refusal.message
    );
    assert_eq!(judged(2, "True"), Ok(()));
    assert_eq!(judged(1, "False"), Ok(()), "what was mended is judged anew");
}

#[rstest]
#[case::factless_takes_the_first_a_054(&[EndpointType::Chat, EndpointType::Embeddings], None, Some(EndpointType::Chat))]
#[case::order_is_part_of_the_decision_a_051(&[EndpointType::Embeddings, EndpointType::Chat], None, Some(EndpointType::Embeddings))]
#[case::facts_narrow_a_052_a_053(&[EndpointType::Chat, EndpointType::Embeddings], Some(&[EndpointType::Embeddings][..]), Some(EndpointType::Embeddings))]
#[case::nothing_in_common_a_056(&[EndpointType::Chat], Some(&[EndpointType::Embeddings][..]), None)]
fn the_contract_is_the_classs_first_that_the_source_allows(
    #[case] allowed: &[EndpointType],
    #[case] supported: Option<&[EndpointType]>,
    #[case] chosen: Option<EndpointType>,
) {
    match (contract(allowed, supported), chosen) {
        (Ok(got), Some(wanted)) => assert_eq!(got, wanted),
        (Err(refusal), None) => {
            assert_eq!(refusal.reason, R::EndpointTypeNotAllowed);
            assert!(
                refusal.message.contains("Embeddings") && refusal.message.contains("Chat"),
                "{}",
                refusal.message
            );
        }
        (got, _) => panic!("{got:?}"),
    }
}

#[test]
fn other_sources_are_refused_plainly_and_the_catalog_by_its_mode_a_024() {
    let mut order = fixture::order("");
    order.spec.model.src = ModelSource::S3;
    let refusal = model_request(&order, true).unwrap_err();
    assert_eq!(refusal.reason, R::SourceNotSupported);
    assert!(refusal.message.contains("not from S3") && !refusal.transient);
    order.spec.model.src = ModelSource::AiModels;
    assert_eq!(
        model_request(&order, false).unwrap_err().reason,
        R::CatalogDisabled,
        "A-024"
    );
    assert_eq!(
        model_request(&order, true).unwrap_err().reason,
        R::SourceNotSupported
    );
}

#[test]
fn a_class_without_policies_asks_for_one_copy_on_one_whole_device_a_060_a_061() {
    let (book, facts) = (RecipeBook::shipped().unwrap(), fixture::facts(Format::Gguf));
    let recipe = book
        .choose(Format::Gguf, EndpointType::Chat)
        .unwrap()
        .recipe;
    let demand = demand(&fixture::order(""), &class_of("").spec, recipe, &facts);
    assert_eq!(
        demand.placement_types,
        [planner::PlacementType::WholeDevice]
    );
    assert_eq!(demand.memory.len(), 1);
    assert_eq!((demand.replicas.min, demand.replicas.max), (1, 1), "A-060");
}

#[test]
fn the_bounds_of_a_class_reach_the_planner_a_003_a_034() {
    //
    let (book, facts) = (RecipeBook::shipped().unwrap(), fixture::facts(Format::Gguf));
    let recipe = book
        .choose(Format::Gguf, EndpointType::Chat)
        .unwrap()
        .recipe;
    let class = class_of(
        "acceleratorPolicy: {allowedSharingModes: [Shared], minSharePercent: 10, maxSharePercent: 50}",
    );
    let demand = demand(&fixture::order(""), &class.spec, recipe, &facts);
    assert_eq!(demand.sharing_modes, [planner::SharingMode::Shared]);
    assert_eq!(
        (
            demand.share_bounds.min_percent,
            demand.share_bounds.max_percent
        ),
        (Some(10), Some(50))
    );
}

#[test]
fn scaling_does_not_settle_a_plan_anew_and_a_policy_does() {
    let (book, facts) = (RecipeBook::shipped().unwrap(), fixture::facts(Format::Gguf));
    let recipe = book
        .choose(Format::Gguf, EndpointType::Chat)
        .unwrap()
        .recipe;
    let of = |spec: &str| {
        inputs(&demand(
            &fixture::order(""),
            &class_of(spec).spec,
            recipe,
            &facts,
        ))
    };
    assert_eq!(
        of(""),
        of("scalingPolicy: {minReplicas: 2, maxReplicas: 4}")
    );
    assert_ne!(
        of(""),
        of("acceleratorPolicy: {allowedPlacementTypes: [Partition]}")
    );
}

#[test]
fn a_hubs_answer_becomes_a_reason_and_only_an_outage_is_tried_again() {
    let named = |error: ModelError| model_refusal(&error);
    let (repository, revision, hub, detail) = (
        "a/b".to_owned(),
        "main".to_owned(),
        "h".to_owned(),
        "d".to_owned(),
    );
    let gone = named(ModelError::NotFound {
        repository: repository.clone(),
        revision: revision.clone(),
        hub: hub.clone(),
        detail: detail.clone(),
    });
    assert_eq!(
        (gone.reason, gone.transient),
        (R::ModelSourceNotFound, false)
    );
    let down = named(ModelError::Unavailable {
        repository: repository.clone(),
        revision: revision.clone(),
        hub,
        detail: detail.clone(),
    });
    assert_eq!(
        (down.reason, down.transient),
        (R::ModelSourceUnavailable, true)
    );
    let many = named(ModelError::Rejected {
        repository,
        revision,
        kind: Rejection::FileAmbiguous,
        detail,
    });
    assert_eq!(
        (many.reason, many.transient),
        (R::ModelFileAmbiguous, false)
    );
    assert!(
        many.message.contains("a/b at revision main"),
        "{}",
        many.message
    );
}
