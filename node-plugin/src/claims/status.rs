//! The status of a claim's devices (KEP-4817), for people and controllers: which MIG
//! instance it is, how much memory it has.
//!
//! In: claims that were prepared. Out: `status.devices[]` of the claim, written by
//! server-side apply. Never: a prepare that waits for it or fails by it, and never a
//! write when nothing differs. What is deallocated, the API server clears by itself.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpu::Inventory;
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Map, Value, json};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::allocation;
use super::facts::Facts;
use super::record::{ClaimRef, PreparedDevice};
use crate::DRIVER;

/// How long a request may take.
const LIMIT: Duration = Duration::from_secs(10);
/// The first and the longest wait after a failure.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));
/// How long a server that drops the field is left alone. It may be upgraded.
const UNSUPPORTED: Duration = Duration::from_secs(600);

/// The status that a claim's devices should have.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    claim: ClaimRef,
    devices: Vec<PreparedDevice>,
    /// The driver-specific part, in the order of the devices.
    data: Vec<Value>,
    /// The status as it was read with the claim; `None` where it has to be read.
    observed: Option<Vec<AllocatedDeviceStatus>>,
}

impl Report {
    /// What to say of prepared devices. `observed` is the status that the claim had when
    /// it was read just now.
    #[must_use]
    pub fn new(
        claim: &ClaimRef,
        devices: &[PreparedDevice],
        inventory: &Inventory,
        observed: Option<Vec<AllocatedDeviceStatus>>,
    ) -> Self {
        Self {
            claim: claim.clone(),
            devices: devices.to_vec(),
            data: devices.iter().map(|d| data(inventory, d)).collect(),
            observed,
        }
    }

    /// The entries of our devices where they differ from what is there, else `None`.
    /// A condition that stays as it is keeps its time.
    #[must_use]
    pub fn next(
        &self,
        there: &[AllocatedDeviceStatus],
        now: jiff::Timestamp,
    ) -> Option<Vec<AllocatedDeviceStatus>> {
        let wanted: Vec<AllocatedDeviceStatus> = self
            .devices
            .iter()
            .zip(&self.data)
            .map(|(device, data)| {
                let found = there.iter().find(|t| {
                    (&*t.driver, &t.pool, &t.device, &t.share_id)
                        == (DRIVER, &device.pool, &device.device, &device.share_id)
                });
                entry(device, data, found, now)
            })
            .collect();
        let differs = wanted.iter().any(|entry| !there.contains(entry));
        differs.then_some(wanted)
    }
}

/// Everything that is known of a device only now, and what a reader needs with it.
fn data(inventory: &Inventory, device: &PreparedDevice) -> Value {
    let facts = Facts::of(inventory, device);
    let mut data = Map::new();
    let mut add = |name: &str, value: Option<Value>| {
        data.extend(value.map(|value| (name.to_owned(), value)));
    };
    add("uuid", facts.uuid.map(Value::from));
    add("parentUUID", facts.parent_uuid.map(Value::from));
    add("memoryBytes", facts.memory_bytes.map(Value::from));
    add("multiprocessors", facts.multiprocessors.map(Value::from));
    add("coresPercent", facts.cores_percent.map(Value::from));
    add("sharing", facts.sharing.map(|kind| kind.as_str().into()));
    add("profile", facts.profile.map(Value::from));
    let placement = |p: gpu::Placement| json!({"start": p.start, "size": p.size});
    add("placement", facts.placement.map(placement));
    add("adminAccess", device.admin_access.then_some(true.into()));
    data.into()
}

fn entry(
    device: &PreparedDevice,
    data: &Value,
    found: Option<&AllocatedDeviceStatus>,
    now: jiff::Timestamp,
) -> AllocatedDeviceStatus {
    let mut ready = Condition {
        type_: "Ready".to_owned(),
        status: "True".to_owned(),
        reason: "Prepared".to_owned(),
        message: "The device is ready for the containers of the claim's pods.".to_owned(),
        last_transition_time: Time(now),
        observed_generation: None,
    };
    let before = found
        .and_then(|found| found.conditions.as_ref())
        .and_then(|conditions| conditions.iter().find(|c| c.type_ == ready.type_));
    if let Some(before) = before.filter(|before| before.status == ready.status) {
        ready.last_transition_time = before.last_transition_time.clone();
    }
    AllocatedDeviceStatus {
        driver: DRIVER.to_owned(),
        pool: device.pool.clone(),
        device: device.device.clone(),
        share_id: device.share_id.clone(),
        conditions: Some(vec![ready]),
        data: Some(RawExtension(data.clone())),
        network_data: None,
    }
}

/// The status of all devices of a claim.
pub(super) fn devices_of(object: &ResourceClaim) -> Vec<AllocatedDeviceStatus> {
    let status = object.status.as_ref();
    status.and_then(|s| s.devices.clone()).unwrap_or_default()
}

/// A report that waits to be written.
struct Waiting {
    report: Report,
    due: Instant,
    delay: Duration,
}

/// The reports that wait to be written, by the claim's UID.
#[derive(Default)]
pub struct Statuses {
    waiting: Mutex<BTreeMap<String, Waiting>>,
    changed: Notify,
}

/// What became of a report.
enum Outcome {
    /// It is as it should be, or its claim is gone.
    Done,
    /// The server does not keep it.
    Dropped,
}

