//! Rules of the class.

use anyhow::{Context, Result};
use serde_json::json;

use crate::rule::{Kind, check, rules, stored};

rules! {
    a_050_a_class_names_at_least_one_contract: Class
        accepts [{ "spec": { "modelPolicy": { "allowedEndpointTypes": ["Embeddings"] } } }]
        refuses [
            { "spec": { "modelPolicy": { "allowedEndpointTypes": [] } } }
                => "spec.modelPolicy.allowedEndpointTypes must not be empty: name at least one of Chat, Embeddings, Rerank",
            { "spec": { "modelPolicy": { "allowedEndpointTypes": null } } }
                => "spec.modelPolicy.allowedEndpointTypes: Required value",
            { "spec": { "modelPolicy": null } } => "spec.modelPolicy: Required value",
            { "spec": null } => "spec: Required value",
        ];

    a_058_there_are_three_contracts: Class
        accepts [{ "spec": { "modelPolicy": { "allowedEndpointTypes": ["Rerank", "Chat", "Embeddings"] } } }]
        refuses [{ "spec": { "modelPolicy": { "allowedEndpointTypes": ["Chat", "Speech"] } } }
            => "Unsupported value: \"Speech\": supported values: \"Chat\", \"Embeddings\", \"Rerank\""];

    a_036_a_contract_is_named_once: Class
        accepts [{ "spec": { "modelPolicy": { "allowedEndpointTypes": ["Chat", "Rerank"] } } }]
        refuses [{ "spec": { "modelPolicy": { "allowedEndpointTypes": ["Chat", "Rerank", "Chat"] } } }
            => "spec.modelPolicy.allowedEndpointTypes names a value twice: remove the repeated one"];

    a_036_min_replicas_does_not_exceed_max_replicas: Class
        accepts [
            { "spec": { "scalingPolicy": { "minReplicas": 2, "maxReplicas": 4 } } },
            { "spec": { "scalingPolicy": { "minReplicas": 3, "maxReplicas": 3 } } },
            { "spec": { "scalingPolicy": { "maxReplicas": 1 } } },
        ]
        refuses [
            { "spec": { "scalingPolicy": { "minReplicas": 3, "maxReplicas": 2 } } }
                => "spec.scalingPolicy.minReplicas must not exceed spec.scalingPolicy.maxReplicas: lower the first or raise the second",
            { "spec": { "scalingPolicy": { "minReplicas": 2 } } } => "spec.scalingPolicy.maxReplicas: Required value",
        ];

    a_036_an_order_keeps_at_least_one_copy: Class
        accepts [{ "spec": { "scalingPolicy": { "minReplicas": 1, "maxReplicas": 1000 } } }]
        refuses [
            { "spec": { "scalingPolicy": { "minReplicas": 0, "maxReplicas": 2 } } }
                => "spec.scalingPolicy.minReplicas must be 1 or more: an order keeps at least one copy",
            { "spec": { "scalingPolicy": { "minReplicas": -1, "maxReplicas": 0 } } }
                => "spec.scalingPolicy.maxReplicas must be 1 or more",
            { "spec": { "scalingPolicy": { "maxReplicas": 1001 } } } => "should be less than or equal to 1000",
        ];

    a_035_the_count_of_devices_is_that_of_one_copy: Class
        accepts [
            { "spec": { "acceleratorPolicy": { "maxAcceleratorCount": 1 } } },
            { "spec": { "acceleratorPolicy": { "maxAcceleratorCount": 64 } } },
        ]
        refuses [
            { "spec": { "acceleratorPolicy": { "maxAcceleratorCount": 0 } } }
                => "spec.acceleratorPolicy.maxAcceleratorCount must be 1 to 64: it counts the devices of one copy",
            { "spec": { "acceleratorPolicy": { "maxAcceleratorCount": 65 } } }
                => "spec.acceleratorPolicy.maxAcceleratorCount must be 1 to 64",
        ];

    a_036_sharing_modes_are_some_and_each_once: Class
        accepts [{ "spec": { "acceleratorPolicy": { "allowedSharingModes": ["Dedicated", "Shared"] } } }]
        refuses [
            { "spec": { "acceleratorPolicy": { "allowedSharingModes": [] } } }
                => "spec.acceleratorPolicy.allowedSharingModes must not be empty: name at least one of Shared, Dedicated",
            { "spec": { "acceleratorPolicy": { "allowedSharingModes": ["Shared", "Shared"] } } }
                => "spec.acceleratorPolicy.allowedSharingModes names a value twice: remove the repeated one",
            { "spec": { "acceleratorPolicy": { "allowedSharingModes": ["Exclusive"] } } }
                => "supported values: \"Shared\", \"Dedicated\"",
        ];

    a_036_placement_types_are_some_and_each_once: Class
        accepts [{ "spec": { "acceleratorPolicy": { "allowedPlacementTypes": ["Partition", "WholeDevice"] } } }]
        refuses [
            { "spec": { "acceleratorPolicy": { "allowedPlacementTypes": [] } } }
                => "spec.acceleratorPolicy.allowedPlacementTypes must not be empty: name at least one of WholeDevice, Partition",
            { "spec": { "acceleratorPolicy": { "allowedPlacementTypes": ["Partition", "Partition"] } } }
                => "spec.acceleratorPolicy.allowedPlacementTypes names a value twice: remove the repeated one",
            { "spec": { "acceleratorPolicy": { "allowedPlacementTypes": ["Mig"] } } }
                => "supported values: \"WholeDevice\", \"Partition\"",
        ];

    a_034_share_bounds_are_percentages: Class
        accepts [{ "spec": { "acceleratorPolicy": {
            "allowedSharingModes": ["Shared"], "minSharePercent": 1, "maxSharePercent": 100 } } }]
        refuses [
            { "spec": { "acceleratorPolicy": { "allowedSharingModes": ["Shared"], "minSharePercent": 0 } } }
                => "spec.acceleratorPolicy.minSharePercent must be 1 to 100: a percentage of a device",
            { "spec": { "acceleratorPolicy": { "allowedSharingModes": ["Shared"], "maxSharePercent": 101 } } }
                => "spec.acceleratorPolicy.maxSharePercent must be 1 to 100: a percentage of a device",
        ];

    a_034_the_lower_share_bound_does_not_exceed_the_upper: Class
        accepts [{ "spec": { "acceleratorPolicy": {
            "allowedSharingModes": ["Shared"], "minSharePercent": 25, "maxSharePercent": 25 } } }]
        refuses [{ "spec": { "acceleratorPolicy": {
            "allowedSharingModes": ["Shared"], "minSharePercent": 50, "maxSharePercent": 25 } } }
            => "spec.acceleratorPolicy.minSharePercent must not exceed maxSharePercent: lower the first or raise the second"];

    a_034_share_bounds_need_shared_devices: Class
        accepts [{ "spec": { "acceleratorPolicy": {
            "allowedSharingModes": ["Dedicated", "Shared"], "minSharePercent": 25 } } }]
        refuses [
            { "spec": { "acceleratorPolicy": { "allowedSharingModes": ["Dedicated"], "minSharePercent": 25 } } }
                => "spec.acceleratorPolicy.minSharePercent needs Shared in allowedSharingModes",
            { "spec": { "acceleratorPolicy": { "maxSharePercent": 25 } } }
                => "spec.acceleratorPolicy.maxSharePercent needs Shared in allowedSharingModes",
        ];

    device_classes_are_names_and_each_once: Class
        accepts [{ "spec": { "acceleratorPolicy": { "deviceClassNames": ["gpu.ai.deckhouse.io", "1g6gb"] } } }]
        refuses [
            { "spec": { "acceleratorPolicy": { "deviceClassNames": [] } } }
                => "spec.acceleratorPolicy.deviceClassNames must not be empty: name a DeviceClass, or remove the field",
            { "spec": { "acceleratorPolicy": { "deviceClassNames": ["one", "one"] } } }
                => "spec.acceleratorPolicy.deviceClassNames names a value twice",
            { "spec": { "acceleratorPolicy": { "deviceClassNames": ["GPU_80"] } } }
                => "each of spec.acceleratorPolicy.deviceClassNames must be the name of a DeviceClass",
        ];

    selectors_have_the_shape_of_a_resource_claim: Class
        accepts [{ "spec": { "acceleratorPolicy": { "selectors": [
            { "cel": { "expression": "device.driver == 'gpu.ai.deckhouse.io'" } }] } } }]
        refuses [
            { "spec": { "acceleratorPolicy": { "selectors": [] } } }
                => "spec.acceleratorPolicy.selectors must not be empty: give a selector, or remove the field",
            { "spec": { "acceleratorPolicy": { "selectors": [{}] } } } => "selectors[0].cel: Required value",
            { "spec": { "acceleratorPolicy": { "selectors": [{ "cel": { "expression": "  " } }] } } }
                => "cel.expression must not be empty",
            { "spec": { "acceleratorPolicy": { "selectors": [{ "cel": { "expression": (format!("'{}' != ''", "x".repeat(10240))) } }] } } }
                => "may not be more than 10240 bytes",
        ];

    a_032_endpoints_are_external_or_cluster_local: Class
        accepts [
            { "spec": { "exposurePolicy": { "type": "External" } } },
            { "spec": { "exposurePolicy": { "type": "ClusterLocal" } } },
        ]
        refuses [{ "spec": { "exposurePolicy": { "type": "NodePort" } } }
            => "supported values: \"External\", \"ClusterLocal\""];

    a_033_only_cluster_local_endpoints_may_do_without_a_token: Class
        accepts [
            { "spec": { "exposurePolicy": { "type": "External", "authentication": "Token" } } },
            { "spec": { "exposurePolicy": { "type": "ClusterLocal", "authentication": "None" } } },
            { "spec": { "exposurePolicy": { "authentication": "None" } } },
        ]
        refuses [
            { "spec": { "exposurePolicy": { "type": "External", "authentication": "None" } } }
                => "spec.exposurePolicy.authentication None is allowed with type ClusterLocal alone: set it to Token, or set type to ClusterLocal",
            { "spec": { "exposurePolicy": { "authentication": "Basic" } } }
                => "supported values: \"Token\", \"None\"",
        ];

    a_080_a_081_https_has_four_modes: Class
        accepts [
            { "spec": { "exposurePolicy": { "type": "External", "https": { "mode": "Disabled" } } } },
            { "spec": { "exposurePolicy": { "type": "External", "https": { "mode": "CertManager" } } } },
            { "spec": { "exposurePolicy": { "type": "External", "https": {
                "mode": "CustomCertificate", "customCertificate": { "secretName": "llm-chat-tls" } } } } },
            { "spec": { "exposurePolicy": { "type": "External", "https": { "mode": "OnlyInURI" } } } },
            // Absent: as the installation is configured.
            { "spec": { "exposurePolicy": { "type": "External" } } },
        ]
        refuses [
            { "spec": { "exposurePolicy": { "type": "External", "https": { "mode": "Enabled" } } } }
                => "supported values: \"Disabled\", \"CertManager\", \"CustomCertificate\", \"OnlyInURI\"",
            { "spec": { "exposurePolicy": { "type": "External", "https": {} } } }
                => "spec.exposurePolicy.https.mode: Required value",
        ];

    a_082_the_two_certificate_blocks_exclude_each_other: Class
        accepts [{ "spec": { "exposurePolicy": { "type": "External", "https": {
            "mode": "CertManager", "certManager": { "clusterIssuerName": "letsencrypt" } } } } }]
        refuses [{ "spec": { "exposurePolicy": { "type": "External", "https": {
            "mode": "CertManager",
            "certManager": { "clusterIssuerName": "letsencrypt" },
            "customCertificate": { "secretName": "llm-chat-tls" } } } } }
            => "spec.exposurePolicy.https.certManager and customCertificate exclude each other: keep the one that belongs to the mode"];

    a_082_a_083_a_custom_certificate_names_its_secret: Class
        accepts [{ "spec": { "exposurePolicy": { "type": "External", "https": {
            "mode": "CustomCertificate", "customCertificate": { "secretName": "llm-chat-tls" } } } } }]
        refuses [
            { "spec": { "exposurePolicy": { "type": "External", "https": { "mode": "CustomCertificate" } } } }
                => "spec.exposurePolicy.https.customCertificate is required with mode CustomCertificate: name a Secret of type kubernetes.io/tls in customCertificate.secretName",
            { "spec": { "exposurePolicy": { "type": "External", "https": {
                "mode": "CustomCertificate", "customCertificate": { "secretName": "" } } } } }
                => "spec.exposurePolicy.https.customCertificate.secretName must be the name of a Secret of type kubernetes.io/tls",
            { "spec": { "exposurePolicy": { "type": "External", "https": {
                "mode": "CustomCertificate", "customCertificate": {} } } } }
                => "spec.exposurePolicy.https.customCertificate.secretName: Required value",
        ];

    a_036_each_certificate_block_belongs_to_its_mode: Class
        accepts [{ "spec": { "exposurePolicy": { "type": "External", "https": {
            "mode": "CertManager", "certManager": {} } } } }]
        refuses [
            { "spec": { "exposurePolicy": { "type": "External", "https": {
                "mode": "Disabled", "certManager": { "clusterIssuerName": "letsencrypt" } } } } }
                => "spec.exposurePolicy.https.certManager belongs to mode CertManager alone: remove the block, or set mode to CertManager",
            { "spec": { "exposurePolicy": { "type": "External", "https": {
                "mode": "OnlyInURI", "customCertificate": { "secretName": "llm-chat-tls" } } } } }
                => "spec.exposurePolicy.https.customCertificate belongs to mode CustomCertificate alone: remove the block, or set mode to CustomCertificate",
            { "spec": { "exposurePolicy": { "type": "External", "https": {
                "mode": "CertManager", "certManager": { "clusterIssuerName": "" } } } } }
                => "spec.exposurePolicy.https.certManager.clusterIssuerName must be the name of a ClusterIssuer",
        ];

    a_084_cluster_local_endpoints_have_no_https_block: Class
        accepts [{ "spec": { "exposurePolicy": { "type": "ClusterLocal" } } }]
        refuses [
            { "spec": { "exposurePolicy": { "type": "ClusterLocal", "https": { "mode": "Disabled" } } } }
                => "spec.exposurePolicy.https must be absent with type ClusterLocal, which publishes nothing outside the cluster: remove the block, or set type to External",
            // The type's default is ClusterLocal.
            { "spec": { "exposurePolicy": { "https": { "mode": "CertManager" } } } }
                => "spec.exposurePolicy.https must be absent with type ClusterLocal",
        ];

    a_037_copies_move_by_one_of_two_strategies: Class
        accepts [
            { "spec": { "updatePolicy": { "strategy": "RollingUpdate" } } },
            { "spec": { "updatePolicy": { "strategy": "Recreate" } } },
        ]
        refuses [{ "spec": { "updatePolicy": { "strategy": "OnDelete" } } }
            => "supported values: \"RollingUpdate\", \"Recreate\""];

    a_038_allowed_namespaces_are_names_and_each_once: Class
        accepts [
            { "spec": { "admissionPolicy": { "allowedNamespaces": ["support", "analytics"] } } },
            { "spec": { "admissionPolicy": { "allowedNamespaces": [] } } },
            { "spec": { "admissionPolicy": {} } },
        ]
        refuses [
            { "spec": { "admissionPolicy": { "allowedNamespaces": ["team-*"] } } }
                => "each of spec.admissionPolicy.allowedNamespaces must be the name of a namespace (patterns are not allowed",
            { "spec": { "admissionPolicy": { "allowedNamespaces": ["support", "support"] } } }
                => "spec.admissionPolicy.allowedNamespaces[1]: Duplicate value",
        ];

    a_040_the_storage_class_of_models_is_a_name: Class
        accepts [{ "spec": { "modelStorageClassName": "fast-local.ssd" } }]
        refuses [{ "spec": { "modelStorageClassName": "" } }
            => "spec.modelStorageClassName must be the name of a StorageClass (remove the field for the cluster's default)"];

    a_class_name_fits_a_label: Class
        accepts [{ "metadata": { "name": ("n".repeat(63)) } }]
        refuses [{ "metadata": { "name": ("n".repeat(64)) } }
            => "metadata.name must have at most 63 characters, so that it fits a label"];

    an_unknown_field_of_a_class_is_refused: Class
        accepts []
        refuses [{ "spec": { "acceleratorPolicy": { "maxAcceleratorCounts": 2 } } }
            => "unknown field \"spec.acceleratorPolicy.maxAcceleratorCounts\""];
}

