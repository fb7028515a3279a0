//! Published configurations with known answers.

use super::*;
use proptest::prelude::*;
use rstest::rstest;
use serde_json::json;

const K: u64 = 1024;

/// (name, config.json's relevant part, cache bytes per token in 16 bit, context)
#[rstest]
#[case::phi_4_mini(
    json!({"architectures":["Phi3ForCausalLM"],"model_type":"phi3","num_hidden_layers":32,"num_attention_heads":24,"num_key_value_heads":8,"hidden_size":3072,"max_position_embeddings":131072,"sliding_window":262144,"torch_dtype":"bfloat16"}),
    131_072, 131_072)]
#[case::llama_3_1_8b(
    json!({"architectures":["LlamaForCausalLM"],"model_type":"llama","num_hidden_layers":32,"num_attention_heads":32,"num_key_value_heads":8,"hidden_size":4096,"max_position_embeddings":131072}),
    128 * K, 131_072)]
#[case::llama_2_7b_without_grouping(
    json!({"architectures":["LlamaForCausalLM"],"model_type":"llama","num_hidden_layers":32,"num_attention_heads":32,"hidden_size":4096,"max_position_embeddings":4096}),
    512 * K, 4_096)]
#[case::llama_3_3_70b(
    json!({"architectures":["LlamaForCausalLM"],"model_type":"llama","num_hidden_layers":80,"num_attention_heads":64,"num_key_value_heads":8,"head_dim":128,"hidden_size":8192,"max_position_embeddings":131072}),
    320 * K, 131_072)]
#[case::qwen2_5_7b_whose_window_is_off(
    json!({"architectures":["Qwen2ForCausalLM"],"model_type":"qwen2","num_hidden_layers":28,"num_attention_heads":28,"num_key_value_heads":4,"hidden_size":3584,"max_position_embeddings":32768,"sliding_window":131072,"use_sliding_window":false,"max_window_layers":28}),
    56 * K, 32_768)]
#[case::qwen3_8b_with_its_own_head_dim(
    json!({"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","num_hidden_layers":36,"num_attention_heads":32,"num_key_value_heads":8,"head_dim":128,"hidden_size":4096,"max_position_embeddings":40960,"sliding_window":null,"use_sliding_window":false}),
    144 * K, 40_960)]
#[case::smollm2_135m(
    json!({"architectures":["LlamaForCausalLM"],"model_type":"llama","num_hidden_layers":30,"num_attention_heads":9,"num_key_value_heads":3,"hidden_size":576,"max_position_embeddings":8192}),
    30 * 3 * 64 * 2 * 2, 8_192)]
#[case::deepseek_v3_latent_attention(
    json!({"architectures":["DeepseekV3ForCausalLM"],"model_type":"deepseek_v3","num_hidden_layers":61,"num_attention_heads":128,"num_key_value_heads":128,"hidden_size":7168,"kv_lora_rank":512,"qk_rope_head_dim":64,"v_head_dim":128,"max_position_embeddings":163840,"num_nextn_predict_layers":1}),
    70_272, 163_840)]
#[case::gpt2_by_its_old_names(
    json!({"architectures":["GPT2LMHeadModel"],"model_type":"gpt2","n_layer":12,"n_head":12,"n_embd":768,"n_positions":1024}),
    36 * K, 1_024)]
#[case::starcoder_with_one_shared_head(
    json!({"architectures":["GPTBigCodeForCausalLM"],"model_type":"gpt_bigcode","n_layer":40,"n_head":48,"n_embd":6144,"n_positions":8192,"multi_query":true}),
    20 * K, 8_192)]
#[case::falcon_40b(
    json!({"architectures":["FalconForCausalLM"],"model_type":"falcon","num_hidden_layers":60,"num_attention_heads":128,"num_kv_heads":8,"hidden_size":8192,"new_decoder_architecture":true,"multi_query":true,"max_position_embeddings":2048}),
    120 * K, 2_048)]
#[case::minilm_keeps_no_cache(
    json!({"architectures":["BertModel"],"model_type":"bert","num_hidden_layers":6,"num_attention_heads":12,"hidden_size":384,"max_position_embeddings":512}),
    0, 512)]
#[case::qwen3_5_9b_hybrid_at_16_bit(
    json!({"architectures":["Qwen3_5ForConditionalGeneration"],"model_type":"qwen3_5","text_config":{"model_type":"qwen3_5_text","num_hidden_layers":32,"num_attention_heads":16,"num_key_value_heads":4,"head_dim":256,"hidden_size":4096,"full_attention_interval":4,"linear_num_value_heads":32,"linear_value_head_dim":128,"linear_num_key_heads":16,"linear_key_head_dim":128,"linear_conv_kernel_dim":4,"mtp_num_hidden_layers":1,"max_position_embeddings":262144}}),
    32 * K, 262_144)]
fn a_published_model_costs_what_is_known(
    #[case] config: Value,
    #[case] bytes_per_token: u64,
    #[case] context: u64,
) {
    let a = parse_config(&config).unwrap();
    assert_eq!(a.kv.bytes_per_token(1, 2), bytes_per_token);
    assert_eq!(a.context_length, context);
}

#[test]
fn qwen3_5_at_tensor_parallel_2_in_8_bit_with_its_speculative_layer_is_9_kib() {
    // 8 full layers and 1 speculative one, 2 of 4 heads on each device.
    let kv = KvLayout {
        groups: vec![KvGroup {
            layers: 8 + 1,
            heads: 4,
            elements: 512,
            window: None,
        }],
        ..KvLayout::default()
    };
    assert_eq!(kv.bytes_per_token(2, 1), 9 * K);
}

