//! Pods in each state that a copy passes through.

use super::*;
use rstest::rstest;

fn pod(status: &str) -> Pod {
    serde_saphyr::from_str(&format!(
        r#"
metadata:
  name: o-0
  labels: {{ai.deckhouse.io/runtime-release: r1}}
  annotations: {{ai.deckhouse.io/order-generation: "2"}}
spec:
  containers: []
  nodeName: worker
  resourceClaims: [{{name: gpu, resourceClaimTemplateName: o-abc}}]
status: {status}
"#
    ))
    .unwrap()
}

#[test]
fn a_copy_carries_its_own_release_and_generation() {
    let copy = read(&pod("{conditions: [{type: Ready, status: 'True'}]}"));
    assert!(copy.ready && copy.problem.is_none());
    assert_eq!(
        (
            copy.release.as_str(),
            copy.generation,
            copy.claim_template.as_deref()
        ),
        ("r1", 2, Some("o-abc"))
    );
}

#[rstest]
#[case::downloading(
    "{podIP: 10.0.0.1, initContainerStatuses: [{name: fetch, ready: false, restartCount: 0, image: i, imageID: i, state: {running: {}}}]}",
    R::ModelDownloading,
    "bringing the model"
)]
#[case::download_refused(
    "{initContainerStatuses: [{name: fetch, ready: false, restartCount: 1, image: i, imageID: i, state: {waiting: {reason: CrashLoopBackOff}}, lastState: {terminated: {exitCode: 1, message: 'InsufficientStorage: the volume has 5 bytes free'}}}]}",
    R::InsufficientStorage,
    "5 bytes free"
)]
#[case::download_died(
    "{initContainerStatuses: [{name: fetch, ready: false, restartCount: 1, image: i, imageID: i, state: {terminated: {exitCode: 137, message: 'x: y'}}}]}",
    R::DownloadFailed,
    "exit code 137"
)]
#[case::loading(
    "{initContainerStatuses: [{name: fetch, ready: true, restartCount: 0, image: i, imageID: i, state: {terminated: {exitCode: 0}}}], containerStatuses: [{name: runtime, ready: false, started: false, restartCount: 0, image: i, imageID: i, state: {running: {}}}]}",
    R::ReplicasStarting,
    "loading the model"
)]
#[case::answers_for_something_else(
    "{containerStatuses: [{name: runtime, ready: true, started: true, restartCount: 0, image: i, imageID: i, state: {running: {}}}, {name: verify, ready: false, started: true, restartCount: 0, image: i, imageID: i, state: {running: {}}}]}",
    R::ReplicasStarting,
    "not yet for the model"
)]
#[case::crashing(
    "{containerStatuses: [{name: runtime, ready: false, restartCount: 3, image: i, imageID: i, state: {waiting: {reason: CrashLoopBackOff}}, lastState: {terminated: {exitCode: 1, reason: Error, message: \"line 1\\nCUDA out of memory\"}}}]}",
    R::RuntimeCrashing,
    "exit code 1, 3 times so far; its last words: line 1 | CUDA out of memory"
)]
#[case::out_of_memory(
    "{containerStatuses: [{name: runtime, ready: false, restartCount: 1, image: i, imageID: i, state: {terminated: {exitCode: 137, reason: OOMKilled}}}]}",
    R::RuntimeCrashing,
    "(OOMKilled)"
)]
#[case::image(
    "{initContainerStatuses: [{name: fetch, ready: false, restartCount: 0, image: i, imageID: i, state: {waiting: {reason: ImagePullBackOff, message: no such image}}}]}",
    R::ReplicasStarting,
    "ImagePullBackOff: no such image"
)]
#[case::preparing("{phase: Pending}", R::ReplicasStarting, "being prepared")]
#[case::fell_silent(
    "{containerStatuses: [{name: runtime, ready: false, started: true, restartCount: 0, image: i, imageID: i, state: {running: {}}}]}",
    R::ReplicasNotReady,
    "does not answer"
)]
fn a_copy_that_is_not_ready_says_why(#[case] status: &str, #[case] reason: R, #[case] says: &str) {
    let (got, message) = read(&pod(status)).problem.unwrap();
    assert_eq!(got, reason, "{message}");
    assert!(
        message.starts_with("o-0") && message.contains(says),
        "{message}"
    );
}

#[test]
fn the_schedulers_words_reach_the_order() {
    let mut pod = pod(
        "{conditions: [{type: PodScheduled, status: 'False', reason: Unschedulable, message: '0/2 nodes are available: cannot allocate all claims.'}]}",
    );
    pod.spec.as_mut().unwrap().node_name = None;
    let copy = read(&pod);
    assert!(!copy.scheduled);
    assert_eq!(
        copy.problem.unwrap(),
        (
            R::ReplicasUnschedulable,
            "o-0: 0/2 nodes are available: cannot allocate all claims.".into()
        )
    );
}

fn copy(name: &str, generation: i64, ready: bool) -> Copy {
    Copy {
        name: name.into(),
        ready,
        ending: false,
        scheduled: true,
        release: "r1".into(),
        generation,
        claim_template: Some("t".into()),
        downloading_at: None,
        secret_missing: false,
        problem: None,
    }
}

fn moved(copies: &[Copy], strategy: UpdateStrategy) -> Vec<String> {
    to_move(
        copies,
        Current {
            generation: 2,
            claim_template: "t",
            strategy,
        },
    )
}

#[test]
fn without_an_edit_no_copy_is_moved_whatever_its_release() {
    let mut held = copy("o-0", 2, true);
    held.release = "older".into();
    assert!(
        moved(&[held], UpdateStrategy::RollingUpdate).is_empty(),
        "A-110"
    );
}

#[test]
fn an_edit_moves_one_copy_at_a_time_and_stops_when_the_new_one_is_not_ready() {
    let both_old = [copy("o-0", 1, true), copy("o-1", 1, true)];
    assert_eq!(
        moved(&both_old, UpdateStrategy::RollingUpdate),
        ["o-1"],
        "A-113"
    );
    let new_not_ready = [copy("o-0", 1, true), copy("o-1", 2, false)];
    assert!(
        moved(&new_not_ready, UpdateStrategy::RollingUpdate).is_empty(),
        "A-118"
    );
    let new_ready = [copy("o-0", 1, true), copy("o-1", 2, true)];
    assert_eq!(moved(&new_ready, UpdateStrategy::RollingUpdate), ["o-0"]);
    let mut ending = both_old.clone();
    ending[1].ending = true;
    assert!(
        moved(&ending, UpdateStrategy::RollingUpdate).is_empty(),
        "one is on its way already"
    );
}

#[test]
fn an_outdated_copy_that_does_not_answer_goes_first() {
    let copies = [copy("o-0", 1, false), copy("o-1", 1, true)];
    assert_eq!(moved(&copies, UpdateStrategy::RollingUpdate), ["o-0"]);
}

#[test]
fn recreate_takes_all_outdated_copies_at_once() {
    let copies = [
        copy("o-0", 1, true),
        copy("o-1", 1, true),
        copy("o-2", 2, true),
    ];
    assert_eq!(moved(&copies, UpdateStrategy::Recreate), ["o-0", "o-1"]);
}

#[test]
fn a_copy_stranded_on_an_outdated_claim_template_goes_at_once() {
    let mut stranded = copy("o-0", 2, false);
    stranded.scheduled = false;
    stranded.claim_template = Some("older".into());
    assert_eq!(
        moved(
            &[stranded, copy("o-1", 2, true)],
            UpdateStrategy::RollingUpdate
        ),
        ["o-0"]
    );
}
