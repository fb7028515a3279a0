//! Rules of the order.

use anyhow::{Context, Result};
use e2e::control_plane::ControlPlane;
use inference_api::{InferenceService, ModelSource};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::rule::{Kind, rules, stored};

rules! {
    a_002_an_order_names_a_class_and_a_model: Order
        accepts [{}]
        refuses [
            { "spec": { "inferenceServiceClassName": null } } => "spec.inferenceServiceClassName: Required value",
            { "spec": { "model": null } } => "spec.model: Required value",
            { "spec": { "model": { "src": null } } } => "spec.model.src: Required value",
            { "spec": { "inferenceServiceClassName": "" } }
                => "spec.inferenceServiceClassName must be the name of an InferenceServiceClass, such as default-llm",
        ];

    a_004_an_order_says_nothing_about_hardware_runtime_or_copies: Order
        accepts []
        refuses [
            { "spec": { "resources": { "accelerator": { "deviceClasses": ["one"] } } } } => "unknown field \"spec.resources\"",
            { "spec": { "replicas": 2 } } => "unknown field \"spec.replicas\"",
            { "spec": { "launchStrategy": "Latency" } } => "unknown field \"spec.launchStrategy\"",
            { "spec": { "model": { "recipe": "vllm" } } } => "unknown field \"spec.model.recipe\"",
        ];

    every_source_has_its_own_block: Order
        accepts [
            { "spec": { "model": { "src": "ai-models", "huggingFace": null, "ref": { "kind": "Model", "name": "qwen" } } } },
            { "spec": { "model": { "src": "S3", "huggingFace": null, "s3": { "uri": "s3://models/predictor" } } } },
            { "spec": { "model": { "src": "PVC", "huggingFace": null, "pvc": { "claimName": "weights" } } } },
            { "spec": { "model": { "src": "OCI", "huggingFace": null, "oci": { "reference": "registry.example.com/qwen:1" } } } },
        ]
        refuses [{ "spec": { "model": { "src": "Ollama" } } }
            => "supported values: \"HuggingFace\", \"ai-models\", \"S3\", \"PVC\", \"OCI\""];

    a_source_needs_its_block: Order
        accepts []
        refuses [
            { "spec": { "model": { "huggingFace": null } } }
                => "spec.model.huggingFace is required with src HuggingFace: give the model's repository",
            { "spec": { "model": { "src": "ai-models", "huggingFace": null } } } => "spec.model.ref is required with src ai-models",
            { "spec": { "model": { "src": "S3", "huggingFace": null } } } => "spec.model.s3 is required with src S3",
            { "spec": { "model": { "src": "PVC", "huggingFace": null } } } => "spec.model.pvc is required with src PVC",
            { "spec": { "model": { "src": "OCI", "huggingFace": null } } } => "spec.model.oci is required with src OCI",
        ];

    a_block_belongs_to_its_source_alone: Order
        accepts []
        refuses [
            { "spec": { "model": { "src": "S3", "s3": { "uri": "s3://models/predictor" } } } }
                => "spec.model.huggingFace belongs to src HuggingFace alone: remove the block, or set spec.model.src to HuggingFace",
            { "spec": { "model": { "ref": { "kind": "Model", "name": "qwen" } } } } => "spec.model.ref belongs to src ai-models alone",
            { "spec": { "model": { "s3": { "uri": "s3://models/predictor" } } } } => "spec.model.s3 belongs to src S3 alone",
            { "spec": { "model": { "pvc": { "claimName": "weights" } } } } => "spec.model.pvc belongs to src PVC alone",
            { "spec": { "model": { "oci": { "reference": "registry.example.com/qwen:1" } } } } => "spec.model.oci belongs to src OCI alone",
        ];

    a_reference_to_the_catalog_names_a_kind_and_a_name: Order
        accepts [
            { "spec": { "model": { "src": "ai-models", "huggingFace": null, "ref": { "kind": "Model", "name": "qwen", "namespace": "shelf" } } } },
            { "spec": { "model": { "src": "ai-models", "huggingFace": null, "ref": { "kind": "ClusterModel", "name": "qwen" } } } },
        ]
        refuses [
            { "spec": { "model": { "src": "ai-models", "huggingFace": null, "ref": { "kind": "ClusterModel", "name": "qwen", "namespace": "shelf" } } } }
                => "spec.model.ref.namespace must be absent with kind ClusterModel, which lies in no namespace",
            { "spec": { "model": { "src": "ai-models", "huggingFace": null, "ref": { "kind": "Model" } } } }
                => "spec.model.ref.name: Required value",
            { "spec": { "model": { "src": "ai-models", "huggingFace": null, "ref": { "kind": "Model", "name": "Qwen 3" } } } }
                => "spec.model.ref.name must be the name of a Model or ClusterModel",
            { "spec": { "model": { "src": "ai-models", "huggingFace": null, "ref": { "kind": "Model", "name": "qwen", "namespace": "*" } } } }
                => "spec.model.ref.namespace must be the name of a namespace",
            { "spec": { "model": { "src": "ai-models", "huggingFace": null, "ref": { "kind": "Dataset", "name": "qwen" } } } }
                => "supported values: \"Model\", \"ClusterModel\"",
        ];

    a_hugging_face_repository_is_owner_and_name: Order
        accepts [
            { "spec": { "model": { "huggingFace": { "repository": "HuggingFaceTB/SmolLM2-135M-Instruct" } } } },
            { "spec": { "model": { "huggingFace": { "repository": "gpt2" } } } },
        ]
        refuses [
            { "spec": { "model": { "huggingFace": { "repository": "https://huggingface.co/Qwen/Qwen3-8B" } } } }
                => "spec.model.huggingFace.repository must be 'owner/name' as the hub shows it, such as 'Qwen/Qwen3-8B': no URL",
            { "spec": { "model": { "huggingFace": { "repository": "Qwen/../secrets" } } } } => "spec.model.huggingFace.repository must be",
            { "spec": { "model": { "huggingFace": { "repository": "Qwen/Qwen3/8B" } } } } => "spec.model.huggingFace.repository must be",
            { "spec": { "model": { "huggingFace": { "repository": "Qwen/Qwen3-8B@main" } } } } => "no revision",
            { "spec": { "model": { "huggingFace": { "repository": "" } } } } => "spec.model.huggingFace.repository must be",
            { "spec": { "model": { "huggingFace": { "repository": ("o".repeat(97)) } } } } => "may not be more than 96 bytes",
        ];

    a_hugging_face_revision_is_a_branch_tag_or_commit: Order
        accepts [
            { "spec": { "model": { "huggingFace": { "revision": "refs/pr/7" } } } },
            { "spec": { "model": { "huggingFace": { "revision": "12fd25f77366fa6b3b4b768ec3050bf629380bac" } } } },
        ]
        refuses [
            { "spec": { "model": { "huggingFace": { "revision": "" } } } }
                => "spec.model.huggingFace.revision must be a branch, a tag or a commit of the repository: remove it to serve the branch main",
            { "spec": { "model": { "huggingFace": { "revision": "main/../../x" } } } } => "spec.model.huggingFace.revision must be",
            { "spec": { "model": { "huggingFace": { "revision": "main?x=1" } } } } => "spec.model.huggingFace.revision must be",
        ];

    a_hugging_face_file_stays_in_the_repository: Order
        accepts [
            { "spec": { "model": { "huggingFace": { "file": "*Q4_K_M.gguf" } } } },
            { "spec": { "model": { "huggingFace": { "file": "gguf/model-Q8_0.gguf" } } } },
        ]
        refuses [
            { "spec": { "model": { "huggingFace": { "file": "/etc/passwd" } } } }
                => "spec.model.huggingFace.file must be a relative path without '..'",
            { "spec": { "model": { "huggingFace": { "file": "a/../../b" } } } } => "spec.model.huggingFace.file must be",
            { "spec": { "model": { "huggingFace": { "file": "" } } } } => "spec.model.huggingFace.file must be",
        ];

    a_hugging_face_token_is_a_key_of_a_secret: Order
        accepts [
            { "spec": { "model": { "huggingFace": { "tokenSecretRef": { "name": "hub" } } } } },
            { "spec": { "model": { "huggingFace": { "tokenSecretRef": { "name": "hub", "key": "HF_TOKEN" } } } } },
        ]
        refuses [
            { "spec": { "model": { "huggingFace": { "tokenSecretRef": { "key": "token" } } } } }
                => "spec.model.huggingFace.tokenSecretRef.name: Required value",
            { "spec": { "model": { "huggingFace": { "tokenSecretRef": { "name": "Hub!" } } } } }
                => "tokenSecretRef.name must be the name of a Secret in the order's namespace",
            { "spec": { "model": { "huggingFace": { "tokenSecretRef": { "name": "hub", "key": "to/ken" } } } } }
                => "tokenSecretRef.key must be a key of the Secret",
        ];

    an_s3_uri_names_a_bucket_and_a_folder: Order
        accepts [
            { "spec": { "model": { "src": "S3", "huggingFace": null, "s3": { "uri": "s3://models" } } } },
            { "spec": { "model": { "src": "S3", "huggingFace": null, "s3": { "uri": "s3://models.eu/predictor/v2/" } } } },
        ]
        refuses [
            { "spec": { "model": { "src": "S3", "huggingFace": null, "s3": { "uri": "https://minio.example.com/models" } } } }
                => "spec.model.s3.uri must be 's3://bucket/folder', such as 's3://models/predictor'",
            { "spec": { "model": { "src": "S3", "huggingFace": null, "s3": { "uri": "s3://ab/predictor" } } } }
                => "the bucket's name has 3 to 63 lower-case characters",
            { "spec": { "model": { "src": "S3", "huggingFace": null, "s3": { "uri": "s3://models/../other" } } } } => "spec.model.s3.uri must be",
            { "spec": { "model": { "src": "S3", "huggingFace": null, "s3": { "uri": "s3://models//x" } } } } => "spec.model.s3.uri must be",
        ];

    an_s3_server_is_an_address: Order
        accepts [{ "spec": { "model": { "src": "S3", "huggingFace": null, "s3": {
            "uri": "s3://models", "endpoint": "http://minio.storage.svc:9000", "region": "eu-central-1",
            "credentialsSecretRef": { "name": "predictor-secret" } } } } }]
        refuses [
            { "spec": { "model": { "src": "S3", "huggingFace": null, "s3": { "uri": "s3://models", "endpoint": "minio:9000" } } } }
                => "spec.model.s3.endpoint must be 'https://host' or 'http://host:port'",
            { "spec": { "model": { "src": "S3", "huggingFace": null, "s3": { "uri": "s3://models", "endpoint": "https://minio/models" } } } }
                => "the bucket and the folder belong in spec.model.s3.uri",
            { "spec": { "model": { "src": "S3", "huggingFace": null, "s3": { "uri": "s3://models", "region": "EU Central" } } } }
                => "spec.model.s3.region must be a region's name, such as 'eu-central-1'",
            { "spec": { "model": { "src": "S3", "huggingFace": null, "s3": { "uri": "s3://models", "credentialsSecretRef": { "name": "" } } } } }
                => "must be the name of a Secret in the order's namespace",
        ];

    a_volume_is_a_claim_and_a_folder_in_it: Order
        accepts [{ "spec": { "model": { "src": "PVC", "huggingFace": null, "pvc": { "claimName": "weights", "path": "models/chat" } } } }]
        refuses [
            { "spec": { "model": { "src": "PVC", "huggingFace": null, "pvc": { "claimName": "weights", "path": "../other" } } } }
                => "spec.model.pvc.path must be a relative path without '..'",
            { "spec": { "model": { "src": "PVC", "huggingFace": null, "pvc": { "claimName": "weights", "path": "/models" } } } }
                => "spec.model.pvc.path must be a relative path",
            { "spec": { "model": { "src": "PVC", "huggingFace": null, "pvc": { "claimName": "pvc://weights" } } } }
                => "spec.model.pvc.claimName must be the name of a PersistentVolumeClaim",
        ];

    an_oci_reference_has_a_tag_or_a_digest_and_no_scheme: Order
        accepts [
            { "spec": { "model": { "src": "OCI", "huggingFace": null, "oci": {
                "reference": "registry.example.com:5000/team/qwen3-8b:1.0", "pullSecretRef": { "name": "registry" } } } } },
            { "spec": { "model": { "src": "OCI", "huggingFace": null, "oci": {
                "reference": (format!("registry.example.com/qwen@sha256:{}", "0".repeat(64))) } } } },
        ]
        refuses [
            { "spec": { "model": { "src": "OCI", "huggingFace": null, "oci": { "reference": "oci://registry.example.com/qwen:1" } } } }
                => "spec.model.oci.reference must be 'registry/repository:tag' or 'registry/repository@sha256:digest', without a scheme",
            { "spec": { "model": { "src": "OCI", "huggingFace": null, "oci": { "reference": "registry.example.com:5000/qwen" } } } }
                => "spec.model.oci.reference must be",
            { "spec": { "model": { "src": "OCI", "huggingFace": null, "oci": { "reference": "registry.example.com/qwen@sha256:12" } } } }
                => "spec.model.oci.reference must be",
        ];

    an_order_name_leaves_room_for_the_names_made_from_it: Order
        accepts [{ "metadata": { "name": ("n".repeat(52)) } }]
        refuses [{ "metadata": { "name": ("n".repeat(53)) } }
            => "metadata.name must have at most 52 characters, so that the names made from it fit: shorten the order's name"];

    an_order_name_is_that_of_a_service: Order
        accepts [{ "metadata": { "name": "support-llm-2" } }]
        refuses [
            { "metadata": { "name": "support.llm" } }
                => "metadata.name must begin with a lower-case letter and hold only lower-case letters, digits and '-' (no '.')",
            { "metadata": { "name": "7b-chat" } } => "metadata.name must begin with a lower-case letter",
        ];
}

