//! Records that a disk or another release left unreadable: what they held stays held, and they are made
//! anew from the claim's allocation.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::resource::v1::ResourceClaim;
use node_plugin::claims::checkpoint::{Checkpoints, ClaimRef, Record, Stage};
use node_plugin::claims::{ClaimSource, Claims};
use tokio::sync::watch;

use crate::node::{MemoryClaims, TestNode, repository};
use crate::random::Random;

/// Claims whose API server can be away.
struct Away {
    claims: Arc<MemoryClaims>,
    away: AtomicBool,
}

impl ClaimSource for Away {
    fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ResourceClaim>, String>> {
        if self.away.load(Ordering::Relaxed) {
            async { Err("no route to the API server".to_owned()) }.boxed()
        } else {
            self.claims.get(namespace, name)
        }
    }
}

/// A plugin on a node whose API server is away until it is told otherwise.
fn cut_off(node: &TestNode) -> (Claims, Arc<Away>) {
    let source = Arc::new(Away {
        claims: node.claims.clone(),
        away: AtomicBool::new(true),
    });
    let (_sender, loaded) = watch::channel(Some(node.loaded()));
    let plugin = Claims::open(node.settings(), source.clone(), loaded, Arc::new(|_| ()));
    (plugin.unwrap(), source)
}

fn file(node: &TestNode, uid: &str) -> PathBuf {
    node.path("plugin/claims").join(format!("{uid}.json"))
}

/// Every kind of damage to a file of this content.
fn damages(whole: &[u8]) -> Vec<(String, Vec<u8>)> {
    let header = whole.iter().position(|byte| *byte == b'\n').unwrap();
    let lengths = [
        0,
        1,
        header / 2,
        header,
        header + 1,
        header + 40,
        header + 120,
        whole.len() / 2,
        whole.len() - 40,
        whole.len() - 1,
    ];
    let mut damages: Vec<(String, Vec<u8>)> = lengths
        .iter()
        .map(|length| (format!("cut to {length}"), whole[..*length].to_vec()))
        .collect();
    damages.push(("zeroed".to_owned(), vec![0; whole.len()]));
    damages.push(("garbage".to_owned(), b"garbage".to_vec()));
    let mut random = Random::seeded(0x5eed);
    for _ in 0..12 {
        let (byte, bit) = (random.below(whole.len()), random.below(8));
        let mut bytes = whole.to_vec();
        bytes[byte] ^= 1 << bit;
        damages.push((format!("bit {bit} of byte {byte} flipped"), bytes));
    }
    damages
}

fn remove_copy(node: &TestNode, uid: &str) {
    std::fs::remove_file(file(node, uid).with_extension("json.corrupt")).unwrap();
}

/// Looks at the node as often as a plugin that has run for a while.
async fn settle(node: &TestNode) {
    let plugin = node.plugin();
    for _ in 0..2 {
        plugin.inventory(node.hardware()).await.unwrap();
    }
}

#[tokio::test]
async fn a_damaged_record_holds_what_it_held_and_is_made_anew_with_the_same_instance() {
    let node = TestNode::with_gpus(2);
    settle(&node).await;
    let (part, whole) = (node.device(0, "3g40gb-4"), node.device(1, ""));
    let claim = node.claim("order-0", "uid-1", &[&part, &whole]);
    let answer = node.plugin().prepare(claim.clone()).await.unwrap();
    let before = node.inventory();
    let good = std::fs::read(file(&node, "uid-1")).unwrap();
    for (what, bytes) in damages(&good) {
        std::fs::write(file(&node, "uid-1"), bytes).unwrap();
        let (plugin, source) = cut_off(&node);
        let reports = plugin.reconcile(Some(node.loaded())).await;
        assert_eq!(reports[0].reason, "CheckpointDamaged", "{what}");
        let (_, statics) = plugin.inventory(node.hardware()).await.unwrap();
        assert!(statics.is_empty(), "{what}: taken for an administrator's");
        for device in [
            node.device(0, "1g10gb-6"),
            node.device(0, ""),
            whole.clone(),
        ] {
            let other = node.claim("other", "uid-2", &[&device]);
            let error = refused_without_mending(&node, other).await;
            assert!(error.contains("uid-1"), "{what}: {error}");
        }

        source.away.store(false, Ordering::Relaxed);
        plugin.reconcile(Some(node.loaded())).await;
        remove_copy(&node, "uid-1");
        node.agrees(&[&claim]);
        assert_eq!(node.inventory(), before, "{what}");
        assert_eq!(
            plugin.prepare(claim.clone()).await.unwrap(),
            answer,
            "{what}"
        );
    }
    node.plugin().unprepare(claim).await.unwrap();
    node.agrees(&[]);
}

