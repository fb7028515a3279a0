//! A copy's pod: an init container that brings the model, the runtime, and a small
//! container whose readiness says that the runtime serves the model by its name.

use super::service::runtime_port;
use super::{
    CLAIM, CLASS_TERMS, CONTEXT_TOKENS, DATA, FETCH_CONTAINER, Input, MODELS, ORDER_GENERATION,
    PROGRESS_PORT, RUNTIME_CONTAINER, RUNTIME_PORT, SEQUENCES, STORAGE, VERIFY_CONTAINER,
    VERIFY_PORT, bytes, labels,
};
use crate::fetch::{FetchSpec, short};
use crate::recipe::{Limits, OnlyWith, Placeholder, Values, expand, memory};
use inference_api::names::{HUGGING_FACE_TOKEN_KEYS, RELEASE_LABEL, TOKEN_KEY};
use inference_api::{InferenceService, TokenSecretReference};
use k8s_openapi::api::core::v1::{
    Affinity, Capabilities, Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EnvVarSource,
    HTTPGetAction, LocalObjectReference, NodeAffinity, NodeSelectorRequirement, NodeSelectorTerm,
    PodResourceClaim, PodSecurityContext, PodSpec, PodTemplateSpec, PreferredSchedulingTerm, Probe,
    ResourceClaim, ResourceRequirements, SeccompProfile, SecretKeySelector, SecurityContext,
    Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use planner::{Plan, SharingMode};
use std::collections::BTreeSet;

/// User and group of every container; also the volume's group.
const NONROOT: i64 = 65532;

/// Name of the model in requests: the order's own, which is what its user knows.
pub fn served_name(order: &InferenceService) -> String {
    order.name_any()
}

pub(super) fn template(input: &Input<'_>, claim_template: &str) -> PodTemplateSpec {
    let order = input.order.name_any();
    let mut pod_labels = labels(&order);
    pod_labels.insert(RELEASE_LABEL.to_owned(), input.recipe.release.clone());
    let generation = input.order.metadata.generation.unwrap_or_default();
    let limits = Limits::of(input.recipe, input.facts);
    let annotations = [
        (ORDER_GENERATION.to_owned(), generation.to_string()),
        (CLASS_TERMS.to_owned(), input.class_terms.to_owned()),
        (CONTEXT_TOKENS.to_owned(), limits.context.to_string()),
        (SEQUENCES.to_owned(), limits.sequences.to_string()),
        (
            "kubectl.kubernetes.io/default-container".to_owned(),
            RUNTIME_CONTAINER.to_owned(),
        ),
    ];
    let secrets: Vec<LocalObjectReference> = input
        .installation
        .image_pull_secrets
        .iter()
        .map(|name| LocalObjectReference { name: name.clone() })
        .collect();
    PodTemplateSpec {
        metadata: Some(ObjectMeta {
            labels: Some(pod_labels),
            annotations: Some(annotations.into()),
            ..ObjectMeta::default()
        }),
        spec: Some(PodSpec {
            automount_service_account_token: Some(false),
            // Variables of Services would be taken for the runtime's own settings.
            enable_service_links: Some(false),
            termination_grace_period_seconds: Some(input.recipe.grace_period_seconds),
            security_context: Some(PodSecurityContext {
                run_as_non_root: Some(true),
                run_as_user: Some(NONROOT),
                run_as_group: Some(NONROOT),
                fs_group: Some(NONROOT),
                // A large volume is not walked at every start.
                fs_group_change_policy: Some("OnRootMismatch".to_owned()),
                seccomp_profile: Some(SeccompProfile {
                    type_: "RuntimeDefault".to_owned(),
                    localhost_profile: None,
                }),
                ..PodSecurityContext::default()
            }),
            image_pull_secrets: (!secrets.is_empty()).then_some(secrets),
            affinity: planned_nodes(input.plan),
            resource_claims: Some(vec![PodResourceClaim {
                name: CLAIM.to_owned(),
                resource_claim_template_name: Some(claim_template.to_owned()),
                ..PodResourceClaim::default()
            }]),
            init_containers: Some(vec![fetch(input)]),
            containers: vec![runtime(input), verify(input)],
            volumes: Some(vec![
                memory_volume(
                    "shm",
                    Some("Memory"),
                    Some(input.recipe.resources.shared_memory.0),
                ),
                memory_volume("tmp", None, None),
            ]),
            ..PodSpec::default()
        }),
    }
}

/// A preference for the nodes on which the plan strands least, the first one
/// most. The scheduler spreads pods over nodes otherwise, and so breaks up a
/// GPU on each. It is no more than a preference: the scheduler still decides,
/// and the number of copies does not enter, so scaling changes no template
///
fn planned_nodes(plan: &Plan) -> Option<Affinity> {
    let mut terms: Vec<PreferredSchedulingTerm> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut weight = 100;
    for placement in &plan.placements {
        if weight == 0 || !seen.insert(&placement.node) {
            continue;
        }
        terms.push(PreferredSchedulingTerm {
            weight,
            preference: NodeSelectorTerm {
                match_fields: Some(vec![NodeSelectorRequirement {
                    key: "metadata.name".to_owned(),
                    operator: "In".to_owned(),
                    values: Some(vec![placement.node.clone()]),
                }]),
                match_expressions: None,
            },
        });
        weight /= 2;
    }
    (!terms.is_empty()).then(|| Affinity {
        node_affinity: Some(NodeAffinity {
            preferred_during_scheduling_ignored_during_execution: Some(terms),
            required_during_scheduling_ignored_during_execution: None,
        }),
        ..Affinity::default()
    })
}

fn memory_volume(name: &str, medium: Option<&str>, limit: Option<u64>) -> Volume {
    Volume {
        name: name.to_owned(),
        empty_dir: Some(EmptyDirVolumeSource {
            medium: medium.map(str::to_owned),
            size_limit: limit.map(bytes),
            ..EmptyDirVolumeSource::default()
        }),
        ..Volume::default()
    }
}

fn mount(name: &str, path: &str) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        ..VolumeMount::default()
    }
}

