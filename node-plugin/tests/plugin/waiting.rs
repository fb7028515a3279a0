//! Claims that have ended and still hold something, GPUs that do not answer, calls that overlap.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use node_plugin::claims::{Claims, Collector};
use tokio::sync::watch;

use crate::node::TestNode;

#[tokio::test]
async fn a_device_of_a_pod_that_was_deleted_by_force_is_waited_for_until_the_kubelet_ends_it() {
    let node = TestNode::with_gpus(1);
    let device = node.device(0, "1g10gb-6");
    let old = node.claim("old", "uid-1", &[&device]);
    // The kubelet's calls go to either instance of a rolling update.
    for other_instance in [false, true] {
        let plugin = node.plugin();
        let ending = if other_instance {
            node.plugin()
        } else {
            plugin.clone()
        };
        node.claim("old", "uid-1", &[&device]);
        plugin.prepare(old.clone()).await.unwrap();
        node.delete_claim("old");
        let new = node.claim("new", "uid-2", &[&device]);
        let waiting = tokio::spawn({
            let (plugin, new) = (plugin.clone(), new.clone());
            async move { plugin.prepare(new).await }
        });
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!waiting.is_finished());
        assert_eq!(node.names("cdi"), ["gpu.ai.deckhouse.io-claim_uid-1.json"]);
        ending.unprepare(old.clone()).await.unwrap();
        waiting.await.unwrap().unwrap();
        node.agrees(&[&new]);
        plugin.unprepare(new).await.unwrap();
    }
}

#[tokio::test]
async fn a_claim_on_a_lost_gpu_ends_and_its_instance_is_destroyed_when_the_gpu_is_back() {
    let node = TestNode::with_gpus(2);
    let device = node.device(0, "3g40gb-4");
    let claim = node.claim("order-0", "uid-1", &[&device]);
    let plugin = node.plugin();
    plugin.prepare(claim.clone()).await.unwrap();
    let control = node.control();
    let gpu = &control.gpus()[0];
    control.lose(gpu).unwrap();
    plugin.unprepare(claim.clone()).await.unwrap();
    plugin.unprepare(claim.clone()).await.unwrap();
    assert_eq!(node.names("cdi"), Vec::<String>::new());
    node.delete_claim("order-0");
    let next = node.claim("next", "uid-2", &[&node.device(0, "1g10gb-6")]);
    plugin.prepare(next.clone()).await.unwrap_err();
    assert_eq!(plugin.collect_garbage().await, 0);
    assert_eq!(node.names("plugin/claims"), ["uid-1.json"]);

    control.clear(Some(gpu)).unwrap();
    assert_eq!(node.instances(), 1, "it outlived the loss");
    let (_, statics) = plugin.inventory(node.hardware()).await.unwrap();
    assert!(statics.is_empty(), "it is not an administrator's");
    // Whoever comes first cleans up: the next claim of the device, or the next sweep.
    plugin.prepare(next.clone()).await.unwrap();
    node.agrees(&[&next]);
    plugin.unprepare(next).await.unwrap();
    node.agrees(&[]);
}

#[tokio::test]
async fn a_partition_ends_while_nvml_is_not_loaded_and_is_destroyed_by_the_next_sweep() {
    let node = TestNode::with_gpus(1);
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "1g10gb-6")]);
    node.plugin().prepare(claim.clone()).await.unwrap();
    let (_sender, none) = watch::channel(None);
    let without = Claims::open(node.settings(), node.claims.clone(), none, Arc::new(|_| ()));
    without.unwrap().unprepare(claim.clone()).await.unwrap();
    assert_eq!(node.instances(), 1);
    assert_eq!(node.names("plugin/claims"), ["uid-1.json"]);
    node.plugin().collect_garbage().await;
    node.agrees(&[]);
}

#[tokio::test]
async fn whole_devices_of_claims_that_are_gone_are_collected_while_nvml_is_not_loaded() {
    let node = TestNode::with_gpus(1);
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "")]);
    node.plugin().prepare(claim).await.unwrap();
    node.delete_claim("order-0");
    let (_sender, none) = watch::channel(None);
    let without = Claims::open(node.settings(), node.claims.clone(), none, Arc::new(|_| ()));
    assert_eq!(without.unwrap().collect_garbage().await, 1);
    node.agrees(&[]);
}