/// The error of a claim while the API server knows only that claim.
async fn refused_without_mending(node: &TestNode, claim: ClaimRef) -> String {
    let alone = Arc::new(MemoryClaims::default());
    alone.put(&claim.name, node.object(&claim.name));
    let (_sender, loaded) = watch::channel(Some(node.loaded()));
    let source = Arc::new(Only(claim.name.clone(), alone));
    let plugin = Claims::open(node.settings(), source, loaded, Arc::new(|_| ())).unwrap();
    plugin.prepare(claim).await.unwrap_err().to_string()
}

/// An API server that answers for one claim only.
struct Only(String, Arc<MemoryClaims>);

impl ClaimSource for Only {
    fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ResourceClaim>, String>> {
        if name == self.0 {
            return self.1.get(namespace, name);
        }
        async { Err("no answer".to_owned()) }.boxed()
    }
}

#[tokio::test]
async fn a_record_damaged_while_running_is_made_anew_by_the_next_call_for_it_or_for_its_device() {
    let node = TestNode::with_gpus(1);
    settle(&node).await;
    let device = node.device(0, "1g10gb-6");
    let claim = node.claim("order-0", "uid-1", &[&device]);
    let plugin = node.plugin();
    let answer = plugin.prepare(claim.clone()).await.unwrap();
    let damage = || std::fs::write(file(&node, "uid-1"), "garbage").unwrap();

    damage();
    assert_eq!(plugin.prepare(claim.clone()).await.unwrap(), answer);
    remove_copy(&node, "uid-1");
    node.agrees(&[&claim]);

    damage();
    let other = node.claim("other", "uid-2", &[&device]);
    let error = plugin.prepare(other).await.unwrap_err().to_string();
    assert!(error.contains("team/order-0"), "{error}");
    remove_copy(&node, "uid-1");
    node.agrees(&[&claim]);

    damage();
    plugin.unprepare(claim).await.unwrap();
    remove_copy(&node, "uid-1");
    node.agrees(&[]);
}

#[tokio::test]
async fn a_damaged_record_of_a_claim_that_is_gone_is_collected_with_its_instance() {
    let node = TestNode::with_gpus(1);
    settle(&node).await;
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "1g10gb-6")]);
    let plugin = node.plugin();
    plugin.prepare(claim).await.unwrap();
    std::fs::write(file(&node, "uid-1"), "").unwrap();
    node.delete_claim("order-0");
    plugin.reconcile(Some(node.loaded())).await;
    assert_eq!(node.instances(), 1, "the kubelet may still unprepare it");
    assert_eq!(plugin.collect_garbage().await, 1);
    remove_copy(&node, "uid-1");
    node.agrees(&[]);
}

#[tokio::test]
async fn an_administrators_instance_outlives_a_damaged_record_that_used_it() {
    for noted in [true, false] {
        let node = TestNode::with_gpus(1);
        node.make_instance("1g.10gb", 3);
        if noted {
            settle(&node).await;
        }
        let claim = node.claim("order-0", "uid-1", &[&node.device(0, "1g10gb-3")]);
        let plugin = node.plugin();
        plugin.prepare(claim.clone()).await.unwrap();
        std::fs::write(file(&node, "uid-1"), "").unwrap();
        node.plugin().reconcile(Some(node.loaded())).await;
        plugin.unprepare(claim).await.unwrap();
        assert_eq!(node.instances(), 1, "{noted}");
    }
}

#[tokio::test]
async fn an_empty_record_without_any_hint_keeps_unexplained_instances_from_everybody() {
    let node = TestNode::with_gpus(1);
    settle(&node).await;
    let device = node.device(0, "1g10gb-6");
    let claim = node.claim("order-0", "uid-1", &[&device]);
    node.plugin().prepare(claim.clone()).await.unwrap();
    std::fs::write(file(&node, "uid-1"), "").unwrap();
    for folder in ["cdi", "plugin/dra-device-metadata"] {
        std::fs::remove_dir_all(node.path(folder)).unwrap();
    }
    let plugin = node.plugin();
    let reports = plugin.reconcile(Some(node.loaded())).await;
    assert!(reports[0].text.contains("uid-1.json"), "{reports:?}");
    assert!(
        plugin
            .inventory(node.hardware())
            .await
            .unwrap()
            .1
            .is_empty()
    );
    let other = node.claim("other", "uid-2", &[&device]);
    let error = plugin.prepare(other).await.unwrap_err().to_string();
    assert!(error.contains("uid-1"), "{error}");
    // The kubelet's call names the claim, and that is all that was missing.
    plugin.unprepare(claim).await.unwrap();
    remove_copy(&node, "uid-1");
    node.agrees(&[]);
}

