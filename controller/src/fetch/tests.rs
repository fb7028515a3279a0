//! The download against a hub in memory that misbehaves.

use super::*;
use crate::model::Checksum;
use crate::test_hub::{COMMIT, Hub, git_blob, hex};
use sha2::{Digest, Sha256};

fn big() -> Vec<u8> {
    (0..600_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect()
}

fn spec(address: &str) -> FetchSpec {
    let big = big();
    let sha = Checksum::Sha256(hex(Sha256::digest(&big)));
    FetchSpec {
        endpoint: address.to_owned(),
        repository: "acme/m".into(),
        commit: COMMIT.into(),
        files: vec![
            ModelFile {
                path: "config.json".into(),
                size: 2,
                checksum: Checksum::GitBlob(git_blob(b"{}")),
            },
            ModelFile {
                path: "sub/model.safetensors".into(),
                size: big.len() as u64,
                checksum: sha,
            },
        ],
    }
}

fn hub() -> Hub {
    Hub::with(
        "acme/m",
        &[("config.json", b"{}"), ("sub/model.safetensors", &big())],
    )
}

fn impatient() -> Patience {
    Patience {
        stall: Duration::from_millis(200),
        attempts: 3,
        pause: Duration::from_millis(1),
    }
}

async fn run(spec: &FetchSpec, root: &Path) -> (Result<PathBuf, FetchError>, Report) {
    let progress = Progress::of(&spec.files);
    let result = fetch(spec, root, None, impatient(), &progress).await;
    (result, progress.report())
}

#[tokio::test]
async fn a_model_comes_whole_checked_and_marked_last() {
    let (address, _) = hub().serve().await;
    let root = tempfile::tempdir().unwrap();
    let (result, report) = run(&spec(&address), root.path()).await;
    let folder = result.unwrap();
    assert_eq!(
        std::fs::read(folder.join("sub/model.safetensors")).unwrap(),
        big()
    );
    assert!(folder.join(MARKER).exists());
    let left: Vec<_> = std::fs::read_dir(folder.join("sub"))
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(
        left,
        ["model.safetensors"],
        "no partial and no tag stays behind"
    );
    assert_eq!(
        (report.downloaded_bytes, report.message.as_str()),
        (report.total_bytes, "complete")
    );
}

#[tokio::test]
async fn a_cut_connection_is_resumed_where_it_broke() {
    let hub = hub();
    hub.live.lock().unwrap().cuts = vec![usize::MAX, 200_000, 100_000];
    let (address, hub) = hub.serve().await;
    let root = tempfile::tempdir().unwrap();
    let (result, report) = run(&spec(&address), root.path()).await;
    let folder = result.unwrap();
    assert_eq!(
        std::fs::read(folder.join("sub/model.safetensors")).unwrap(),
        big()
    );
    let ranges = hub.requests_for("model.safetensors");
    assert_eq!(ranges.len(), 3);
    assert_eq!(ranges[0], None);
    assert!(
        ranges[1..]
            .iter()
            .all(|r| r.as_deref().is_some_and(|r| r != "bytes=0-")),
        "{ranges:?}"
    );
    assert_eq!(
        report.downloaded_bytes, report.total_bytes,
        "nothing is counted twice"
    );
}

#[tokio::test]
async fn a_restart_goes_on_from_the_partial_file_and_then_has_nothing_to_do() {
    let (address, hub) = hub().serve().await;
    let root = tempfile::tempdir().unwrap();
    let folder = model_folder(root.path(), COMMIT);
    std::fs::create_dir_all(folder.join("sub")).unwrap();
    std::fs::write(
        folder.join("sub/model.safetensors.partial"),
        &big()[..250_000],
    )
    .unwrap();
    let spec = spec(&address);
    run(&spec, root.path()).await.0.unwrap();
    assert_eq!(
        hub.requests_for("model.safetensors"),
        [Some("bytes=250000-".to_owned())]
    );
    let before = hub.live.lock().unwrap().seen.len();
    let (result, report) = run(&spec, root.path()).await;
    result.unwrap();
    assert_eq!(
        hub.live.lock().unwrap().seen.len(),
        before,
        "a complete model asks the hub for nothing"
    );
    assert_eq!(report.downloaded_bytes, report.total_bytes);
}

#[tokio::test]
async fn a_damaged_partial_file_is_noticed_and_replaced() {
    let (address, _) = hub().serve().await;
    let root = tempfile::tempdir().unwrap();
    let folder = model_folder(root.path(), COMMIT);
    std::fs::create_dir_all(folder.join("sub")).unwrap();
    std::fs::write(
        folder.join("sub/model.safetensors.partial"),
        vec![0; 250_000],
    )
    .unwrap();
    let (result, report) = run(&spec(&address), root.path()).await;
    assert_eq!(
        std::fs::read(result.unwrap().join("sub/model.safetensors")).unwrap(),
        big()
    );
    assert_eq!(report.downloaded_bytes, report.total_bytes);
}

#[tokio::test]
async fn content_that_differs_from_its_checksum_is_never_named_as_the_model() {
    let (address, hub) = hub().serve().await;
    let mut wrong = spec(&address);
    wrong.files[1].checksum = Checksum::Sha256("0".repeat(64));
    let root = tempfile::tempdir().unwrap();
    let error = run(&wrong, root.path()).await.0.unwrap_err();
    assert!(matches!(error, FetchError::Damaged { .. }), "{error}");
    assert_eq!(
        error.reason(),
        inference_api::OrderReason::ModelFilesInvalid
    );
    let folder = model_folder(root.path(), COMMIT);
    assert!(!folder.join("sub/model.safetensors").exists() && !folder.join(MARKER).exists());
    assert_eq!(
        hub.requests_for("model.safetensors").len(),
        2,
        "one more try, not endless ones"
    );
}

#[tokio::test]
async fn a_stalled_body_is_given_up_and_resumed() {
    let hub = hub();
    hub.live.lock().unwrap().stalls = 2;
    let (address, hub) = hub.serve().await;
    let root = tempfile::tempdir().unwrap();
    run(&spec(&address), root.path()).await.0.unwrap();
    assert!(
        hub.requests_for("model.safetensors").len() + hub.requests_for("config.json").len() >= 4
    );
}

#[tokio::test]
async fn a_failing_hub_is_tried_again_but_not_for_ever() {
    let hub = hub();
    hub.live.lock().unwrap().statuses = vec![503, 429];
    let (address, _) = hub.serve().await;
    let root = tempfile::tempdir().unwrap();
    run(&spec(&address), root.path()).await.0.unwrap();

    let nobody = spec("http://127.0.0.1:1");
    let error = run(&nobody, tempfile::tempdir().unwrap().path())
        .await
        .0
        .unwrap_err();
    assert!(
        matches!(&error, FetchError::GivenUp { attempts: 3, .. }),
        "{error}"
    );
}

#[tokio::test]
async fn a_revision_that_is_gone_and_a_refusal_end_at_once() {
    let (address, hub) = hub().serve().await;
    let root = tempfile::tempdir().unwrap();
    let mut moved = spec(&address);
    moved.commit = "f".repeat(40);
    let error = run(&moved, root.path()).await.0.unwrap_err();
    assert!(matches!(error, FetchError::NotFound { .. }), "{error}");
    assert_eq!(hub.live.lock().unwrap().seen.len(), 1);

    let mut gated = self::hub();
    gated.token = Some("hf_x".into());
    let (address, _) = gated.serve().await;
    let error = run(&spec(&address), root.path()).await.0.unwrap_err();
    assert!(
        matches!(error, FetchError::AccessDenied { status: 401, .. }),
        "{error}"
    );
    let progress = Progress::default();
    fetch(
        &spec(&address),
        root.path(),
        Some("hf_x"),
        impatient(),
        &progress,
    )
    .await
    .unwrap();
}

#[tokio::test]
async fn a_volume_without_room_is_refused_before_the_first_byte() {
    let (address, hub) = hub().serve().await;
    let root = tempfile::tempdir().unwrap();
    let mut huge = spec(&address);
    huge.files[1].size = u64::MAX / 2;
    let error = run(&huge, root.path()).await.0.unwrap_err();
    assert_eq!(
        error.reason(),
        inference_api::OrderReason::InsufficientStorage
    );
    assert!(hub.live.lock().unwrap().seen.is_empty());
}

#[tokio::test]
async fn another_revision_makes_room_and_nothing_else_is_touched() {
    let (address, _) = hub().serve().await;
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(root.path().join("abcdefabcdef")).unwrap();
    std::fs::create_dir_all(root.path().join("lost+found")).unwrap();
    run(&spec(&address), root.path()).await.0.unwrap();
    assert!(!root.path().join("abcdefabcdef").exists() && root.path().join("lost+found").exists());
}

#[tokio::test]
async fn a_specification_that_leaves_the_volume_is_refused() {
    let mut bad = spec("http://127.0.0.1:1");
    bad.files[0].path = "../config.json".into();
    let root = tempfile::tempdir().unwrap();
    let error = run(&bad, root.path()).await.0.unwrap_err();
    assert!(matches!(error, FetchError::Spec(_)), "{error}");
}
