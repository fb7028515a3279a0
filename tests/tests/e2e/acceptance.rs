//! What the administrator's guide promises of classes and orders, on the cluster.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use e2e::cluster::devices::{DRIVER, gpu_of, published};
use e2e::cluster::hub::{SMOLLM, put_repository};
use e2e::cluster::order::{Order, condition, put_class, put_class_of};
use e2e::cluster::{Cluster, wait};
use inference_api::{EndpointType, InferenceService, InferenceServiceClass};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::rbac::v1::RoleBinding;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::scene::*;

#[tokio::test]
async fn two_small_orders_of_a_class_without_policies_take_two_devices_and_one_copy_each_a_060_a_061_a_062()
-> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("plain").await?;
    let spec = json!({ "modelPolicy": { "allowedEndpointTypes": ["Chat"] } });
    put_class_of(&cluster.client, "e2e-plain", spec).await?;
    let first = Order::file(&cluster, &namespace, "first", "e2e-plain", SMOLLM).await?;
    let second = Order::file(&cluster, &namespace, "second", "e2e-plain", SMOLLM).await?;
    let mut devices = Vec::new();
    for order in [&first, &second] {
        let served = order.ready().await?;
        let replicas = served.status.and_then(|status| status.replicas);
        let summary = replicas.map(|replicas| replicas.summary);
        ensure!(summary.as_deref() == Some("1/1"), "{summary:?} copies");
        devices.extend(order.devices().await?);
    }
    let [one, two] = &devices[..] else {
        anyhow::bail!("two orders hold {devices:?}");
    };
    ensure!(
        one != two && gpu_of(&one.1) == one.1 && gpu_of(&two.1) == two.1,
        "not two whole devices: {devices:?}"
    );
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    ensure!(pods.list(&ListParams::default()).await?.items.len() == 2);
    let scalers: Api<HorizontalPodAutoscaler> = Api::all(cluster.client.clone());
    let scalers = scalers.list(&ListParams::default()).await?;
    ensure!(scalers.items.is_empty(), "{scalers:?}");
    cluster.delete_namespace(&namespace).await
}

#[tokio::test]
async fn a_device_class_that_cannot_be_judged_is_named_and_the_order_goes_on_when_it_is_mended_a_106()
-> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("device-class").await?;
    let name = "e2e-colour";
    let device_classes: Api<DeviceClass> = Api::all(cluster.client.clone());
    // It compiles, and fails on every device: nothing publishes this attribute.
    let expression = |attribute: &str| {
        json!({ "spec": { "selectors": [{ "cel": { "expression":
            format!(r#"device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].{attribute} == "gpu""#)
        } }] } })
    };
    let mut broken = expression("colour");
    broken["apiVersion"] = json!("resource.k8s.io/v1");
    broken["kind"] = json!("DeviceClass");
    broken["metadata"] = json!({ "name": name });
    let apply = PatchParams::apply("e2e").force();
    device_classes
        .patch(name, &apply, &Patch::Apply(&broken))
        .await?;
    let spec = json!({
        "modelPolicy": { "allowedEndpointTypes": ["Chat"] },
        "acceleratorPolicy": {
            "allowedPlacementTypes": ["WholeDevice"],
            "deviceClassNames": [name],
        },
    });
    put_class_of(&cluster.client, "e2e-device-class", spec).await?;
    let order = Order::file(&cluster, &namespace, "order", "e2e-device-class", SMOLLM).await?;
    let message = order.refused("Planned", "PlacementUndecidable").await?;
    ensure!(
        message.contains(name),
        "the DeviceClass is not named: {message}"
    );
    ensure!(
        order.devices().await?.is_empty(),
        "a refused order holds a device"
    );

    let mended = Patch::Merge(expression("type"));
    device_classes
        .patch(name, &PatchParams::default(), &mended)
        .await?;
    order
        .until(
            "be planned once the DeviceClass is mended",
            wait::LONG,
            |order| condition(order, "Planned").is_some_and(|planned| planned.status == "True"),
        )
        .await?;
    device_classes
        .delete(name, &DeleteParams::default())
        .await?;
    cluster.delete_namespace(&namespace).await
}