#[tokio::test]
async fn a_claim_has_to_be_gone_at_two_looks_before_it_is_collected() {
    let node = TestNode::with_gpus(1);
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "")]);
    let plugin = node.plugin();
    plugin.prepare(claim.clone()).await.unwrap();
    let grace = Duration::from_millis(50);
    let mut collector = Collector::new(plugin);
    node.delete_claim("order-0");
    assert_eq!(collector.sweep(Duration::ZERO, grace).await.collected, 0);
    // Back between two looks: the time starts anew.
    node.claim("order-0", "uid-1", &[&node.device(0, "")]);
    tokio::time::sleep(grace).await;
    assert_eq!(collector.sweep(Duration::ZERO, grace).await.collected, 0);
    node.agrees(&[&claim]);
    node.delete_claim("order-0");
    assert_eq!(collector.sweep(Duration::ZERO, grace).await.collected, 0);
    tokio::time::sleep(grace).await;
    assert_eq!(collector.sweep(Duration::ZERO, grace).await.collected, 1);
    node.agrees(&[]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_instances_prepare_and_unprepare_the_same_gpu_and_claim_at_once_and_agree() {
    let node = TestNode::with_gpus(1);
    let instances = [node.plugin(), node.plugin()];
    let claims: Vec<_> = (0..7)
        .map(|at| {
            let device = node.device(0, &format!("1g10gb-{at}"));
            node.claim(&format!("claim-{at}"), &format!("uid-{at}"), &[&device])
        })
        .collect();
    for _ in 0..3 {
        let calls = claims.iter().enumerate().flat_map(|(index, claim)| {
            let (here, there) = (
                instances[index % 2].clone(),
                instances[1 - index % 2].clone(),
            );
            let (prepared, ended) = (claim.clone(), claim.clone());
            [
                tokio::spawn(async move { here.prepare(prepared).await.map(drop) }),
                tokio::spawn(async move { there.unprepare(ended).await }),
            ]
        });
        for call in calls.collect::<Vec<_>>() {
            call.await.unwrap().unwrap();
        }
        let there: BTreeSet<String> = node.names("plugin/claims").into_iter().collect();
        let prepared = claims
            .iter()
            .filter(|c| there.contains(&format!("{}.json", c.uid)));
        node.agrees(&prepared.collect::<Vec<_>>());
    }
    for claim in &claims {
        instances[0].unprepare(claim.clone()).await.unwrap();
    }
    node.agrees(&[]);
}

#[tokio::test]
async fn a_claim_that_was_made_anew_under_the_same_name_gets_the_device_of_the_old_one() {
    let node = TestNode::with_gpus(1);
    let device = node.device(0, "1g10gb-6");
    let plugin = node.plugin();
    let old = node.claim("order-0", "uid-1", &[&device]);
    plugin.prepare(old.clone()).await.unwrap();
    let new = node.claim("order-0", "uid-2", &[&device]);
    let error = plugin.prepare(old.clone()).await.unwrap_err().to_string();
    assert!(error.contains("uid-2"), "{error}");
    let waiting = tokio::spawn({
        let (plugin, new) = (plugin.clone(), new.clone());
        async move { plugin.prepare(new).await }
    });
    plugin.unprepare(old).await.unwrap();
    waiting.await.unwrap().unwrap();
    node.agrees(&[&new]);
}

#[tokio::test]
async fn a_hung_gpu_delays_no_other_and_the_call_that_comes_again_gets_the_result() {
    let node = TestNode::with_gpus(2);
    let slow = node.claim("slow", "uid-1", &[&node.device(0, "1g10gb-6")]);
    let quick = node.claim("quick", "uid-2", &[&node.device(1, "1g10gb-6")]);
    let plugin = node.plugin();
    let control = node.control();
    let (gpu, create) = (
        &control.gpus()[0],
        "nvmlDeviceCreateGpuInstanceWithPlacement",
    );
    let long = Duration::from_secs(3);
    control.delay(Some(gpu), create, long).unwrap();
    let hung = tokio::spawn({
        let (plugin, slow) = (plugin.clone(), slow.clone());
        async move { plugin.prepare(slow).await }
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    let begin = Instant::now();
    plugin.prepare(quick.clone()).await.unwrap();
    assert!(!hung.is_finished(), "{:?}", begin.elapsed());
    // The kubelet gave up and asks again.
    hung.abort();
    plugin.prepare(slow.clone()).await.unwrap();
    node.agrees(&[&slow, &quick]);
}
