//! What the platform reports on an order and on a class.
//!
//! In: what the controller found and did. The order's status is the only window a namespace user
//! has into the class's decision, so it must never name other namespaces, their orders or
//! the class's internals. Byte counts are exact and end in `Bytes`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::accelerator_policy::{PlacementType, SharingMode};
use crate::inference_service_class::EndpointType;

/// State of an order in one word.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Not serving yet, or not any more; the conditions say what it waits for.
    Pending,
    /// Serving as ordered.
    Ready,
    /// Serving, but not as ordered: it cannot grow, or a copy is missing.
    Degraded,
    /// Not served, and waiting alone will not help.
    Failed,
    /// Being deleted.
    Deleting,
}

impl Phase {
    /// The value as written in status.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Ready => "Ready",
            Self::Degraded => "Degraded",
            Self::Failed => "Failed",
            Self::Deleting => "Deleting",
        }
    }
}

/// What the platform reports on an order.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct InferenceServiceStatus {
    /// Generation of the order that this status speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// State in one word: `Pending`, `Ready`, `Degraded` (serves, but cannot grow or misses a copy), `Failed` (waiting alone will not help) or `Deleting`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,

    /// The order's conditions: ClassResolved, ModelResolved, Planned, RuntimeCurrent, WorkloadReady and Ready. The reference of custom resources explains every reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,

    /// The class that the order was last planned under.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<ClassStatus>,

    /// What is known of the model and how it is served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelStatus>,

    /// The plan: what each copy gets, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanStatus>,

    /// The copies, counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<ReplicasStatus>,

    /// How the model is reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<EndpointStatus>,

    /// The runtime release that the copies serve on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub release: Option<ReleaseStatus>,

    /// The volumes that hold the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageStatus>,
}

/// The class that the order was last planned under.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ClassStatus {
    /// Name of the class.
    pub name: String,

    /// Generation of the class that the plan was made from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
}

/// What is known of the model and how it is served.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// Inference API that the order speaks: `Chat`, `Embeddings` or `Rerank`. It is the first contract of the class that the model's source allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint_type: Option<EndpointType>,

    /// Name to use for the model in requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub served_name: Option<String>,

    /// The exact revision served: a commit, a digest, or whatever the source pins by. Every copy serves this one until the order is edited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,

    /// Format of the model's files, such as `GGUF` or `Safetensors`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,

    /// File served, where the source holds several variants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,

    /// Architecture as the model's own files name it, such as `LlamaForCausalLM`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,

    /// Quantization of the weights, such as `Q4_1`, where the files name one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,

    /// Number of parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<i64>,

    /// Memory that the weights take, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights_bytes: Option<i64>,

    /// Memory that one token of context takes in the KV cache, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_bytes_per_token: Option<i64>,

    /// Longest context that the copies serve, in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_tokens: Option<i64>,

    /// Progress of bringing the model to the copies' volumes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub download: Option<DownloadStatus>,
}

/// Progress of bringing the model to the copies' volumes, all copies together.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct DownloadStatus {
    /// Bytes to download.
    pub total_bytes: i64,

    /// Bytes downloaded and checked so far.
    pub downloaded_bytes: i64,

    /// The same in percent, rounded down: 100 only when everything is there.
    pub percent: i32,

    /// Progress of each copy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub copies: Vec<CopyDownloadStatus>,
}

