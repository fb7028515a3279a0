//! Golden objects: `UPDATE_GOLDEN=1 cargo test -p controller` writes them anew.

use super::*;
use crate::model::{Checksum, Format, KvLayout, ModelFile, ModelRequest};
use crate::recipe::RecipeBook;
use planner::{Explanation, Placement, PlacementType, Plan, SharingMode};
use rstest::rstest;
use std::path::Path;

pub(crate) fn order(extra: &str) -> InferenceService {
    serde_saphyr::from_str(&format!(
        r#"
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceService
metadata: {{name: support-llm, namespace: my-namespace, uid: 8f0c, generation: 3}}
spec:
  inferenceServiceClassName: default-llm
  model:
    src: HuggingFace
    huggingFace: {{repository: acme/m{extra}}}
"#
    ))
    .unwrap()
}

pub(crate) fn facts(format: Format) -> ModelFacts {
    let (path, entry) = match format {
        Format::Gguf => ("m-Q4_1.gguf", Some("m-Q4_1.gguf".to_owned())),
        Format::Safetensors => ("model.safetensors", None),
    };
    ModelFacts {
        request: ModelRequest {
            repository: "acme/m".into(),
            revision: "main".into(),
            file: None,
        },
        commit: "0123456789abcdef0123456789abcdef01234567".into(),
        format,
        files: vec![ModelFile {
            path: path.into(),
            size: 98_000_000,
            checksum: Checksum::Sha256("ab".repeat(32)),
        }],
        entry_file: entry,
        architecture: "LlamaForCausalLM".into(),
        weights_bytes: 97_000_000,
        layers: 30,
        hidden_size: 576,
        kv_heads: 3,
        head_dim: 64,
        context_length: 8192,
        kv: KvLayout::uniform(30, 3, 64),
        dtype: None,
        quantization: None,
    }
}

pub(crate) fn plan(devices: u32) -> Plan {
    Plan {
        device_class_name: "mig.ai.deckhouse.io".into(),
        driver: "gpu.ai.deckhouse.io".into(),
        sharing_mode: SharingMode::Dedicated,
        placement_type: PlacementType::Partition,
        profile: Some("1g.10gb".into()),
        devices_per_replica: devices,
        memory_needed_bytes: 1_500_000_000,
        memory_bytes: 10_468_982_784,
        device_memory_bytes: 10_468_982_784,
        selectors: vec!["device.attributes['gpu.ai.deckhouse.io'].profile == '1g.10gb'".into()],
        capacity_requests: BTreeMap::new(),
        replicas_that_fit: 2,
        below_minimum: false,
        placements: ["node-b", "node-b", "node-a"]
            .map(|node| Placement {
                node: node.into(),
                devices: vec![],
            })
            .into(),
        explanation: Explanation::default(),
    }
}

pub(crate) fn installation() -> Installation {
    Installation {
        fetch_image: "ai-inference/controller:dev".into(),
        image_pull_policy: Some("IfNotPresent".into()),
        image_pull_secrets: vec![],
        hub_endpoint: "https://huggingface.co".into(),
    }
}

fn render(
    order: &InferenceService,
    format: Format,
    contract: EndpointType,
    devices: u32,
    replicas: i32,
) -> String {
    render_plan(order, format, contract, &plan(devices), replicas)
}

fn render_plan(
    order: &InferenceService,
    format: Format,
    contract: EndpointType,
    plan: &Plan,
    replicas: i32,
) -> String {
    let book = RecipeBook::shipped().unwrap();
    let facts = facts(format);
    let installation = installation();
    let input = Input {
        order,
        facts: &facts,
        recipe: book.choose(format, contract).unwrap().recipe,
        contract,
        class_terms: "0a1b2c3d4e",
        plan,
        replicas,
        token: true,
        storage_class: Some("fast"),
        installation: &installation,
    };
    let template = claim_template(&input);
    let set = statefulset(&input, &template.name_any(), None);
    let yaml = |v: serde_json::Value| serde_saphyr::to_string(&v).unwrap();
    [
        yaml(serde_json::to_value(&template).unwrap()),
        yaml(serde_json::to_value(&set).unwrap()),
        yaml(serde_json::to_value(service(&input)).unwrap()),
    ]
    .join("---\n")
}

#[rstest]
#[case::gguf_chat("llama-cpp-chat", "", Format::Gguf, EndpointType::Chat, 1)]
#[case::gguf_embeddings("llama-cpp-embeddings", "", Format::Gguf, EndpointType::Embeddings, 1)]
#[case::safetensors_chat_on_two(
    "vllm-chat-2-devices",
    "",
    Format::Safetensors,
    EndpointType::Chat,
    2
)]
#[case::gated(
    "vllm-gated",
    ", tokenSecretRef: {name: hub}",
    Format::Safetensors,
    EndpointType::Chat,
    1
)]
fn objects_equal_their_golden_file(
    #[case] name: &str,
    #[case] extra: &str,
    #[case] format: Format,
    #[case] contract: EndpointType,
    #[case] devices: u32,
) {
    expect_golden(name, &render(&order(extra), format, contract, devices, 1));
}

