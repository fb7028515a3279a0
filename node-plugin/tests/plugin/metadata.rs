//! What a container is told about its devices: KEP-5304's files and the CDI file that
//! mounts them.

use std::collections::BTreeSet;
use std::path::Path;

use node_plugin::claims::cdi::Spec;
use node_plugin::claims::checkpoint::{ClaimRef, PreparedDevice};
use node_plugin::claims::core::Step;
use node_plugin::slices::{self, Described};
use serde_json::{Value, json};

use crate::node::dies_at;
use crate::node::{NODE, TestNode, topologies};

/// Where containers look, by the KEP.
const FOLDER: &str = "/var/run/kubernetes.io/dra-device-attributes";
const FILE: &str = "gpu.ai.deckhouse.io-metadata.json";

/// A claim whose devices were allocated for these requests.
fn claim(node: &TestNode, name: &str, uid: &str, results: &[(&str, &str)]) -> ClaimRef {
    node.put_claim(object(name, uid, results))
}

fn object(name: &str, uid: &str, results: &[(&str, &str)]) -> Value {
    let results: Vec<Value> = results
        .iter()
        .map(|(request, device)| {
            json!({"request": request, "driver": "gpu.ai.deckhouse.io", "pool": NODE,
                   "device": device})
        })
        .collect();
    json!({
        "metadata": {"namespace": "team", "name": name, "uid": uid},
        "spec": {"devices": {}},
        "status": {"allocation": {"devices": {"results": results}}},
    })
}

/// What a container with these CDI devices finds: (path in the container, host's path).
fn mounts(node: &TestNode, uid: &str, ids: &[String]) -> Vec<(String, String)> {
    let spec = node.cdi(uid).unwrap();
    let mut found = Vec::new();
    for id in ids {
        let name = id.strip_prefix("gpu.ai.deckhouse.io/claim=").unwrap();
        let device = spec.devices.iter().find(|device| device.name == name);
        let device = device.unwrap_or_else(|| panic!("{id} cannot be resolved"));
        for mount in &device.container_edits.mounts {
            assert!(mount.options.contains(&"ro".to_owned()));
            found.push((mount.container_path.clone(), mount.host_path.clone()));
        }
    }
    found
}

/// The objects in the one metadata file that these devices' containers get.
fn read(node: &TestNode, uid: &str, devices: &[PreparedDevice]) -> (String, Vec<Value>) {
    let ids: Vec<String> = devices
        .iter()
        .flat_map(|d| d.cdi_device_ids.clone())
        .collect();
    let mounts = mounts(node, uid, &ids);
    let [(container, host)] = mounts.as_slice() else {
        panic!("{mounts:?}");
    };
    let text = std::fs::read_to_string(host).unwrap();
    let objects = serde_json::Deserializer::from_str(&text)
        .into_iter::<Value>()
        .map(Result::unwrap)
        .collect();
    (container.clone(), objects)
}

fn attribute(object: &Value, name: &str) -> Value {
    object["requests"][0]["devices"][0]["attributes"][name].clone()
}

#[tokio::test]
async fn a_container_reads_of_its_partition_what_is_published_and_the_uuid_that_prepare_made() {
    let node = TestNode::new("h100-80gb-8");
    let device = node.device(2, "1g10gb-6");
    let claim = claim(&node, "order-0", "uid-1", &[("gpu", &device)]);
    let prepared = node.plugin().prepare(claim).await.unwrap();
    let inventory = node.inventory();
    let gpu = &inventory.gpus[2];
    let profile = gpu.profiles.iter().find(|p| p.name == "1g.10gb").unwrap();

    let (path, objects) = read(&node, "uid-1", &prepared);
    assert_eq!(path, format!("{FOLDER}/resourceclaims/order-0/gpu/{FILE}"));
    let versions: Vec<&Value> = objects.iter().map(|o| &o["apiVersion"]).collect();
    assert_eq!(
        versions,
        [
            "metadata.resource.k8s.io/v1beta1",
            "metadata.resource.k8s.io/v1alpha1"
        ]
    );
    for object in &objects {
        assert_eq!(object["kind"], "DeviceMetadata");
        assert_eq!(
            object["metadata"],
            json!({"name": "order-0", "namespace": "team", "uid": "uid-1", "generation": 1})
        );
        assert_eq!(object.get("podClaimName"), None);
        assert_eq!(object["requests"][0]["name"], "gpu");
        let found = &object["requests"][0]["devices"][0];
        assert_eq!(
            (&found["driver"], &found["pool"], &found["name"]),
            (
                &json!("gpu.ai.deckhouse.io"),
                &json!(NODE),
                &json!(device.clone())
            )
        );
        let uuid = gpu.instances[0].compute_instances[0].uuid.clone();
        assert!(uuid.starts_with("MIG-"));
        assert_eq!(attribute(object, "uuid"), json!({"string": uuid}));
        assert_eq!(
            attribute(object, "memoryBytes"),
            json!({"int": profile.memory_bytes})
        );
        let published = Described::from(inventory.clone())
            .device(&device)
            .unwrap()
            .attributes;
        for (name, value) in published.unwrap() {
            assert_eq!(attribute(object, &name), json!(value), "{name}");
        }
    }
}

