//! Prepare and unprepare on fake hardware.

use node_plugin::claims::ClaimError;
use node_plugin::claims::checkpoint::PreparedDevice;
use serde_json::json;

use crate::node::TestNode;

fn names(devices: &[PreparedDevice]) -> Vec<&str> {
    devices
        .iter()
        .map(|device| device.device.as_str())
        .collect()
}

#[tokio::test]
async fn a_partition_is_created_named_in_cdi_and_destroyed() {
    let node = TestNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let device = node.device(2, "1g10gb-6");
    let claim = node.claim("order-0", "uid-1", &[&device]);

    let prepared = plugin.prepare(claim.clone()).await.unwrap();
    assert_eq!(names(&prepared), [device.as_str()]);
    let ids = [
        format!("gpu.ai.deckhouse.io/claim=uid-1-{device}"),
        "gpu.ai.deckhouse.io/claim=uid-1-metadata-gpu".to_owned(),
    ];
    assert_eq!(prepared[0].cdi_device_ids, ids);
    assert_eq!(node.instances(), 1);

    let spec = node.cdi("uid-1").unwrap();
    assert_eq!(spec.kind, "gpu.ai.deckhouse.io/claim");
    assert_eq!(spec.devices[0].name, format!("uid-1-{device}"));
    assert_eq!(
        spec.container_edits.env,
        [
            "NVIDIA_VISIBLE_DEVICES=void".to_owned(),
            format!("GPU_AI_DECKHOUSE_IO_DEVICES={device}")
        ]
    );
    let edits = &spec.devices[0].container_edits;
    assert_eq!(
        edits.env,
        [format!("GPU_AI_DECKHOUSE_IO_CLAIM_uid_1_GPU={device}")]
    );
    let paths: Vec<&str> = edits.device_nodes.iter().map(|n| n.path.as_str()).collect();
    assert_eq!(paths.len(), 3);
    assert_eq!(paths[0], "/dev/nvidia2");
    assert!(paths[1].starts_with("/dev/nvidia-caps/nvidia-cap"));
    for at in edits
        .device_nodes
        .iter()
        .chain(&spec.container_edits.device_nodes)
    {
        assert!(std::path::Path::new(at.host_path.as_ref().unwrap()).exists());
    }

    plugin.unprepare(claim).await.unwrap();
    assert_eq!(node.instances(), 0);
    assert_eq!(node.cdi_files(), Vec::<String>::new());
}

#[tokio::test]
async fn preparing_again_also_after_a_restart_gives_the_same_answer_and_creates_nothing() {
    let node = TestNode::new("h100-80gb-8");
    let (part, whole) = (node.device(0, "2g20gb-4"), node.device(1, ""));
    let claim = node.claim("order-0", "uid-1", &[&part, &whole]);
    let plugin = node.plugin();
    let first = plugin.prepare(claim.clone()).await.unwrap();
    assert_eq!(plugin.prepare(claim.clone()).await.unwrap(), first);
    assert_eq!(node.plugin().prepare(claim).await.unwrap(), first);
    assert_eq!(node.instances(), 1);
}

#[tokio::test]
async fn unpreparing_an_unknown_claim_succeeds_and_removes_a_stray_cdi_file() {
    let node = TestNode::new("t4-1");
    let plugin = node.plugin();
    let claim = node.claim("order-0", "uid-1", &[]);
    std::fs::write(node.path("cdi/gpu.ai.deckhouse.io-claim_uid-1.json"), "{}").unwrap();
    plugin.unprepare(claim.clone()).await.unwrap();
    plugin.unprepare(claim).await.unwrap();
    assert_eq!(node.cdi_files(), Vec::<String>::new());
}

#[tokio::test]
async fn claims_that_are_gone_replaced_or_not_allocated_are_refused_by_name() {
    let node = TestNode::new("t4-1");
    let plugin = node.plugin();
    let mut claim = node.claim("order-0", "uid-2", &[&node.device(0, "")]);
    claim.uid = "uid-1".to_owned();
    let error = plugin.prepare(claim.clone()).await.unwrap_err().to_string();
    assert!(
        error.contains("team/order-0") && error.contains("uid-2"),
        "{error}"
    );

    node.delete_claim("order-0");
    let error = plugin.prepare(claim).await.unwrap_err().to_string();
    assert!(error.contains("does not exist"), "{error}");
}

