//! Faults of the hardware, from the driver's word to slices, the kubelet and people.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use e2e::control_plane::ControlPlane;
use e2e::kubelet::{HealthVersion, Kubelet, Plugin};
use fake_nvml::control::Hardware;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{DeviceTaint, ResourceSlice};
use kube::api::ListParams;
use kube::{Api, Client};

use crate::node::TestNode;
use crate::server::{
    LIMIT, Running, allocated_claim, client, complete, create_node, slices_of, versions, wait_for,
    wait_until_ready,
};

/// A plugin that does not wait long.
const QUICK: [&str; 3] = [
    "--health-interval-seconds=1",
    "--health-deadline-seconds=1",
    "--health-hold-seconds=1",
];

/// NVML's words, `nvmlDeviceGpuRecoveryAction_t`.
const NOTHING: u32 = 0;
const RESET: u32 = 1;

fn start(node: &TestNode, name: &str, client: &Client) -> Running {
    Running::start_with(node, name, "pod-1", client.clone(), &QUICK)
}

fn hardware(node: &TestNode) -> Hardware {
    Hardware::of(&node.path("driver")).unwrap()
}

async fn register(node: &TestNode) -> Plugin {
    Kubelet::new(node.path("r"))
        .register("gpu.ai.deckhouse.io", LIMIT)
        .await
        .unwrap()
}

type Slices = BTreeMap<String, ResourceSlice>;

/// The taints of every device, as `key=value effect`.
fn taints(slices: &Slices) -> BTreeMap<String, BTreeSet<String>> {
    let devices = slices
        .values()
        .flat_map(|slice| slice.spec.devices.iter().flatten());
    let text = |taint: &DeviceTaint| {
        let key = taint.key.strip_prefix("gpu.ai.deckhouse.io/").unwrap();
        let value = taint.value.as_deref().unwrap_or_default();
        format!("{key}={value} {}", taint.effect)
    };
    devices
        .map(|device| {
            let taints = device.taints.iter().flatten().map(text);
            (device.name.clone(), taints.collect())
        })
        .collect()
}

/// Whether exactly the devices for which `concerned` holds have this taint and no others any.
fn only(slices: &Slices, taint: &str, concerned: impl Fn(&str) -> bool) -> bool {
    complete(slices)
        && taints(slices).iter().all(|(device, taints)| {
            if concerned(device) {
                taints.contains(taint)
            } else {
                taints.is_empty()
            }
        })
}

async fn events(client: &Client, node: &str, reason: &str) -> Vec<String> {
    let events: Api<Event> = Api::namespaced(client.clone(), "default");
    let all = events.list(&ListParams::default()).await.unwrap().items;
    let about = |event: &Event| {
        event.regarding.as_ref().and_then(|r| r.name.as_deref()) == Some(node)
            && event.reason.as_deref() == Some(reason)
    };
    let own = all.into_iter().filter(about);
    own.filter_map(|event| event.note).collect()
}

