//! What is reported on an order. `compute` is pure but for the time of change.

use super::apply::Applied;
use super::build::Decision;
use super::copies::Copy;
use super::current::{runtime_current, waits_for};
use super::dereference::{Seen, is_owned};
use super::{Context, Error, Refusal};
use crate::FIELD_MANAGER;
use crate::render::{StandingVolume, served_name};
use inference_api::{
    ClassStatus, CopyDownloadStatus, DownloadStatus, EndpointStatus, InferenceService,
    InferenceServiceStatus, ModelStatus, OrderCondition as C, OrderReason as R, Phase, PlanStatus,
    RejectedPlacement, ReleaseStatus, ReplicasStatus, StorageStatus, set_condition,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use planner::Plan;
use std::collections::BTreeSet;

/// Most rejected placements in a status; the rest is in the planner's log.
const REJECTED: usize = 16;

fn int(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn count(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// The status that follows from what was seen, decided and done.
pub fn compute(
    order: &InferenceService,
    seen: &Seen,
    decision: &Decision,
    applied: &Applied,
    downloads: &[CopyDownloadStatus],
) -> InferenceServiceStatus {
    let old = order.status.clone().unwrap_or_default();
    let copies = &applied.copies;
    let ready = copies.iter().filter(|c| c.ready && !c.ending).count();
    let standing = applied.statefulset.as_ref();
    // During a move one more may stand than is wanted.
    let desired = match (&decision.class, standing) {
        (None, Some(s)) => s.spec.replicas.unwrap_or_default(),
        _ => decision.replicas,
    };
    let mut status = InferenceServiceStatus {
        observed_generation: order.metadata.generation,
        conditions: old.conditions.clone(),
        class: decision
            .class
            .clone()
            .map(|(name, generation)| ClassStatus { name, generation })
            .or(old.class),
        model: decision
            .facts
            .as_ref()
            .map_or(old.model.clone(), |_| Some(model(order, decision, copies))),
        plan: decision
            .plan
            .as_ref()
            .map(|plan| plan_status(plan, decision, old.plan.as_ref()))
            // Standing copies stay on their placement, whatever is in the way of a new one.
            .or_else(|| old.plan.clone().filter(|_| standing.is_some())),
        replicas: Some(
            ReplicasStatus::new(desired, count(copies.len()), count(ready)).within(
                // With the class out of reach, what held last still does.
                decision
                    .bounds
                    .or_else(|| old.replicas.as_ref().and_then(bounds)),
            ),
        ),
        endpoint: standing.map(|_| endpoint(order, decision)),
        release: release(decision, copies, standing.is_some()),
        storage: storage(order, seen, decision, old.storage.as_ref()),
        phase: None,
    };
    if let Some(model) = &mut status.model {
        model.download = download(
            decision,
            old.model.and_then(|m| m.download),
            downloads,
            ready,
        );
    }
    let serving = ready > 0 && decision.rebuild.is_none();
    conditions(order, decision, applied, desired, ready, &mut status);
    status.phase = Some(phase(
        &status,
        decision,
        applied,
        serving,
        ready >= usize::try_from(desired).unwrap_or(0),
    ));
    status
}

/// The status of an order that is being deleted while something holds its deletion (a
/// finalizer, or a deletion in the foreground): what is left of it, and what it waits for.
pub fn deleting(order: &InferenceService, copies: &[Copy]) -> InferenceServiceStatus {
    let old = order.status.clone().unwrap_or_default();
    let ready = copies.iter().filter(|c| c.ready && !c.ending).count();
    let generation = order.metadata.generation;
    let now = Time(k8s_openapi::jiff::Timestamp::now());
    let mut status = InferenceServiceStatus {
        observed_generation: generation,
        phase: Some(Phase::Deleting),
        replicas: Some(ReplicasStatus::new(0, count(copies.len()), count(ready))),
        endpoint: old.endpoint.clone().filter(|_| ready > 0),
        ..old
    };
    let left = format!("{} copies are left, {ready} of them answer", copies.len());
    let holds = order.finalizers().join(", ");
    let words = format!(
        "the order is being deleted; its deletion waits for the finalizers {holds}; {left}"
    );
    for update in [
        C::WorkloadReady.unmet(R::Deleting, left),
        C::Ready.unmet(R::Deleting, words),
    ] {
        set_condition(&mut status.conditions, update, generation, &now);
    }
    status
}

fn bounds(replicas: &ReplicasStatus) -> Option<(i32, i32)> {
    replicas.minimum.zip(replicas.maximum)
}

/// The volumes of the order's own workload. What the class says of them is known only
/// while the class is.
fn storage(
    order: &InferenceService,
    seen: &Seen,
    decision: &Decision,
    old: Option<&StorageStatus>,
) -> Option<StorageStatus> {
    let standing = seen
        .statefulset
        .as_deref()
        .filter(|s| is_owned(order, *s))?;
    let volume = StandingVolume::of(standing)?;
    Some(StorageStatus {
        size_bytes: volume.bytes().map(int),
        storage_class_name: volume.storage_class,
        kept_in_spite_of: match decision.class {
            Some(_) => decision.kept_in_spite_of.clone(),
            None => old.and_then(|o| o.kept_in_spite_of.clone()),
        },
    })
}

fn model(order: &InferenceService, decision: &Decision, copies: &[Copy]) -> ModelStatus {
    let facts = decision.facts.as_ref();
    let recipe = decision.recipe.as_ref().map(|(r, _)| r);
    // While copies are of several releases, what each of them accepts.
    let raised = copies
        .iter()
        .filter_map(|c| c.limits)
        .map(|l| l.context)
        .min();
    ModelStatus {
        endpoint_type: decision.contract,
        served_name: Some(served_name(order)),
        revision: facts.map(|f| f.commit.clone()),
        format: facts.map(|f| f.format.to_string()),
        file: facts.and_then(|f| f.entry_file.clone()),
        architecture: facts.map(|f| f.architecture.clone()),
        quantization: facts.and_then(|f| f.quantization.clone()),
        parameters: None,
        weights_bytes: facts.map(|f| int(f.weights_bytes)),
        kv_cache_bytes_per_token: facts
            .zip(recipe)
            .map(|(f, r)| int(f.kv.bytes_per_token(1, r.memory.cache_element_bytes))),
        context_tokens: raised
            .or_else(|| decision.limits().map(|l| l.context))
            .map(int),
        download: None,
    }
}

fn placement_type(placement: planner::PlacementType) -> inference_api::PlacementType {
    match placement {
        planner::PlacementType::Partition => inference_api::PlacementType::Partition,
        planner::PlacementType::WholeDevice => inference_api::PlacementType::WholeDevice,
    }
}

/// What a copy takes of its device's memory, in percent and rounded up; none where it
/// has the device alone.
fn share_percent(plan: &Plan) -> Option<i32> {
    let shared = plan.sharing_mode == planner::SharingMode::Shared;
    let whole = plan.device_memory_bytes;
    if !shared || whole == 0 {
        return None;
    }
    let percent = (u128::from(plan.memory_bytes) * 100).div_ceil(u128::from(whole));
    i32::try_from(percent).ok()
}

fn plan_status(plan: &Plan, decision: &Decision, old: Option<&PlanStatus>) -> PlanStatus {
    let mut status = PlanStatus {
        device_class_name: Some(plan.device_class_name.clone()),
        sharing_mode: Some(match plan.sharing_mode {
            planner::SharingMode::Dedicated => inference_api::SharingMode::Dedicated,
            planner::SharingMode::Shared => inference_api::SharingMode::Shared,
        }),
        placement_type: Some(placement_type(plan.placement_type)),
        profile: plan.profile.clone(),
        share_percent: share_percent(plan),
        devices_per_replica: i32::try_from(plan.devices_per_replica).ok(),
        memory_per_device_bytes: Some(int(plan.memory_bytes)),
        required_memory_bytes: Some(int(plan
            .memory_needed_bytes
            .saturating_mul(u64::from(plan.devices_per_replica)))),
        replicas_that_fit: i32::try_from(plan.replicas_that_fit).ok(),
        recipe: decision.recipe.as_ref().map(|(r, _)| r.name.clone()),
        reason: None,
        rejected: vec![],
    };
    if decision.replanned || old.is_none() {
        let why = decision
            .recipe
            .as_ref()
            .map(|(_, why)| why.clone())
            .unwrap_or_default();
        status.reason = Some(format!("{} Runtime: {why}.", plan.explanation));
        status.rejected = plan
            .explanation
            .rejections
            .iter()
            .take(REJECTED)
            .map(|r| RejectedPlacement {
                device_class_name: r.device_class_name.clone(),
                placement_type: r.placement_type.map(placement_type),
                profile: r.profile.clone(),
                reason: r.message.clone(),
            })
            .collect();
    } else if let Some(old) = old {
        // A kept plan keeps its explanation and its count of that time.
        status.reason.clone_from(&old.reason);
        status.rejected.clone_from(&old.rejected);
    }
    status
}

fn endpoint(order: &InferenceService, decision: &Decision) -> EndpointStatus {
    let (name, namespace) = (order.name_any(), order.namespace().unwrap_or_default());
    let token = match (&decision.class, &order.status) {
        // With the class out of reach, what was true last still is.
        (None, Some(old)) => old
            .endpoint
            .as_ref()
            .and_then(|e| e.token_secret_name.clone()),
        _ => decision
            .token
            .then(|| InferenceService::token_secret_name(&name)),
    };
    EndpointStatus {
        address: format!("http://{name}.{namespace}.svc"),
        path: match (decision.contract, &order.status) {
            (None, Some(old)) => old.endpoint.as_ref().and_then(|e| e.path.clone()),
            (contract, _) => contract.map(|c| c.path().to_owned()),
        },
        token_secret_name: token,
        ca_secret_name: None,
    }
}

fn release(decision: &Decision, copies: &[Copy], stands: bool) -> Option<ReleaseStatus> {
    let (recipe, _) = decision.recipe.as_ref()?;
    stands.then(|| ReleaseStatus {
        shipped: recipe.release.clone(),
        previous: {
            let others = copies.iter().map(|c| c.release.as_str());
            let others: BTreeSet<&str> = others.filter(|r| *r != recipe.release).collect();
            let others: Vec<&str> = others.into_iter().collect();
            (!others.is_empty()).then(|| others.join(", "))
        },
        replicas_on_shipped: count(
            copies
                .iter()
                .filter(|c| c.release == recipe.release)
                .count(),
        ),
    })
}

fn download(
    decision: &Decision,
    old: Option<DownloadStatus>,
    copies: &[CopyDownloadStatus],
    ready: usize,
) -> Option<DownloadStatus> {
    let whole = int(decision.facts.as_ref()?.download_bytes());
    if copies.is_empty() {
        // Between two readings nothing is known to have changed.
        return match (ready, old) {
            (0, old) => old,
            _ => Some(DownloadStatus {
                total_bytes: whole,
                downloaded_bytes: whole,
                percent: 100,
                copies: vec![],
            }),
        };
    }
    let total = copies
        .iter()
        .map(|c| c.total_bytes)
        .fold(0, i64::saturating_add);
    // A download that just ended does not answer any more, and the pod's status tells later.
    if total == 0 && old.is_some() {
        return old;
    }
    let done = copies
        .iter()
        .map(|c| c.downloaded_bytes)
        .fold(0, i64::saturating_add);
    let percent = i128::from(done) * 100 / i128::from(total.max(1));
    Some(DownloadStatus {
        total_bytes: total,
        downloaded_bytes: done,
        percent: i32::try_from(percent).unwrap_or(0).clamp(0, 100),
        copies: copies.to_vec(),
    })
}

fn conditions(
    order: &InferenceService,
    decision: &Decision,
    applied: &Applied,
    desired: i32,
    ready: usize,
    status: &mut InferenceServiceStatus,
) {
    let generation = order.metadata.generation;
    let now = Time(k8s_openapi::jiff::Timestamp::now());
    let mut set = |update| {
        set_condition(&mut status.conditions, update, generation, &now);
    };
    let stopped = decision.stopped.as_ref();
    let at = |c: C| stopped.filter(|r| r.condition == c);
    // ClassResolved.
    set(match at(C::ClassResolved) {
        Some(r) => C::ClassResolved.unmet(r.reason, &r.message),
        None => C::ClassResolved.met(
            R::ClassResolved,
            "the class exists and admits the order's namespace",
        ),
    });
    // ModelResolved.
    set(match (at(C::ModelResolved), &decision.facts) {
        (Some(r), _) => C::ModelResolved.unmet(r.reason, &r.message),
        (None, Some(f)) => C::ModelResolved.met(
            R::ModelResolved,
            format!(
                "{} at commit {}: {} {}, {} bytes of weights",
                f.request.repository, f.commit, f.format, f.architecture, f.weights_bytes
            ),
        ),
        (None, None) => C::ModelResolved.unknown(
            R::WaitingForClass,
            "the model is read once the class is resolved",
        ),
    });
    // Planned.
    set(match (at(C::Planned), &decision.plan) {
        (Some(r), _) => C::Planned.unmet(r.reason, refusal_words(r, decision)),
        (None, Some(plan)) => C::Planned.met(R::LaunchPlanCalculated, plan_words(plan)),
        (None, None) if at(C::ClassResolved).is_some() => C::Planned.unknown(
            R::WaitingForClass,
            "nothing is planned until the class is resolved",
        ),
        (None, None) => C::Planned.unknown(
            R::WaitingForModel,
            "nothing is planned until the model is known",
        ),
    });
    set(runtime_current(order, decision, applied));
    let workload = workload(decision, applied, desired, ready);
    set(match &workload {
        Ok(message) => C::WorkloadReady.met(R::WorkloadReady, message),
        Err((reason, message)) => C::WorkloadReady.unmet(*reason, message),
    });
    let address = status
        .endpoint
        .as_ref()
        .map(|e| e.address.clone())
        .unwrap_or_default();
    let taken_down = decision.rebuild.as_ref();
    set(match (ready, stopped, workload) {
        (1.., ..) if let Some(why) = taken_down => C::Ready.unmet(R::WorkloadRebuilding, why),
        (1.., ..) => C::Ready.met(R::Ready, ready_words(decision, &address)),
        (0, Some(r), _) => C::Ready.unmet(r.reason, refusal_words(r, decision)),
        (0, None, Err((reason, message))) => C::Ready.unmet(reason, message),
        (0, None, Ok(_)) => C::Ready.unmet(R::NotReady, "no copy answers"),
    });
}

/// A refusal's message; where the class has to be looked at, with its name.
fn refusal_words(refusal: &Refusal, decision: &Decision) -> String {
    match (refusal.reason, &decision.class) {
        (R::PlacementUndecidable, Some((name, _))) => {
            format!("{} The class is {name}.", refusal.message)
        }
        _ => refusal.message.clone(),
    }
}

/// That the order is served, and what its class promises and this version does not do yet.
fn ready_words(decision: &Decision, address: &str) -> String {
    let mut words = format!("answers at {address} inside the cluster");
    if decision.token {
        words.push_str(", with the order's token (checked by the runtime itself)");
    }
    if decision.external {
        words.push_str(
            "; it is not published outside the cluster, which this version does not do yet",
        );
    }
    if let Some((minimum, maximum)) = decision.bounds
        && minimum < maximum
    {
        words.push_str(&format!(
            "; it keeps {minimum} of at most {maximum} copies: growing with the load is not done by this version yet"
        ));
    }
    words
}

fn plan_words(plan: &Plan) -> String {
    let what = match (&plan.profile, plan.placement_type) {
        (Some(profile), _) => format!("partition {profile}"),
        (None, planner::PlacementType::Partition) => "partition".to_owned(),
        (None, planner::PlacementType::WholeDevice) => "whole device".to_owned(),
    };
    let fit = if plan.below_minimum {
        format!("; only {} fit when it was planned", plan.replicas_that_fit)
    } else {
        String::new()
    };
    let class = &plan.device_class_name;
    match share_percent(plan) {
        Some(percent) => {
            format!("each copy gets a share of {percent} % of a {what} of {class}{fit}")
        }
        None => format!(
            "each copy gets {} × {what} of {class}{fit}",
            plan.devices_per_replica
        ),
    }
}

/// Which problem of several copies speaks for the order: the gravest.
fn gravity(reason: R) -> u8 {
    match reason {
        R::RuntimeCrashing
        | R::InsufficientStorage
        | R::AccessDenied
        | R::ModelFilesInvalid
        | R::ModelSourceNotFound => 0,
        R::DownloadFailed
        | R::VolumePending
        | R::ReplicasUnschedulable
        | R::ContainerNotStarted => 1,
        R::ReplicasNotReady => 2,
        R::ModelDownloading => 3,
        _ => 4,
    }
}

fn workload(
    decision: &Decision,
    applied: &Applied,
    desired: i32,
    ready: usize,
) -> Result<String, (R, String)> {
    if let Some(refused) = &applied.refused {
        return Err((refused.reason, refused.message.clone()));
    }
    if applied.statefulset.is_none() {
        let why = if decision.stopped.is_some() {
            "no copy is raised while the order is refused or finds no room"
        } else if !decision.leftovers.is_empty() {
            return Err((R::WorkloadCreating, waits_for(&decision.leftovers)));
        } else {
            "the workload is being made"
        };
        return Err((R::WorkloadCreating, why.to_owned()));
    }
    if count(ready) >= desired {
        return Ok(format!("{ready} of {desired} copies answer"));
    }
    let mut problems: Vec<&(R, String)> = applied
        .copies
        .iter()
        .filter_map(|c| c.problem.as_ref())
        .collect();
    problems.sort_by_key(|(reason, _)| gravity(*reason));
    match problems.first() {
        // It serves, and what is missing is room.
        Some((R::ReplicasUnschedulable, words)) if ready > 0 => Err((
            R::ScaleUpBlocked,
            format!("{ready} of {desired} copies answer, and there is no room for more; {words}"),
        )),
        Some((reason, words)) => Err((
            *reason,
            format!("{ready} of {desired} copies answer; {words}"),
        )),
        None => Err((
            R::WorkloadCreating,
            format!("{ready} of {desired} copies answer; the others are being made"),
        )),
    }
}

fn phase(
    status: &InferenceServiceStatus,
    decision: &Decision,
    applied: &Applied,
    serving: bool,
    complete: bool,
) -> Phase {
    if serving {
        let sound = decision.stopped.is_none() && applied.refused.is_none() && complete;
        return if sound { Phase::Ready } else { Phase::Degraded };
    }
    let hopeless = |r: &Refusal| {
        !r.transient && !matches!(r.reason, R::ResourceClaimExhausted | R::NoDeviceClass)
    };
    let stuck = C::WorkloadReady
        .find(&status.conditions)
        .and_then(|c| R::parse(&c.reason))
        .is_some_and(|r| gravity(r) == 0);
    if decision.stopped.as_ref().is_some_and(hopeless) || stuck {
        Phase::Failed
    } else {
        Phase::Pending
    }
}

/// Writes the status if it differs.
///
/// # Errors
/// [`Error::Api`].
pub async fn publish(
    order: &InferenceService,
    fresh: InferenceServiceStatus,
    cx: &Context,
) -> Result<(), Error> {
    if order.status.as_ref() == Some(&fresh) {
        return Ok(());
    }
    let (name, namespace) = (order.name_any(), order.namespace().unwrap_or_default());
    let api: Api<InferenceService> = Api::namespaced(cx.client.clone(), &namespace);
    let body = serde_json::json!({
        "apiVersion": "ai.deckhouse.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "uid": order.uid()},
        "status": fresh,
    });
    let written = api
        .patch_status(
            &name,
            &PatchParams::apply(FIELD_MANAGER).force(),
            &Patch::Apply(&body),
        )
        .await;
    match written {
        Ok(_) => {
            cx.metrics.writes.inc();
            Ok(())
        }
        // Deleted, or another of the same name, in the meantime.
        Err(kube::Error::Api(s)) if matches!(s.code, 404 | 409) => Ok(()),
        Err(error) => Err(Error::api(
            "patch the status of",
            format!("InferenceService {namespace}/{name}"),
        )(error)),
    }
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
