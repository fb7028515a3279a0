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
fn a_copy_carries_its_own_release_and_generation_a_116() {
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
#[case::ends_without_an_error(
    "{containerStatuses: [{name: runtime, ready: false, restartCount: 3, image: i, imageID: i, state: {waiting: {reason: CrashLoopBackOff}}, lastState: {terminated: {exitCode: 0, reason: Completed}}}]}",
    R::RuntimeCrashing,
    "exit code 0"
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
    R::ContainerNotStarted,
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

#[test]
fn a_copy_carries_the_limits_that_it_was_raised_with_a_114() {
    let mut pod = pod("{}");
    assert_eq!(read(&pod).limits, None, "a copy of an earlier version");
    let notes = pod.metadata.annotations.as_mut().unwrap();
    notes.insert(CONTEXT_TOKENS.into(), "4096".into());
    notes.insert(SEQUENCES.into(), "4".into());
    let limits = read(&pod).limits.unwrap();
    assert_eq!((limits.context, limits.sequences), (4096, 4));
}

#[rstest]
#[case("chat-0", 0)]
#[case("chat-10", 10)]
#[case("gpt-4-2", 2)]
fn copies_are_numbered_and_not_sorted_by_their_letters(#[case] name: &str, #[case] number: i32) {
    assert_eq!(ordinal(name), number);
}

const SCHEDULED_LONG_AGO: &str = "conditions: [{type: PodScheduled, status: 'True', lastTransitionTime: '1970-01-01T00:00:50Z'}]";

#[rstest]
#[case::preparing(&format!("{{{SCHEDULED_LONG_AGO}}}"), true)]
#[case::loading_has_the_kubelets_probe(&format!("{{{SCHEDULED_LONG_AGO}, containerStatuses: [{{name: runtime, ready: false, started: false, restartCount: 0, image: i, imageID: i, state: {{running: {{}}}}}}]}}"), false)]
#[case::silent(&format!("{{{SCHEDULED_LONG_AGO}, containerStatuses: [{{name: runtime, ready: false, started: true, restartCount: 0, image: i, imageID: i, state: {{running: {{}}}}}}]}}"), true)]
#[case::downloading_tells_its_progress(&format!("{{{SCHEDULED_LONG_AGO}, initContainerStatuses: [{{name: fetch, ready: false, restartCount: 0, image: i, imageID: i, state: {{running: {{}}}}}}]}}"), false)]
fn a_copy_that_hangs_is_stuck_after_a_time_a_118(#[case] status: &str, #[case] hangs: bool) {
    let copy = read(&pod(status));
    assert_eq!(copy.stuck(50 + STALLED_AFTER - 1), None);
    assert_eq!(copy.stuck(50 + STALLED_AFTER).is_some(), hangs, "{copy:?}");
    assert_eq!(copy.judged_in(60), hangs.then_some(STALLED_AFTER - 10));
}

#[rstest]
#[case::no_image(
    "{initContainerStatuses: [{name: fetch, ready: false, restartCount: 0, image: i, imageID: i, state: {waiting: {reason: ErrImagePull}}}]}"
)]
#[case::runtime_without_image(
    "{initContainerStatuses: [{name: fetch, ready: true, restartCount: 0, image: i, imageID: i, state: {terminated: {exitCode: 0}}}], containerStatuses: [{name: runtime, ready: false, restartCount: 0, image: i, imageID: i, state: {waiting: {reason: ImagePullBackOff}}}]}"
)]
#[case::full_disk(
    "{initContainerStatuses: [{name: fetch, ready: false, restartCount: 1, image: i, imageID: i, state: {terminated: {exitCode: 1, message: 'InsufficientStorage: full'}}}]}"
)]
#[case::crash(
    "{containerStatuses: [{name: runtime, ready: false, restartCount: 1, image: i, imageID: i, state: {terminated: {exitCode: 2}}}]}"
)]
fn what_fails_is_stuck_at_once_a_118(#[case] status: &str) {
    assert!(read(&pod(status)).stuck(0).is_some());
}

#[test]
fn a_copy_without_a_volume_is_stuck_a_118() {
    let mut pod = pod(
        "{conditions: [{type: PodScheduled, status: 'False', reason: Unschedulable, message: 'pod has unbound immediate PersistentVolumeClaims'}]}",
    );
    pod.spec.as_mut().unwrap().node_name = None;
    let copy = read(&pod);
    assert_eq!(copy.problem.as_ref().unwrap().0, R::VolumePending);
    assert!(copy.stuck(0).is_some());
}