/// Waits for one event of each reason, and that no second one follows at once.
async fn one_event(client: &Client, node: &str, reason: &str, text: &str) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let found = events(client, node, reason).await;
        let found: Vec<_> = found.iter().filter(|note| note.contains(text)).collect();
        if !found.is_empty() {
            assert_eq!(found.len(), 1, "{found:?}");
            return;
        }
        assert!(Instant::now() < deadline, "no {reason} with {text}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_xid_taints_its_gpu_is_told_to_the_kubelet_in_both_versions_and_ends_with_recovery() {
    let (client, name) = (client(), "sick");
    create_node(&client, name).await;
    let node = TestNode::new("h100-80gb-8");
    let hardware = hardware(&node);
    let running = start(&node, name, &client);
    let plugin = register(&node).await;
    wait_until_ready(&running).await;
    let before = slices_of(&client, name).await;
    let (sick, well) = (node.device(0, ""), node.device(1, ""));
    let mut new = plugin.watch_health(HealthVersion::V1).await.unwrap();
    let mut old = plugin.watch_health(HealthVersion::V1alpha1).await.unwrap();
    assert!(new.next(LIMIT).await.unwrap() && old.next(LIMIT).await.unwrap());
    let published: BTreeSet<String> = taints(&before).into_keys().collect();
    let told: BTreeSet<String> = new.devices.keys().map(|(_, name)| name.clone()).collect();
    assert!(told.is_superset(&published), "{told:?}");
    assert!(new.devices.values().all(|d| d.healthy == Some(true)));

    // An application's error is no fault of the device.
    hardware.xid("0", 31, None).unwrap();
    new.until(LIMIT, |devices| {
        devices.values().any(|d| d.message.contains("XID 31"))
    })
    .await
    .unwrap();
    assert_eq!(new.device(&sick).unwrap().healthy, Some(true));
    assert_eq!(versions(&slices_of(&client, name).await), versions(&before));

    hardware.recovery_action("0", RESET).unwrap();
    hardware.xid("0", 119, None).unwrap();
    let at = Instant::now();
    let unhealthy = |device: &str| {
        let device = device.to_owned();
        move |devices: &BTreeMap<(String, String), e2e::kubelet::DeviceHealth>| {
            devices.iter().any(|((pool, name), health)| {
                pool == "sick" && *name == device && health.healthy == Some(false)
            })
        }
    };
    new.until(LIMIT, unhealthy(&sick)).await.unwrap();
    assert!(at.elapsed() < Duration::from_secs(5), "{:?}", at.elapsed());
    old.until(LIMIT, unhealthy(&sick)).await.unwrap();
    let message = &new.device(&sick).unwrap().message;
    assert!(message.contains("XID 119 on GPU"), "{message}");
    assert_eq!(old.device(&sick).unwrap().message, "");
    assert_eq!(new.device(&well).unwrap().healthy, Some(true));
    let fatal = wait_for(&client, name, |slices| {
        only(slices, "xid=119 NoExecute", |device| {
            device.starts_with(&sick)
        }) && only(slices, "recovery=gpu-reset NoSchedule", |d| {
            d.starts_with(&sick)
        })
    })
    .await;
    assert_eq!(
        taints(&fatal).into_keys().collect::<BTreeSet<_>>(),
        published
    );
    one_event(&client, name, "GPUFault", "XID 119").await;
    one_event(&client, name, "GPUNotice", "XID 31").await;
    // Further readings, and the XID once more, write nothing.
    hardware.xid("0", 119, None).unwrap();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(slices_of(&client, name).await, fatal);
    let metrics = running.get("/metrics").await;
    for sample in [
        "health_faults{fault=\"xid\",severity=\"fatal\"} 1\n",
        "health_faults{fault=\"xid\",severity=\"information\"} 1\n",
        "xids_total{xid=\"119\"} 2\n",
        "xids_total{xid=\"31\"} 1\n",
    ] {
        let sample = format!("ai_inference_node_plugin_{sample}");
        assert!(metrics.contains(&sample), "{sample} in {metrics}");
    }
    assert!(
        !metrics.contains("health_publication_duration_seconds_count 0"),
        "{metrics}"
    );

    // The GPU is reset.
    hardware.recovery_action("0", NOTHING).unwrap();
    let after = wait_for(&client, name, |slices| only(slices, "", |_| false)).await;
    assert_eq!(taints(&after), taints(&before));
    new.until(LIMIT, |devices| {
        devices.values().all(|d| d.healthy == Some(true))
    })
    .await
    .unwrap();
    one_event(&client, name, "GPURecovered", "XID 119").await;
    assert_eq!(events(&client, name, "GPUFault").await.len(), 2);

    running.stop().await;
    while new.next(LIMIT).await.unwrap() {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_keeps_faults_with_their_times_and_the_devices_of_a_lost_gpu() {
    let (client, name) = (client(), "forgetful");
    create_node(&client, name).await;
    let node = TestNode::new("a30-2");
    let hardware = hardware(&node);
    let running = start(&node, name, &client);
    let before = wait_for(&client, name, complete).await;
    register(&node).await;
    wait_until_ready(&running).await;
    let (xid, lost) = (node.device(0, ""), node.device(1, ""));
    hardware.recovery_action("0", RESET).unwrap();
    hardware.xid("0", 95, None).unwrap();
    hardware.lose("1").unwrap();
    let both = |slices: &Slices| {
        complete(slices)
            && taints(slices).iter().all(|(device, taints)| {
                device.starts_with(&xid) && taints.contains("xid=95 NoExecute")
                    || device.starts_with(&lost) && taints.contains("lost= NoExecute")
            })
    };
    let tainted = wait_for(&client, name, both).await;
    assert_eq!(
        taints(&tainted).into_keys().collect::<BTreeSet<_>>(),
        taints(&before).into_keys().collect::<BTreeSet<_>>()
    );
    let times = |slices: &Slices| -> BTreeMap<(String, String), Option<String>> {
        let devices = slices
            .values()
            .flat_map(|slice| slice.spec.devices.iter().flatten());
        let of = |device: &k8s_openapi::api::resource::v1::Device| {
            let taints = device.taints.clone().unwrap_or_default();
            let name = device.name.clone();
            let own = |t: &DeviceTaint| t.key.ends_with("/xid") || t.key.ends_with("/lost");
            let times = taints.into_iter().filter(own).map(move |taint| {
                let time = taint.time_added.map(|time| time.0.to_string());
                ((name.clone(), taint.key), time)
            });
            times.collect::<Vec<_>>()
        };
        devices.flat_map(of).collect()
    };
    let began = times(&tainted);
    assert!(began.values().all(Option::is_some));
    running.stop().await;

    // A wipe, too, as by a kubelet that found no plugin: nobody else knows the times then.
    let api: Api<ResourceSlice> = Api::all(client.clone());
    let own = ListParams::default().fields(&format!("spec.nodeName={name}"));
    api.delete_collection(&kube::api::DeleteParams::default(), &own)
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let running = start(&node, name, &client);
    let again = wait_for(&client, name, complete).await;
    assert!(both(&again), "{:?}", taints(&again));
    assert_eq!(times(&again), began);
    register(&node).await;
    wait_until_ready(&running).await;
    running.stop().await;

    // NVML does not even start: the pool is not empty, and no device has another name.
    let not_loaded = Some(9); // NVML_ERROR_DRIVER_NOT_LOADED
    hardware
        .fail(None, "nvmlInitWithFlags", not_loaded)
        .unwrap();
    let running = start(&node, name, &client);
    let unreadable = wait_for(&client, name, |slices| {
        let all = taints(slices);
        complete(slices)
            && all.values().all(|taints| {
                taints.contains("unreadable= NoSchedule") || taints.contains("lost= NoExecute")
            })
    })
    .await;
    assert_eq!(
        taints(&unreadable).into_keys().collect::<BTreeSet<_>>(),
        taints(&before).into_keys().collect::<BTreeSet<_>>()
    );
    assert_eq!(times(&unreadable), began);

    // Everything is repaired while the plugin runs.
    hardware.fail(None, "nvmlInitWithFlags", None).unwrap();
    hardware.reset("0").unwrap();
    hardware.reset("1").unwrap();
    let after = wait_for(&client, name, |slices| only(slices, "", |_| false)).await;
    assert_eq!(taints(&after), taints(&before));
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_xid_on_a_mig_instance_taints_only_what_overlaps_it() {
    let (client, name) = (client(), "partly");
    create_node(&client, name).await;
    let node = TestNode::new("h100-80gb-8");
    let running = start(&node, name, &client);
    let plugin = register(&node).await;
    wait_until_ready(&running).await;
    let namespace = ControlPlane::shared()
        .unwrap()
        .namespace("partly")
        .await
        .unwrap();
    let device = node.device(0, "2g20gb-4");
    let claim = allocated_claim(&client, &namespace, name, &device).await;
    plugin.prepare_claim(&claim).await.unwrap();
    let gpu = node.inventory().gpus.remove(0);
    let instance = gpu.instances[0].gpu_instance_id;
    let hardware = hardware(&node);
    hardware.recovery_action("0", RESET).unwrap();
    hardware.xid("0", 94, Some((instance, None))).unwrap();
    let taint = "xid=94 NoSchedule";
    let own = node.device(0, "");
    let shared = format!("{own}-shared");
    // Taints keep the pool's generation: each slice gets them by a write of its own.
    let slices = wait_for(&client, name, |slices| {
        let tainted = |device: &String| taints(slices)[device].contains(taint);
        complete(slices) && [&device, &own, &shared].into_iter().all(tainted)
    })
    .await;
    let concerned: BTreeSet<String> = taints(&slices)
        .into_iter()
        .filter(|(_, taints)| taints.contains(taint))
        .map(|(device, _)| device.strip_prefix(&own).unwrap_or(&device).to_owned())
        .collect();
    // Memory slices 4 and 5, whatever reaches into them, and what spans the GPU.
    let expected: BTreeSet<String> = [
        "",
        "-mig-1g10gb-4",
        "-mig-1g10gb-5",
        "-mig-1g10gb-me-4",
        "-mig-1g10gb-me-5",
        "-mig-1g20gb-4",
        "-mig-2g20gb-4",
        "-mig-3g40gb-4",
        "-mig-7g80gb-0",
        "-shared",
    ]
    .map(str::to_owned)
    .into();
    assert_eq!(concerned, expected);
    plugin.unprepare_claim(&claim).await.unwrap();
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_hangs_makes_its_gpu_unreadable_and_holds_up_no_other() {
    let (client, name) = (client(), "slow");
    create_node(&client, name).await;
    let node = TestNode::new("h100-80gb-8");
    let running = start(&node, name, &client);
    let plugin = register(&node).await;
    wait_until_ready(&running).await;
    let hardware = hardware(&node);
    let hangs = Duration::from_secs(8);
    hardware
        .delay(Some("0"), "nvmlDeviceGetTemperatureV", hangs)
        .unwrap();
    let silent = node.device(0, "");
    let at = Instant::now();
    wait_for(&client, name, |slices| {
        only(slices, "unreadable= NoSchedule", |d| d.starts_with(&silent))
    })
    .await;
    assert!(at.elapsed() < hangs, "{:?}", at.elapsed());
    one_event(&client, name, "GPUFault", "does not answer since").await;

    // The others are read, prepared and told meanwhile.
    hardware.recovery_action("1", RESET).unwrap();
    let other = node.device(1, "");
    wait_for(&client, name, |slices| {
        let all = taints(slices);
        complete(slices) && all[&other].contains("recovery=gpu-reset NoSchedule")
    })
    .await;
    let namespace = ControlPlane::shared()
        .unwrap()
        .namespace("slow")
        .await
        .unwrap();
    let claim = allocated_claim(&client, &namespace, name, &node.device(2, "1g10gb-6")).await;
    plugin.prepare_claim(&claim).await.unwrap();
    plugin.unprepare_claim(&claim).await.unwrap();
    assert!(running.get("/livez").await.contains("200 OK"));
    assert!(running.get("/readyz").await.contains("200 OK"));

    // It answers again.
    hardware
        .delay(Some("0"), "nvmlDeviceGetTemperatureV", Duration::ZERO)
        .unwrap();
    hardware.recovery_action("1", NOTHING).unwrap();
    wait_for(&client, name, |slices| only(slices, "", |_| false)).await;
    one_event(&client, name, "GPURecovered", "does not answer since").await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_administrators_word_ends_a_fault_and_the_policy_decides_who_is_evicted() {
    let (client, name) = (client(), "annotated");
    create_node(&client, name).await;
    let node = TestNode::new("t4-1");
    let flags = [
        "--health-interval-seconds=1",
        "--health-hold-seconds=3600",
        "--health-fatal-effect=NoSchedule",
        "--health-ignored-xids=48,62",
    ];
    let running = Running::start_with(&node, name, "pod-1", client.clone(), &flags);
    register(&node).await;
    wait_until_ready(&running).await;
    let hardware = hardware(&node);
    hardware.xid("0", 62, None).unwrap();
    hardware.xid("0", 64, None).unwrap();
    let tainted = wait_for(&client, name, |slices| {
        only(slices, "xid=64 NoSchedule", |_| true)
    })
    .await;
    assert_eq!(taints(&tainted)[&node.device(0, "")].len(), 1);
    let pci = node.inventory().gpus[0].pci;
    let later = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(5);
    let annotation = format!("{pci}={later:.0}");
    let patch = serde_json::json!({"metadata": {"annotations": {
        "gpu.ai.deckhouse.io/repaired": annotation,
    }}});
    Api::<k8s_openapi::api::core::v1::Node>::all(client.clone())
        .patch(
            name,
            &kube::api::PatchParams::default(),
            &kube::api::Patch::Merge(&patch),
        )
        .await
        .unwrap();
    wait_for(&client, name, |slices| only(slices, "", |_| false)).await;
    one_event(&client, name, "GPURecovered", "XID 64").await;
    running.stop().await;
}
