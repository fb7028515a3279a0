//! The shipped recipes, the choice among them, and the formula's figures.

use super::*;
use crate::model::{KvLayout, ModelRequest};
use rstest::rstest;

pub(crate) fn facts(
    format: Format,
    weights: u64,
    kv: KvLayout,
    hidden: u64,
    context: u64,
) -> crate::model::ModelFacts {
    crate::model::ModelFacts {
        request: ModelRequest {
            repository: "acme/m".into(),
            revision: "main".into(),
            file: None,
        },
        commit: "0".repeat(40),
        format,
        files: vec![],
        entry_file: None,
        architecture: "X".into(),
        weights_bytes: weights,
        layers: 32,
        hidden_size: hidden,
        kv_heads: 8,
        head_dim: 128,
        context_length: context,
        kv,
        dtype: None,
        quantization: None,
    }
}

#[test]
fn the_shipped_recipes_are_valid() {
    let names: Vec<_> = RecipeBook::shipped()
        .unwrap()
        .iter()
        .map(|r| r.name.clone())
        .collect();
    assert_eq!(names, ["vllm", "llama-cpp"]);
}

#[rstest]
#[case(Format::Safetensors, EndpointType::Chat, "vllm")]
#[case(Format::Safetensors, EndpointType::Embeddings, "vllm")]
#[case(Format::Safetensors, EndpointType::Rerank, "vllm")]
#[case(Format::Gguf, EndpointType::Chat, "llama-cpp")]
#[case(Format::Gguf, EndpointType::Embeddings, "llama-cpp")]
fn a_recipe_is_chosen_by_format_and_contract_with_its_reason(
    #[case] format: Format,
    #[case] contract: EndpointType,
    #[case] name: &str,
) {
    let book = RecipeBook::shipped().unwrap();
    let choice = book.choose(format, contract).unwrap();
    assert_eq!(choice.recipe.name, name);
    assert!(
        choice.reason.contains(&format.to_string()),
        "{}",
        choice.reason
    );
}

#[test]
fn a_choice_that_there_is_not_names_every_recipe() {
    let text = EMBEDDED[0]
        .1
        .replace("contracts: [Chat, Embeddings, Rerank]", "contracts: [Chat]");
    let book = RecipeBook::parse([("a.yaml".to_owned(), text)]).unwrap();
    assert_eq!(
        book.choose(Format::Gguf, EndpointType::Chat).unwrap_err(),
        "vllm does not read GGUF"
    );
    assert_eq!(
        book.choose(Format::Safetensors, EndpointType::Rerank)
            .unwrap_err(),
        "vllm does not serve Rerank"
    );
}

#[rstest]
#[case("command: [vllm]", "command: [\"{shell}\"]", "is no placeholder")]
#[case("command: [vllm]", "command: [\"a{port}\"]", "whole argument")]
#[case(
    "command: [vllm]",
    "command: [vllm, --trust-remote-code]",
    "not allowed"
)]
#[case("needsAccelerator: true", "needsAccelerator: false", "not supported")]
#[case("sequences: 64", "sequences: 0", "above 0")]
#[case(
    "needsAccelerator: true",
    "needsAccelerator: true\nsurprise: 1",
    "surprise"
)]
fn a_wrong_recipe_is_refused_with_its_fault(
    #[case] from: &str,
    #[case] to: &str,
    #[case] says: &str,
) {
    let text = EMBEDDED[0].1.replacen(from, to, 1);
    let error = RecipeBook::parse([("x.yaml".to_owned(), text)])
        .unwrap_err()
        .to_string();
    assert!(error.contains(says) && error.contains("x.yaml"), "{error}");
}

#[test]
fn an_image_can_be_overridden_by_name_only() {
    let book = RecipeBook::shipped().unwrap();
    let images = BTreeMap::from([("llama-cpp".to_owned(), "local/llama:1".to_owned())]);
    let book = book.with_overrides(&images, &BTreeMap::new()).unwrap();
    assert_eq!(book.iter().nth(1).unwrap().image, "local/llama:1");
    let error = book
        .with_overrides(
            &BTreeMap::from([("ollama".to_owned(), "x".to_owned())]),
            &BTreeMap::new(),
        )
        .unwrap_err();
    assert!(error.to_string().contains("vllm, llama-cpp"), "{error}");
}

#[test]
fn an_8b_model_in_16_bit_needs_22_6_gib_at_32k_under_vllm() {
    let book = RecipeBook::shipped().unwrap();
    let recipe = book
        .choose(Format::Safetensors, EndpointType::Chat)
        .unwrap()
        .recipe;
    let facts = facts(
        Format::Safetensors,
        16_060_522_496,
        KvLayout::uniform(32, 8, 128),
        4096,
        131_072,
    );
    assert_eq!(memory::context_length(recipe, &facts), 32_768);
    assert_eq!(memory::cache(recipe, &facts, 1), 4 << 30);
    let need = memory::per_device(recipe, &facts, 1);
    // 16.38 GB of weights, 4 GiB of cache, 160 MiB of activations, 1.5 GiB besides.
    assert_eq!(
        need,
        16_381_732_946 + (4 << 30) + 2048 * 4096 * 2 * 10 + (1 << 30) + (512 << 20)
    );
    assert_eq!(
        memory::granted_cache(recipe, &facts, 1, need),
        4 << 30,
        "the demand itself grants the cache it counted"
    );
    assert_eq!(
        memory::granted_cache(recipe, &facts, 1, need + 5),
        (4 << 30) + 5
    );
}

#[test]
fn devices_divide_weights_and_cache_but_not_what_each_process_needs() {
    let book = RecipeBook::shipped().unwrap();
    let recipe = book
        .choose(Format::Safetensors, EndpointType::Chat)
        .unwrap()
        .recipe;
    let facts = facts(
        Format::Safetensors,
        16_000_000_000,
        KvLayout::uniform(32, 8, 128),
        4096,
        131_072,
    );
    let needs = memory::needs(recipe, &facts, 6);
    assert_eq!(
        needs.iter().map(|n| n.devices).collect::<Vec<_>>(),
        [1, 2, 4]
    );
    let own = memory::without_cache(recipe, &facts, 1) - 16_320_000_000;
    assert_eq!(needs[1].bytes_per_device, own + 8_160_000_000 + (2 << 30));
}

#[test]
fn smollm2_under_llama_cpp_fits_a_small_partition() {
    let book = RecipeBook::shipped().unwrap();
    let recipe = book
        .choose(Format::Gguf, EndpointType::Chat)
        .unwrap()
        .recipe;
    let facts = facts(
        Format::Gguf,
        98_000_000,
        KvLayout::uniform(30, 3, 64),
        576,
        8192,
    );
    let need = memory::per_device(recipe, &facts, 1);
    assert!(need > 1 << 30 && need < 2 << 30, "{need}");
    assert_eq!(memory::volume(recipe, &facts), 1 << 30);
}
