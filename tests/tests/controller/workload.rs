//! One order's workload, with the StatefulSet's controller, the scheduler and the kubelet played by
//! the test: pods are made from the template as it stands, and end when the test says so.

use anyhow::{Context, Result, ensure};
use inference_api::{InferenceService, InferenceServiceClass};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::setup::Corner;

/// A copy that answers.
pub(crate) fn answers() -> Value {
    json!({"phase": "Running", "podIP": "10.0.0.9", "conditions": [
        {"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]})
}

/// A copy whose runtime loads the model.
pub(crate) fn loads() -> Value {
    json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": [
        {"name": "runtime", "ready": false, "started": false, "restartCount": 0, "image": "i", "imageID": "i",
         "state": {"running": {}}}]})
}

/// A copy whose image is not there.
pub(crate) fn without_image() -> Value {
    json!({"phase": "Pending", "conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": [
        {"name": "runtime", "ready": false, "started": false, "restartCount": 0, "image": "i", "imageID": "i",
         "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]})
}

/// The workload of the order `chat` in a corner.
pub(crate) struct Workload<'a> {
    pub(crate) corner: &'a Corner,
}

impl Workload<'_> {
    /// Files the order `chat` and raises so many copies, which answer.
    pub(crate) async fn served(corner: &Corner, copies: i32) -> Result<Workload<'_>> {
        let workload = Workload { corner };
        workload
            .class(json!({"scalingPolicy": {"minReplicas": copies, "maxReplicas": copies}}))
            .await?;
        corner.order("chat", "acme/tiny").await?;
        let enough = |s: &StatefulSet| s.spec.replicas == Some(copies);
        corner
            .until::<StatefulSet>("chat", "have the class's copies", enough)
            .await?;
        for ordinal in 0..copies {
            workload.raise(ordinal, answers()).await?;
        }
        workload
            .says(
                "RuntimeCurrent",
                "RuntimeCurrent",
                &format!("{copies} copies"),
            )
            .await?;
        Ok(workload)
    }

    /// The StatefulSet.
    pub(crate) async fn set(&self) -> Result<StatefulSet> {
        Ok(self.corner.api().get("chat").await?)
    }

    /// The pod of a copy.
    pub(crate) async fn pod(&self, ordinal: i32) -> Result<Pod> {
        Ok(self.corner.api().get(&format!("chat-{ordinal}")).await?)
    }

    /// Makes a copy's pod from the template.
    pub(crate) async fn raise(&self, ordinal: i32, status: Value) -> Result<Pod> {
        let set = self.set().await?;
        ensure!(set.spec.replicas > Some(ordinal), "so many are not wanted");
        let mut pod = serde_json::to_value(&set.spec.template)?;
        pod["apiVersion"] = json!("v1");
        pod["kind"] = json!("Pod");
        pod["metadata"]["name"] = json!(format!("chat-{ordinal}"));
        pod["metadata"]["ownerReferences"] = json!([{
            "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "chat", "uid": set.uid(), "controller": true,
        }]);
        pod["spec"]["nodeName"] = json!(self.corner.name);
        let volumes = pod["spec"]["volumes"]
            .as_array_mut()
            .context("no volumes")?;
        volumes.push(json!({"name": "storage", "emptyDir": {}}));
        let pod: Pod = serde_json::from_value(pod)?;
        self.corner
            .api::<Pod>()
            .create(&PostParams::default(), &pod)
            .await?;
        self.report(ordinal, status).await
    }

    /// Writes a copy's status as the kubelet would.
    pub(crate) async fn report(&self, ordinal: i32, status: Value) -> Result<Pod> {
        let patch = Patch::Merge(json!({ "status": status }));
        Ok(self
            .corner
            .api::<Pod>()
            .patch_status(&format!("chat-{ordinal}"), &PatchParams::default(), &patch)
            .await?)
    }

    /// Waits until the controller takes a copy down; ends it then.
    pub(crate) async fn goes(&self, ordinal: i32) -> Result<()> {
        let asked = |p: &Pod| p.metadata.deletion_timestamp.is_some();
        let name = format!("chat-{ordinal}");
        if let Err(error) = self.corner.until::<Pod>(&name, "go", asked).await {
            let order: InferenceService = self.corner.api().get("chat").await?;
            return Err(error.context(format!("it says {:?}", found(&order, "RuntimeCurrent"))));
        }
        self.ends(ordinal).await
    }

    /// Ends a copy, whoever asked for it.
    pub(crate) async fn ends(&self, ordinal: i32) -> Result<()> {
        self.corner
            .api::<Pod>()
            .delete(
                &format!("chat-{ordinal}"),
                &DeleteParams::default().grace_period(0),
            )
            .await?;
        Ok(())
    }

    /// Whether a copy is left alone.
    pub(crate) async fn stays(&self, ordinal: i32) -> Result<bool> {
        Ok(self
            .pod(ordinal)
            .await?
            .metadata
            .deletion_timestamp
            .is_none())
    }

    /// Edits the order, in a way that changes nothing of what it needs.
    pub(crate) async fn edit(&self, revision: &str) -> Result<()> {
        let edit = json!({"spec": {"model": {"huggingFace": {"revision": revision}}}});
        self.corner
            .api::<InferenceService>()
            .patch("chat", &PatchParams::default(), &Patch::Merge(&edit))
            .await?;
        Ok(())
    }

    /// Edits the class.
    pub(crate) async fn class(&self, spec: Value) -> Result<()> {
        let classes: Api<InferenceServiceClass> = Api::all(self.corner.client.clone());
        let patch = Patch::Merge(json!({ "spec": spec }));
        classes
            .patch(&self.corner.name, &PatchParams::default(), &patch)
            .await?;
        Ok(())
    }

    /// Waits until a condition of the order has a reason and says something; gives the order then.
    pub(crate) async fn says(
        &self,
        condition: &str,
        reason: &str,
        words: &str,
    ) -> Result<InferenceService> {
        let met = |order: &InferenceService| {
            found(order, condition).is_some_and(|c| c.reason == reason && c.message.contains(words))
        };
        let what = format!("say {condition} {reason} {words:?}");
        match self.corner.until("chat", &what, met).await {
            Ok(order) => Ok(order),
            Err(error) => {
                let order: InferenceService = self.corner.api().get("chat").await?;
                Err(error.context(format!("it says {:?}", found(&order, condition))))
            }
        }
    }
}

/// A condition of an order.
pub(crate) fn found<'a>(order: &'a InferenceService, condition: &str) -> Option<&'a Condition> {
    let conditions = order.status.as_ref().map(|s| s.conditions.as_slice());
    let mut conditions = conditions.unwrap_or_default().iter();
    conditions.find(|c| c.type_ == condition)
}