#[tokio::test]
async fn a_null_in_place_of_a_block_is_refused() -> Result<()> {
    let plane = ControlPlane::shared()?;
    let namespace = plane.namespace("null-block").await?;
    let yaml = "
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceService
metadata: { name: support-llm }
spec:
  inferenceServiceClassName: default-llm
  model: { src: HuggingFace, huggingFace: null }
";
    let answer = plane.apply_yaml(&namespace, yaml).await;
    let error = format!(
        "{:#}",
        answer
            .err()
            .context("a null in place of the block is accepted")?
    );
    assert!(
        error.contains("spec.model.huggingFace in body must be of type object"),
        "{error}"
    );
    Ok(())
}

#[tokio::test]
async fn a_113_an_order_may_be_edited_in_every_field() -> Result<()> {
    let plane = ControlPlane::shared()?;
    let namespace = plane.namespace("edited").await?;
    let orders: Api<InferenceService> = Api::namespaced(plane.client()?, &namespace);
    let order: InferenceService = serde_json::from_value(stored(Kind::Order, &json!({})).await?)?;
    let order = InferenceService::new("support-llm", order.spec);
    let created = orders.create(&PostParams::default(), &order).await?;
    let edit = json!({ "spec": {
        "inferenceServiceClassName": "night-shift",
        "model": { "src": "S3", "huggingFace": null, "s3": { "uri": "s3://models/predictor" } },
    } });
    let edited = orders
        .patch("support-llm", &PatchParams::default(), &Patch::Merge(&edit))
        .await?;
    assert_eq!(edited.spec.inference_service_class_name, "night-shift");
    assert_eq!(edited.spec.model.src, ModelSource::S3);
    assert_eq!(
        edited.metadata.generation,
        created.metadata.generation.map(|generation| generation + 1),
        "an edit is seen as one"
    );
    Ok(())
}

