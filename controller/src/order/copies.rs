//! The copies, read from their pods: what each was raised with, and what it waits
//! for. Pure. Which of them are moved is decided in [`super::moves`].

use crate::recipe::Limits;
use crate::render::{
    CLASS_TERMS, CONTEXT_TOKENS, FETCH_CONTAINER, ORDER_GENERATION, RUNTIME_CONTAINER, SEQUENCES,
};
use inference_api::OrderReason as R;
use inference_api::names::RELEASE_LABEL;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition};
use kube::ResourceExt;

/// Longest piece of a runtime's last words in a status.
const LAST_WORDS: usize = 400;

/// Seconds that a copy may stay in one state that nothing else bounds (waiting for
/// the scheduler, being prepared on its node, running without an answer), before a
/// move counts as stopped by it. A start has the kubelet's probe, a download its own.
pub const STALLED_AFTER: i64 = 600;

/// One copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Copy {
    /// Its pod's name.
    pub name: String,
    /// Its pod's UID.
    pub uid: String,
    /// Its number among the copies.
    pub ordinal: i32,
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
    /// Terms of the class that it was raised under; none where it is older than the record.
    pub class_terms: Option<String>,
    /// What it accepts; none where it is older than the record.
    pub limits: Option<Limits>,
    /// Claim template that it was raised with.
    pub claim_template: Option<String>,
    /// Address of its running download.
    pub downloading_at: Option<String>,
    /// Whether its container waits for a Secret that is not there.
    pub secret_missing: bool,
    /// Why it is not ready.
    pub problem: Option<(R, String)>,
    /// Since when (seconds of the epoch) it is in a state that nothing else bounds.
    pub idle_since: Option<i64>,
}

impl Copy {
    /// Why waiting alone will not make it ready, as far as one can tell at `now`.
    pub fn stuck(&self, now: i64) -> Option<String> {
        let (reason, words) = self.problem.as_ref()?;
        let stalled = self.idle_since.is_some_and(|t| now - t >= STALLED_AFTER);
        match reason {
            R::RuntimeCrashing
            | R::DownloadFailed
            | R::InsufficientStorage
            | R::AccessDenied
            | R::ModelFilesInvalid
            | R::ModelSourceNotFound
            | R::VolumePending
            | R::ReplicasUnschedulable
            | R::ContainerNotStarted => Some(words.clone()),
            _ if stalled => Some(format!(
                "{words}, for {} minutes and more",
                STALLED_AFTER / 60
            )),
            _ => None,
        }
    }

    /// In how many seconds [`Copy::stuck`] may answer otherwise, though nothing happens.
    pub fn judged_in(&self, now: i64) -> Option<i64> {
        let left = self.idle_since? + STALLED_AFTER - now;
        (left > 0).then_some(left)
    }
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
    let number = |key: &str| pod.annotations().get(key).and_then(|n| n.parse().ok());
    let mut copy = Copy {
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        ordinal: ordinal(&pod.name_any()),
        ready: condition("Ready").is_some_and(|c| c.status == "True"),
        ending: pod.metadata.deletion_timestamp.is_some(),
        scheduled: pod.spec.as_ref().is_some_and(|s| s.node_name.is_some()),
        release: pod.labels().get(RELEASE_LABEL).cloned().unwrap_or_default(),
        generation: pod
            .annotations()
            .get(ORDER_GENERATION)
            .and_then(|g| g.parse().ok())
            .unwrap_or_default(),
        class_terms: pod.annotations().get(CLASS_TERMS).cloned(),
        limits: number(CONTEXT_TOKENS)
            .zip(number(SEQUENCES))
            .map(|(context, sequences)| Limits {
                context,
                sequences: u32::try_from(sequences).unwrap_or(u32::MAX),
            }),
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
        idle_since: None,
    };
    if !copy.ready {
        let found = problem(&copy, condition("PodScheduled"), init, runtime.clone());
        let loading = runtime.is_some_and(|c| is_running(&c) && c.started != Some(true));
        if matches!(found.0, R::ReplicasStarting | R::ReplicasNotReady) && !loading {
            copy.idle_since = last_change(pod, &conditions);
        }
        copy.problem = Some(found);
    }
    copy
}

/// The number at the end of a StatefulSet's pod.
fn ordinal(name: &str) -> i32 {
    name.rsplit_once('-')
        .and_then(|(_, n)| n.parse().ok())
        .unwrap_or_default()
}

/// When a pod's conditions last changed; when it was made, where none did.
fn last_change(pod: &Pod, conditions: &[PodCondition]) -> Option<i64> {
    conditions
        .iter()
        .filter_map(|c| c.last_transition_time.as_ref())
        .chain(&pod.metadata.creation_timestamp)
        .map(|t| t.0.as_second())
        .max()
}

fn is_running(c: &ContainerStatus) -> bool {
    c.state.as_ref().is_some_and(|s| s.running.is_some())
}

fn is_ended(c: &ContainerStatus) -> bool {
    c.state.as_ref().is_some_and(|s| s.terminated.is_some())
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
    // A server that ends with 0 has ended all the same; one that runs again may have been
    // restarted with its node.
    let down = is_ended(c) || waiting(c).is_some_and(|(reason, _)| reason == "CrashLoopBackOff");
    (down || t.exit_code != 0 || t.reason.as_deref() == Some("OOMKilled")).then(|| {
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
        return waits(name, &reason, &words);
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

/// What a container that was never started waits for. What the kubelet says beside
/// its two words for the usual course is a refusal: no image, no Secret.
fn waits(name: &str, reason: &str, words: &str) -> (R, String) {
    let usual = matches!(reason, "PodInitializing" | "ContainerCreating" | "");
    let text = match (reason, words) {
        (_, "") if usual => {
            format!("{name}: its devices and volumes are being prepared on its node")
        }
        (reason, "") => format!("{name}: {reason}"),
        (reason, words) => format!("{name}: {reason}: {}", tail(words)),
    };
    if usual {
        (R::ReplicasStarting, text)
    } else {
        (R::ContainerNotStarted, text)
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
    waits(name, &reason, &words)
}

#[cfg(test)]
#[path = "copies_tests.rs"]
mod tests;
