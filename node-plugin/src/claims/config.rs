//! The opaque configuration that a claim or class may carry for this driver.
//!
//! In: the `parameters` of an opaque device configuration. Out: a [`GpuConfig`], or
//! which field is wrong. Never: a setting that is silently ignored: an unknown field
//! is an error, because its author expects it to do something.

use serde::Deserialize;

/// The API version of the configuration.
pub const API_VERSION: &str = "gpu.ai.deckhouse.io/v1alpha1";
/// The kind of the configuration.
pub const KIND: &str = "GpuConfig";

/// The driver's configuration; it has no settings yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuConfig {}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Raw {
    api_version: String,
    kind: String,
}

/// Decodes a configuration.
///
/// # Errors
/// A text that names the field and what it should be.
pub fn decode(parameters: &serde_json::Value) -> Result<GpuConfig, String> {
    let raw = Raw::deserialize(parameters).map_err(|error| error.to_string())?;
    if raw.api_version != API_VERSION {
        return Err(format!(
            "field `apiVersion` is {:?}, expected {API_VERSION:?}",
            raw.api_version
        ));
    }
    if raw.kind != KIND {
        return Err(format!("field `kind` is {:?}, expected {KIND:?}", raw.kind));
    }
    Ok(GpuConfig {})
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn unknown_missing_and_malformed_fields_are_named() {
        let good = json!({"apiVersion": API_VERSION, "kind": KIND});
        assert_eq!(decode(&good), Ok(GpuConfig {}));
        for (bad, field) in [
            (
                json!({"apiVersion": API_VERSION, "kind": KIND, "sharing": {}}),
                "sharing",
            ),
            (json!({"apiVersion": "v1", "kind": KIND}), "apiVersion"),
            (
                json!({"apiVersion": API_VERSION, "kind": "MigConfig"}),
                "kind",
            ),
            (json!({"kind": KIND}), "apiVersion"),
            (json!({"apiVersion": 1, "kind": KIND}), "integer"),
            (json!("text"), "expected struct"),
            (json!(null), "expected struct"),
        ] {
            let error = decode(&bad).unwrap_err();
            assert!(error.contains(field), "{bad}: {error}");
        }
    }
}