fn closed() -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        read_only_root_filesystem: Some(true),
        capabilities: Some(Capabilities {
            drop: Some(vec!["ALL".to_owned()]),
            add: None,
        }),
        ..SecurityContext::default()
    }
}

fn plain(name: &str, value: impl Into<String>) -> EnvVar {
    EnvVar {
        name: name.to_owned(),
        value: Some(value.into()),
        value_from: None,
    }
}

/// A text that others chose, for an argument or a variable: the kubelet would put
/// variables, and so the endpoint's token, in the place of `$(NAME)`.
fn literal(text: &str) -> String {
    text.replace('$', "$$")
}

fn secret(name: &str, secret: &str, key: &str, optional: bool) -> EnvVar {
    EnvVar {
        name: name.to_owned(),
        value: None,
        value_from: Some(EnvVarSource {
            secret_key_ref: Some(SecretKeySelector {
                name: secret.to_owned(),
                key: key.to_owned(),
                optional: optional.then_some(true),
            }),
            ..EnvVarSource::default()
        }),
    }
}

/// Variables that carry the hub's token, in order of preference. With no key
/// named, the first key that the Secret has counts.
pub const TOKEN_VARIABLES: [&str; 3] = [
    "AI_INFERENCE_HUB_TOKEN",
    "AI_INFERENCE_HUB_TOKEN_2",
    "AI_INFERENCE_HUB_TOKEN_3",
];

fn token_variables(reference: &TokenSecretReference) -> Vec<EnvVar> {
    match &reference.key {
        Some(key) => vec![secret(TOKEN_VARIABLES[0], &reference.name, key, false)],
        None => TOKEN_VARIABLES
            .iter()
            .zip(HUGGING_FACE_TOKEN_KEYS)
            .map(|(variable, key)| secret(variable, &reference.name, key, true))
            .collect(),
    }
}