#[tokio::test]
async fn a_031_the_sample_of_the_guide_is_accepted_as_it_stands() -> Result<()> {
    let spec = json!({
        "exposurePolicy": {
            "type": "External",
            "authentication": "Token",
            "https": { "mode": "CertManager", "certManager": { "clusterIssuerName": "letsencrypt" } },
        },
        "admissionPolicy": { "allowedNamespaces": ["support", "analytics"] },
        "modelPolicy": { "allowedEndpointTypes": ["Chat"] },
        "scalingPolicy": { "minReplicas": 1, "maxReplicas": 4 },
        "acceleratorPolicy": {
            "allowedSharingModes": ["Shared", "Dedicated"],
            "allowedPlacementTypes": ["WholeDevice", "Partition"],
            "maxAcceleratorCount": 1,
        },
        "updatePolicy": { "strategy": "RollingUpdate" },
        "modelStorageClassName": "local-nvme",
    });
    let class = stored(Kind::Class, &json!({ "spec": spec })).await?;
    assert_eq!(class["spec"], spec, "nothing was added or taken away");
    Ok(())
}

#[tokio::test]
async fn a_055_a_class_of_one_contract_gets_the_documented_defaults_a_033_a_060_a_061() -> Result<()>
{
    let class = stored(Kind::Class, &json!({})).await?;
    // Token unless the class says otherwise; what is absent means one copy and a
    // whole accelerator, and stays absent.
    assert_eq!(
        class["spec"],
        json!({
            "exposurePolicy": { "type": "ClusterLocal", "authentication": "Token" },
            "modelPolicy": { "allowedEndpointTypes": ["Chat"] },
            "updatePolicy": { "strategy": "RollingUpdate" },
        })
    );
    let typed: inference_api::InferenceServiceClass = serde_json::from_value(class)?;
    let scaling = typed.spec.scaling();
    assert_eq!((scaling.min_replicas, scaling.max_replicas), (1, 1));
    assert_eq!(
        typed.spec.accelerators(),
        inference_api::AcceleratorPolicy::default()
    );
    Ok(())
}

