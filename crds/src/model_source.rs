//! The five sources of a model, one block each.
//!
//! In: what the user writes about where the model lies. Every shape that can be judged without
//! looking anywhere is judged here; that the source exists is the condition `ModelResolved`.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rules;

/// Kind of a model's source.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModelSource {
    /// A repository of the Hugging Face hub.
    HuggingFace,
    /// The cluster's model catalog (module `ai-models`).
    #[serde(rename = "ai-models")]
    AiModels,
    /// A folder of an S3-compatible bucket.
    S3,
    /// A volume that holds the model already.
    #[serde(rename = "PVC")]
    Pvc,
    /// An artifact in an OCI registry.
    #[serde(rename = "OCI")]
    Oci,
}

impl ModelSource {
    /// The value as written in the manifest.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::HuggingFace => "HuggingFace",
            Self::AiModels => "ai-models",
            Self::S3 => "S3",
            Self::Pvc => "PVC",
            Self::Oci => "OCI",
        }
    }
}

/// Kind of a catalog entry.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CatalogKind {
    /// A model of one namespace.
    Model,
    /// A model of the whole cluster.
    ClusterModel,
}

/// A model of the cluster's catalog.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = rules::forbidden(
    "self.kind == 'Model' || !has(self.namespace)",
    ".namespace",
    "spec.model.ref.namespace must be absent with kind ClusterModel, which lies in no namespace: remove it, or set kind to Model"
))]
pub struct CatalogReference {
    /// `Model` (of a namespace) or `ClusterModel` (of the whole cluster).
    pub kind: CatalogKind,

    /// Name of the Model or ClusterModel.
    #[schemars(length(max = 253))]
    #[x_kube(validation = rules::object_name("spec.model.ref.name", "a Model or ClusterModel"))]
    pub name: String,

    /// Namespace of the Model. Absent: the order's own. Forbidden with kind `ClusterModel`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    #[x_kube(validation = rules::object_name("spec.model.ref.namespace", "a namespace"))]
    pub namespace: Option<String>,
}

/// A repository of the Hugging Face hub.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct HuggingFaceSource {
    /// Repository as `owner/name`, such as `Qwen/Qwen3-8B`; not a URL. The oldest repositories have no owner (`gpt2`).
    #[schemars(length(max = 96))]
    #[x_kube(validation = rules::invalid(
        "self.matches('^[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?(/[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?)?$') && !self.contains('..') && !self.contains('--')",
        "spec.model.huggingFace.repository must be 'owner/name' as the hub shows it, such as 'Qwen/Qwen3-8B': no URL, no revision, letters, digits, '.', '_' and '-' only"
    ))]
    pub repository: String,

    /// Branch, tag or commit. Absent: the branch `main`. It is resolved to a commit once; the commit is in `status.model.revision`, and every copy serves that one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 255))]
    #[x_kube(validation = rules::invalid(
        "self.matches('^[A-Za-z0-9_][A-Za-z0-9._/-]*$') && !self.contains('..')",
        "spec.model.huggingFace.revision must be a branch, a tag or a commit of the repository: remove it to serve the branch main"
    ))]
    pub revision: Option<String>,

    /// File to serve, where the repository holds several variants of the model (GGUF): a path inside the repository or a pattern with `*`, such as `*Q4_K_M.gguf`. It must match one variant.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 255))]
    #[x_kube(validation = rules::relative_path("spec.model.huggingFace.file"))]
    pub file: Option<String>,

    /// Secret of the order's namespace with a token of the hub, for gated and private repositories. The token reaches the download and nothing else.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_secret_ref: Option<TokenSecretReference>,
}

impl HuggingFaceSource {
    /// The revision to resolve: the one named, or `main`.
    #[must_use]
    pub fn revision_or_main(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

/// A key of a Secret that holds a token.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct TokenSecretReference {
    /// Name of a Secret in the order's namespace.
    #[schemars(length(max = 253))]
    #[x_kube(validation = rules::object_name("tokenSecretRef.name", "a Secret in the order's namespace"))]
    pub name: String,

    /// Key of the Secret that holds the token. Absent: the first of `token`, `HF_TOKEN` and `HUGGING_FACE_HUB_TOKEN` that the Secret has.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    #[x_kube(validation = rules::invalid(
        "self.matches('^[-._a-zA-Z0-9]+$')",
        "tokenSecretRef.key must be a key of the Secret: letters, digits, '-', '_' and '.'"
    ))]
    pub key: Option<String>,
}

/// A Secret of the order's namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SecretReference {
    /// Name of a Secret in the order's namespace.
    #[schemars(length(max = 253))]
    #[x_kube(validation = rules::object_name("the Secret's name", "a Secret in the order's namespace"))]
    pub name: String,
}

/// A folder of an S3-compatible bucket.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct S3Source {
    /// Bucket and folder as `s3://bucket/folder`; every object below it belongs to the model.
    #[schemars(length(max = 1024))]
    #[x_kube(validation = rules::invalid(
        "self.matches('^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/?#[:space:]]+)*/?$') && !self.contains('/../') && !self.endsWith('/..')",
        "spec.model.s3.uri must be 's3://bucket/folder', such as 's3://models/predictor': the bucket's name has 3 to 63 lower-case characters; the server's address belongs in spec.model.s3.endpoint"
    ))]
    pub uri: String,

    /// Address of an S3-compatible server, such as `https://minio.example.com:9000`. Absent: Amazon's own for the region.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    #[x_kube(validation = rules::invalid(
        "self.matches('^https?://[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?/?$')",
        "spec.model.s3.endpoint must be 'https://host' or 'http://host:port': the bucket and the folder belong in spec.model.s3.uri"
    ))]
    pub endpoint: Option<String>,

    /// Region of the bucket. Absent: `us-east-1`, which most S3-compatible servers accept.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    #[x_kube(validation = rules::invalid(
        "self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
        "spec.model.s3.region must be a region's name, such as 'eu-central-1'"
    ))]
    pub region: Option<String>,

    /// Secret of the order's namespace with the keys `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, by whomever it is maintained. Absent: the bucket is read without credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials_secret_ref: Option<SecretReference>,
}

/// A volume that holds the model already. It is mounted read-only.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PvcSource {
    /// Name of a PersistentVolumeClaim in the order's namespace.
    #[schemars(length(max = 253))]
    #[x_kube(validation = rules::object_name("spec.model.pvc.claimName", "a PersistentVolumeClaim in the order's namespace"))]
    pub claim_name: String,

    /// Folder of the model inside the volume, such as `models/chat`. Absent: the volume's root.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    #[x_kube(validation = rules::relative_path("spec.model.pvc.path"))]
    pub path: Option<String>,
}

/// An artifact in an OCI registry.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct OciSource {
    /// Artifact as `registry/repository:tag` or `registry/repository@sha256:digest`; no scheme. A tag is resolved to a digest once; the digest is in `status.model.revision`.
    #[schemars(length(max = 512))]
    #[x_kube(validation = rules::invalid(
        "self.matches('^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?$') && (self.matches(':[A-Za-z0-9_][A-Za-z0-9._-]*$') || self.contains('@sha256:'))",
        "spec.model.oci.reference must be 'registry/repository:tag' or 'registry/repository@sha256:digest', without a scheme such as 'oci://'"
    ))]
    pub reference: String,

    /// Secret of the order's namespace, of type `kubernetes.io/dockerconfigjson`, with the registry's credentials. Absent: the registry is read without credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pull_secret_ref: Option<SecretReference>,
}