#[tokio::test]
async fn an_order_waits_while_every_gpu_is_taken_and_goes_on_when_one_is_freed_a_106() -> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("full").await?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    let claims: Api<ResourceClaim> = Api::namespaced(cluster.client.clone(), &namespace);
    let mut gpus: BTreeMap<String, usize> = BTreeMap::new();
    for (node, device) in published(&cluster).await? {
        if gpu_of(&device.name) == device.name {
            *gpus.entry(node).or_default() += 1;
        }
    }
    for (node, count) in &gpus {
        let name = format!("all-of-{node}");
        let claim = serde_json::from_value(json!({
            "metadata": { "name": name },
            "spec": { "devices": { "requests": [{
                "name": "gpus",
                "exactly": { "deviceClassName": DRIVER, "count": count },
            }] } },
        }))?;
        claims.create(&PostParams::default(), &claim).await?;
        let reference = json!({ "name": "gpus", "resourceClaimName": name });
        let pod = idle_pod(&name, &reference, Some(node))?;
        pods.create(&PostParams::default(), &pod).await?;
    }
    for node in gpus.keys() {
        let what = "run with every GPU of its node";
        wait::until(&pods, &format!("all-of-{node}"), what, wait::LONG, running).await?;
    }

    let order = Order::file(&cluster, &namespace, "order", "default-llm", SMOLLM).await?;
    let message = order.refused("Planned", "ResourceClaimExhausted").await?;
    ensure!(
        message.contains("taken"),
        "it is not said that the devices are taken: {message}"
    );
    let waiting = order.api::<InferenceService>().get(&order.name).await?;
    let phase = waiting.status.and_then(|status| status.phase);
    ensure!(phase == Some(inference_api::Phase::Pending), "{phase:?}");
    ensure!(
        order.devices().await?.is_empty(),
        "a waiting order holds a device"
    );

    let freed = gpus.keys().next().context("no node has a GPU")?;
    let name = format!("all-of-{freed}");
    pods.delete(&name, &DeleteParams::default()).await?;
    wait::gone(&pods, &name, wait::LONG).await?;
    claims.delete(&name, &DeleteParams::default()).await?;
    order.ready().await?;
    let held = order.devices().await?;
    ensure!(
        held.iter().all(|(node, _)| node == freed) && held.len() == 1,
        "{held:?} where only {freed} has room"
    );
    cluster.delete_namespace(&namespace).await
}

#[tokio::test]
async fn the_list_of_a_class_decides_the_contract_and_embeddings_are_served_a_051_a_054_a_055_a_059()
-> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("contracts").await?;
    let cases = [
        (
            "chat-first",
            json!(["Chat", "Embeddings"]),
            EndpointType::Chat,
        ),
        (
            "embeddings-first",
            json!(["Embeddings", "Chat"]),
            EndpointType::Embeddings,
        ),
        (
            "embeddings-only",
            json!(["Embeddings"]),
            EndpointType::Embeddings,
        ),
    ];
    for (name, contracts, expected) in cases {
        let class = format!("e2e-{name}");
        let spec = json!({
            "modelPolicy": { "allowedEndpointTypes": contracts },
            "acceleratorPolicy": { "allowedPlacementTypes": ["WholeDevice"] },
        });
        put_class_of(&cluster.client, &class, spec).await?;
        let order = Order::file(&cluster, &namespace, name, &class, SMOLLM).await?;
        let contract = order.contract().await?;
        ensure!(contract == Some(expected), "{name} is told as {contract:?}");
        if name != "embeddings-only" {
            order.delete().await?;
            continue;
        }
        order.ready().await?;
        let paris = order.embed("Paris is the capital of France.").await?;
        let again = order.embed("Paris is the capital of France.").await?;
        let other = order.embed("The stock market fell sharply today.").await?;
        // The width of SmolLM2-135M.
        ensure!(paris.len() == 576, "a vector of {} numbers", paris.len());
        let likeness = |a: &[f64], b: &[f64]| {
            let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
            product(a, b) / (product(a, a) * product(b, b)).sqrt()
        };
        let (same, different) = (likeness(&paris, &again), likeness(&paris, &other));
        ensure!(
            same > 0.999 && different < same - 0.001,
            "the same text is {same} alike, another one {different}"
        );
    }
    cluster.delete_namespace(&namespace).await
}

