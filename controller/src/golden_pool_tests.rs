//! What is planned on the pool that the node plugin publishes, read from its golden slices:
//! whole devices, partitions and shared devices of the same GPUs.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use planner::{
    Demand, MemoryNeed, OrderRef, Outcome, PlacementType, Plan, ReplicaBounds, ShareBounds,
    SharingMode, Snapshot,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::view;

const DRIVER: &str = "gpu.ai.deckhouse.io";
const NODE: &str = "worker-7";

fn object<T: DeserializeOwned>(value: Value) -> Arc<T> {
    Arc::new(serde_json::from_value(value).unwrap())
}

fn slices() -> Vec<Arc<ResourceSlice>> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/slices/h100-80gb-8.yaml");
    let text = std::fs::read_to_string(path).unwrap();
    let documents: Vec<ResourceSlice> = serde_saphyr::from_multiple(&text).unwrap();
    documents.into_iter().map(Arc::new).collect()
}

/// The GPUs by address, in the order of their shared devices.
fn gpus(slices: &[Arc<ResourceSlice>]) -> Vec<String> {
    let devices = slices.iter().flat_map(|s| s.spec.devices.iter().flatten());
    let names = devices.filter_map(|device| device.name.strip_suffix("-shared"));
    names.map(str::to_owned).collect()
}

/// A claim of nobody's order that holds 20 GiB of the first GPU's shared device.
fn share_of(device: &str) -> Arc<ResourceClaim> {
    object(json!({
        "metadata": {"namespace": "lab", "name": "notebook", "uid": "1"},
        "spec": {},
        "status": {"allocation": {"devices": {"results": [{
            "request": "gpu", "driver": DRIVER, "pool": NODE, "device": device,
            "shareID": "0b5a4a0e-6e0f-4d0e-9d0c-0a2b8f2c9d11",
            "consumedCapacity": {"memory": "20Gi", "cores": "25"},
        }]}}},
    }))
}

fn cluster(claims: &[Arc<ResourceClaim>]) -> Snapshot {
    let class = |name: &str, kind: &str| -> Arc<DeviceClass> {
        let expression = format!(
            "device.driver == \"{DRIVER}\" && device.attributes[\"{DRIVER}\"].type == \"{kind}\""
        );
        object(json!({
            "metadata": {"name": name},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        }))
    };
    let classes = [
        class("gpu.ai.deckhouse.io", "gpu"),
        class("mig.ai.deckhouse.io", "mig"),
        class("share.ai.deckhouse.io", "share"),
    ];
    let node: Arc<Node> = object(json!({
        "metadata": {"name": NODE},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }));
    view::snapshot(&slices(), &classes, claims, &[node])
}

fn demand(gibibytes: u64, replicas: u32, mode: SharingMode, kind: PlacementType) -> Demand {
    Demand {
        order: OrderRef {
            namespace: "team".to_owned(),
            name: "chat".to_owned(),
        },
        memory: vec![MemoryNeed {
            devices: 1,
            bytes_per_device: gibibytes << 30,
        }],
        sharing_modes: vec![mode],
        placement_types: vec![kind],
        device_class_names: None,
        selectors: Vec::new(),
        share_bounds: ShareBounds::default(),
        replicas: ReplicaBounds {
            min: 1,
            max: replicas,
        },
        device_tolerations: Vec::new(),
        node_tolerations: Vec::new(),
        node_selector: BTreeMap::new(),
    }
}

fn planned(snapshot: &Snapshot, demand: &Demand) -> Plan {
    match planner::plan(snapshot, demand) {
        Outcome::Planned(plan) => *plan,
        other => panic!("{other:?}"),
    }
}

fn devices(plan: &Plan) -> Vec<&str> {
    let placements = plan.placements.iter();
    let devices = placements.flat_map(|placement| placement.devices.iter());
    devices.map(|device| device.device.as_str()).collect()
}

#[test]
fn a_shared_device_is_never_planned_as_a_whole_gpu() {
    let demand = demand(70, 16, SharingMode::Dedicated, PlacementType::WholeDevice);
    let plan = planned(&cluster(&[]), &demand);
    assert_eq!(plan.device_class_name, "gpu.ai.deckhouse.io");
    assert_eq!(devices(&plan).len(), 8);
    assert!(devices(&plan).iter().all(|name| !name.ends_with("-shared")));
}

#[test]
fn a_plan_sees_that_a_share_holds_the_counters_of_its_gpu() {
    let first = gpus(&slices()).remove(0);
    let claims = [share_of(&format!("{first}-shared"))];
    let cluster = cluster(&claims);
    let wholes = demand(70, 16, SharingMode::Dedicated, PlacementType::WholeDevice);
    let plan = planned(&cluster, &wholes);
    assert_eq!(devices(&plan).len(), 7);
    let partitions = demand(8, 99, SharingMode::Dedicated, PlacementType::Partition);
    let partitions = planned(&cluster, &partitions);
    assert_eq!(devices(&partitions).len(), 7 * 7);
    for device in devices(&plan).iter().chain(&devices(&partitions)) {
        assert!(!device.starts_with(&first), "{device}");
    }
}

#[test]
fn a_further_share_goes_where_one_is_and_counts_what_that_holds() {
    let first = format!("{}-shared", gpus(&slices()).remove(0));
    let cluster = cluster(&[share_of(&first)]);
    let shared = |gibibytes| {
        demand(
            gibibytes,
            1,
            SharingMode::Shared,
            PlacementType::WholeDevice,
        )
    };
    let small = planned(&cluster, &shared(20));
    assert_eq!(devices(&small), [first.as_str()]);
    assert_eq!(small.device_class_name, "share.ai.deckhouse.io");
    // 81559 MiB less 20 GiB leave less than 60 GiB.
    assert_ne!(devices(&planned(&cluster, &shared(60))), [first.as_str()]);
}
