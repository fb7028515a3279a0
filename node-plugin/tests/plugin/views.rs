//! A real API server with feature gates off, and on again, under a publisher that goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use e2e::control_plane::ControlPlane;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kube::api::{DeleteParams, ListParams};
use kube::{Api, Client};
use node_plugin::events::NodeEvents;
use node_plugin::metrics::Metrics;
use node_plugin::readiness::Readiness;
use node_plugin::slices::publisher::Publisher;
use node_plugin::slices::{SharingKind, View, Wanted, pool};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::golden::shared_by;
use crate::node::TestNode;
use crate::server::create_node;

const NAME: &str = "viewed";
/// Restarting an API server takes some seconds, and many at a busy time.
const LIMIT: Duration = Duration::from_secs(90);
/// The defaults of 1.35.
const OLD: &str = "DRAPartitionableDevices=false,DRAConsumableCapacity=false,\
                   DRADeviceTaints=false,DRADeviceTaintRules=false";

/// What the scheduler would take devices from: the devices of the highest generation, if all of its
/// slices are there.
async fn offered(client: &Client) -> Option<(i64, Vec<Device>)> {
    let own = ListParams::default().fields(&format!("spec.nodeName={NAME}"));
    let slices = Api::<ResourceSlice>::all(client.clone()).list(&own).await;
    let slices = slices.ok()?.items;
    let generation = slices.iter().map(|s| s.spec.pool.generation).max()?;
    let now: Vec<&ResourceSlice> = slices
        .iter()
        .filter(|s| s.spec.pool.generation == generation)
        .collect();
    let count = now.first()?.spec.pool.resource_slice_count;
    if i64::try_from(now.len()) != Ok(count) {
        return None;
    }
    let devices = now.iter().flat_map(|s| s.spec.devices.iter().flatten());
    Some((generation, devices.cloned().collect()))
}

/// Whether two devices of a GPU could be given to two claims at once.
fn could_double(devices: &[Device]) -> bool {
    let mut alone: BTreeMap<&str, usize> = BTreeMap::new();
    for device in devices.iter().filter(|d| d.consumes_counters.is_none()) {
        let gpu = device.attributes.as_ref().unwrap()["pciAddress"]
            .string
            .as_deref();
        *alone.entry(gpu.unwrap()).or_default() += 1;
    }
    alone.values().any(|count| *count > 1)
}

