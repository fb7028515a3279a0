//! The class that the platform ships.
//!
//! Out: its manifest, and the same as a typed object. Creating it is the controller's: once, if
//! absent, so that an administrator's edits stay.

use crate::InferenceServiceClass;

/// Manifest of the built-in class `default-llm`, as shipped.
pub const DEFAULT_CLASS_YAML: &str = include_str!("../default-llm.yaml");

/// The built-in class `default-llm`.
///
/// # Errors
/// If the shipped manifest is not one: a fault of the build, which a test rules out.
pub fn default_class() -> Result<InferenceServiceClass, serde_saphyr::Error> {
    serde_saphyr::from_str(DEFAULT_CLASS_YAML)
}