/// Progress of one copy's download.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct CopyDownloadStatus {
    /// Name of the copy: its pod.
    pub name: String,

    /// Bytes to download.
    pub total_bytes: i64,

    /// Bytes downloaded and checked so far.
    pub downloaded_bytes: i64,

    /// What the download does or why it stopped, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The plan: what each copy gets, and why.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PlanStatus {
    /// DeviceClass that the copies' claims name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_class_name: Option<String>,

    /// `Dedicated` (a device or partition for each copy) or `Shared` (a share of one).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing_mode: Option<SharingMode>,

    /// `WholeDevice` or `Partition`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement_type: Option<PlacementType>,

    /// Profile of the partition, such as `1g.10gb`; absent for whole devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,

    /// Share of a device in percent; absent for dedicated placements.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_percent: Option<i32>,

    /// Devices, or partitions, of each copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices_per_replica: Option<i32>,

    /// Memory of each of these devices, partitions or shares, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_per_device_bytes: Option<i64>,

    /// Memory that one copy needs, in bytes: weights, KV cache and the runtime's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub required_memory_bytes: Option<i64>,

    /// Copies that fitted when the plan was made, those that run already included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas_that_fit: Option<i32>,

    /// Recipe that the runtime is started by, such as `vllm` or `llama-cpp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipe: Option<String>,

    /// Why this placement, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,

    /// Placements that were considered and not taken, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub rejected: Vec<RejectedPlacement>,
}

/// A placement that was considered and not taken.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RejectedPlacement {
    /// DeviceClass of the placement.
    pub device_class_name: String,

    /// `WholeDevice` or `Partition`; absent where the whole DeviceClass was rejected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement_type: Option<PlacementType>,

    /// Profile of the partition; absent for whole devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,

    /// Why it was not taken, in words.
    pub reason: String,
}

/// The copies, counted.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ReplicasStatus {
    /// Copies that are wanted now.
    pub desired: i32,

    /// Copies that exist.
    pub current: i32,

    /// Copies that answer for the model.
    pub ready: i32,

    /// Fewest copies that the order may have now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minimum: Option<i32>,

    /// Most copies that the order may have now. This version does not grow by itself: it keeps `desired`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub maximum: Option<i32>,

    /// Ready and desired copies for people to read, such as `1/2`.
    pub summary: String,
}

impl ReplicasStatus {
    /// The counts with their summary.
    #[must_use]
    pub fn new(desired: i32, current: i32, ready: i32) -> Self {
        Self {
            desired,
            current,
            ready,
            minimum: None,
            maximum: None,
            summary: format!("{ready}/{desired}"),
        }
    }

    /// The same with the bounds that hold now.
    #[must_use]
    pub fn within(self, bounds: Option<(i32, i32)>) -> Self {
        Self {
            minimum: bounds.map(|(minimum, _)| minimum),
            maximum: bounds.map(|(_, maximum)| maximum),
            ..self
        }
    }
}

/// How the model is reached.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct EndpointStatus {
    /// Address to send requests to, such as `http://support-llm.my-namespace.svc`.
    pub address: String,

    /// Path of the contract's main request, such as `/v1/chat/completions`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,

    /// Secret of the order's namespace whose key `token` holds the bearer token; absent where the class asks for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_secret_name: Option<String>,

    /// Secret of the order's namespace whose key `ca.crt` holds the certificate to trust; absent where a public one is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_secret_name: Option<String>,
}

/// The runtime release that the copies serve on.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ReleaseStatus {
    /// Release that the platform ships now: copies raised from now on come up on it.
    pub shipped: String,

    /// Release that other copies still serve on (several, joined by commas, after several updates); absent when all are on the shipped one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous: Option<String>,

    /// Copies that have reached the shipped release.
    pub replicas_on_shipped: i32,
}

/// The volumes that hold the model.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct StorageStatus {
    /// StorageClass of the standing volumes; absent where the cluster's default was taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_class_name: Option<String>,

    /// Size of each volume, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<i64>,

    /// StorageClass that the class names now and that the standing volumes were kept in spite of (event SettledRegionKept); absent while they agree.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept_in_spite_of: Option<String>,
}

/// What the platform reports on a class.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct InferenceServiceClassStatus {
    /// Generation of the class that this status speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// The class's conditions: Validated and Ready. The reference of custom resources explains every reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,

    /// Orders that use the class, in all namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub orders: Option<i32>,
}
