//! The order: what a namespace user files.
//!
//! In: a class and a model, nothing else. Nothing here may widen what the class permits
//! a field about hardware, share, runtime or copies does not belong in this file.
//! Every field may be edited later: an edit moves the copies the way the class asks.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::model_source::{
    CatalogReference, HuggingFaceSource, ModelSource, OciSource, PvcSource, S3Source,
};
use crate::rules;
use crate::status::InferenceServiceStatus;

/// What is ordered: a class and a model. Everything else (which accelerator, what portion of it, which runtime, how many copies) is decided by the platform within the class.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "ai.deckhouse.io",
    version = "v1alpha1",
    kind = "InferenceService",
    plural = "inferenceservices",
    namespaced,
    status = "InferenceServiceStatus",
    derive = "PartialEq",
    shortname = "infsvc",
    category = "ai",
    doc = "An order: names a class and a model, and is served as an inference endpoint on an accelerator that the platform plans within the class.",
    printcolumn(name = "Class", type_ = "string", json_path = ".spec.inferenceServiceClassName", description = "Class that the order uses."),
    printcolumn(name = "Contract", type_ = "string", json_path = ".status.model.endpointType", description = "Inference API that the order speaks."),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.replicas.summary", description = "Copies that answer / copies wanted."),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase", description = "State of the order in one word."),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason", description = "Why the order is or is not ready; the reference of custom resources explains every reason."),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp", description = "Time since the order was filed."),
    printcolumn(name = "Model", type_ = "string", json_path = ".status.model.servedName", priority = 1, description = "Name to use for the model in requests."),
    printcolumn(name = "Placement", type_ = "string", json_path = ".status.plan.placementType", priority = 1, description = "Whole accelerators or partitions of them."),
    printcolumn(name = "Profile", type_ = "string", json_path = ".status.plan.profile", priority = 1, description = "Partition profile of each copy."),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.endpoint.address", priority = 1, description = "Address of the endpoint."),
    validation = rules::invalid(
        "size(self.metadata.name) <= 52",
        "metadata.name must have at most 52 characters, so that the names made from it fit: shorten the order's name"
    ),
    validation = rules::invalid(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name must begin with a lower-case letter and hold only lower-case letters, digits and '-' (no '.'), because a Service gets this name: rename the order"
    ),
)]
#[serde(rename_all = "camelCase")]
pub struct InferenceServiceSpec {
    /// Name of the InferenceServiceClass that the order uses: the administrator's policy it is served under. `default-llm` is shipped with the platform. May be edited: the order is then planned anew.
    #[schemars(length(max = 63))]
    #[x_kube(validation = rules::object_name("spec.inferenceServiceClassName", "an InferenceServiceClass, such as default-llm"))]
    pub inference_service_class_name: String,

    /// The model to serve: where it comes from, and the one block that belongs to that source.
    pub model: ModelSpec,
}

/// The model to serve: `src` names the kind of source, and exactly the block that belongs to it is filled in.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = needs("HuggingFace", "huggingFace", "the model's repository"),
    validation = needs("ai-models", "ref", "the catalog's Model or ClusterModel"),
    validation = needs("S3", "s3", "the bucket's URI"),
    validation = needs("PVC", "pvc", "the claim's name"),
    validation = needs("OCI", "oci", "the artifact's reference"),
    validation = only_with("HuggingFace", "huggingFace"),
    validation = only_with("ai-models", "ref"),
    validation = only_with("S3", "s3"),
    validation = only_with("PVC", "pvc"),
    validation = only_with("OCI", "oci"),
)]
pub struct ModelSpec {
    /// Kind of source: `HuggingFace` (a repository of the Hugging Face hub, block `huggingFace`), `ai-models` (the cluster's model catalog, block `ref`), `S3` (a bucket, block `s3`), `PVC` (a volume that holds the model already, block `pvc`) or `OCI` (an artifact in a registry, block `oci`).
    pub src: ModelSource,

    /// The catalog's model. Required with src `ai-models` and forbidden otherwise.
    #[serde(rename = "ref", skip_serializing_if = "Option::is_none")]
    pub reference: Option<CatalogReference>,

    /// A repository of the Hugging Face hub. Required with src `HuggingFace` and forbidden otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugging_face: Option<HuggingFaceSource>,

    /// A folder of an S3-compatible bucket. Required with src `S3` and forbidden otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Source>,

    /// A volume of the order's namespace that holds the model already. Required with src `PVC` and forbidden otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pvc: Option<PvcSource>,

    /// An artifact in an OCI registry. Required with src `OCI` and forbidden otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oci: Option<OciSource>,
}

/// The source `src` needs the block `block`.
fn needs(src: &str, block: &str, what: &str) -> kube::core::Rule {
    rules::required(
        format!("self.src != '{src}' || has(self.{block})"),
        &format!(".{block}"),
        format!("spec.model.{block} is required with src {src}: give {what}"),
    )
}

/// The block `block` belongs to the source `src` alone.
fn only_with(src: &str, block: &str) -> kube::core::Rule {
    rules::forbidden(
        format!("self.src == '{src}' || !has(self.{block})"),
        &format!(".{block}"),
        format!(
            "spec.model.{block} belongs to src {src} alone: remove the block, or set spec.model.src to {src}"
        ),
    )
}
