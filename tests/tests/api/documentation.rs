//! Every field explains itself: `kubectl explain` has a text for all of them.

use anyhow::{Context, Result, ensure};
use e2e::control_plane::{ControlPlane, get};
use serde_json::Value;

use crate::rule::stored_manifest;

/// The paths of all fields below `schema` that have no description.
fn undescribed(path: &str, schema: &Value, found: &mut Vec<String>) {
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        if field["description"].as_str().is_none_or(str::is_empty) {
            found.push(path.clone());
        }
        undescribed(&path, field, found);
        undescribed(&format!("{path}[]"), &field["items"], found);
    }
}

/// The schema of `kind` as the API server publishes it.
async fn published(kind: &str) -> Result<Value> {
    let client = ControlPlane::shared()?.client()?;
    let request = get(
        "/openapi/v3/apis/ai.deckhouse.io/v1alpha1",
        "application/json",
    )?;
    let document: Value = client.request(request).await?;
    document["components"]["schemas"]
        .get(format!("io.deckhouse.ai.v1alpha1.{kind}"))
        .cloned()
        .with_context(|| format!("the API server publishes no schema of {kind}"))
}

#[tokio::test]
async fn a_130_every_field_has_a_description() -> Result<()> {
    for kind in ["InferenceService", "InferenceServiceClass"] {
        let schema = published(kind).await?;
        ensure!(
            schema["properties"]["spec"]["properties"].is_object(),
            "the schema of {kind} is not where it is looked for"
        );
        let mut found = Vec::new();
        for part in ["spec", "status"] {
            ensure!(
                schema["properties"][part]["description"].is_string(),
                "{kind}.{part} has no description"
            );
            undescribed(
                &format!("{kind}.{part}"),
                &schema["properties"][part],
                &mut found,
            );
        }
        assert_eq!(found, [""; 0], "fields without a description");
    }
    Ok(())
}

#[tokio::test]
async fn the_manifests_of_the_readme_are_accepted() -> Result<()> {
    let readme = include_str!("../../../README.md");
    let mut kinds = Vec::new();
    for block in readme.split("```yaml\n").skip(1) {
        let (yaml, _) = block.split_once("```").context("a block without an end")?;
        let manifest: Value = serde_saphyr::from_str(yaml)?;
        stored_manifest(&manifest).await?;
        kinds.extend(manifest["kind"].as_str().map(str::to_owned));
    }
    assert!(
        kinds.iter().any(|kind| kind == "InferenceService"),
        "{kinds:?}"
    );
    assert!(
        kinds.iter().any(|kind| kind == "InferenceServiceClass"),
        "{kinds:?}"
    );
    Ok(())
}

#[tokio::test]
async fn kubectl_explains_a_nested_field() -> Result<()> {
    let output = ControlPlane::shared()?
        .kubectl()?
        .args([
            "explain",
            "inferenceserviceclass.spec.modelPolicy.allowedEndpointTypes",
        ])
        .output()?;
    let text = String::from_utf8(output.stdout)?
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ");
    assert!(
        text.contains("the preferred one first: `Chat`, `Embeddings`, `Rerank`"),
        "{text}"
    );
    Ok(())
}
