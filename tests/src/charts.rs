//! The charts as Helm renders them.
//!
//! In: a chart's folder in this repository and Helm's arguments. Out: manifests, or Helm's own words
//! about why there are none. Nothing is installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::control_plane::asset;

/// This repository's root.
#[must_use]
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The manifests of the chart in `folder`, for a release in `namespace`.
///
/// # Errors
/// If Helm refuses: the error is what it says.
pub fn render(folder: impl AsRef<Path>, namespace: &str, more: &[&str]) -> Result<String> {
    let output = Command::new(asset("helm")?)
        .args(["template", "test"])
        .arg(repository().join(folder))
        .args(["--namespace", namespace])
        .args(more)
        .output()
        .context("running helm")?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// The documents of a rendered chart.
///
/// # Errors
/// If they are no YAML.
pub fn documents(rendered: &str) -> Result<Vec<Value>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(rendered)?;
    Ok(documents.into_iter().filter(|one| !one.is_null()).collect())
}

/// What is missing of a chart's documentation, a sentence each: every value has a comment in
/// `values.yaml`, and a description and a place in `values.schema.json`; every property of the schema
/// has a default, but for those of `without_default`.
///
/// # Errors
/// If the files cannot be read.
pub fn undocumented(folder: &str, without_default: &[&str]) -> Result<Vec<String>> {
    let folder = repository().join(folder);
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).context(name.to_owned());
    let schema: Value = serde_json::from_str(&read("values.schema.json")?)?;
    let text = read("values.yaml")?;
    let values: Value = serde_saphyr::from_str(&text)?;
    let mut missing = Vec::new();
    let lines: Vec<&str> = text.lines().collect();
    for name in keys(&values) {
        let at = lines.iter().position(|line| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with(':'))
        });
        // One comment may stand above several lines, without a gap.
        let above = lines[..at.unwrap_or_default()].iter().rev();
        let top = above.take_while(|line| !line.is_empty()).last();
        if !top.is_some_and(|line| line.starts_with('#')) {
            missing.push(format!("{name} has no comment"));
        }
    }
    undescribed("", &schema, &values, &mut missing);
    for name in keys(&schema["properties"]) {
        if values[name].is_null() && !without_default.contains(&name) {
            missing.push(format!("{name} has no default"));
        }
    }
    Ok(missing)
}

fn undescribed(path: &str, schema: &Value, values: &Value, missing: &mut Vec<String>) {
    let Some(properties) = schema["properties"].as_object() else {
        return;
    };
    if schema["additionalProperties"] != false {
        missing.push(format!("{path} takes any key"));
    }
    for (name, property) in properties {
        let path = format!("{path}.{name}");
        let description = property["description"].as_str().unwrap_or_default();
        if !description.ends_with('.') {
            missing.push(format!("{path} has no description"));
        }
        undescribed(&path, property, &values[name], missing);
    }
    for name in keys(values) {
        if !properties.contains_key(name) {
            missing.push(format!("{path}.{name} is not in the schema"));
        }
    }
}

fn keys(value: &Value) -> impl Iterator<Item = &str> {
    value
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, _)| key.as_str())
}