#[tokio::test]
async fn a_claim_of_a_template_is_found_by_the_pods_name_for_it_and_an_alternative_is_named() {
    let node = TestNode::new("h100-80gb-8");
    let device = node.device(0, "2g20gb-4");
    let mut object = object("web-abc-gpu-x7f", "uid-1", &[("gpu/half", &device)]);
    object["metadata"]["annotations"] = json!({"resource.kubernetes.io/pod-claim-name": "model"});
    let claim = node.put_claim(object);
    let prepared = node.plugin().prepare(claim.clone()).await.unwrap();
    assert_eq!(prepared[0].request, "gpu");
    let there = read(&node, "uid-1", &prepared);
    let (path, objects) = &there;
    assert_eq!(
        *path,
        format!("{FOLDER}/resourceclaimtemplates/model/gpu/{FILE}")
    );
    assert_eq!(objects[0]["podClaimName"], "model");
    assert_eq!(objects[0]["requests"][0]["name"], "gpu/half");

    // After a restart both are known without the claim's object.
    std::fs::remove_dir_all(node.path("plugin/dra-device-metadata")).unwrap();
    std::fs::remove_dir_all(node.path("cdi")).unwrap();
    node.delete_claim("web-abc-gpu-x7f");
    node.plugin().reconcile(Some(node.loaded())).await;
    assert_eq!(read(&node, "uid-1", &prepared), there);
}

#[tokio::test]
async fn each_request_has_a_file_and_only_its_own_containers_get_it() {
    let node = TestNode::new("h100-80gb-8");
    let (first, second) = (node.device(0, ""), node.device(1, ""));
    let other = node.device(2, "1g10gb-6");
    let results = [
        ("pair", first.as_str()),
        ("pair", &second),
        ("small", &other),
    ];
    let claim = claim(&node, "order-0", "uid-1", &results);
    let prepared = node.plugin().prepare(claim).await.unwrap();

    let (path, objects) = read(&node, "uid-1", &prepared[..2]);
    assert!(path.ends_with(&format!("/order-0/pair/{FILE}")), "{path}");
    let names: Vec<&Value> = objects[0]["requests"][0]["devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| &d["name"])
        .collect();
    assert_eq!(names, [&json!(first), &json!(second)]);
    let (path, objects) = read(&node, "uid-1", &prepared[2..]);
    assert!(path.ends_with(&format!("/order-0/small/{FILE}")), "{path}");
    assert_eq!(objects[0]["requests"][0]["devices"][0]["name"], other);
}

#[tokio::test]
async fn files_go_with_their_claim_and_those_of_unknown_claims_at_the_start() {
    let node = TestNode::new("t4-1");
    let folder = node.path("plugin/dra-device-metadata");
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "")]);
    let plugin = node.plugin();
    plugin.prepare(claim.clone()).await.unwrap();
    assert!(folder.join("uid-1/gpu.json").exists());
    let stray = folder.join("uid-9");
    std::fs::create_dir_all(&stray).unwrap();
    std::fs::write(stray.join(".gpu.json.tmp"), "{").unwrap();

    node.plugin().reconcile(Some(node.loaded())).await;
    assert!(!stray.exists());
    assert!(folder.join("uid-1/gpu.json").exists());
    plugin.unprepare(claim.clone()).await.unwrap();
    plugin.unprepare(claim).await.unwrap();
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0);
}

#[tokio::test]
async fn a_file_that_is_cut_or_old_is_written_again_and_its_generation_counts_changes_only() {
    let node = TestNode::new("a30-2");
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "1g6gb-3")]);
    let plugin = node.plugin();
    let prepared = plugin.prepare(claim.clone()).await.unwrap();
    let good = read(&node, "uid-1", &prepared);
    let host = node.path("plugin/dra-device-metadata/uid-1/gpu.json");
    let bytes = std::fs::read(&host).unwrap();

    std::fs::write(&host, &bytes[..bytes.len() / 2]).unwrap();
    plugin.prepare(claim.clone()).await.unwrap();
    let mended = read(&node, "uid-1", &prepared);
    assert_eq!(mended.1[0]["requests"], good.1[0]["requests"]);

    let old = String::from_utf8(bytes)
        .unwrap()
        .replace("\"driverVersion\"", "\"driverVersions\"");
    std::fs::write(&host, old).unwrap();
    plugin.prepare(claim.clone()).await.unwrap();
    let (_, objects) = read(&node, "uid-1", &prepared);
    assert_eq!(objects[0]["requests"], good.1[0]["requests"]);
    assert_eq!(objects[0]["metadata"]["generation"], 2);
    let written = std::fs::metadata(&host).unwrap().modified().unwrap();
    plugin.prepare(claim).await.unwrap();
    assert_eq!(
        std::fs::metadata(&host).unwrap().modified().unwrap(),
        written
    );
}