fn fetch(input: &Input<'_>) -> Container {
    let spec = FetchSpec {
        endpoint: input.installation.hub_endpoint.clone(),
        repository: input.facts.request.repository.clone(),
        commit: input.facts.commit.clone(),
        files: input.facts.files.clone(),
    };
    // A specification is plain data; it always serializes.
    let json = serde_json::to_string(&spec).unwrap_or_default();
    let mut env = vec![
        plain("AI_INFERENCE_FETCH_SPEC", literal(&json)),
        plain("AI_INFERENCE_FETCH_TARGET", MODELS),
    ];
    let source = input.order.spec.model.hugging_face.as_ref();
    if let Some(reference) = source.and_then(|s| s.token_secret_ref.as_ref()) {
        env.extend(token_variables(reference));
    }
    Container {
        name: FETCH_CONTAINER.to_owned(),
        image: Some(input.installation.fetch_image.clone()),
        image_pull_policy: input.installation.image_pull_policy.clone(),
        args: Some(vec!["fetch".to_owned()]),
        env: Some(env),
        ports: Some(vec![ContainerPort {
            name: Some("progress".to_owned()),
            container_port: PROGRESS_PORT,
            protocol: Some("TCP".to_owned()),
            ..ContainerPort::default()
        }]),
        resources: Some(ResourceRequirements {
            requests: Some(
                [
                    ("cpu".to_owned(), Quantity("100m".to_owned())),
                    ("memory".to_owned(), bytes(128 << 20)),
                ]
                .into(),
            ),
            limits: Some([("memory".to_owned(), bytes(256 << 20))].into()),
            claims: None,
        }),
        security_context: Some(closed()),
        volume_mounts: Some(vec![mount(STORAGE, DATA)]),
        ..Container::default()
    }
}

fn runtime(input: &Input<'_>) -> Container {
    let recipe = input.recipe;
    let mut env: Vec<EnvVar> = recipe
        .environment
        .iter()
        .map(|(k, v)| plain(k, v))
        .collect();
    if input.token {
        let name = InferenceService::token_secret_name(&input.order.name_any());
        env.push(secret(&recipe.api_key_variable, &name, TOKEN_KEY, false));
    }
    let memory = bytes(memory::container(recipe, input.facts));
    // A GiB of weights gets ten seconds more than the ten minutes of every start.
    let budget = 600 + 10 * (input.facts.weights_bytes >> 30);
    let startup_failures = i32::try_from(budget / 5).unwrap_or(i32::MAX);
    Container {
        name: RUNTIME_CONTAINER.to_owned(),
        image: Some(recipe.image.clone()),
        image_pull_policy: input.installation.image_pull_policy.clone(),
        command: (!recipe.command.is_empty()).then(|| recipe.command.clone()),
        args: Some(arguments(input)),
        env: Some(env),
        ports: Some(vec![ContainerPort {
            name: Some("http".to_owned()),
            container_port: RUNTIME_PORT,
            protocol: Some("TCP".to_owned()),
            ..ContainerPort::default()
        }]),
        resources: Some(ResourceRequirements {
            requests: Some(
                [
                    ("cpu".to_owned(), Quantity(recipe.resources.cpu.clone())),
                    ("memory".to_owned(), memory.clone()),
                ]
                .into(),
            ),
            limits: Some([("memory".to_owned(), memory)].into()),
            claims: Some(vec![ResourceClaim {
                name: CLAIM.to_owned(),
                request: None,
            }]),
        }),
        startup_probe: Some(probe(
            &recipe.probes.startup,
            runtime_port(),
            5,
            startup_failures,
        )),
        readiness_probe: Some(probe(&recipe.probes.readiness, runtime_port(), 5, 3)),
        liveness_probe: Some(probe(&recipe.probes.liveness, runtime_port(), 10, 6)),
        security_context: Some(closed()),
        // A runtime that dies says why in its last lines.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(vec![
            mount(STORAGE, DATA),
            mount("shm", "/dev/shm"),
            mount("tmp", "/tmp"),
        ]),
        ..Container::default()
    }
}