#[tokio::test]
async fn a_061_an_empty_accelerator_policy_means_what_an_absent_one_means() -> Result<()> {
    let change = json!({ "spec": { "acceleratorPolicy": {} } });
    let class: inference_api::InferenceServiceClass =
        serde_json::from_value(stored(Kind::Class, &change).await?)?;
    assert_eq!(
        class.spec.accelerator_policy,
        Some(inference_api::AcceleratorPolicy::default())
    );
    Ok(())
}

#[tokio::test]
async fn a_051_the_order_of_contracts_is_kept() -> Result<()> {
    let contracts = json!(["Rerank", "Chat", "Embeddings"]);
    let change = json!({ "spec": { "modelPolicy": { "allowedEndpointTypes": contracts } } });
    let class = stored(Kind::Class, &change).await?;
    assert_eq!(
        class["spec"]["modelPolicy"]["allowedEndpointTypes"],
        contracts
    );
    Ok(())
}

#[tokio::test]
async fn a_038_an_empty_list_of_namespaces_is_not_an_absent_one() -> Result<()> {
    let change = json!({ "spec": { "admissionPolicy": { "allowedNamespaces": [] } } });
    let none: inference_api::InferenceServiceClass =
        serde_json::from_value(stored(Kind::Class, &change).await?)?;
    assert!(!none.spec.admits("support"));
    let every: inference_api::InferenceServiceClass =
        serde_json::from_value(stored(Kind::Class, &json!({})).await?)?;
    assert!(every.spec.admits("support"));
    Ok(())
}

