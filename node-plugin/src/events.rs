//! Events on this node's Node object.
//!
//! In: what a person should know. Out: an Event, repeated ones counted by the API.
//! Never: an event in place of a log line; the API server may be out of reach.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

use crate::DRIVER;

/// Writes events about this node. Cloning shares it.
#[derive(Clone)]
pub struct NodeEvents {
    recorder: Option<Arc<Recorder>>,
    reference: ObjectReference,
}

impl NodeEvents {
    /// Events about a node, written with this client.
    #[must_use]
    pub fn new(client: Client, node: &str) -> Self {
        let reporter = Reporter {
            controller: DRIVER.to_owned(),
            instance: Some(node.to_owned()),
        };
        Self {
            recorder: Some(Arc::new(Recorder::new(client, reporter))),
            reference: of(node),
        }
    }

    /// Events that go nowhere.
    #[must_use]
    pub fn nowhere() -> Self {
        Self {
            recorder: None,
            reference: ObjectReference::default(),
        }
    }

    /// Something that a person should look at.
    pub async fn warn(&self, reason: &str, action: &str, note: &str) {
        self.publish(EventType::Warning, reason, action, None, note)
            .await;
    }

    /// Something that is good to know.
    pub async fn tell(&self, reason: &str, action: &str, note: &str) {
        self.publish(EventType::Normal, reason, action, None, note)
            .await;
    }

    /// Something about one thing on a device, to look at or good to know. Events that
    /// differ only in their note count as one, so the thing is named beside it.
    pub async fn of_device(
        &self,
        type_: EventType,
        reason: &str,
        (device, thing): (&str, &str),
        note: &str,
    ) {
        let related = ObjectReference {
            api_version: Some("resource.k8s.io/v1".to_owned()),
            kind: Some("Device".to_owned()),
            name: Some(device.to_owned()),
            field_path: Some(thing.to_owned()),
            ..ObjectReference::default()
        };
        self.publish(type_, reason, "WatchHealth", Some(related), note)
            .await;
    }

    async fn publish(
        &self,
        type_: EventType,
        reason: &str,
        action: &str,
        secondary: Option<ObjectReference>,
        note: &str,
    ) {
        let Some(recorder) = &self.recorder else {
            return;
        };
        let mut note = note.to_owned();
        while note.len() > 1024 {
            note.pop(); // The API's limit.
        }
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: action.to_owned(),
            secondary,
        };
        if let Err(error) = recorder.publish(&event, &self.reference).await {
            tracing::warn!(%error, reason, "An event could not be written.");
        }
    }
}

/// The node as events name it: the kubelet uses a node's name for its UID, and
/// `kubectl describe node` looks for that.
fn of(node: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.to_owned()),
        uid: Some(node.to_owned()),
        ..ObjectReference::default()
    }
}
