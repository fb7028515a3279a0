//! The copies, read from their pods: what each waits for, and which are moved.
//! Pure.

use crate::render::{FETCH_CONTAINER, ORDER_GENERATION, RUNTIME_CONTAINER};
use inference_api::names::RELEASE_LABEL;
use inference_api::{OrderReason as R, UpdateStrategy};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition};
use kube::ResourceExt;

/// Longest piece of a runtime's last words in a status.
const LAST_WORDS: usize = 400;

/// One copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Its pod's name.
    pub name: String,
    /// Whether it answers.
    pub ready: bool,
    /// Whether it is on its way out.
    pub ending: bool,
    /// Whether a node was found.
    pub scheduled: bool,
    /// Release that it was raised with.
    pub release: String,
    /// Generation of the order that its description was made from.
    pub generation: i64,
    /// Claim template that it was raised with.
    pub claim_template: Option<String>,
    /// Address of its running download.
    pub downloading_at: Option<String>,
    /// Whether its container waits for a Secret that is not there.
    pub secret_missing: bool,
    /// Why it is not ready.
    pub problem: Option<(R, String)>,
}

/// Reads a pod.
pub fn read(pod: &Pod) -> Copy {
    let status = pod.status.clone().unwrap_or_default();
    let conditions = status.conditions.clone().unwrap_or_default();
    let condition = |name: &str| conditions.iter().find(|c| c.type_ == name);
    let container = |list: &Option<Vec<ContainerStatus>>, name: &str| {
        list.iter().flatten().find(|c| c.name == name).cloned()
    };
    let init = container(&status.init_container_statuses, FETCH_CONTAINER);
    let runtime = container(&status.container_statuses, RUNTIME_CONTAINER);
    let fetching = init.as_ref().is_some_and(is_running);
    let claims = pod
        .spec
        .iter()
        .flat_map(|s| s.resource_claims.iter().flatten());
    let mut copy = Copy {
        name: pod.name_any(),
        ready: condition("Ready").is_some_and(|c| c.status == "True"),
        ending: pod.metadata.deletion_timestamp.is_some(),
        scheduled: pod.spec.as_ref().is_some_and(|s| s.node_name.is_some()),
        release: pod.labels().get(RELEASE_LABEL).cloned().unwrap_or_default(),
        generation: pod
            .annotations()
            .get(ORDER_GENERATION)
            .and_then(|g| g.parse().ok())
            .unwrap_or_default(),
        claim_template: claims
            .filter_map(|c| c.resource_claim_template_name.clone())
            .next(),
        downloading_at: status.pod_ip.clone().filter(|_| fetching),
        secret_missing: [&init, &runtime].into_iter().flatten().any(|c| {
            waiting(c).is_some_and(|(reason, message)| {
                reason == "CreateContainerConfigError"
                    && message.contains("secret")
                    && message.contains("not found")
            })
        }),
        problem: None,
    };
    if !copy.ready {
        copy.problem = Some(problem(&copy, condition("PodScheduled"), init, runtime));
    }
    copy
}

fn is_running(c: &ContainerStatus) -> bool {
    c.state.as_ref().is_some_and(|s| s.running.is_some())
}

fn is_done(c: &ContainerStatus) -> bool {
    let ended = c.state.as_ref().and_then(|s| s.terminated.as_ref());
    ended.is_some_and(|t| t.exit_code == 0)
}

fn waiting(c: &ContainerStatus) -> Option<(String, String)> {
    let w = c.state.as_ref()?.waiting.as_ref()?;
    Some((
        w.reason.clone().unwrap_or_default(),
        w.message.clone().unwrap_or_default(),
    ))
}

/// Exit code, reason and last words of a container that ended by itself.
fn ended(c: &ContainerStatus) -> Option<(i32, String, String)> {
    let of = |s: &Option<k8s_openapi::api::core::v1::ContainerState>| {
        s.as_ref().and_then(|s| s.terminated.clone())
    };
    let t = of(&c.state).or_else(|| of(&c.last_state))?;
    (t.exit_code != 0 || t.reason.as_deref() == Some("OOMKilled")).then(|| {
        (
            t.exit_code,
            t.reason.unwrap_or_default(),
            t.message.unwrap_or_default(),
        )
    })
}

fn tail(text: &str) -> String {
    let text = text.trim();
    let skip = text.chars().count().saturating_sub(LAST_WORDS);
    let kept: String = text
        .chars()
        .skip(skip)
        .filter(|c| *c == '\n' || !c.is_control())
        .collect();
    kept.replace('\n', " | ")
}

