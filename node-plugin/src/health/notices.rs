//! Faults as people are told of them.
//!
//! In: what began and what ended. Out: lines of the log, and events on the Node, one after
//! the other. Never: a wait of the monitor for the API server.

use kube::runtime::events::EventType;
use tokio::sync::mpsc;

use super::core::{Change, Ended};
use super::store::StoreError;
use super::{Fault, Scope, Severity};
use crate::events::NodeEvents;
use crate::slices::names;

/// What to tell people, in order and without holding anybody up.
pub(super) struct Notice {
    type_: EventType,
    reason: &'static str,
    /// The device and what is about it; none for the node.
    about: Option<(String, String)>,
    note: String,
}

impl Notice {
    /// What was kept over the restart cannot be used.
    pub(super) fn state_unusable(error: &StoreError) -> Self {
        Self {
            type_: EventType::Warning,
            reason: "HealthStateUnusable",
            about: None,
            note: error.to_string(),
        }
    }

    fn of(fault: &Fault, type_: EventType, reason: &'static str, note: String) -> Self {
        let device = names::whole(fault.scope.pci());
        let mut thing = fault.kind.name().to_owned();
        if !fault.value.is_empty() {
            thing = format!("{thing}={}", fault.value);
        }
        if let Scope::Instance { placement, .. } = fault.scope {
            thing = format!("{thing} at {}", placement.start);
        }
        Self {
            type_,
            reason,
            about: Some((device, thing)),
            note,
        }
    }
}

/// What to tell of a change: in the log here and now, and in events.
pub(super) fn of_change(change: Change) -> Vec<Notice> {
    let mut notices = Vec::new();
    for fault in change.begun {
        let warning = fault.severity > Severity::Information;
        if warning {
            tracing::error!(fault = fault.message, effect = ?fault.effect, "A fault began.");
        } else {
            tracing::info!(fault = fault.message, "A GPU reports something.");
        }
        let (type_, reason) = match warning {
            true => (EventType::Warning, "GPUFault"),
            false => (EventType::Normal, "GPUNotice"),
        };
        let notice = Notice::of(&fault, type_, reason, fault.message.clone());
        notices.push(notice);
    }
    for ended in change.ended {
        let Ended { fault, why } = ended;
        tracing::info!(fault = fault.message, why, "A fault ended.");
        if fault.severity > Severity::Information {
            let note = format!("{why}: {}", fault.message);
            let notice = Notice::of(&fault, EventType::Normal, "GPURecovered", note);
            notices.push(notice);
        }
    }
    notices
}

/// Tells people, in order and without holding anybody up.
pub(super) async fn announce(events: NodeEvents, mut notices: mpsc::UnboundedReceiver<Notice>) {
    while let Some(notice) = notices.recv().await {
        let Notice { type_, reason, .. } = notice;
        match &notice.about {
            Some((device, thing)) => {
                let about = (device.as_str(), thing.as_str());
                events.of_device(type_, reason, about, &notice.note).await;
            }
            None => events.warn(reason, "WatchHealth", &notice.note).await,
        }
    }
}