/// Says that the runtime serves the model by its name: a kubelet's probe reads no answer,
/// and the token in its headers would stand in the pod's specification.
fn verify(input: &Input<'_>) -> Container {
    let models = &input.recipe.probes.models;
    let mut env = vec![
        plain(
            "AI_INFERENCE_SERVED_NAME",
            literal(&served_name(input.order)),
        ),
        plain(
            "AI_INFERENCE_MODELS_URL",
            literal(&format!("http://127.0.0.1:{RUNTIME_PORT}{models}")),
        ),
    ];
    if input.token {
        let name = InferenceService::token_secret_name(&input.order.name_any());
        env.push(secret(
            "AI_INFERENCE_ENDPOINT_TOKEN",
            &name,
            TOKEN_KEY,
            false,
        ));
    }
    Container {
        name: VERIFY_CONTAINER.to_owned(),
        image: Some(input.installation.fetch_image.clone()),
        image_pull_policy: input.installation.image_pull_policy.clone(),
        args: Some(vec!["verify".to_owned()]),
        env: Some(env),
        ports: Some(vec![ContainerPort {
            name: Some("verify".to_owned()),
            container_port: VERIFY_PORT,
            protocol: Some("TCP".to_owned()),
            ..ContainerPort::default()
        }]),
        resources: Some(ResourceRequirements {
            requests: Some(
                [
                    ("cpu".to_owned(), Quantity("5m".to_owned())),
                    ("memory".to_owned(), bytes(16 << 20)),
                ]
                .into(),
            ),
            limits: Some([("memory".to_owned(), bytes(64 << 20))].into()),
            claims: None,
        }),
        readiness_probe: Some(probe("/ready", IntOrString::Int(VERIFY_PORT), 5, 3)),
        security_context: Some(closed()),
        ..Container::default()
    }
}

fn probe(path: &str, port: IntOrString, period: i32, failures: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port,
            scheme: Some("HTTP".to_owned()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(period),
        timeout_seconds: Some(5),
        failure_threshold: Some(failures),
        ..Probe::default()
    }
}

/// The granted part of a device's memory, rounded down to four places: a runtime that
/// takes a little less than its share starts, one that takes more does not.
fn memory_fraction(plan: &Plan) -> String {
    let whole = u128::from(plan.device_memory_bytes.max(1));
    let parts = (u128::from(plan.memory_bytes) * 10_000 / whole).clamp(1, 10_000);
    format!("{}.{:04}", parts / 10_000, parts % 10_000)
}

fn arguments(input: &Input<'_>) -> Vec<String> {
    let (recipe, facts) = (input.recipe, input.facts);
    let devices = input.plan.devices_per_replica;
    let context = memory::context_length(recipe, facts);
    let folder = format!("{MODELS}/{}", short(&facts.commit));
    let mut values: Values = [
        (Placeholder::ServedName, served_name(input.order)),
        (Placeholder::Port, RUNTIME_PORT.to_string()),
        (Placeholder::ContextLength, context.to_string()),
        (
            Placeholder::TotalContext,
            context
                .saturating_mul(u64::from(recipe.sequences))
                .to_string(),
        ),
        (Placeholder::Sequences, recipe.sequences.to_string()),
        (Placeholder::BatchTokens, recipe.batch_tokens.to_string()),
        (Placeholder::Devices, devices.to_string()),
        (
            Placeholder::KvCacheBytes,
            memory::granted_cache(recipe, facts, devices, input.plan.memory_bytes).to_string(),
        ),
        (Placeholder::MemoryFraction, memory_fraction(input.plan)),
    ]
    .into();
    if let Some(file) = &facts.entry_file {
        values.insert(
            Placeholder::ModelFile,
            format!("{folder}/{}", literal(file)),
        );
    }
    values.insert(Placeholder::ModelFolder, folder);
    let cached = !facts.kv.groups.is_empty();
    recipe
        .arguments
        .iter()
        .filter(|a| {
            a.contracts
                .as_ref()
                .is_none_or(|c| c.contains(&input.contract))
        })
        .filter(|a| match a.only_with {
            None => true,
            Some(OnlyWith::KvCache) => cached,
            Some(OnlyWith::Share) => input.plan.sharing_mode == SharingMode::Shared,
        })
        .flat_map(|a| a.args.iter().filter_map(|word| expand(word, &values)))
        .collect()
}
