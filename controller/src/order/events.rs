//! Events of an order: each tells of one change between two statuses.

use super::{Context, Refusal};
use inference_api::{
    InferenceService, InferenceServiceStatus, OrderCondition, OrderEvent, OrderReason,
};
use kube::runtime::events::{Event, EventType};
use kube::{Resource, ResourceExt};
use tracing::warn;

/// What happened between the two, in order; `obstacle` is what is in the way now. Pure.
pub fn between(
    old: &InferenceServiceStatus,
    new: &InferenceServiceStatus,
    obstacle: Option<&Refusal>,
) -> Vec<(OrderEvent, String)> {
    let mut events = Vec::new();
    let plan = |s: &InferenceServiceStatus| {
        s.plan.as_ref().map(|p| {
            (
                p.device_class_name.clone(),
                p.profile.clone(),
                p.devices_per_replica,
            )
        })
    };
    if let Some(p) = &new.plan
        && plan(old) != plan(new)
    {
        let message = OrderCondition::Planned
            .find(&new.conditions)
            .map(|c| c.message.clone())
            .unwrap_or_default();
        events.push((
            OrderEvent::PlanChanged,
            format!("{message}: {}", p.reason.clone().unwrap_or_default()),
        ));
    }
    let download = |s: &InferenceServiceStatus| s.model.as_ref().and_then(|m| m.download.clone());
    match (download(old), download(new)) {
        (None, Some(d)) if d.percent < 100 => {
            events.push((
                OrderEvent::DownloadStarted,
                format!("{} bytes to bring", d.total_bytes),
            ));
        }
        (Some(before), Some(now)) if now.percent > before.percent => {
            if now.percent >= 100 && now.copies.is_empty() {
                events.push((
                    OrderEvent::DownloadCompleted,
                    format!("{} bytes, checked", now.total_bytes),
                ));
            } else if now.percent / 25 > before.percent / 25 {
                events.push((
                    OrderEvent::DownloadProgress,
                    format!(
                        "{} %: {} of {} bytes",
                        now.percent, now.downloaded_bytes, now.total_bytes
                    ),
                ));
            }
        }
        _ => {}
    }
    // What the download left as its last words is on this condition alone.
    let failed = |s: &InferenceServiceStatus| {
        let c = OrderCondition::WorkloadReady.find(&s.conditions)?.clone();
        let word = OrderReason::parse(&c.reason)?;
        matches!(
            word,
            OrderReason::DownloadFailed
                | OrderReason::InsufficientStorage
                | OrderReason::AccessDenied
                | OrderReason::ModelFilesInvalid
                | OrderReason::ModelSourceNotFound
        )
        .then_some(c)
    };
    if let Some(c) = failed(new)
        && failed(old).is_none_or(|was| was.reason != c.reason)
    {
        events.push((OrderEvent::DownloadFailed, c.message));
    }
    let kept =
        |s: &InferenceServiceStatus| s.storage.as_ref().and_then(|s| s.kept_in_spite_of.clone());
    if let Some(class) = kept(new)
        && kept(old).as_ref() != Some(&class)
    {
        events.push((
            OrderEvent::SettledRegionKept,
            format!("the class names the storage class {class} now; the standing volume is kept where it was made"),
        ));
    }
    let was = |word: &str| {
        old.conditions
            .iter()
            .any(|c| c.status == "False" && c.reason == word)
    };
    if let Some(refusal) = obstacle
        && !was(refusal.reason.as_str())
    {
        events.push((
            OrderEvent::OrderRefused,
            format!("{}: {}", refusal.reason, refusal.message),
        ));
    }
    let ready = |s: &InferenceServiceStatus| OrderCondition::Ready.is_met(&s.conditions);
    if ready(new) && !ready(old) {
        let address = new
            .endpoint
            .as_ref()
            .map(|e| e.address.clone())
            .unwrap_or_default();
        events.push((
            OrderEvent::OrderReady,
            format!("the endpoint answers at {address}"),
        ));
    }
    events.extend(of_the_copies(old, new));
    events
}

/// What became of the copies: a hold, a move, a removal, each told when it begins.
fn of_the_copies(
    old: &InferenceServiceStatus,
    new: &InferenceServiceStatus,
) -> Option<(OrderEvent, String)> {
    use OrderReason as R;
    let current = |s: &InferenceServiceStatus| {
        let c = OrderCondition::RuntimeCurrent.find(&s.conditions)?;
        Some((R::parse(&c.reason)?, c.message.clone()))
    };
    let before = current(old).map(|(reason, _)| reason);
    let (reason, message) = current(new)?;
    let moved = matches!(before, Some(R::ReplicasMoving | R::MoveStopped));
    let event = match reason {
        _ if before == Some(reason) => return None,
        R::ReplicasHeldOnPreviousRuntime => OrderEvent::ReplicasHeldOnPreviousRuntime,
        R::ClassChangeHeld => OrderEvent::ClassChangeHeld,
        R::WorkloadRebuilding => OrderEvent::WorkloadRebuilding,
        R::MoveStopped => OrderEvent::MoveStopped,
        R::ReplicasMoving if before != Some(R::MoveStopped) => OrderEvent::ReplicasMoving,
        R::RuntimeCurrent if moved => OrderEvent::ReplicasMoved,
        _ => return None,
    };
    Some((event, message))
}