#[tokio::test]
async fn a_bare_link_to_an_embeddings_model_is_served_as_chat_where_the_class_prefers_it_a_054_a_057()
-> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("bare-link").await?;
    // A repository that says in every way that it embeds.
    let (hidden, vocabulary) = (64, 1000);
    let bytes = hidden * vocabulary * 2;
    let tensors = json!({ "model.embed_tokens.weight": {
        "dtype": "BF16", "shape": [vocabulary, hidden], "data_offsets": [0, bytes],
    } });
    let files = json!({
        "README.md": { "text": "---\npipeline_tag: feature-extraction\nlibrary_name: sentence-transformers\n---\n" },
        "modules.json": { "text": json!([{ "idx": 0, "path": "", "type": "sentence_transformers.models.Transformer" }]).to_string() },
        "1_Pooling/config.json": { "text": json!({ "pooling_mode_lasttoken": true }).to_string() },
        "config.json": { "text": json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "vocab_size": vocabulary,
            "torch_dtype": "bfloat16",
        }).to_string() },
        "tokenizer.json": { "text": "{}" },
        "model.safetensors": {
            "safetensorsHeader": tensors,
            "size": bytes + 8 + tensors.to_string().len(),
        },
    });
    put_repository(&cluster, "acme/embedder", files).await?;
    for (name, contracts, expected) in [
        (
            "preferred",
            json!(["Chat", "Embeddings"]),
            EndpointType::Chat,
        ),
        ("named", json!(["Embeddings"]), EndpointType::Embeddings),
    ] {
        let class = format!("e2e-link-{name}");
        let spec = json!({ "modelPolicy": { "allowedEndpointTypes": contracts } });
        put_class_of(&cluster.client, &class, spec).await?;
        let order = Order::file(&cluster, &namespace, name, &class, "acme/embedder").await?;
        let contract = order.contract().await?;
        ensure!(contract == Some(expected), "{name} is told as {contract:?}");
        // Nobody waits for such a runtime here.
        order.delete().await?;
    }
    cluster.delete_namespace(&namespace).await
}

#[tokio::test]
async fn a_namespace_user_orders_a_model_and_reads_its_contract_but_no_class_a_001_a_090_a_093()
-> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("user").await?;
    // Binding the shipped roles is the administrator's.
    let bindings: Api<RoleBinding> = Api::namespaced(cluster.client.clone(), &namespace);
    for level in ["user", "editor"] {
        let binding = serde_json::from_value(json!({
            "metadata": { "name": level },
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": format!("d8:user-authz:ai-inference:{level}"),
            },
            "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "anna" }],
        }))?;
        bindings.create(&PostParams::default(), &binding).await?;
    }
    let anna = cluster.client_as("anna").await?;
    let orders: Api<InferenceService> = Api::namespaced(anna.clone(), &namespace);
    let order: InferenceService = serde_json::from_value(json!({
        "apiVersion": "ai.deckhouse.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": { "name": "mine" },
        "spec": {
            "inferenceServiceClassName": "default-llm",
            "model": { "src": "HuggingFace", "huggingFace": { "repository": SMOLLM } },
        },
    }))?;
    orders.create(&PostParams::default(), &order).await?;
    let told = wait::until(&orders, "mine", "tell its contract", wait::LONG, |order| {
        let model = order
            .status
            .as_ref()
            .and_then(|status| status.model.as_ref());
        model.is_some_and(|model| model.endpoint_type == Some(EndpointType::Chat))
    })
    .await?;
    ensure!(told.spec.inference_service_class_name == "default-llm");

    let refused = |what: &str, answer: Option<kube::Error>| -> Outcome {
        match answer {
            Some(kube::Error::Api(status)) if status.code == 403 => Ok(()),
            other => anyhow::bail!("{what} is not forbidden: {other:?}"),
        }
    };
    let classes: Api<InferenceServiceClass> = Api::all(anna.clone());
    refused("reading a class", classes.get("default-llm").await.err())?;
    let secrets: Api<Secret> = Api::namespaced(anna.clone(), &namespace);
    refused(
        "reading Secrets",
        secrets.list(&ListParams::default()).await.err(),
    )?;
    let phase = Patch::Merge(json!({ "status": { "phase": "Ready" } }));
    let write = orders
        .patch_status("mine", &PatchParams::default(), &phase)
        .await;
    refused("writing an order's status", write.err())?;
    let elsewhere: Api<InferenceService> = Api::namespaced(anna, "default");
    refused(
        "ordering elsewhere",
        elsewhere.create(&PostParams::default(), &order).await.err(),
    )?;

    orders.delete("mine", &DeleteParams::default()).await?;
    cluster.delete_namespace(&namespace).await
}

