//! The page of everything that an installation can set.
//!
//! In: both charts' `values.schema.json` and `values.yaml`, and the module's settings. Out:
//! `docs/configuration.md`, which a test compares. Nothing is said here that a chart does not say.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

const HEAD: &str = "\
<!-- Generated from the charts' values.schema.json and values.yaml and the module's settings; do not edit. Regenerate: hack/regenerate -->
# Configuration

A value that is not listed here, or has another form, is refused by Helm.

## The module's settings

`spec.settings` of the ModuleConfig `ai-inference`, settings version 1; in the controller's chart it is the value of the same name.

| Setting | Values | Default | Meaning |
|---|---|---|---|
";

/// The charts: folder and headline.
const CHARTS: [(&str, &str); 2] = [
    ("controller/chart", "Chart of the controller"),
    ("daemonset", "Chart of the node plugin"),
];

/// The whole page.
///
/// # Errors
/// If a chart cannot be read.
pub fn page(root: &Path) -> Result<String> {
    let read =
        |file: String| std::fs::read_to_string(root.join(&file)).with_context(|| file.clone());
    let mut page = HEAD.to_owned();
    let settings: Value =
        serde_saphyr::from_str(&read("module/openapi/config-values.yaml".into())?)?;
    rows(&mut page, "", &settings, &settings, None);
    for (folder, headline) in CHARTS {
        let schema: Value = serde_json::from_str(&read(format!("{folder}/values.schema.json"))?)?;
        let values: Value = serde_saphyr::from_str(&read(format!("{folder}/values.yaml"))?)?;
        let _ = write!(
            page,
            "\n## {headline}\n\n`{folder}`; `values.yaml` there has the same with comments.\n\n| Value | Values | Default | Meaning |\n|---|---|---|---|\n"
        );
        rows(&mut page, "", &schema, &schema, Some(&values));
    }
    Ok(page)
}

/// A row for each value below `schema`; `root` has what it refers to.
fn rows(page: &mut String, path: &str, schema: &Value, root: &Value, defaults: Option<&Value>) {
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let field = resolved(field, root);
        let path = if path.is_empty() {
            name.clone()
        } else {
            format!("{path}.{name}")
        };
        let default = match defaults {
            Some(values) => values.get(name),
            None => field.get("default"),
        };
        let has_parts = field["properties"].is_object();
        let shown = match default {
            Some(value) if !has_parts => format!("`{value}`"),
            _ => String::new(),
        };
        let meaning = field["description"].as_str().unwrap_or_default().trim();
        let meaning = meaning
            .replace('|', "\\|")
            .replace("\n\n", " ")
            .replace('\n', " ");
        let _ = writeln!(page, "| `{path}` | {} | {shown} | {meaning} |", kind(field));
        let below = defaults.map(|values| values.get(name).unwrap_or(&Value::Null));
        rows(page, &path, field, root, below);
    }
}

fn resolved<'a>(field: &'a Value, root: &'a Value) -> &'a Value {
    let target = field["$ref"]
        .as_str()
        .and_then(|reference| root.pointer(reference.strip_prefix('#')?));
    target.unwrap_or(field)
}

fn kind(field: &Value) -> String {
    if let Some(values) = field["enum"].as_array() {
        let words = values.iter().map(|value| match value.as_str() {
            Some("") => "empty".to_owned(),
            Some(word) => format!("`{word}`"),
            None => format!("`{value}`"),
        });
        return words.collect::<Vec<_>>().join(", ");
    }
    let kind = field["type"].as_str().unwrap_or("any");
    let bound = |name: &str, sign: &str| {
        field[name]
            .as_i64()
            .map(|bound| format!(" {sign} {bound}"))
            .unwrap_or_default()
    };
    match kind {
        "array" => format!(
            "list of {}",
            field["items"]["type"].as_str().unwrap_or("any")
        ),
        kind => format!("{kind}{}{}", bound("minimum", "≥"), bound("maximum", "≤")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_all_settings_is_current_a_130() {
        let root = crate::charts::repository();
        let page = page(&root).unwrap();
        for row in [
            "| `catalog.mode` | `Enabled`, `None` | `\"Enabled\"` |",
            "| `hub.endpoint` | string | `\"https://huggingface.co\"` |",
            "| `health.intervalSeconds` | integer ≥ 1 | `10` |",
        ] {
            assert!(page.contains(row), "{row} is not in\n{page}");
        }
        let file = root.join("docs/configuration.md");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&file, &page).unwrap();
        }
        let committed = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(
            committed == page,
            "docs/configuration.md is stale: run `UPDATE_GOLDEN=1 cargo test -p e2e --lib configuration` and commit it"
        );
    }
}
