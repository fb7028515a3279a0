//! What can be judged from the order and its class alone. Pure.

use super::Refusal;
use crate::model::{ModelError, ModelFacts, ModelRequest, Rejection};
use crate::recipe::{Recipe, memory};
use inference_api::{
    ClassCondition, ConditionStatus, EndpointType, InferenceService, InferenceServiceClass,
    InferenceServiceClassSpec, ModelSource, OrderCondition as C, OrderReason as R, PlacementType,
    SharingMode,
};
use kube::ResourceExt;
use planner::{Demand, OrderRef, ReplicaBounds, ShareBounds};

/// Whether the order may use its class: it exists, admits the order's
/// namespace, and nothing of it was found invalid. A class that nobody judged yet is
/// taken as it is; an order is woken when it is judged.
///
/// # Errors
/// ClassNotFound, NamespaceNotAllowed, ClassNotReady.
pub fn class<'a>(
    order: &InferenceService,
    class: Option<&'a InferenceServiceClass>,
) -> Result<&'a InferenceServiceClass, Refusal> {
    let name = &order.spec.inference_service_class_name;
    let refuse = |reason, message| Err(Refusal::new(C::ClassResolved, reason, message));
    let Some(class) = class else {
        return refuse(
            R::ClassNotFound,
            format!(
                "there is no InferenceServiceClass {name}; correct spec.inferenceServiceClassName"
            ),
        );
    };
    let namespace = order.namespace().unwrap_or_default();
    if !class.spec.admits(&namespace) {
        return refuse(
            R::NamespaceNotAllowed,
            format!("the class {name} does not admit orders of the namespace {namespace}"),
        );
    }
    if is_refused(class) {
        // What is wrong with the class is its administrator's to read.
        return refuse(
            R::ClassNotReady,
            format!(
                "the class {name} did not pass validation; its condition Validated says why, to those who may read it"
            ),
        );
    }
    Ok(class)
}

/// Whether the class, as it is now, was judged and found invalid.
fn is_refused(class: &InferenceServiceClass) -> bool {
    let conditions = class.status.as_ref().map(|s| s.conditions.as_slice());
    ClassCondition::Validated
        .find(conditions.unwrap_or_default())
        .is_some_and(|c| {
            c.status == ConditionStatus::False.as_str()
                && c.observed_generation == class.metadata.generation
        })
}

/// The contract: the first of the class's list that the source
/// allows. A source without facts allows all of them.
///
/// # Errors
/// EndpointTypeNotAllowed, naming both sets.
pub fn contract(
    allowed: &[EndpointType],
    supported: Option<&[EndpointType]>,
) -> Result<EndpointType, Refusal> {
    let chosen = allowed
        .iter()
        .find(|t| supported.is_none_or(|s| s.contains(t)));
    chosen.copied().ok_or_else(|| {
        let words = |set: &[EndpointType]| {
            if set.is_empty() {
                return "none".to_owned();
            }
            set.iter()
                .map(|t| t.as_str())
                .collect::<Vec<_>>()
                .join(", ")
        };
        Refusal::new(
            C::ModelResolved,
            R::EndpointTypeNotAllowed,
            format!(
                "the model can do {}, and the class allows {}",
                words(supported.unwrap_or_default()),
                words(allowed)
            ),
        )
    })
}

/// What to ask the hub for.
///
/// # Errors
/// CatalogDisabled, SourceNotSupported.
pub fn model_request(order: &InferenceService, catalog: bool) -> Result<ModelRequest, Refusal> {
    let model = &order.spec.model;
    let refuse = |reason, message: String| Err(Refusal::new(C::ModelResolved, reason, message));
    match (model.src, &model.hugging_face) {
        (ModelSource::HuggingFace, Some(source)) => Ok(ModelRequest {
            repository: source.repository.clone(),
            revision: source.revision_or_main().to_owned(),
            file: source.file.clone(),
        }),
        (ModelSource::AiModels, _) if !catalog => refuse(
            R::CatalogDisabled,
            "the platform is configured without the model catalog (catalog.mode None); order from HuggingFace".into(),
        ),
        (source, _) => refuse(
            R::SourceNotSupported,
            format!(
                "this version serves models from HuggingFace only, not from {}; set spec.model.src to HuggingFace",
                source.as_str()
            ),
        ),
    }
}

/// A hub's answer as a condition.
pub fn model_refusal(error: &ModelError) -> Refusal {
    let reason = match error {
        ModelError::NotFound { .. } => R::ModelSourceNotFound,
        ModelError::AccessDenied { .. } => R::AccessDenied,
        ModelError::Unavailable { .. } => R::ModelSourceUnavailable,
        ModelError::Rejected { kind, .. } => match kind {
            Rejection::NotSupported => R::ModelNotSupported,
            Rejection::FileNotFound => R::ModelFileNotFound,
            Rejection::FileAmbiguous => R::ModelFileAmbiguous,
            Rejection::FilesInvalid => R::ModelFilesInvalid,
        },
    };
    let refusal = Refusal::new(C::ModelResolved, reason, error.to_string());
    if error.is_transient() {
        refusal.transient()
    } else {
        refusal
    }
}

/// What the planner is asked for.
pub fn demand(
    order: &InferenceService,
    class: &InferenceServiceClassSpec,
    recipe: &Recipe,
    facts: &ModelFacts,
) -> Demand {
    let policy = class.accelerators();
    let max = u32::try_from(policy.max_accelerator_count.max(1)).unwrap_or(1);
    let scaling = class.scaling();
    let count = |n: i32| u32::try_from(n).unwrap_or(0);
    let percent = |bound: Option<i32>| bound.and_then(|p| u32::try_from(p).ok());
    Demand {
        order: OrderRef {
            namespace: order.namespace().unwrap_or_default(),
            name: order.name_any(),
        },
        memory: memory::needs(recipe, facts, max),
        sharing_modes: policy
            .allowed_sharing_modes
            .iter()
            .map(|m| match m {
                SharingMode::Shared => planner::SharingMode::Shared,
                SharingMode::Dedicated => planner::SharingMode::Dedicated,
            })
            .collect(),
        placement_types: policy
            .allowed_placement_types
            .iter()
            .map(|t| match t {
                PlacementType::WholeDevice => planner::PlacementType::WholeDevice,
                PlacementType::Partition => planner::PlacementType::Partition,
            })
            .collect(),
        device_class_names: policy.device_class_names.clone(),
        selectors: policy
            .selectors
            .iter()
            .flatten()
            .map(|s| s.cel.expression.clone())
            .collect(),
        share_bounds: ShareBounds {
            min_percent: percent(policy.min_share_percent),
            max_percent: percent(policy.max_share_percent),
        },
        replicas: ReplicaBounds {
            min: count(scaling.min_replicas),
            max: count(scaling.max_replicas),
        },
        device_tolerations: vec![],
        node_tolerations: vec![],
        node_selector: Default::default(),
    }
}

/// A hash of everything in a demand that a placement depends on; the number of
/// copies is not among it, so scaling settles nothing anew.
pub fn inputs(demand: &Demand) -> String {
    let mut demand = demand.clone();
    demand.replicas = ReplicaBounds { min: 1, max: 1 };
    crate::render::short_hash(&demand)
}

#[cfg(test)]
#[path = "validate_tests.rs"]
mod tests;