fn problem(
    copy: &Copy,
    scheduled: Option<&PodCondition>,
    init: Option<ContainerStatus>,
    runtime: Option<ContainerStatus>,
) -> (R, String) {
    let name = &copy.name;
    if copy.ending {
        return (R::ReplicasStarting, format!("{name} is ending"));
    }
    if !copy.scheduled {
        let words = scheduled
            .and_then(|c| c.message.clone())
            .unwrap_or_default();
        let refused = scheduled
            .is_some_and(|c| c.status == "False" && c.reason.as_deref() == Some("Unschedulable"));
        return match (refused, words.contains("PersistentVolumeClaim")) {
            (true, true) => (R::VolumePending, format!("{name}: {words}")),
            (true, false) => (R::ReplicasUnschedulable, format!("{name}: {words}")),
            (false, _) => (
                R::ReplicasStarting,
                format!("{name} waits for the scheduler"),
            ),
        };
    }
    if let Some(c) = &init
        && !is_done(c)
    {
        return fetch_problem(name, c);
    }
    let Some(c) = runtime else {
        return (
            R::ReplicasStarting,
            format!("{name}: its devices and volumes are being prepared on its node"),
        );
    };
    if let Some((code, reason, words)) = ended(&c) {
        let words = if words.is_empty() {
            "it left no words".to_owned()
        } else {
            tail(&words)
        };
        let reason = if reason.is_empty() || reason == "Error" {
            String::new()
        } else {
            format!(" ({reason})")
        };
        return (
            R::RuntimeCrashing,
            format!(
                "{name}: the runtime ended with exit code {code}{reason}, {} times so far; its last words: {words}",
                c.restart_count.max(1)
            ),
        );
    }
    if let Some((reason, words)) = waiting(&c) {
        return (R::ReplicasStarting, waiting_words(name, &reason, &words));
    }
    if c.ready {
        return (
            R::ReplicasStarting,
            format!("{name} answers, and not yet for the model that it is to serve"),
        );
    }
    if c.started == Some(true) {
        return (
            R::ReplicasNotReady,
            format!("{name} runs but does not answer"),
        );
    }
    (R::ReplicasStarting, format!("{name} is loading the model"))
}

fn waiting_words(name: &str, reason: &str, words: &str) -> String {
    match (reason, words) {
        ("PodInitializing" | "ContainerCreating" | "", "") => {
            format!("{name}: its devices and volumes are being prepared on its node")
        }
        (reason, "") => format!("{name}: {reason}"),
        (reason, words) => format!("{name}: {reason}: {}", tail(words)),
    }
}

fn fetch_problem(name: &str, c: &ContainerStatus) -> (R, String) {
    if is_running(c) {
        return (
            R::ModelDownloading,
            format!("{name} is bringing the model to its volume"),
        );
    }
    if let Some((code, _, words)) = ended(c) {
        // The download leaves `Reason: text` as its last words.
        if let Some((word, text)) = words.trim().split_once(": ")
            && let Some(reason) = R::parse(word)
        {
            return (reason, format!("{name}: {}", tail(text)));
        }
        return (
            R::DownloadFailed,
            format!(
                "{name}: the download ended with exit code {code}: {}",
                tail(&words)
            ),
        );
    }
    let (reason, words) = waiting(c).unwrap_or_default();
    (R::ReplicasStarting, waiting_words(name, &reason, &words))
}

/// What a copy is compared with.
#[derive(Clone, Copy, Debug)]
pub struct Current<'a> {
    /// Generation of the order.
    pub generation: i64,
    /// Claim template that copies are raised with now.
    pub claim_template: &'a str,
    /// How the class moves copies.
    pub strategy: UpdateStrategy,
}

/// Copies to take down now, so that they come up on the current description.
///
/// A copy that found no node on an outdated claim template serves nobody and goes
/// at once. After an edit, the copies of an older generation go as the class
/// asks: one at a time while all others answer, so that a new
/// description that does not get ready stops the move; or all at once.
pub fn to_move(copies: &[Copy], current: Current<'_>) -> Vec<String> {
    let live = || copies.iter().filter(|c| !c.ending);
    let stranded = |c: &Copy| {
        !c.scheduled
            && c.claim_template
                .as_deref()
                .is_some_and(|t| t != current.claim_template)
    };
    let outdated = |c: &Copy| c.generation < current.generation;
    let mut moved: Vec<String> = live()
        .filter(|c| stranded(c))
        .map(|c| c.name.clone())
        .collect();
    if current.strategy == UpdateStrategy::Recreate {
        moved.extend(
            live()
                .filter(|c| outdated(c) && !stranded(c))
                .map(|c| c.name.clone()),
        );
        return moved;
    }
    // Outdated and not answering: nobody loses by its going.
    let idle: Vec<String> = live()
        .filter(|c| outdated(c) && !c.ready && !stranded(c))
        .map(|c| c.name.clone())
        .collect();
    let waits_for_others = copies
        .iter()
        .any(|c| c.ending || (!c.ready && !outdated(c)));
    if !idle.is_empty() {
        moved.extend(idle);
    } else if !waits_for_others && moved.is_empty() {
        moved.extend(live().filter(|c| outdated(c)).map(|c| c.name.clone()).max());
    }
    moved
}

#[cfg(test)]
#[path = "copies_tests.rs"]
mod tests;