#[tokio::test]
async fn a_token_that_is_deleted_is_made_anew_with_the_next_copy_and_the_old_one_is_refused_a_087()
-> Outcome {
    let _gpus = GPUS.lock().await;
    let cluster = Cluster::connect().await?;
    let namespace = cluster.create_namespace("token").await?;
    let policy = json!({ "allowedPlacementTypes": ["WholeDevice"] });
    put_class(&cluster.client, "e2e-token", policy).await?;
    let order = Order::file(&cluster, &namespace, "order", "e2e-token", SMOLLM).await?;
    order.ready().await?;
    let old = order.token().await?;
    ensure!(order.status_with_token(&old).await? == "200");
    ensure!(order.status_with_token("guessed").await? == "401");
    ensure!(order.status_without_token().await? == "401");

    let secrets: Api<Secret> = order.api();
    secrets
        .delete("order-token", &DeleteParams::default())
        .await?;
    let pods: Api<Pod> = order.api();
    let uid = pods.get("order-0").await?.metadata.uid;
    pods.delete("order-0", &DeleteParams::default()).await?;
    let what = "serve with a token made anew";
    wait::until(&pods, "order-0", what, wait::MODEL, |pod| {
        pod.metadata.uid != uid && running(pod)
    })
    .await?;
    order.ready().await?;
    let new = order.token().await?;
    ensure!(new != old && order.status_with_token(&new).await? == "200");
    ensure!(
        order.status_with_token(&old).await? == "401",
        "the old token is still taken"
    );
    cluster.delete_namespace(&namespace).await
}

#[tokio::test]
async fn classes_that_contradict_themselves_are_refused_by_the_cluster_a_036_a_050_a_082_a_084()
-> Outcome {
    let cluster = Cluster::connect().await?;
    let certificates = json!({
        "mode": "CertManager",
        "certManager": { "clusterIssuerName": "letsencrypt" },
        "customCertificate": { "secretName": "llm-chat-tls" },
    });
    let cases = [
        (
            "modelPolicy.allowedEndpointTypes",
            json!({
                "modelPolicy": { "allowedEndpointTypes": [] },
            }),
        ),
        (
            "customCertificate",
            json!({
                "modelPolicy": { "allowedEndpointTypes": ["Chat"] },
                "exposurePolicy": { "type": "External", "https": certificates },
            }),
        ),
        (
            "https",
            json!({
                "modelPolicy": { "allowedEndpointTypes": ["Chat"] },
                "exposurePolicy": { "type": "ClusterLocal", "https": { "mode": "Disabled" } },
            }),
        ),
        (
            "minReplicas",
            json!({
                "modelPolicy": { "allowedEndpointTypes": ["Chat"] },
                "scalingPolicy": { "minReplicas": 3, "maxReplicas": 2 },
            }),
        ),
    ];
    for (named, spec) in cases {
        let error = put_class_of(&cluster.client, "e2e-wrong", spec).await.err();
        let error = error.with_context(|| format!("accepted in spite of {named}"))?;
        ensure!(format!("{error:#}").contains(named), "{named}: {error:#}");
    }
    Ok(())
}
