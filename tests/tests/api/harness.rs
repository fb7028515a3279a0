//! The harness itself: who its clients are, and that it leaves nothing behind.

use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::control_plane::ControlPlane;
use inference_api::InferenceService;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client, Error};

/// Who the server says that `client` is.
async fn name_of(client: Client) -> Result<String> {
    let review = Api::<SelfSubjectReview>::all(client)
        .create(&PostParams::default(), &SelfSubjectReview::default())
        .await?;
    review
        .status
        .and_then(|status| status.user_info)
        .and_then(|user| user.username)
        .context("a SelfSubjectReview without a user")
}

#[tokio::test]
async fn the_clients_are_who_they_are_said_to_be() -> Result<()> {
    let plane = ControlPlane::shared()?;
    assert_eq!(name_of(plane.client()?).await?, "administrator");
    let namespace = plane.namespace("clients").await?;
    let account = plane
        .client_for_service_account(&namespace, "robot")
        .await?;
    assert_eq!(
        name_of(account).await?,
        format!("system:serviceaccount:{namespace}:robot")
    );
    assert_eq!(
        name_of(plane.client_as("anna", &["editors"])?).await?,
        "anna"
    );
    Ok(())
}

#[tokio::test]
async fn a_091_a_user_without_a_role_may_do_nothing() -> Result<()> {
    let plane = ControlPlane::shared()?;
    let orders: Api<InferenceService> =
        Api::namespaced(plane.client_as("anna", &["editors"])?, "default");
    match orders.list(&ListParams::default()).await {
        Err(Error::Api(status)) => assert_eq!(status.code, 403, "{}", status.message),
        answer => anyhow::bail!("not refused: {answer:?}"),
    }
    Ok(())
}

#[tokio::test]
async fn a_dropped_control_plane_leaves_no_process_and_no_folder() -> Result<()> {
    let plane = ControlPlane::start()?;
    let address = plane.address().replace("https://", "");
    let kubeconfig = plane.kubeconfig().to_owned();
    ensure!(
        kubeconfig.is_file(),
        "{} is not there",
        kubeconfig.display()
    );
    ensure!(
        TcpStream::connect(&address).is_ok(),
        "{address} does not answer"
    );
    drop(plane);
    assert!(
        TcpStream::connect(&address).is_err(),
        "{address} still answers"
    );
    assert!(
        !kubeconfig.exists(),
        "{} is still there",
        kubeconfig.display()
    );
    Ok(())
}

/// Set for the process that the next test kills: the file to write its kubeconfig's path into.
const TO_BE_KILLED: &str = "E2E_TO_BE_KILLED";

#[test]
fn a_killed_test_leaves_no_process_and_no_folder() -> Result<()> {
    const THIS: &str = "harness::a_killed_test_leaves_no_process_and_no_folder";
    if let Some(file) = std::env::var_os(TO_BE_KILLED) {
        let plane = ControlPlane::start()?;
        let note = format!("{}\n{}", plane.address(), plane.kubeconfig().display());
        let written = Path::new(&file).with_extension("written");
        std::fs::write(&written, note)?;
        std::fs::rename(&written, &file)?;
        loop {
            std::thread::park();
        }
    }
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("running");
    let mut test = Command::new(std::env::current_exe()?)
        .args(["--exact", THIS])
        .env(TO_BE_KILLED, &file)
        .stdout(Stdio::null())
        .spawn()?;
    wait_until("the control plane runs", || file.exists())?;
    test.kill()?;
    test.wait()?;
    let note = std::fs::read_to_string(&file)?;
    let (address, kubeconfig) = note.split_once('\n').context("a note of one line")?;
    let address = address.replace("https://", "");
    wait_until("nothing listens", || TcpStream::connect(&address).is_err())?;
    wait_until("the folder is gone", || !Path::new(kubeconfig).exists())
}

/// Waits for what no watch tells of: another process.
fn wait_until(what: &str, is_so: impl Fn() -> bool) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        ensure!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
