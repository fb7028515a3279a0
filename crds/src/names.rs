//! Names that several parts of the platform must agree on: the API group, labels, annotations, the
//! built-in class, and the names derived from an order's name.
//!
//! In: an order's name. Out: the names of what is made for it. This module never looks anything up.

use crate::InferenceService;

/// API group of both kinds.
pub const GROUP: &str = "ai.deckhouse.io";
/// API version of both kinds.
pub const VERSION: &str = "v1alpha1";
/// Namespace of the platform's own workloads.
pub const PLATFORM_NAMESPACE: &str = "d8-ai-inference";
/// Name of the class that the platform ships.
pub const DEFAULT_CLASS: &str = "default-llm";
/// Value of the label `app.kubernetes.io/managed-by` on every object made for an order.
pub const MANAGED_BY: &str = "ai-inference";
/// Value of the label `app.kubernetes.io/name` on every object made for an order.
pub const RUNTIME_NAME: &str = "inference-runtime";
/// Annotation of the built-in class: the platform version whose shipped text it was made from.
pub const SHIPPED_VERSION_ANNOTATION: &str = "ai.deckhouse.io/shipped-version";
/// Label and annotation of a copy: the runtime release it was raised with.
pub const RELEASE_LABEL: &str = "ai.deckhouse.io/runtime-release";
/// Key of the token in an order's token Secret.
pub const TOKEN_KEY: &str = "token";
/// Keys looked up in a Hugging Face token Secret when the order names none, in this order.
pub const HUGGING_FACE_TOKEN_KEYS: [&str; 3] = ["token", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"];
/// Key of the access key id in an S3 credentials Secret (B-041).
pub const S3_ACCESS_KEY_ID: &str = "AWS_ACCESS_KEY_ID";
/// Key of the secret access key in an S3 credentials Secret (B-041).
pub const S3_SECRET_ACCESS_KEY: &str = "AWS_SECRET_ACCESS_KEY";

/// Longest name of an order, in characters. Its StatefulSet puts `<order>-<hash of up to 10>` into
/// the label `controller-revision-hash`, and a label's value holds 63.
pub const MAX_ORDER_NAME: usize = 52;
/// Longest name of a class, in characters, so that it fits a label's value.
pub const MAX_CLASS_NAME: usize = 63;

impl InferenceService {
    /// Name of the Secret that holds the order's endpoint token, for an order called `order`.
    #[must_use]
    pub fn token_secret_name(order: &str) -> String {
        format!("{order}-token")
    }
}