impl Statuses {
    /// Has a report written, in place of an earlier one of the claim. Returns at once.
    pub fn put(&self, report: Report) {
        let uid = report.claim.uid.clone();
        let waiting = Waiting {
            report,
            due: Instant::now(),
            delay: RETRY.0,
        };
        self.waiting().insert(uid, waiting);
        self.changed.notify_one();
    }

    /// A claim that is not prepared any more: nothing is written of it.
    pub fn forget(&self, uid: &str) {
        self.waiting().remove(uid);
    }

    fn waiting(&self) -> MutexGuard<'_, BTreeMap<String, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes reports, one after the other, until `stop`.
    pub async fn run(self: Arc<Self>, client: Client, node: String, stop: CancellationToken) {
        let mut said = String::new();
        let mut unsupported: Option<Instant> = None;
        loop {
            let next = self.earliest();
            let at = next.as_ref().map(|(_, due)| match unsupported {
                Some(until) => (*due).max(until),
                None => *due,
            });
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.changed.notified() => continue,
                () = until(at) => {}
            }
            let Some(waiting) = next.and_then(|(uid, _)| self.waiting().remove(&uid)) else {
                continue;
            };
            let claim = waiting.report.claim.clone();
            match write(&client, &node, &waiting.report).await {
                Ok(Outcome::Done) => {
                    said.clear();
                    unsupported = None;
                }
                Ok(Outcome::Dropped) => {
                    if unsupported.is_none() {
                        tracing::info!(%claim, "The API server does not keep the status of devices (feature DRAResourceClaimDeviceStatus); it is tried again now and then.");
                    }
                    unsupported = Some(Instant::now() + UNSUPPORTED);
                    self.again(waiting);
                }
                Err(error) => {
                    if said != error {
                        tracing::warn!(%claim, error, "The status of a claim's devices cannot be written; it is tried again.");
                        said = error;
                    }
                    self.again(waiting);
                }
            }
        }
    }

    fn earliest(&self) -> Option<(String, Instant)> {
        let waiting = self.waiting();
        let first = waiting.iter().min_by_key(|(_, waiting)| waiting.due);
        first.map(|(uid, waiting)| (uid.clone(), waiting.due))
    }

    /// Puts a report back, unless there is a newer one. The claim is read first then.
    fn again(&self, mut waiting: Waiting) {
        waiting.report.observed = None;
        waiting.due = Instant::now() + waiting.delay;
        waiting.delay = (waiting.delay * 2).min(RETRY.1);
        let uid = waiting.report.claim.uid.clone();
        self.waiting().entry(uid).or_insert(waiting);
    }
}

/// Waits until then; for ever without a time.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn write(client: &Client, node: &str, report: &Report) -> Result<Outcome, String> {
    let claim = &report.claim;
    let api: Api<ResourceClaim> = Api::namespaced(client.clone(), &claim.namespace);
    let there = match &report.observed {
        Some(there) => there.clone(),
        None => match limited(api.get_opt(&claim.name)).await? {
            Some(object) if allocation::why_unused(&object, claim, node).is_none() => {
                devices_of(&object)
            }
            _ => return Ok(Outcome::Done),
        },
    };
    let Some(devices) = report.next(&there, jiff::Timestamp::now()) else {
        return Ok(Outcome::Done);
    };
    let patch = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        // Of this claim and of no later one of the name.
        "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid},
        "status": {"devices": devices},
    });
    let params = PatchParams::apply(DRIVER).force();
    let stored = limited(api.patch_status(&claim.name, &params, &Patch::Apply(&patch))).await?;
    let kept = devices_of(&stored).iter().any(|d| d.driver == DRIVER);
    Ok(if kept {
        Outcome::Done
    } else {
        Outcome::Dropped
    })
}

async fn limited<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match tokio::time::timeout(LIMIT, call).await {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {} s", LIMIT.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::record::{InstanceIds, Target};

    fn report(uuid: &str) -> Report {
        let claim = ClaimRef {
            namespace: "team".into(),
            name: "order-0".into(),
            uid: "uid-1".into(),
        };
        let device = PreparedDevice {
            pool: "worker-7".into(),
            device: "gpu-0000-65-00-0-mig-1g10gb-6".into(),
            target: Target::partition_for_test(Some(InstanceIds {
                gpu_instance: 1,
                compute_instance: 0,
                uuid: uuid.into(),
            })),
            ..PreparedDevice::for_test()
        };
        let inventory = super::super::hardware::nothing();
        Report::new(&claim, &[device], &inventory, None)
    }

    #[test]
    fn nothing_is_written_twice_and_a_change_keeps_the_time_of_what_stays() {
        let time = |second| jiff::Timestamp::from_second(second).unwrap();
        let first = report("MIG-1").next(&[], time(1)).unwrap();
        assert_eq!(first.len(), 1);
        assert_eq!(report("MIG-1").next(&first, time(2)), None);

        let mut foreign = first[0].clone();
        foreign.driver = "nic.example.com".into();
        let both = [foreign, first[0].clone()];
        assert_eq!(report("MIG-1").next(&both, time(2)), None);
        let changed = report("MIG-2").next(&both, time(2)).unwrap();
        assert_eq!(changed.len(), 1, "the other driver's entry is not ours");
        let condition = |d: &AllocatedDeviceStatus| d.conditions.clone().unwrap().remove(0);
        assert_eq!(
            condition(&changed[0]).last_transition_time,
            condition(&first[0]).last_transition_time
        );
        assert_eq!(changed[0].data.clone().unwrap().0["uuid"], "MIG-2");
    }
}
