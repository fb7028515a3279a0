//! The CustomResourceDefinitions as installed.
//!
//! In: the types of this crate. Out: the two definitions, as objects and as YAML. Use these and not
//! the derived `crd()`: they differ from it where the derive's habits would weaken the schema.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt;

use crate::{InferenceService, InferenceServiceClass};

/// Head of each generated file.
const HEAD: &str = "# Generated from the Rust types of the crate inference-api; do not edit.\n# Regenerate: UPDATE_GOLDEN=1 cargo test -p inference-api\n";

/// Definition of `InferenceService`.
#[must_use]
pub fn inference_service_crd() -> CustomResourceDefinition {
    tightened(InferenceService::crd())
}

/// Definition of `InferenceServiceClass`.
#[must_use]
pub fn inference_service_class_crd() -> CustomResourceDefinition {
    tightened(InferenceServiceClass::crd())
}

/// Both definitions.
#[must_use]
pub fn crds() -> [CustomResourceDefinition; 2] {
    [inference_service_class_crd(), inference_service_crd()]
}

/// File name in `crds/generated/` and YAML of each definition.
///
/// # Errors
/// If a definition does not serialize: a fault of the build, which a test rules out.
pub fn crd_files() -> Result<Vec<(String, String)>, serde_saphyr::ser::Error> {
    crds()
        .iter()
        .map(|crd| {
            let file = format!("{}.yaml", crd.spec.names.plural);
            Ok((file, format!("{HEAD}{}", serde_saphyr::to_string(crd)?)))
        })
        .collect()
}

/// Both definitions as one YAML stream.
///
/// # Errors
/// As [`crd_files`].
pub fn crd_yaml() -> Result<String, serde_saphyr::ser::Error> {
    Ok(crd_files()?
        .into_iter()
        .map(|(_, yaml)| yaml)
        .collect::<Vec<_>>()
        .join("---\n"))
}

/// A null in place of a field would slip past the rules, which ask whether the field is there: the
/// derive marks every `Option` as nullable, and without the mark the API server refuses a null.
fn tightened(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    for version in &mut crd.spec.versions {
        if let Some(schema) = version
            .schema
            .as_mut()
            .and_then(|schema| schema.open_api_v3_schema.as_mut())
        {
            not_nullable(schema);
        }
    }
    crd
}

fn not_nullable(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    for property in schema
        .properties
        .iter_mut()
        .flat_map(|all| all.values_mut())
    {
        not_nullable(property);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = schema.items.as_mut() {
        not_nullable(items);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = schema.additional_properties.as_mut() {
        not_nullable(values);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The committed files are what the types say. `UPDATE_GOLDEN=1` writes them.
    #[test]
    fn the_generated_files_are_current() {
        let mut files: Vec<(String, String)> = crd_files()
            .unwrap()
            .into_iter()
            .map(|(file, yaml)| (format!("crds/generated/{file}"), yaml))
            .collect();
        files.push((
            "docs/custom-resources.md".to_owned(),
            crate::reference::page(),
        ));
        files.push(("docs/faq.md".to_owned(), crate::faq::page()));
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for (file, text) in files {
            let path = root.join(&file);
            if std::env::var_os("UPDATE_GOLDEN").is_some() {
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(&path, &text).unwrap();
            }
            let committed = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(
                committed == text,
                "{file} is stale: run `UPDATE_GOLDEN=1 cargo test -p inference-api` and commit it"
            );
        }
    }

    #[test]
    fn the_yaml_reads_back_as_the_same_definitions() {
        for (crd, (_, yaml)) in crds().iter().zip(crd_files().unwrap()) {
            let read: CustomResourceDefinition = serde_saphyr::from_str(&yaml).unwrap();
            assert_eq!(&read, crd);
        }
    }
}