#[tokio::test]
async fn a_record_of_a_later_release_keeps_its_devices_and_says_so() {
    let node = TestNode::with_gpus(2);
    settle(&node).await;
    let part = node.device(0, "3g40gb-4");
    let claim = node.claim("order-0", "uid-1", &[&part]);
    node.plugin().prepare(claim.clone()).await.unwrap();
    let later = later_version(&std::fs::read_to_string(file(&node, "uid-1")).unwrap());
    std::fs::write(file(&node, "uid-1"), &later).unwrap();

    let plugin = node.plugin();
    let reports = plugin.reconcile(Some(node.loaded())).await;
    assert_eq!(reports[0].reason, "CheckpointTooNew");
    assert!(reports[0].text.contains("version 9"), "{reports:?}");
    assert!(
        plugin
            .inventory(node.hardware())
            .await
            .unwrap()
            .1
            .is_empty()
    );
    for at in ["1g10gb-6", "3g40gb-4", ""] {
        let other = node.claim("other", "uid-2", &[&node.device(0, at)]);
        let error = plugin.prepare(other).await.unwrap_err().to_string();
        assert!(
            error.contains("uid-1") && error.contains("version 9"),
            "{error}"
        );
    }
    let beside = node.claim("beside", "uid-3", &[&node.device(0, "4g40gb-0")]);
    plugin.prepare(beside.clone()).await.unwrap();
    plugin.unprepare(beside).await.unwrap();
    for error in [
        plugin.prepare(claim.clone()).await.unwrap_err(),
        plugin.unprepare(claim).await.unwrap_err(),
    ] {
        assert!(
            error.to_string().contains("run the release that wrote it"),
            "{error}"
        );
    }
    plugin.collect_garbage().await;
    assert_eq!(
        std::fs::read_to_string(file(&node, "uid-1")).unwrap(),
        later
    );
    assert_eq!(node.instances(), 1);
}

/// A record as a later release may write it: fields and kinds that nobody here knows.
fn later_version(text: &str) -> String {
    use sha2::Digest;
    let (_, payload) = text.split_once('\n').unwrap();
    let payload = payload
        .replace("\"PrepareCompleted\"", "\"PrepareSuspended\"")
        .replace(
            "\"type\":\"partition\"",
            "\"type\":\"slab\",\"colour\":\"blue\"",
        );
    let digest = sha2::Sha256::digest(format!("9\n{payload}").as_bytes());
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{{\"version\":9,\"sha256\":\"{digest}\"}}\n{payload}")
}

/// Every format that was ever released, as it was written then. A file here is never changed; a new
/// format gets a new one.
#[tokio::test]
async fn records_of_every_released_format_are_read_and_their_claims_can_end() {
    let folder = repository().join("node-plugin/tests/plugin/checkpoints");
    let node = TestNode::with_gpus(2);
    let mut seen = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let uid = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let into = file(&node, &uid);
        std::fs::create_dir_all(into.parent().unwrap()).unwrap();
        std::fs::copy(&path, into).unwrap();
        let records = Checkpoints::open(node.path("plugin/claims")).unwrap();
        let record: Record = records.read(&uid).unwrap().unwrap();
        seen.push((uid, record.stage));
        node.plugin().unprepare(record.claim).await.unwrap();
        node.agrees(&[]);
    }
    seen.sort_by(|a, b| a.0.cmp(&b.0));
    let expected = [
        ("v1-partition-completed", Stage::PrepareCompleted),
        ("v1-partition-started", Stage::PrepareStarted),
        ("v1-whole-completed", Stage::PrepareCompleted),
        ("v2-partition-unprepared", Stage::Unprepared),
    ];
    assert_eq!(seen, expected.map(|(uid, stage)| (uid.to_owned(), stage)));
}

#[tokio::test]
async fn a_checkpoint_folder_that_cannot_be_read_is_said_to_be_that_and_nothing_is_taken_for_gone()
{
    let node = TestNode::with_gpus(1);
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "1g10gb-6")]);
    let plugin = node.plugin();
    plugin.prepare(claim.clone()).await.unwrap();
    node.delete_claim("order-0");
    let (folder, aside) = (node.path("plugin/claims"), node.path("plugin/aside"));
    std::fs::rename(&folder, &aside).unwrap();
    std::fs::write(&folder, "").unwrap();
    let error = plugin.inventory(node.hardware()).await.unwrap_err();
    assert!(
        error.to_string().contains("the checkpoints cannot be read"),
        "{error}"
    );
    assert_eq!(plugin.collect_garbage().await, 0);
    assert_eq!(node.instances(), 1);
    std::fs::remove_file(&folder).unwrap();
    std::fs::rename(aside, folder).unwrap();
    assert_eq!(plugin.collect_garbage().await, 1);
    node.agrees(&[]);
}
