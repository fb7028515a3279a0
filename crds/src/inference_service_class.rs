//! The class: the administrator's whole control surface.
//!
//! In: the policy that orders of the class are served under. What can be judged from the class
//! alone is a rule of the schema; what needs other objects (storage classes, device classes, a
//! selector's meaning) is a condition. Absent blocks have a stated meaning: the functions at the
//! end give the policy in force, and nothing else may interpret an absent block.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::accelerator_policy::AcceleratorPolicy;
use crate::exposure_policy::ExposurePolicy;
use crate::rules;
use crate::status::InferenceServiceClassStatus;

/// Policy that orders of this class are served under. An order can override nothing of it.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "ai.deckhouse.io",
    version = "v1alpha1",
    kind = "InferenceServiceClass",
    plural = "inferenceserviceclasses",
    status = "InferenceServiceClassStatus",
    derive = "PartialEq",
    shortname = "infclass",
    category = "ai",
    doc = "A class of orders: the only place where policy about their accelerators, copies, access and models lives.",
    printcolumn(name = "Validated", type_ = "string", json_path = ".status.conditions[?(@.type==\"Validated\")].status", description = "Whether the class passed validation."),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status", description = "Whether orders can be served under the class."),
    printcolumn(name = "Contracts", type_ = "string", json_path = ".spec.modelPolicy.allowedEndpointTypes", description = "Inference APIs that orders may speak, the preferred one first."),
    printcolumn(name = "Min", type_ = "integer", json_path = ".spec.scalingPolicy.minReplicas", description = "Fewest copies of an order; empty: one."),
    printcolumn(name = "Max", type_ = "integer", json_path = ".spec.scalingPolicy.maxReplicas", description = "Most copies of an order; empty: one."),
    printcolumn(name = "Orders", type_ = "integer", json_path = ".status.orders", description = "Orders that use the class."),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp", description = "Time since the class was made."),
    printcolumn(name = "Exposure", type_ = "string", json_path = ".spec.exposurePolicy.type", priority = 1, description = "Where endpoints are published."),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason", priority = 1, description = "Why the class is or is not ready; the reference of custom resources explains every reason."),
    validation = rules::invalid(
        "size(self.metadata.name) <= 63",
        "metadata.name must have at most 63 characters, so that it fits a label: shorten the class's name"
    ),
)]
#[serde(rename_all = "camelCase")]
pub struct InferenceServiceClassSpec {
    /// Where the endpoints of orders are published and who may call them. Absent: inside the cluster only, with a token.
    #[serde(default)]
    pub exposure_policy: ExposurePolicy,

    /// Which namespaces may order. Absent: every namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admission_policy: Option<AdmissionPolicy>,

    /// Which inference APIs orders may speak. Mandatory: without it an order would have no contract.
    pub model_policy: ModelPolicy,

    /// How many copies an order has. Absent: one copy and no growth automation, a capacity decision that the platform does not take for you.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling_policy: Option<ScalingPolicy>,

    /// Which accelerators and which portions of them orders get. Absent: every copy takes one whole accelerator for itself, and two orders that would each fit half of one take two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accelerator_policy: Option<AcceleratorPolicy>,

    /// How running copies are moved when an order is edited. Absent: RollingUpdate.
    #[serde(default)]
    pub update_policy: UpdatePolicy,

    /// StorageClass of the volumes that hold models. It reaches new volumes only: an order whose volume exists stays on the class it was made on, and says so with the event SettledRegionKept. Absent: the cluster's default StorageClass.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    #[x_kube(validation = rules::object_name("spec.modelStorageClassName", "a StorageClass (remove the field for the cluster's default)"))]
    pub model_storage_class_name: Option<String>,
}

/// Which namespaces may order.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionPolicy {
    /// Namespaces whose orders are admitted. Absent: every namespace. An empty list: none. An order whose namespace is taken off the list keeps serving and reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024), inner(length(max = 63)))]
    #[x_kube(
        merge_strategy = ListMerge::Set,
        validation = rules::object_names("spec.admissionPolicy.allowedNamespaces", "a namespace (patterns are not allowed; remove the field to admit every namespace)")
    )]
    pub allowed_namespaces: Option<Vec<String>>,
}

