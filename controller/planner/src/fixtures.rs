//! Clusters for tests: nodes of H100 cards as our node plugin publishes them,
//! and what a test needs to vary.

use std::collections::BTreeMap;

use crate::*;

pub(crate) const DRIVER: &str = "gpu.ai.deckhouse.io";
pub(crate) const WHOLE_CLASS: &str = "gpu.ai.deckhouse.io";
pub(crate) const MIG_CLASS: &str = "mig.ai.deckhouse.io";
pub(crate) const SHARE_CLASS: &str = "share.ai.deckhouse.io";
pub(crate) const GIB: u64 = 1 << 30;

/// What an H100 with 80 GB reports in total, in bytes.
pub(crate) const H100_BYTES: u64 = 85_520_809_984;

/// MIG profiles of an H100 with 80 GB: name, memory in MiB, compute slices,
/// memory slices, placement starts.
pub(crate) const H100_PROFILES: &[(&str, u64, u32, u32, &[u32])] = &[
    ("1g.10gb", 9984, 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
    ("1g.10gb+me", 9984, 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
    ("1g.20gb", 20096, 1, 2, &[0, 2, 4, 6]),
    ("2g.20gb", 20096, 2, 2, &[0, 2, 4]),
    ("3g.40gb", 40448, 3, 4, &[0, 4]),
    ("4g.40gb", 40448, 4, 4, &[0]),
    ("7g.80gb", 81152, 7, 8, &[0]),
];

fn counters(memory: impl Iterator<Item = u32>, compute: u32) -> BTreeMap<String, Quantity> {
    let mut counters: BTreeMap<String, Quantity> = memory
        .map(|slice| (format!("memory-slice-{slice}"), Quantity::from_units(1)))
        .collect();
    counters.insert(
        "compute-slices".to_owned(),
        Quantity::from_units(i64::from(compute)),
    );
    counters
}

fn capacity(bytes: u64) -> BTreeMap<String, Capacity> {
    let value = Quantity::from_bytes(bytes);
    BTreeMap::from([(
        "memory".to_owned(),
        Capacity {
            value,
            request_policy: None,
        },
    )])
}

fn device(name: String, attributes: &[(&str, AttributeValue)], bytes: u64) -> Device {
    Device {
        name,
        attributes: attributes
            .iter()
            .map(|(n, v)| ((*n).to_owned(), v.clone()))
            .collect(),
        capacity: capacity(bytes),
        consumes: Vec::new(),
        taints: Vec::new(),
        allow_multiple_allocations: false,
        scope: None,
    }
}

/// Name of a whole card.
pub(crate) fn whole(gpu: u32) -> String {
    format!("gpu-{gpu}")
}

/// Name of a partition.
pub(crate) fn partition(gpu: u32, profile: &str, start: u32) -> String {
    let profile = profile.replace('.', "").replace('+', "-");
    format!("gpu-{gpu}-mig-{profile}-{start}")
}

/// Devices of one H100: the card itself and every partition that it could have.
pub(crate) fn h100(gpu: u32) -> Vec<Device> {
    let uuid = format!("GPU-{gpu}");
    let product: AttributeValue = "NVIDIA H100 80GB HBM3".into();
    let mut devices = Vec::new();
    for (profile, mib, compute, size, starts) in H100_PROFILES {
        for &start in *starts {
            let mut partition = device(
                partition(gpu, profile, start),
                &[
                    ("type", "mig".into()),
                    ("profile", (*profile).into()),
                    ("parentUUID", uuid.as_str().into()),
                    ("productName", product.clone()),
                ],
                mib << 20,
            );
            partition.consumes = vec![CounterConsumption {
                counter_set: whole(gpu),
                counters: counters(start..start + size, *compute),
            }];
            devices.push(partition);
        }
    }
    let mut card = device(
        whole(gpu),
        &[
            ("type", "gpu".into()),
            ("uuid", uuid.as_str().into()),
            ("productName", product),
        ],
        H100_BYTES,
    );
    card.consumes = vec![CounterConsumption {
        counter_set: whole(gpu),
        counters: counters(0..8, 7),
    }];
    devices.push(card);
    devices
}

/// Name of a card's shared device.
pub(crate) fn shared(gpu: u32) -> String {
    format!("gpu-{gpu}-shared")
}

/// A capacity of which shares take whole steps, everything unless they say.
fn consumable(total: u64, step: u64) -> Capacity {
    let amount = Quantity::from_bytes;
    Capacity {
        value: amount(total),
        request_policy: Some(RequestPolicy {
            default: Some(amount(total)),
            valid_values: Vec::new(),
            valid_range: Some(CapacityRange {
                min: amount(step),
                max: Some(amount(total)),
                step: Some(amount(step)),
            }),
        }),
    }
}

/// Adds to every card the device that is handed out in shares, and its class.
pub(crate) fn with_shares(mut cluster: Snapshot) -> Snapshot {
    for slice in &mut cluster.slices {
        let Some(card) = slice.devices.last().cloned() else {
            continue;
        };
        let mut device = card.clone();
        device.name = format!("{}-shared", card.name);
        device.attributes.insert("type".to_owned(), "share".into());
        device.allow_multiple_allocations = true;
        device.capacity = BTreeMap::from([
            ("cores".to_owned(), consumable(100, 1)),
            ("memory".to_owned(), consumable(80 * GIB, 1 << 20)),
        ]);
        slice.devices.push(device);
    }
    cluster.device_classes.push(class(SHARE_CLASS, "share"));
    cluster
}

/// A claim as the scheduler allocates it for a plan's first placement.
pub(crate) fn claim_of(plan: &Plan, order: &OrderRef, id: usize) -> AllocatedClaim {
    let spot = &plan.placements[0];
    let devices: Vec<String> = spot.devices.iter().map(|d| d.device.clone()).collect();
    let mut held = claim(Some((&order.namespace, &order.name)), &spot.node, &devices);
    if plan.sharing_mode == SharingMode::Shared {
        held.devices[0].share_id = Some(id.to_string());
        held.devices[0].consumed_capacity = plan.capacity_requests.clone();
    }
    held
}

/// A slice of a node's pool.
pub(crate) fn slice(node: &str, name: &str, slice_count: i64) -> Slice {
    Slice {
        name: format!("{node}-{name}"),
        driver: DRIVER.to_owned(),
        pool: Pool {
            name: node.to_owned(),
            generation: 1,
            slice_count,
        },
        scope: Scope::NodeName(node.to_owned()),
        counter_sets: Vec::new(),
        devices: Vec::new(),
    }
}

/// Slices of a node with this many H100 cards: one with the counters, one per
/// card.
pub(crate) fn h100_slices(node: &str, gpus: u32) -> Vec<Slice> {
    let count = i64::from(gpus) + 1;
    let mut sets = slice(node, "0", count);
    sets.counter_sets = (0..gpus)
        .map(|gpu| CounterSet {
            name: whole(gpu),
            counters: counters(0..8, 7),
        })
        .collect();
    let mut slices = vec![sets];
    for gpu in 0..gpus {
        let mut card = slice(node, &(gpu + 1).to_string(), count);
        card.devices = h100(gpu);
        slices.push(card);
    }
    slices
}

/// Slices of a node with cards that cannot be partitioned.
pub(crate) fn plain_slices(node: &str, gpus: u32, bytes: u64) -> Vec<Slice> {
    let mut cards = slice(node, "0", 1);
    cards.devices = (0..gpus)
        .map(|gpu| device(whole(gpu), &[("type", "gpu".into())], bytes))
        .collect();
    vec![cards]
}

pub(crate) fn node(name: &str) -> Node {
    Node {
        name: name.to_owned(),
        ready: true,
        ..Node::default()
    }
}

pub(crate) fn class(name: &str, device_type: &str) -> DeviceClass {
    DeviceClass {
        name: name.to_owned(),
        selectors: vec![format!(
            "device.driver == \"{DRIVER}\" && device.attributes[\"{DRIVER}\"].type == \"{device_type}\""
        )],
    }
}

/// A cluster of nodes `node-0`, `node-1`, … with this many H100 cards each.
pub(crate) fn h100_cluster(nodes: u32, gpus: u32) -> Snapshot {
    let names: Vec<String> = (0..nodes).map(|n| format!("node-{n}")).collect();
    Snapshot {
        slices: names
            .iter()
            .flat_map(|name| h100_slices(name, gpus))
            .collect(),
        device_classes: vec![class(WHOLE_CLASS, "gpu"), class(MIG_CLASS, "mig")],
        claims: Vec::new(),
        nodes: names.iter().map(|name| node(name)).collect(),
    }
}

/// A claim that holds devices of one node.
pub(crate) fn claim(order: Option<(&str, &str)>, node: &str, devices: &[String]) -> AllocatedClaim {
    let held = |device: &String| AllocatedDevice {
        driver: DRIVER.to_owned(),
        pool: node.to_owned(),
        device: device.clone(),
        share_id: None,
        consumed_capacity: BTreeMap::new(),
        admin_access: false,
    };
    AllocatedClaim {
        namespace: order
            .map_or("elsewhere", |(namespace, _)| namespace)
            .to_owned(),
        name: format!("claim-{node}-{}", devices.join("-")),
        uid: String::new(),
        order: order.map(|(namespace, name)| OrderRef {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }),
        devices: devices.iter().map(held).collect(),
    }
}

/// A demand for one replica on one device, as the class `default-llm` allows it.
pub(crate) fn demand(gib: u64) -> Demand {
    Demand {
        order: OrderRef {
            namespace: "team".to_owned(),
            name: "chat".to_owned(),
        },
        memory: vec![MemoryNeed {
            devices: 1,
            bytes_per_device: gib * GIB,
        }],
        sharing_modes: vec![SharingMode::Shared, SharingMode::Dedicated],
        placement_types: vec![PlacementType::WholeDevice, PlacementType::Partition],
        device_class_names: None,
        selectors: Vec::new(),
        share_bounds: ShareBounds::default(),
        replicas: ReplicaBounds { min: 1, max: 1 },
        device_tolerations: Vec::new(),
        node_tolerations: Vec::new(),
        node_selector: BTreeMap::new(),
    }
}

/// The device of the cluster with this name on this node.
pub(crate) fn device_mut<'s>(snapshot: &'s mut Snapshot, node: &str, name: &str) -> &'s mut Device {
    snapshot
        .slices
        .iter_mut()
        .filter(|slice| slice.pool.name == node)
        .flat_map(|slice| &mut slice.devices)
        .find(|device| device.name == name)
        .expect("the fixture has the device")
}

pub(crate) fn planned(outcome: Outcome) -> Plan {
    match outcome {
        Outcome::Planned(plan) => *plan,
        other => panic!("expected a plan, got {other:#?}"),
    }
}

pub(crate) fn exhausted(outcome: Outcome) -> Explanation {
    match outcome {
        Outcome::Exhausted(explanation) => explanation,
        other => panic!("expected exhaustion, got {other:#?}"),
    }
}

pub(crate) fn undecidable(outcome: Outcome) -> Explanation {
    match outcome {
        Outcome::Undecidable(explanation) => explanation,
        other => panic!("expected an undecidable placement, got {other:#?}"),
    }
}

/// What a plan is on: device class and profile.
pub(crate) fn chosen(plan: &Plan) -> (&str, Option<&str>) {
    (plan.device_class_name.as_str(), plan.profile.as_deref())
}