#[tokio::test]
async fn a_070_a_071_the_built_in_class_is_accepted_as_shipped() -> Result<()> {
    let plane = e2e::control_plane::ControlPlane::shared()?;
    let applied = plane
        .apply_yaml("default", inference_api::DEFAULT_CLASS_YAML)
        .await?;
    let [class] = applied.as_slice() else {
        anyhow::bail!("one object, not {}", applied.len());
    };
    let shipped = serde_json::to_value(inference_api::default_class()?.spec)?;
    assert_eq!(
        class.data["spec"], shipped,
        "the shipped text holds every default"
    );
    assert_eq!(
        shipped,
        json!({
            "exposurePolicy": { "type": "External", "authentication": "Token" },
            "modelPolicy": { "allowedEndpointTypes": ["Chat", "Embeddings", "Rerank"] },
            "scalingPolicy": { "minReplicas": 1, "maxReplicas": 2 },
            "acceleratorPolicy": {
                "allowedSharingModes": ["Shared", "Dedicated"],
                "allowedPlacementTypes": ["WholeDevice", "Partition"],
                "maxAcceleratorCount": 1,
            },
            "updatePolicy": { "strategy": "RollingUpdate" },
        })
    );
    Ok(())
}

#[tokio::test]
async fn a_030_a_class_lies_in_no_namespace_and_an_order_repeats_none_of_its_fields() -> Result<()>
{
    let [order, class] = ["inferenceservices", "inferenceserviceclasses"].map(|plural| {
        let mut found = inference_api::crds()
            .into_iter()
            .filter(|crd| crd.spec.names.plural == plural);
        found.next()
    });
    let (order, class) = (
        order.context("no kind of orders")?,
        class.context("no kind of classes")?,
    );
    assert_eq!(
        (order.spec.scope.as_str(), class.spec.scope.as_str()),
        ("Namespaced", "Cluster")
    );
    // Whatever a class decides, with the class's own words for it: an order has no such field.
    let schema = serde_json::to_value(&class.spec.versions[0].schema)?;
    let spec = &schema["openAPIV3Schema"]["properties"]["spec"]["properties"];
    let fields: Vec<&String> = spec
        .as_object()
        .context("a class has no fields")?
        .keys()
        .collect();
    assert!(fields.len() >= 6, "{fields:?}");
    for field in fields {
        let words = format!("unknown field \"spec.{field}\"");
        let change = json!({ "spec": { field: {} } });
        check(Kind::Order, &[], &[(change, &words)]).await?;
    }
    Ok(())
}