/// An inference API contract.
#[derive(
    Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord,
)]
pub enum EndpointType {
    /// Chat completions (`/v1/chat/completions`).
    Chat,
    /// Embeddings (`/v1/embeddings`).
    Embeddings,
    /// Reranking (`/v1/rerank`).
    Rerank,
}

impl EndpointType {
    /// The value as written in a manifest.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "Chat",
            Self::Embeddings => "Embeddings",
            Self::Rerank => "Rerank",
        }
    }

    /// Path of the contract's main request on an endpoint.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Rerank => "/v1/rerank",
        }
    }
}

/// Which inference APIs orders may speak.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ModelPolicy {
    /// Contracts that orders may get, the preferred one first: `Chat`, `Embeddings`, `Rerank`. An order gets the first that its model's source says the model can do; a source that says nothing (a Hugging Face repository) gives the first of the list, whatever the model is. Where that matters, declare a class with one contract.
    #[schemars(length(max = 3))]
    #[x_kube(
        merge_strategy = ListMerge::Atomic,
        validation = rules::not_empty("spec.modelPolicy.allowedEndpointTypes", "name at least one of Chat, Embeddings, Rerank, the preferred one first"),
        validation = rules::unique("spec.modelPolicy.allowedEndpointTypes")
    )]
    pub allowed_endpoint_types: Vec<EndpointType>,
}

/// How many copies an order has.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = rules::invalid(
    "self.minReplicas <= self.maxReplicas",
    "spec.scalingPolicy.minReplicas must not exceed spec.scalingPolicy.maxReplicas: lower the first or raise the second"
))]
pub struct ScalingPolicy {
    /// Fewest copies of an order, 1 or more; the platform never takes these away. Default: 1. Equal to maxReplicas: a fixed number of copies without growth automation.
    #[serde(default = "one")]
    #[schemars(range(max = 1000))]
    #[x_kube(validation = rules::invalid("self >= 1", "spec.scalingPolicy.minReplicas must be 1 or more: an order keeps at least one copy"))]
    pub min_replicas: i32,

    /// Most copies of an order. Growth automation works between the two bounds; this version has none yet and keeps minReplicas, and the class's condition Ready says so.
    #[schemars(range(max = 1000))]
    #[x_kube(validation = rules::invalid("self >= 1", "spec.scalingPolicy.maxReplicas must be 1 or more"))]
    pub max_replicas: i32,
}

fn one() -> i32 {
    1
}

impl Default for ScalingPolicy {
    /// What an absent `scalingPolicy` means: one copy, no growth.
    fn default() -> Self {
        Self {
            min_replicas: 1,
            max_replicas: 1,
        }
    }
}

/// How running copies are moved to a new description.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdateStrategy {
    /// One copy after the other; a spare device is used, and none is needed.
    #[default]
    RollingUpdate,
    /// All copies out, then all in.
    Recreate,
}

/// How running copies are moved when an order is edited.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct UpdatePolicy {
    /// `RollingUpdate` (one copy after the other: where a device is spare, one more copy is raised first, so that none is missed; where none is, one goes out before one comes in) or `Recreate` (all copies out, then all in). Default: RollingUpdate.
    #[serde(default)]
    pub strategy: UpdateStrategy,
}

impl InferenceServiceClassSpec {
    /// The bounds in force: an absent block means one copy.
    #[must_use]
    pub fn scaling(&self) -> ScalingPolicy {
        self.scaling_policy.unwrap_or_default()
    }

    /// The accelerator policy in force: an absent block means one whole accelerator.
    #[must_use]
    pub fn accelerators(&self) -> AcceleratorPolicy {
        self.accelerator_policy.clone().unwrap_or_default()
    }

    /// Whether orders of `namespace` are admitted: an absent list means every namespace, an empty one none.
    #[must_use]
    pub fn admits(&self, namespace: &str) -> bool {
        self.admission_policy
            .as_ref()
            .and_then(|policy| policy.allowed_namespaces.as_ref())
            .is_none_or(|allowed| allowed.iter().any(|name| name == namespace))
    }
}
