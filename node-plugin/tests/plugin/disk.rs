//! A disk that is full or read-only: claims fail by a clear error, nothing is lost, and they go on when
//! the disk does.

use std::path::Path;
use std::process::Command;

use node_plugin::claims::checkpoint::ClaimRef;

use crate::node::TestNode;

/// A small file system in memory, mounted on a folder until it is dropped.
struct Mounted(std::path::PathBuf);

impl Mounted {
    /// `None` where this user may not mount.
    fn on(folder: &Path, options: &str) -> Option<Self> {
        std::fs::create_dir_all(folder).unwrap();
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(folder);
        let output = mount.output().unwrap();
        if output.status.success() {
            return Some(Self(folder.to_owned()));
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !rustix::process::geteuid().is_root(),
            "root cannot mount: {said}"
        );
        println!("skipped: {said}");
        None
    }

    fn remount(&self, options: &str) {
        let mut mount = Command::new("mount");
        mount
            .args(["-o", &format!("remount,{options}")])
            .arg(&self.0);
        assert!(mount.status().unwrap().success());
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let mut umount = Command::new("umount");
        drop(umount.arg("-l").arg(&self.0).status());
    }
}

async fn refused(node: &TestNode, claim: &ClaimRef, word: &str) {
    let error = node.plugin().prepare(claim.clone()).await.unwrap_err();
    let error = error.to_string();
    assert!(error.contains(word), "{error}");
    assert_eq!(node.instances(), 1, "only the first claim's");
}

#[tokio::test]
async fn a_full_disk_fails_the_claim_by_its_path_and_holds_nothing_and_claims_can_still_end() {
    let node = TestNode::with_gpus(1);
    let folder = node.path("plugin");
    let Some(disk) = Mounted::on(&folder, "size=64k") else {
        return;
    };
    let first = node.claim("first", "uid-1", &[&node.device(0, "1g10gb-6")]);
    let second = node.claim("second", "uid-2", &[&node.device(0, "1g10gb-5")]);
    let plugin = node.plugin();
    plugin.prepare(first.clone()).await.unwrap();
    std::fs::write(folder.join("filler"), vec![0; 1 << 20]).unwrap_err();

    refused(&node, &second, "uid-2.json").await;
    plugin.prepare(first.clone()).await.unwrap();
    std::fs::remove_file(folder.join("filler")).unwrap();
    node.agrees(&[&first]);
    plugin.prepare(second.clone()).await.unwrap();
    node.agrees(&[&first, &second]);

    std::fs::write(folder.join("filler"), vec![0; 1 << 20]).unwrap_err();
    plugin.unprepare(second).await.unwrap();
    plugin.unprepare(first).await.unwrap();
    node.agrees(&[]);
    drop(disk);
}

#[tokio::test]
async fn a_disk_that_became_read_only_fails_claims_until_it_is_writable_again() {
    let node = TestNode::with_gpus(1);
    let Some(disk) = Mounted::on(&node.path("plugin"), "size=1m") else {
        return;
    };
    let first = node.claim("first", "uid-1", &[&node.device(0, "1g10gb-6")]);
    let second = node.claim("second", "uid-2", &[&node.device(0, "1g10gb-5")]);
    let plugin = node.plugin();
    plugin.prepare(first.clone()).await.unwrap();
    disk.remount("ro");
    let error = plugin
        .prepare(second.clone())
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("Read-only"), "{error}");
    let error = plugin
        .unprepare(first.clone())
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("Read-only"), "{error}");
    disk.remount("rw");
    plugin.prepare(first.clone()).await.unwrap();
    node.agrees(&[&first]);
    plugin.prepare(second.clone()).await.unwrap();
    node.agrees(&[&first, &second]);
    for claim in [first, second] {
        plugin.unprepare(claim).await.unwrap();
    }
    node.agrees(&[]);
    drop(disk);
}

#[tokio::test]
async fn a_full_cdi_folder_fails_the_claim_and_leaves_no_instance() {
    let node = TestNode::with_gpus(1);
    let Some(disk) = Mounted::on(&node.path("cdi"), "size=16k") else {
        return;
    };
    std::fs::write(node.path("cdi/filler"), vec![0; 1 << 20]).unwrap_err();
    let claim = node.claim("order-0", "uid-1", &[&node.device(0, "1g10gb-6")]);
    let plugin = node.plugin();
    let error = plugin.prepare(claim.clone()).await.unwrap_err().to_string();
    assert!(error.contains("the CDI file"), "{error}");
    assert_eq!(node.instances(), 0);
    std::fs::remove_file(node.path("cdi/filler")).unwrap();
    node.agrees(&[]);
    plugin.prepare(claim.clone()).await.unwrap();
    node.agrees(&[&claim]);
    drop(disk);
}