#[tokio::test]
async fn hardware_that_a_live_claim_holds_is_refused_and_the_holder_is_untouched() {
    let node = TestNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let holder = node.claim("holder", "uid-1", &[&node.device(0, "3g40gb-4")]);
    let before = plugin.prepare(holder.clone()).await.unwrap();
    for (name, device) in [
        ("same", node.device(0, "3g40gb-4")),
        ("inside", node.device(0, "1g10gb-6")),
        ("around", node.device(0, "7g80gb-0")),
        ("whole", node.device(0, "")),
    ] {
        let claim = node.claim(name, &format!("uid-{name}"), &[&device]);
        let error = plugin.prepare(claim.clone()).await.unwrap_err().to_string();
        assert!(
            error.contains("team/holder") && error.contains(&device),
            "{error}"
        );
        plugin.unprepare(claim).await.unwrap();
    }
    let beside = node.claim("beside", "uid-beside", &[&node.device(0, "4g40gb-0")]);
    plugin.prepare(beside).await.unwrap();
    assert_eq!(plugin.prepare(holder).await.unwrap(), before);
    assert_eq!(node.instances(), 2);
}

#[tokio::test]
async fn a_whole_device_is_refused_while_its_partition_is_held_and_taken_after() {
    let node = TestNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let part = node.claim("part", "uid-1", &[&node.device(0, "1g10gb-0")]);
    let whole = node.claim("whole", "uid-2", &[&node.device(0, "")]);
    plugin.prepare(part.clone()).await.unwrap();
    plugin.prepare(whole.clone()).await.unwrap_err();
    plugin.unprepare(part.clone()).await.unwrap();
    plugin.prepare(whole).await.unwrap();
    assert!(matches!(
        node.inventory().gpus[0].mig,
        gpu::MigMode::Disabled { .. }
    ));
    plugin.prepare(part).await.unwrap_err();
}

#[tokio::test]
async fn malformed_configuration_names_claim_request_and_field() {
    let node = TestNode::new("t4-1");
    let plugin = node.plugin();
    let config = |parameters| {
        json!([
            {"source": "FromClass", "opaque": {"driver": "gpu.nvidia.com", "parameters": {"x": 1}}},
            {"source": "FromClaim", "requests": ["gpu"],
             "opaque": {"driver": "gpu.ai.deckhouse.io", "parameters": parameters}},
        ])
    };
    let device = node.device(0, "");
    let known = json!({"apiVersion": "gpu.ai.deckhouse.io/v1alpha1", "kind": "GpuConfig"});
    let claim = node.claim_with("good", "uid-1", &[&device], &config(known.clone()));
    plugin.prepare(claim.clone()).await.unwrap();
    plugin.unprepare(claim).await.unwrap();

    let mut unknown = known;
    unknown["sharing"] = json!({"strategy": "MPS"});
    let claim = node.claim_with("bad", "uid-2", &[&device], &config(unknown));
    let error = plugin.prepare(claim).await.unwrap_err().to_string();
    for part in ["team/bad", "request gpu", "`sharing`", "FromClaim"] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[tokio::test]
async fn a_device_that_is_not_there_and_a_missing_device_node_are_named_and_not_remembered() {
    let node = TestNode::new("t4-1");
    let plugin = node.plugin();
    let error = plugin
        .prepare(node.claim("odd", "uid-1", &["gpu-0000-ff-00-0"]))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("0000:ff:00.0"), "{error}");

    let claim = node.claim("order-0", "uid-2", &[&node.device(0, "")]);
    let device_node = node.path("driver/dev/nvidia0");
    std::fs::remove_file(&device_node).unwrap();
    let error = plugin.prepare(claim.clone()).await.unwrap_err().to_string();
    assert!(error.contains("dev/nvidia0"), "{error}");
    assert_eq!(node.cdi_files(), Vec::<String>::new());
    std::fs::write(&device_node, "").unwrap();
    plugin.prepare(claim).await.unwrap();
}

#[tokio::test]
async fn after_a_reboot_a_claim_gets_its_instance_and_cdi_file_back() {
    let node = TestNode::new("h100-80gb-8");
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "1g10gb-6")]);
    let before = node.plugin().prepare(claim.clone()).await.unwrap();
    node.reboot();
    assert_eq!(node.instances(), 0);

    let plugin = node.plugin();
    plugin.reconcile(Some(node.loaded())).await;
    let after = plugin.prepare(claim).await.unwrap();
    assert_eq!(names(&after), names(&before));
    assert_eq!(after[0].cdi_device_ids, before[0].cdi_device_ids);
    assert_eq!(node.instances(), 1);
    assert!(node.cdi("uid-1").is_some());
}

#[tokio::test]
async fn a_claim_from_before_a_reboot_does_not_block_its_device() {
    let node = TestNode::new("h100-80gb-8");
    let device = node.device(0, "1g10gb-6");
    let old = node.claim("old", "uid-1", &[&device]);
    node.plugin().prepare(old.clone()).await.unwrap();
    node.reboot();

    let plugin = node.plugin();
    let new = node.claim("new", "uid-2", &[&device]);
    plugin.prepare(new).await.unwrap();
    let error = plugin.prepare(old).await.unwrap_err().to_string();
    assert!(error.contains("team/new"), "{error}");
}

