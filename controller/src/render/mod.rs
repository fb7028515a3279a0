//! (order, class, plan, recipe, facts) → Kubernetes objects.
//!
//! In: decisions that others made. Out: the claim template, the StatefulSet, the
//! Service, as typed objects with owner references. Pure: the same input gives
//! the same bytes, and numbers of copies change nothing but `replicas`. Never: a
//! decision, a device's UUID in an environment, a service account token in a pod.

mod budget;
mod claim;
mod pod;
mod service;
mod statefulset;

pub use pod::{TOKEN_VARIABLES, served_name};

pub use budget::budget;
pub use claim::claim_template;
pub use service::service;
pub use statefulset::{StandingVolume, statefulset};

use crate::model::ModelFacts;
use crate::recipe::Recipe;
use crate::view::{LABEL_INSTANCE, LABEL_MANAGED_BY, LABEL_NAME};
use inference_api::names::{MANAGED_BY, RUNTIME_NAME};
use inference_api::{EndpointType, InferenceService};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::{Resource, ResourceExt};
use planner::Plan;
use std::collections::BTreeMap;

/// Port that runtimes listen on.
pub const RUNTIME_PORT: i32 = 8000;
/// Port of the download's progress.
pub const PROGRESS_PORT: i32 = 8081;
/// Name of the runtime container.
pub const RUNTIME_CONTAINER: &str = "runtime";
/// Port of the container that tells whether the model is served.
pub const VERIFY_PORT: i32 = 8082;
/// Name of the container that tells whether the model is served. It sorts after
/// [`RUNTIME_CONTAINER`], which stays the first in a pod's status.
pub const VERIFY_CONTAINER: &str = "verify";
/// Name of the init container that brings the model.
pub const FETCH_CONTAINER: &str = "fetch";
/// Name of the volume that holds the model, and of its claim template.
pub const STORAGE: &str = "storage";
/// Name of the claim and of its request.
pub const CLAIM: &str = "gpu";
/// Annotation of a copy: the order's generation that its description was made
/// from. A copy of an older one is moved; one of an older release is held.
pub const ORDER_GENERATION: &str = "ai.deckhouse.io/order-generation";
/// Annotation of a copy: hash of the class's terms that it was raised under. A copy
/// under others is moved, as one of an older generation is.
pub const CLASS_TERMS: &str = "ai.deckhouse.io/class-terms";
/// Annotations of a copy: what it accepts, by the recipe that it was raised with.
pub const CONTEXT_TOKENS: &str = "ai.deckhouse.io/context-tokens";
/// See [`CONTEXT_TOKENS`].
pub const SEQUENCES: &str = "ai.deckhouse.io/sequences";
/// Where the volume is mounted.
pub const DATA: &str = "/data";
/// Folder of models on the volume.
pub const MODELS: &str = "/data/models";

/// What the installation decides about every pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installation {
    /// Image of this program, for the containers that bring the model and verify it.
    pub fetch_image: String,
    /// When images are pulled; none leaves it to Kubernetes.
    pub image_pull_policy: Option<String>,
    /// Secrets for pulling images.
    pub image_pull_secrets: Vec<String>,
    /// The hub's address, as pods reach it.
    pub hub_endpoint: String,
}

/// Everything that rendering needs.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The order.
    pub order: &'a InferenceService,
    /// Facts of its model.
    pub facts: &'a ModelFacts,
    /// The runtime.
    pub recipe: &'a Recipe,
    /// The contract.
    pub contract: EndpointType,
    /// Hash of the class's terms.
    pub class_terms: &'a str,
    /// The placement.
    pub plan: &'a Plan,
    /// Copies wanted.
    pub replicas: i32,
    /// Whether requests need the order's token.
    pub token: bool,
    /// StorageClass for new volumes; none takes the cluster's default.
    pub storage_class: Option<&'a str>,
    /// What the installation decides.
    pub installation: &'a Installation,
}

/// Labels of everything made for an order.
pub fn labels(order: &str) -> BTreeMap<String, String> {
    [
        (LABEL_NAME, RUNTIME_NAME),
        (LABEL_INSTANCE, order),
        (LABEL_MANAGED_BY, MANAGED_BY),
    ]
    .map(|(k, v)| (k.to_owned(), v.to_owned()))
    .into()
}

/// The order as owner: what is made for it goes with it.
pub fn owner(order: &InferenceService) -> Option<OwnerReference> {
    order.controller_owner_ref(&())
}

fn metadata(order: &InferenceService, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: order.namespace(),
        labels: Some(labels(&order.name_any())),
        owner_references: owner(order).map(|o| vec![o]),
        ..ObjectMeta::default()
    }
}

/// Bytes in the form that the API server keeps: the largest binary suffix that divides them.
pub fn bytes(n: u64) -> Quantity {
    let mut value = n;
    let mut suffix = "";
    for next in ["Ki", "Mi", "Gi", "Ti"] {
        if value == 0 || !value.is_multiple_of(1024) {
            break;
        }
        value /= 1024;
        suffix = next;
    }
    Quantity(format!("{value}{suffix}"))
}

/// Ten hex digits of a hash of some serializable value.
pub fn short_hash<T: serde::Serialize>(value: &T) -> String {
    use sha2::{Digest, Sha256};
    // Maps are ordered and fields are declared in a fixed order, so equal values
    // give equal bytes; what cannot be serialized has no hash of its own.
    let json = serde_json::to_vec(value).unwrap_or_default();
    Sha256::digest(&json)
        .iter()
        .take(5)
        .map(|b| format!("{b:02x}"))
        .collect()
}

#[cfg(test)]
pub(crate) mod tests;