async fn wait(client: &Client, what: &str, devices: usize) -> (i64, Vec<Device>) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let now = offered(client).await;
        match now {
            Some(now) if now.1.len() == devices => return now,
            _ => {}
        }
        let count = now.map(|now| now.1.len());
        assert!(
            Instant::now() < deadline,
            "{what}: {count:?} and not {devices} devices"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn events(client: &Client, reason: &str) -> Vec<String> {
    let events: Api<Event> = Api::namespaced(client.clone(), "default");
    let deadline = Instant::now() + LIMIT;
    loop {
        let all = events.list(&ListParams::default()).await.unwrap().items;
        let of_reason = all
            .into_iter()
            .filter(|e| e.reason.as_deref() == Some(reason));
        let notes: Vec<String> = of_reason.filter_map(|event| event.note).collect();
        if !notes.is_empty() {
            return notes;
        }
        assert!(Instant::now() < deadline, "no event {reason}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_server_drops_is_not_offered_and_what_it_keeps_later_is_without_a_restart() {
    let mut plane = ControlPlane::start_with(OLD).unwrap();
    let client = plane.client().unwrap();
    create_node(&client, NAME).await;
    let inventory = TestNode::new("h100-80gb-8").inventory();
    let sharing = shared_by(SharingKind::Mps, &inventory);
    let wanted = Wanted::new(inventory, BTreeSet::new()).shared(sharing);
    let (sender, receiver) = watch::channel(Some(Arc::new(wanted.clone())));
    let stop = CancellationToken::new();
    let publisher = Publisher::new(
        client.clone(),
        NAME.to_owned(),
        receiver,
        NodeEvents::new(client.clone(), NAME),
        Metrics::default(),
        Readiness::default(),
    );
    let publisher = tokio::spawn(publisher.run(stop.clone(), async { false }));
    // Whatever stands there meanwhile: never two devices of a GPU that nothing keeps apart.
    let looks = Arc::new(AtomicUsize::new(0));
    let watching = tokio::spawn({
        let (client, looks) = (client.clone(), looks.clone());
        async move {
            loop {
                if let Some((generation, devices)) = offered(&client).await {
                    looks.fetch_add(1, Ordering::Relaxed);
                    assert!(!could_double(&devices), "in generation {generation}");
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    });

    let (first, whole) = wait(&client, "gates off", 8).await;
    assert!(whole.iter().all(|d| d.consumes_counters.is_none()));
    let notes = events(&client, "ReducedResourceSlices").await;
    for gate in [
        "DRAPartitionableDevices",
        "DRAConsumableCapacity",
        "DRADeviceTaints",
    ] {
        assert!(notes[0].contains(gate), "{notes:?}");
    }
    // A taint would be dropped: the GPU that cannot be read is taken back until it can be.
    let mut lost = wanted.clone();
    let pci = lost.inventory.gpus[0].pci;
    lost.unreadable.insert(pci);
    sender.send_replace(Some(Arc::new(lost)));
    let (_, without) = wait(&client, "a lost GPU", 7).await;
    assert!(without.iter().all(|d| !d.name.contains(&pci.dns_label())));
    sender.send_replace(Some(Arc::new(wanted.clone())));
    wait(&client, "the GPU is back", 8).await;

    // One gate after the other.
    plane
        .replace_api_server("DRAConsumableCapacity=false")
        .await
        .unwrap();
    let (second, devices) = wait(&client, "counters and taints", 8 * 26).await;
    assert!(second > first);
    assert!(
        devices
            .iter()
            .all(|d| d.allow_multiple_allocations.is_none())
    );
    plane.replace_api_server("").await.unwrap();
    let (third, devices) = wait(&client, "everything", 8 * 27).await;
    // The shared devices stand in the slice of the whole ones: one write, the same generation.
    assert_eq!(third, second);
    assert_eq!(devices, crate::shares::devices(&wanted, View::FULL));
    events(&client, "FullResourceSlices").await;

    // The gates go off under slices that are there: they keep their fields, and nothing changes
    // until somebody wipes them.
    plane.replace_api_server(OLD).await.unwrap();
    let own = ListParams::default().fields(&format!("spec.nodeName={NAME}"));
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    slices
        .delete_collection(&DeleteParams::default(), &own)
        .await
        .unwrap();
    wait(&client, "gates off again", 8).await;

    assert!(!watching.is_finished(), "{:?}", watching.await);
    watching.abort();
    assert!(looks.load(Ordering::Relaxed) > 20);
    stop.cancel();
    publisher.await.unwrap();
}

#[test]
fn without_taints_a_gpu_with_counters_is_taken_back_as_a_whole_and_its_counters_stay() {
    let inventory = TestNode::new("h100-80gb-8").inventory();
    let sharing = shared_by(SharingKind::Mps, &inventory);
    let mut wanted = Wanted::new(inventory, BTreeSet::new()).shared(sharing);
    let pci = wanted.inventory.gpus[0].pci;
    wanted.unreadable.insert(pci);
    let blind = View {
        taints: false,
        ..View::FULL
    };
    let names: Vec<String> = crate::shares::devices(&wanted, blind)
        .into_iter()
        .map(|d| d.name)
        .collect();
    assert_eq!(names.len(), 7 * 27);
    assert!(names.iter().all(|name| !name.contains(&pci.dns_label())));
    // The counters are not what a claim gets; a slice that stays as it is need not be written.
    assert_eq!(pool(&wanted, blind)[0], pool(&wanted, View::FULL)[0]);
}