#[tokio::test]
async fn an_administrators_instance_is_used_and_never_destroyed() {
    let node = TestNode::new("h100-80gb-8");
    node.make_instance("1g.10gb", 3);

    let plugin = node.plugin();
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "1g10gb-3")]);
    plugin.prepare(claim.clone()).await.unwrap();
    let (_, statics) = plugin.inventory(node.hardware()).await.unwrap();
    assert_eq!(statics.len(), 1);
    plugin.unprepare(claim).await.unwrap();
    assert_eq!(node.instances(), 1);

    let over = node.claim("over", "uid-2", &[&node.device(0, "4g40gb-0")]);
    let error = plugin.prepare(over).await.unwrap_err().to_string();
    assert!(error.contains("no claim created"), "{error}");
    assert_eq!(node.instances(), 1);
}

#[tokio::test]
async fn our_own_instances_are_not_taken_for_an_administrators() {
    let node = TestNode::new("h100-80gb-8");
    let plugin = node.plugin();
    plugin
        .prepare(node.claim("a", "uid-1", &[&node.device(0, "1g10gb-6")]))
        .await
        .unwrap();
    let (inventory, statics) = plugin.inventory(node.hardware()).await.unwrap();
    assert_eq!(inventory.gpus[0].instances.len(), 1);
    assert!(statics.is_empty());
}

#[tokio::test]
async fn claims_that_the_kubelet_forgot_are_collected_and_living_ones_stay() {
    let node = TestNode::new("h100-80gb-8");
    let plugin = node.plugin();
    for (name, uid, at) in [
        ("gone", "uid-1", "1g10gb-6"),
        ("replaced", "uid-2", "1g10gb-5"),
    ] {
        plugin
            .prepare(node.claim(name, uid, &[&node.device(0, at)]))
            .await
            .unwrap();
    }
    let alive = node.claim("alive", "uid-3", &[&node.device(0, "1g10gb-4")]);
    plugin.prepare(alive).await.unwrap();
    node.delete_claim("gone");
    node.claim("replaced", "uid-4", &[]);

    assert_eq!(plugin.collect_garbage().await, 2);
    assert_eq!(node.instances(), 1);
    assert_eq!(node.cdi_files(), ["gpu.ai.deckhouse.io-claim_uid-3.json"]);
}

#[tokio::test]
async fn a_corrupt_checkpoint_is_put_aside_and_the_others_go_on() {
    let node = TestNode::new("t4-1");
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "")]);
    node.plugin().prepare(claim.clone()).await.unwrap();
    let broken = node.path("plugin/claims/uid-0.json");
    std::fs::write(&broken, "{\"version\":1,\"sha256\":\"\"}\nnonsense").unwrap();
    std::fs::remove_dir_all(node.path("cdi")).unwrap();

    let plugin = node.plugin();
    let reports = plugin.reconcile(Some(node.loaded())).await;
    assert_eq!(reports.len(), 1);
    assert!(reports[0].text.contains("uid-0.json"), "{reports:?}");
    assert!(!broken.exists() && node.path("plugin/claims/uid-0.json.corrupt").exists());
    assert!(
        node.cdi("uid-1").is_some(),
        "the CDI file of the good claim was restored"
    );
}

#[tokio::test]
async fn without_nvml_prepare_says_so_and_whole_devices_can_still_be_given_back() {
    let node = TestNode::new("t4-1");
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "")]);
    node.plugin().prepare(claim.clone()).await.unwrap();

    let (_sender, none) = tokio::sync::watch::channel(None);
    let plugin = node_plugin::claims::Claims::open(
        node.settings(),
        node.claims.clone(),
        none,
        std::sync::Arc::new(|_| ()),
    )
    .unwrap();
    let error = plugin.prepare(claim.clone()).await.unwrap_err().to_string();
    assert!(error.contains("NVML is not loaded"), "{error}");
    plugin.unprepare(claim).await.unwrap();
    assert_eq!(node.cdi_files(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_claims_at_once_and_from_two_instances_all_get_their_own_partition() {
    let node = TestNode::new("h100-80gb-8");
    let instances = [node.plugin(), node.plugin()];
    let mut tasks = Vec::new();
    for gpu in 0..8 {
        for start in 0..7 {
            let (name, uid) = (format!("claim-{gpu}-{start}"), format!("uid-{gpu}-{start}"));
            let claim = node.claim(
                &name,
                &uid,
                &[&node.device(gpu, &format!("1g10gb-{start}"))],
            );
            // The kubelet may ask again while the first attempt still runs.
            for plugin in &instances {
                let (plugin, claim) = (plugin.clone(), claim.clone());
                tasks.push(tokio::spawn(async move {
                    loop {
                        match plugin.prepare(claim.clone()).await {
                            // A machine may be that busy; the kubelet calls again.
                            Err(ClaimError::Slow { .. }) => {}
                            answer => return answer,
                        }
                    }
                }));
            }
        }
    }
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(node.instances(), 56);
    assert_eq!(node.cdi_files().len(), 56);
}