/// The server alone drops an unknown field with a warning: the schema of a custom resource cannot
/// refuse it. kubectl asks for strictness by itself.
#[tokio::test]
async fn kubectl_refuses_an_unknown_field_of_an_order_a_004() -> Result<()> {
    let plane = ControlPlane::shared()?;
    let manifest = json!({
        "apiVersion": "ai.deckhouse.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": { "name": "support-llm", "namespace": "default" },
        "spec": {
            "inferenceServiceClassName": "default-llm",
            "replicas": 2,
            "model": { "src": "HuggingFace", "huggingFace": { "repository": "Qwen/Qwen3-8B" } },
        },
    });
    for command in [["apply"], ["create"]] {
        let error = kubectl_error(plane, &command, &manifest)?;
        assert!(error.contains("unknown field \"spec.replicas\""), "{error}");
    }
    Ok(())
}

/// What `kubectl COMMAND -f -` says when it refuses `manifest`.
fn kubectl_error(plane: &ControlPlane, command: &[&str], manifest: &Value) -> Result<String> {
    use std::io::Write;
    use std::process::Stdio;

    let mut kubectl = plane
        .kubectl()?
        .args(command)
        .args(["--dry-run=server", "-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    kubectl
        .stdin
        .take()
        .context("kubectl has no input")?
        .write_all(manifest.to_string().as_bytes())?;
    let output = kubectl.wait_with_output()?;
    anyhow::ensure!(
        !output.status.success(),
        "kubectl {command:?} accepts {manifest:#}"
    );
    Ok(String::from_utf8(output.stderr)?)
}
