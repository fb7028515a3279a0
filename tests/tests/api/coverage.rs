//! That no rule goes untried: each message of the schema is looked for by a case that breaks the rule.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrArray,
};

/// Fewer characters than this could be in any message.
const TELLING: usize = 20;

/// The texts that follow `=>` in the tables of rules: the words that refusals are checked for.
fn words(source: &str) -> Vec<String> {
    source
        .split("=>")
        .filter_map(|rest| rest.trim_start().strip_prefix('"'))
        .map(|rest| {
            let mut text = String::new();
            let mut letters = rest.chars();
            while let Some(letter) = letters.next() {
                match letter {
                    '"' => break,
                    '\\' => text.extend(letters.next()),
                    _ => text.push(letter),
                }
            }
            text
        })
        .collect()
}

fn messages(schema: &JSONSchemaProps, found: &mut Vec<String>) {
    let rules = schema.x_kubernetes_validations.iter().flatten();
    found.extend(rules.filter_map(|rule| rule.message.clone()));
    for field in schema.properties.iter().flat_map(|all| all.values()) {
        messages(field, found);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &schema.items {
        messages(items, found);
    }
}

#[test]
fn every_rule_of_the_schema_is_broken_by_a_case_a_036() {
    let words = [
        include_str!("class_rules.rs"),
        include_str!("order_rules.rs"),
    ]
    .map(words)
    .concat();
    let mut all = Vec::new();
    for crd in inference_api::crds() {
        for version in &crd.spec.versions {
            let schema = version.schema.as_ref();
            if let Some(schema) = schema.and_then(|schema| schema.open_api_v3_schema.as_ref()) {
                messages(schema, &mut all);
            }
        }
    }
    assert!(
        all.len() > 40,
        "the rules are not where they are looked for: {}",
        all.len()
    );
    all.retain(|message| {
        !words
            .iter()
            .any(|text| text.len() >= TELLING && message.contains(text.as_str()))
    });
    assert_eq!(all, [""; 0], "rules that no case breaks");
}