#[test]
fn gemma_with_two_kinds_of_layers_needs_10_78_gib_at_128k() {
    let mut types = Vec::new();
    for i in 1..=60 {
        types.push(if i % 6 == 0 {
            "full_attention"
        } else {
            "sliding_attention"
        });
    }
    let a = parse_config(&json!({"architectures":["Gemma4ForConditionalGeneration"],"model_type":"gemma4","text_config":{
        "model_type":"gemma4_text","num_hidden_layers":60,"num_attention_heads":32,"num_key_value_heads":16,"head_dim":256,
        "num_global_key_value_heads":4,"global_head_dim":512,"hidden_size":5376,"sliding_window":1024,"layer_types":types,
        "max_position_embeddings":262144}}))
    .unwrap();
    let gib = a.kv.bytes_per_sequence(131_072, 1, 2) as f64 / f64::from(1 << 30);
    assert!((gib - 10.78).abs() < 0.005, "{gib}");
}

#[test]
fn gpt_oss_120b_needs_4_5044_gib_at_128k() {
    let types: Vec<_> = (0..36)
        .map(|i| {
            if i % 2 == 0 {
                "sliding_attention"
            } else {
                "full_attention"
            }
        })
        .collect();
    let a = parse_config(&json!({"architectures":["GptOssForCausalLM"],"model_type":"gpt_oss","num_hidden_layers":36,
        "num_attention_heads":64,"num_key_value_heads":8,"head_dim":64,"hidden_size":2880,"sliding_window":128,
        "layer_types":types,"max_position_embeddings":131072,"quantization_config":{"quant_method":"mxfp4"}}))
    .unwrap();
    let gib = a.kv.bytes_per_sequence(131_072, 1, 2) as f64 / f64::from(1 << 30);
    assert!((gib - 4.5044).abs() < 0.0001, "{gib}");
    assert_eq!(a.quantization.as_deref(), Some("mxfp4"));
}

#[test]
fn gemma_3_before_layer_types_has_one_full_layer_in_six() {
    let a = parse_config(&json!({"architectures":["Gemma3ForCausalLM"],"model_type":"gemma3_text","num_hidden_layers":26,
        "num_attention_heads":4,"num_key_value_heads":1,"head_dim":256,"hidden_size":1152,"sliding_window":512,
        "sliding_window_pattern":6,"max_position_embeddings":32768}))
    .unwrap();
    assert_eq!(
        a.kv.groups
            .iter()
            .map(|g| (g.layers, g.window))
            .collect::<Vec<_>>(),
        [(4, None), (22, Some(512))]
    );
}

#[test]
fn layers_that_share_a_cache_are_counted_once() {
    let types: Vec<_> = (1..=30)
        .map(|i| {
            if i % 5 == 0 {
                "full_attention"
            } else {
                "sliding_attention"
            }
        })
        .collect();
    let a = parse_config(&json!({"architectures":["Gemma3nForConditionalGeneration"],"model_type":"gemma3n","text_config":{
        "model_type":"gemma3n_text","num_hidden_layers":30,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":256,
        "hidden_size":2048,"sliding_window":512,"num_kv_shared_layers":10,"layer_types":types,"max_position_embeddings":32768}}))
    .unwrap();
    assert_eq!(a.kv.groups.iter().map(|g| g.layers).sum::<u64>(), 20);
}

#[rstest]
#[case::no_layers(json!({"architectures":["X"],"num_attention_heads":1,"hidden_size":1}), "num_hidden_layers")]
#[case::absurd_layers(json!({"architectures":["X"],"num_hidden_layers":1u64<<40,"num_attention_heads":1,"hidden_size":1}), "at most 4096")]
#[case::no_name(json!({"num_hidden_layers":1,"num_attention_heads":1,"hidden_size":1}), "architectures")]
#[case::not_an_object(json!([1, 2]), "architectures")]
fn a_configuration_that_describes_no_model_is_refused_by_name(
    #[case] config: Value,
    #[case] says: &str,
) {
    let error = parse_config(&config).unwrap_err().to_string();
    assert!(error.contains(says), "{error}");
}

fn arbitrary_json() -> impl Strategy<Value = Value> {
    let key = prop_oneof![
        Just("num_hidden_layers"),
        Just("num_attention_heads"),
        Just("hidden_size"),
        Just("layer_types"),
        Just("sliding_window"),
        Just("text_config"),
        Just("model_type"),
        Just("kv_lora_rank"),
        Just("head_dim"),
        Just("num_kv_shared_layers"),
        Just("architectures"),
        Just("full_attention_interval"),
        Just("attn_layer_period"),
        Just("attn_layer_offset"),
        Just("linear_num_value_heads"),
        Just("hybrid_override_pattern"),
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0u64..64).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[a-zM*-]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 64, 8, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            proptest::collection::hash_map(key.clone().prop_map(String::from), inner, 0..12)
                .prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_json_is_answered_without_a_panic(config in arbitrary_json()) {
        if let Ok(a) = parse_config(&config) {
            prop_assert!(u64::from(a.layers) <= MAX_LAYERS);
            let _ = a.kv.bytes_per_sequence(u64::MAX, 1, 2);
        }
    }
}
