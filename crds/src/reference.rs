//! The reference of both kinds for people, made from the definitions and the documented words.
//!
//! In: the definitions as installed. Out: `docs/custom-resources.md`, which a test compares. Nothing
//! is said here that the schema or a word does not say itself.

use std::fmt::Write;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray,
};

use crate::{
    ClassCondition, ClassEvent, ClassReason, Documented, OrderCondition, OrderEvent, OrderReason,
    crds,
};

const HEAD: &str = "\
<!-- Generated from the Rust types of the crate inference-api; do not edit. Regenerate: hack/regenerate -->
# Custom resources

Every field of both kinds, the rules that the API server checks, and the words that stand in status. `kubectl explain` prints the same texts.

A field that is not listed here is refused by `kubectl` (and by any client that asks for `fieldValidation=Strict`, and by server-side apply); other clients get a warning, and the field is dropped.
";

/// The whole page.
pub(crate) fn page() -> String {
    let mut page = HEAD.to_owned();
    for crd in crds() {
        kind(&mut page, &crd);
    }
    page.push_str("\n## Conditions of a class\n\n");
    words::<ClassCondition>(&mut page, "Condition");
    page.push_str("\n### Reasons\n\n");
    words::<ClassReason>(&mut page, "Reason");
    page.push_str("\n### Events\n\n");
    words::<ClassEvent>(&mut page, "Event");
    page.push_str("\n## Conditions of an order\n\n");
    words::<OrderCondition>(&mut page, "Condition");
    page.push_str("\n### Reasons\n\n");
    words::<OrderReason>(&mut page, "Reason");
    page.push_str("\n### Events\n\n");
    words::<OrderEvent>(&mut page, "Event");
    page
}

fn kind(page: &mut String, crd: &CustomResourceDefinition) {
    let names = &crd.spec.names;
    let Some(version) = crd.spec.versions.first() else {
        return;
    };
    let Some(schema) = version
        .schema
        .as_ref()
        .and_then(|schema| schema.open_api_v3_schema.as_ref())
    else {
        return;
    };
    let short = names
        .short_names
        .iter()
        .flatten()
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>();
    let _ = write!(
        page,
        "\n## {}\n\n`{}/{}`, {}. Short name {}.\n\n{}\n\n| Field | Type | Meaning |\n|---|---|---|\n",
        names.kind,
        crd.spec.group,
        version.name,
        if crd.spec.scope == "Namespaced" {
            "in a namespace"
        } else {
            "for the whole cluster"
        },
        short.join(", "),
        schema.description.as_deref().unwrap_or_default(),
    );
    let mut rules = Vec::new();
    collect_rules(schema, &mut rules);
    for part in ["spec", "status"] {
        if let Some(field) = schema.properties.as_ref().and_then(|all| all.get(part)) {
            fields(page, part, field);
        }
    }
    page.push_str("\nThe API server refuses what breaks a rule, with these words:\n\n");
    for rule in rules {
        let _ = writeln!(page, "- {rule}");
    }
}

/// A row for each field below `schema`.
fn fields(page: &mut String, path: &str, schema: &JSONSchemaProps) {
    let required = schema.required.as_deref().unwrap_or_default();
    for (name, field) in schema.properties.iter().flatten() {
        let path = format!("{path}.{name}");
        let mark = if required.contains(name) {
            " (required)"
        } else {
            ""
        };
        let meaning = field
            .description
            .as_deref()
            .unwrap_or_default()
            .replace('|', "\\|");
        let _ = writeln!(page, "| `{path}`{mark} | {} | {meaning} |", type_of(field));
        // Conditions are Kubernetes' own shape.
        if name == "conditions" {
            continue;
        }
        fields(page, &path, field);
        if let Some(JSONSchemaPropsOrArray::Schema(items)) = &field.items {
            fields(page, &format!("{path}[]"), items);
        }
    }
}

fn type_of(field: &JSONSchemaProps) -> String {
    let type_ = field.type_.as_deref().unwrap_or("any");
    match (&field.items, &field.enum_) {
        (Some(JSONSchemaPropsOrArray::Schema(items)), _) => format!("list of {}", type_of(items)),
        (_, Some(values)) => values
            .iter()
            .filter_map(|value| value.0.as_str())
            .map(|value| format!("`{value}`"))
            .collect::<Vec<_>>()
            .join(", "),
        _ => type_.to_owned(),
    }
}

/// The messages of all rules of `schema`, each once, in the order of the fields.
fn collect_rules(schema: &JSONSchemaProps, found: &mut Vec<String>) {
    for message in schema
        .x_kubernetes_validations
        .iter()
        .flatten()
        .filter_map(|rule| rule.message.clone())
    {
        if !found.contains(&message) {
            found.push(message);
        }
    }
    for field in schema.properties.iter().flat_map(|all| all.values()) {
        collect_rules(field, found);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &schema.items {
        collect_rules(items, found);
    }
}

fn words<W: Documented>(page: &mut String, head: &str) {
    let _ = writeln!(page, "| {head} | Meaning | What to do |\n|---|---|---|");
    for word in W::ALL {
        let _ = writeln!(
            page,
            "| `{}` | {} | {} |",
            word.as_str(),
            word.meaning(),
            word.remedy()
        );
    }
}