/// Records what happened. An event that cannot be written is logged and lost:
/// what lasts is in the conditions.
pub async fn publish(
    order: &InferenceService,
    fresh: &InferenceServiceStatus,
    obstacle: Option<&Refusal>,
    cx: &Context,
) {
    let old = order.status.clone().unwrap_or_default();
    for (reason, note) in between(&old, fresh, obstacle) {
        let event = Event {
            type_: if reason.is_warning() {
                EventType::Warning
            } else {
                EventType::Normal
            },
            reason: reason.as_str().to_owned(),
            note: Some(note.chars().take(1000).collect()),
            action: "Reconcile".to_owned(),
            secondary: None,
        };
        if let Err(error) = cx.recorder.publish(&event, &order.object_ref(&())).await {
            warn!(order = order.name_any(), %error, "An event could not be recorded.");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inference_api::{DownloadStatus, ModelStatus, StorageStatus};

    fn downloading(percent: i32) -> InferenceServiceStatus {
        InferenceServiceStatus {
            model: Some(ModelStatus {
                download: Some(DownloadStatus {
                    total_bytes: 100,
                    downloaded_bytes: i64::from(percent),
                    percent,
                    copies: if percent < 100 {
                        vec![Default::default()]
                    } else {
                        vec![]
                    },
                }),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    fn names(old: &InferenceServiceStatus, new: &InferenceServiceStatus) -> Vec<OrderEvent> {
        between(old, new, None)
            .into_iter()
            .map(|(e, _)| e)
            .collect()
    }

    #[test]
    fn a_download_is_told_at_its_start_each_quarter_and_its_end() {
        let none = InferenceServiceStatus::default();
        assert_eq!(names(&none, &downloading(3)), [OrderEvent::DownloadStarted]);
        assert!(names(&downloading(3), &downloading(20)).is_empty());
        assert_eq!(
            names(&downloading(20), &downloading(30)),
            [OrderEvent::DownloadProgress]
        );
        assert_eq!(
            names(&downloading(30), &downloading(100)),
            [OrderEvent::DownloadCompleted]
        );
        assert!(names(&downloading(100), &downloading(100)).is_empty());
    }

    #[test]
    fn a_download_that_failed_is_told_until_it_fails_otherwise() {
        use inference_api::set_condition;
        let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
            k8s_openapi::jiff::Timestamp::now(),
        );
        let status = |reason| {
            let mut status = InferenceServiceStatus::default();
            let update = OrderCondition::WorkloadReady.unmet(reason, "chat-0: words");
            set_condition(&mut status.conditions, update, Some(1), &now);
            status
        };
        let broken = status(OrderReason::DownloadFailed);
        let coming = status(OrderReason::ModelDownloading);
        assert_eq!(names(&coming, &broken), [OrderEvent::DownloadFailed]);
        assert!(names(&broken, &broken).is_empty());
        let full = status(OrderReason::InsufficientStorage);
        assert_eq!(names(&broken, &full), [OrderEvent::DownloadFailed]);
        assert!(names(&broken, &coming).is_empty());
    }

    #[test]
    fn a_move_is_told_when_it_begins_stops_and_ends_and_each_hold_once_a_117() {
        use OrderReason as R;
        use inference_api::set_condition;
        let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
            k8s_openapi::jiff::Timestamp::now(),
        );
        let status = |reason| {
            let mut status = InferenceServiceStatus::default();
            let update = OrderCondition::RuntimeCurrent.unmet(reason, "1 of 2");
            set_condition(&mut status.conditions, update, Some(1), &now);
            status
        };
        let told = |from, to| names(&status(from), &status(to));
        assert_eq!(
            told(R::RuntimeCurrent, R::ReplicasMoving),
            [OrderEvent::ReplicasMoving]
        );
        assert!(told(R::ReplicasMoving, R::ReplicasMoving).is_empty());
        assert_eq!(
            told(R::ReplicasMoving, R::MoveStopped),
            [OrderEvent::MoveStopped]
        );
        assert!(told(R::MoveStopped, R::ReplicasMoving).is_empty());
        assert_eq!(
            told(R::ReplicasMoving, R::RuntimeCurrent),
            [OrderEvent::ReplicasMoved]
        );
        assert!(told(R::WorkloadNotCreated, R::RuntimeCurrent).is_empty());
        for (reason, event) in [
            (R::ClassChangeHeld, OrderEvent::ClassChangeHeld),
            (R::WorkloadRebuilding, OrderEvent::WorkloadRebuilding),
            (
                R::ReplicasHeldOnPreviousRuntime,
                OrderEvent::ReplicasHeldOnPreviousRuntime,
            ),
        ] {
            assert_eq!(told(R::RuntimeCurrent, reason), [event]);
            assert!(told(reason, reason).is_empty());
        }
    }

    #[test]
    fn what_the_api_server_refuses_is_told_once() {
        use inference_api::set_condition;
        let refusal = Refusal::new(
            OrderCondition::WorkloadReady,
            OrderReason::NameTaken,
            "Service ns/chat exists",
        );
        let mut told = InferenceServiceStatus::default();
        let events = |old: &InferenceServiceStatus| between(old, old, Some(&refusal)).len();
        assert_eq!(events(&told), 1);
        let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
            k8s_openapi::jiff::Timestamp::now(),
        );
        let update = refusal.condition.unmet(refusal.reason, &refusal.message);
        set_condition(&mut told.conditions, update, Some(1), &now);
        assert_eq!(events(&told), 0);
    }

    #[test]
    fn a_kept_volume_is_told_once_per_divergence_a_043() {
        let kept = |class: Option<&str>| InferenceServiceStatus {
            storage: Some(StorageStatus {
                kept_in_spite_of: class.map(str::to_owned),
                ..Default::default()
            }),
            ..Default::default()
        };
        assert_eq!(
            names(&kept(None), &kept(Some("fast"))),
            [OrderEvent::SettledRegionKept]
        );
        assert!(names(&kept(Some("fast")), &kept(Some("fast"))).is_empty());
        assert_eq!(
            names(&kept(Some("fast")), &kept(Some("slow"))),
            [OrderEvent::SettledRegionKept]
        );
    }
}