#[test]
fn a_share_is_requested_and_the_runtime_keeps_to_it() {
    let mut plan = plan(1);
    plan.device_class_name = "share.ai.deckhouse.io".into();
    plan.sharing_mode = SharingMode::Shared;
    plan.placement_type = PlacementType::WholeDevice;
    plan.profile = None;
    plan.memory_bytes = 12 << 30;
    plan.device_memory_bytes = 80 << 30;
    plan.capacity_requests = [
        ("memory".to_owned(), planner::Quantity::from_bytes(12 << 30)),
        ("cores".to_owned(), planner::Quantity::from_units(15)),
    ]
    .into();
    let rendered = render_plan(
        &order(""),
        Format::Safetensors,
        EndpointType::Chat,
        &plan,
        1,
    );
    for said in [
        "memory: 12Gi",
        "cores: \"15\"",
        "--gpu-memory-utilization",
        "0.1500",
    ] {
        assert!(rendered.contains(said), "{said} in\n{rendered}");
    }
    expect_golden("vllm-share", &rendered);
}

fn expect_golden(name: &str, rendered: &str) {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/golden/pods/{name}.yaml"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, rendered).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        golden == rendered,
        "{name} differs: UPDATE_GOLDEN=1 cargo test -p controller, and look at the change"
    );
}

#[test]
fn scaling_changes_nothing_but_the_number_of_copies_a_116() {
    let one = render(&order(""), Format::Gguf, EndpointType::Chat, 1, 1);
    let two = render(&order(""), Format::Gguf, EndpointType::Chat, 1, 2);
    assert_eq!(one.replace("replicas: 1", "replicas: 2"), two);
}

#[test]
fn a_pod_holds_no_device_uuid_no_service_account_token_and_no_hub_token_in_the_runtime() {
    let text = render(
        &order(", tokenSecretRef: {name: hub, key: k}"),
        Format::Safetensors,
        EndpointType::Chat,
        1,
        1,
    );
    assert!(!text.contains("CUDA_VISIBLE_DEVICES") && !text.contains("trust-remote-code"));
    assert!(text.contains("automountServiceAccountToken: false"));
    let set: k8s_openapi::api::apps::v1::StatefulSet =
        serde_saphyr::from_str(text.split("---\n").nth(1).unwrap()).unwrap();
    let pod = set.spec.template.spec.unwrap();
    let secrets = |c: &k8s_openapi::api::core::v1::Container| -> Vec<String> {
        let refs = c
            .env
            .iter()
            .flatten()
            .filter_map(|e| e.value_from.as_ref()?.secret_key_ref.as_ref());
        refs.map(|r| r.name.clone()).collect()
    };
    assert_eq!(
        secrets(&pod.containers[0]),
        ["support-llm-token"],
        "the hub's token reaches the download and nothing else"
    );
    assert_eq!(secrets(&pod.init_containers.unwrap()[0]), ["hub"]);
}

#[test]
fn a_copy_is_ready_only_while_its_runtime_is_asked_for_the_model_by_name() {
    let text = render(&order(""), Format::Safetensors, EndpointType::Chat, 1, 1);
    let set: k8s_openapi::api::apps::v1::StatefulSet =
        serde_saphyr::from_str(text.split("---\n").nth(1).unwrap()).unwrap();
    let pod = set.spec.template.spec.unwrap();
    let verify = &pod.containers[1];
    let value = |name: &str| {
        let found = verify.env.iter().flatten().find(|e| e.name == name);
        found.and_then(|e| e.value.clone()).unwrap_or_default()
    };
    assert_eq!(value("AI_INFERENCE_SERVED_NAME"), "support-llm");
    assert_eq!(
        value("AI_INFERENCE_MODELS_URL"),
        "http://127.0.0.1:8000/v1/models"
    );
    let path = verify.readiness_probe.clone().unwrap().http_get.unwrap();
    assert_eq!(path.path.as_deref(), Some("/ready"));
    assert!(
        path.http_headers.is_none(),
        "a token in a probe is a token in the pod's specification"
    );
}

#[test]
fn a_files_name_cannot_ask_for_a_variable() {
    let (order, installation) = (order(""), installation());
    let mut facts = facts(Format::Gguf);
    facts.files[0].path = "$(LLAMA_API_KEY).gguf".into();
    facts.entry_file = Some("$(LLAMA_API_KEY).gguf".into());
    let book = RecipeBook::shipped().unwrap();
    let plan = plan(1);
    let input = Input {
        order: &order,
        facts: &facts,
        recipe: book
            .choose(Format::Gguf, EndpointType::Chat)
            .unwrap()
            .recipe,
        contract: EndpointType::Chat,
        class_terms: "0a1b2c3d4e",
        plan: &plan,
        replicas: 1,
        token: true,
        storage_class: None,
        installation: &installation,
    };
    let text = serde_json::to_string(&statefulset(&input, "t", None)).unwrap();
    assert_eq!(text.matches("$$(LLAMA_API_KEY).gguf").count(), 2, "{text}");
    assert!(!text.replace("$$", "").contains("$("), "{text}");
}

#[rstest]
#[case(0, "0")]
#[case(1, "1")]
#[case(1 << 30, "1Gi")]
#[case(3 << 29, "1536Mi")]
#[case(98_000_001, "98000001")]
fn bytes_are_written_as_the_api_server_keeps_them(#[case] n: u64, #[case] text: &str) {
    assert_eq!(bytes(n).0, text);
}

#[test]
fn the_charts_definitions_are_the_generated_ones() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (file, yaml) in inference_api::crd_files().unwrap() {
        let path = root.join("chart/files/crds").join(&file);
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, &yaml).unwrap();
        }
        let held = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            held == yaml,
            "{file} is stale: UPDATE_GOLDEN=1 cargo test -p controller"
        );
    }
}
