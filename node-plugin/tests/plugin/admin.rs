//! Administrative access: it sees every device and changes nothing.

use std::sync::Arc;

use node_plugin::claims::hardware::Hardware;
use node_plugin::claims::{Claims, Loaded};
use serde_json::json;
use tokio::sync::watch;

use crate::node::TestNode;

#[tokio::test]
async fn a_lost_gpu_can_be_looked_at_and_not_used() {
    let node = TestNode::new("a30-2");
    let hardware = node.hardware();
    let inventory = hardware.inventory().unwrap();
    let loaded = Loaded {
        hardware: hardware.clone(),
        driver_version: inventory.driver_version.clone(),
    };
    let (_sender, receiver) = watch::channel(Some(loaded.clone()));
    let hook = Arc::new(|_| ());
    let plugin = Claims::open(node.settings(), node.claims.clone(), receiver, hook).unwrap();

    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let gpus = json!({&inventory.gpus[1].uuid: {"mig": true, "migPending": true, "lost": true}});
    let state = json!({"bootId": boot.trim(), "gpus": gpus});
    std::fs::write(node.path("driver/state.json"), state.to_string()).unwrap();
    assert_eq!(hardware.inventory().unwrap().gpus.len(), 1);

    let device = node.device_of(&inventory.gpus[1], "");
    let part = node.device_of(&inventory.gpus[1], "1g6gb-3");
    let user = node.claim("user", "uid-1", &[&device]);
    plugin.prepare(user).await.unwrap_err();
    let admin = node.admin_claim("admin", "uid-2", &[&device, &part]);
    let prepared = plugin.prepare(admin.clone()).await.unwrap();
    let spec = node.cdi("uid-2").unwrap();
    let minor = inventory.gpus[1].minor;
    for device in &spec.devices[..2] {
        let nodes: Vec<&str> = device
            .container_edits
            .device_nodes
            .iter()
            .map(|n| n.path.as_str())
            .collect();
        assert_eq!(nodes, [format!("/dev/nvidia{minor}")]);
    }
    // Also after the kubelet or the plugin asks again.
    assert_eq!(plugin.prepare(admin.clone()).await.unwrap(), prepared);
    plugin.reconcile(Some(loaded)).await;
    assert!(node.cdi("uid-2").is_some());
    plugin.unprepare(admin).await.unwrap();
    assert_eq!(node.cdi_files(), Vec::<String>::new());
}