#[tokio::test]
async fn at_no_step_does_a_cdi_file_mount_what_is_not_there() {
    let steps = [
        Step::Started,
        Step::Acted,
        Step::CdiWritten,
        Step::Completed,
        Step::CdiRemoved,
        Step::Released,
        Step::Forgotten,
    ];
    for step in steps {
        let node = TestNode::new("a30-2");
        let claim = node.claim("order-0", "uid-1", &[&node.device(0, "1g6gb-3")]);
        let plugin = node.plugin_stopping(dies_at(step));
        if plugin.prepare(claim.clone()).await.is_ok() {
            plugin.unprepare(claim).await.unwrap_err();
        }
        if let Some(spec) = node.cdi("uid-1") {
            assert_sources_exist(&spec);
        }
    }
}

fn assert_sources_exist(spec: &Spec) {
    let devices = spec.devices.iter().map(|device| &device.container_edits);
    for edits in devices.chain([&spec.container_edits]) {
        for mount in &edits.mounts {
            assert!(Path::new(&mount.host_path).exists(), "{}", mount.host_path);
        }
    }
}

#[test]
fn no_device_of_any_topology_has_more_attributes_than_the_api_allows() {
    for topology in topologies() {
        let node = TestNode::new(&topology);
        let inventory = node.inventory();
        let described = Described::from(inventory.clone());
        for gpu in &inventory.gpus {
            let whole = slices::names::whole(gpu.pci);
            let device = described.device(&whole).unwrap();
            // uuid is published; memory, share and administrative access are added.
            assert!(device.attributes.unwrap().len() + 4 <= 32, "{topology}");
        }
    }
}

/// What a runtime checks when it reads a file (`pkg/cdi` and `pkg/parser` of
/// `tags.cncf.io/container-device-interface` 1.1.1); it ignores a file that fails.
fn assert_valid(spec: &Spec) {
    let inner = |c: char| c.is_ascii_alphanumeric() || "_-.:".contains(c);
    let outer = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let (vendor, class) = spec.kind.split_once('/').unwrap();
    for part in [vendor, class] {
        assert!(part.starts_with(|c: char| c.is_ascii_alphabetic()));
        assert!(outer(part.chars().last()) && part.chars().all(|c| inner(c) && c != ':'));
    }
    // 0.5.0 is needed for hostPath and names that start with a digit; a dot in the
    // class would need 0.6.0.
    assert!(spec.cdi_version == "0.5.0" && !class.contains('.'));
    let mut names = BTreeSet::new();
    assert!(!spec.devices.is_empty());
    for device in &spec.devices {
        let name = &device.name;
        assert!(names.insert(name), "{name} twice");
        assert!(outer(name.chars().next()) && outer(name.chars().last()));
        assert!(name.chars().all(inner), "{name}");
        let edits = &device.container_edits;
        assert!(
            !(edits.env.is_empty() && edits.device_nodes.is_empty() && edits.mounts.is_empty()),
            "{name} does nothing, which is not allowed"
        );
    }
    let devices = spec.devices.iter().map(|device| &device.container_edits);
    for edits in devices.chain([&spec.container_edits]) {
        for env in &edits.env {
            assert!(env.find('=').is_some_and(|at| at > 0), "{env}");
        }
        for node in &edits.device_nodes {
            assert!(node.path.starts_with("/dev/"), "{node:?}");
        }
        for mount in &edits.mounts {
            assert!(Path::new(&mount.host_path).is_absolute());
            assert!(Path::new(&mount.container_path).is_absolute());
        }
    }
}

#[tokio::test]
async fn every_cdi_file_is_one_that_a_runtime_accepts() {
    let node = TestNode::new("h100-80gb-8");
    let plugin = node.plugin();
    let uid = "3b1c2f7e-8f0a-4c39-9d6e-2a5d1f0b7c11";
    let (part, whole) = (node.device(0, "1g10gb-me-6"), node.device(1, ""));
    let results = [
        ("part.0", part.as_str()),
        ("whole", &whole),
        ("whole", &node.device(2, "")),
    ];
    plugin
        .prepare(claim(&node, "order-0", uid, &results))
        .await
        .unwrap();
    assert_valid(&node.cdi(uid).unwrap());
    let watching = node.admin_claim("watch", "uid-2", &[&part, &whole]);
    plugin.prepare(watching).await.unwrap();
    assert_valid(&node.cdi("uid-2").unwrap());
}
