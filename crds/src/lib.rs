//! InferenceService and InferenceServiceClass: types, conditions, reasons, events.
//!
//! In: nothing. Out: the API of the platform as Rust types, the CustomResourceDefinitions made from
//! them ([`crd_yaml`]), the built-in class, and the words users meet in status. What can be judged
//! from one object alone is a rule of the schema; this crate holds no client, no clock and no
//! decision that needs a second object.

// `KubeSchema` copies each struct, `pub` included, into a function body.
#![allow(unreachable_pub)]

mod accelerator_policy;
mod conditions;
mod crd;
mod default_class;
mod events;
mod exposure_policy;
#[cfg(test)]
mod faq;
mod inference_service;
mod inference_service_class;
mod model_source;
pub mod names;
mod reasons;
#[cfg(test)]
mod reference;
mod rules;
mod status;
mod vocabulary;

pub use accelerator_policy::{
    AcceleratorPolicy, AcceleratorSelector, CelSelector, PlacementType, SharingMode,
};
pub use conditions::{
    ClassCondition, ConditionStatus, ConditionUpdate, OrderCondition, set_condition,
};
pub use crd::{crd_files, crd_yaml, crds, inference_service_class_crd, inference_service_crd};
pub use default_class::{DEFAULT_CLASS_YAML, default_class};
pub use events::{ClassEvent, OrderEvent};
pub use exposure_policy::{
    Authentication, CertManagerPolicy, CustomCertificatePolicy, ExposurePolicy, ExposureType,
    HttpsMode, HttpsPolicy,
};
pub use inference_service::{InferenceService, InferenceServiceSpec, ModelSpec};
pub use inference_service_class::{
    AdmissionPolicy, EndpointType, InferenceServiceClass, InferenceServiceClassSpec, ModelPolicy,
    ScalingPolicy, UpdatePolicy, UpdateStrategy,
};
pub use model_source::{
    CatalogKind, CatalogReference, HuggingFaceSource, ModelSource, OciSource, PvcSource, S3Source,
    SecretReference, TokenSecretReference,
};
pub use reasons::{ClassReason, OrderReason};
pub use status::{
    ClassStatus, CopyDownloadStatus, DownloadStatus, EndpointStatus, InferenceServiceClassStatus,
    InferenceServiceStatus, ModelStatus, Phase, PlanStatus, RejectedPlacement, ReleaseStatus,
    ReplicasStatus, StorageStatus,
};
pub use vocabulary::Documented;
