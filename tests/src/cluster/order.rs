//! Orders as tests make them, watch them and talk to them.

use std::time::Duration;

use anyhow::{Context, ensure};
use inference_api::{EndpointType, InferenceService, InferenceServiceClass};
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::{Cluster, container_environment, wait};

/// Port of the runtime in its pod.
const RUNTIME_PORT: u16 = 8000;

/// An order of one test.
#[derive(Debug)]
pub struct Order {
    cluster: Cluster,
    /// Its namespace.
    pub namespace: String,
    /// Its name; also that of its StatefulSet and its Service.
    pub name: String,
}

/// What a copy's container is told about its devices, and where it runs.
#[derive(Debug)]
pub struct Copy {
    /// Node that it runs on.
    pub node: String,
    /// Identity of the container: a restart changes it.
    pub container_id: String,
    /// Its environment.
    pub environment: Vec<(String, String)>,
}

impl Order {
    /// Files an order of a repository of the hub.
    ///
    /// # Errors
    /// When the API server refuses it.
    pub async fn file(
        cluster: &Cluster,
        namespace: &str,
        name: &str,
        class: &str,
        repository: &str,
    ) -> anyhow::Result<Self> {
        let order: InferenceService = serde_json::from_value(json!({
            "apiVersion": "ai.deckhouse.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": { "name": name, "namespace": namespace },
            "spec": {
                "inferenceServiceClassName": class,
                "model": { "src": "HuggingFace", "huggingFace": { "repository": repository } },
            },
        }))?;
        Api::namespaced(cluster.client.clone(), namespace)
            .create(&PostParams::default(), &order)
            .await
            .with_context(|| format!("file order {namespace}/{name}"))?;
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Ok(Self {
            cluster: cluster.clone(),
            namespace,
            name,
        })
    }

    /// Waits until its status tells a contract, and gives it.
    ///
    /// # Errors
    /// When it is not told in time.
    pub async fn contract(&self) -> anyhow::Result<Option<EndpointType>> {
        let contract = |order: &InferenceService| {
            let model = order.status.as_ref()?.model.as_ref();
            model?.endpoint_type
        };
        let what = "tell its contract";
        let told = self.until(what, wait::LONG, |order| contract(order).is_some());
        Ok(contract(&told.await?))
    }

    /// The objects of a kind in the order's namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.cluster.client.clone(), &self.namespace)
    }

    /// The order as it stands.
    ///
    /// # Errors
    /// When it is not there.
    pub async fn api_object(&self) -> anyhow::Result<InferenceService> {
        Ok(self.api().get(&self.name).await?)
    }

    /// Waits until the order is served.
    ///
    /// # Errors
    /// When it is not in time.
    pub async fn ready(&self) -> anyhow::Result<InferenceService> {
        self.until("become Ready", wait::MODEL, |order| {
            condition(order, "Ready").is_some_and(|ready| ready.status == "True")
        })
        .await
    }

    /// Waits until a condition is False for a reason, and answers its message.
    ///
    /// # Errors
    /// When it is not in time.
    pub async fn refused(&self, kind: &str, reason: &str) -> anyhow::Result<String> {
        let expectation = format!("get the condition {kind}=False for the reason {reason}");
        let order = self
            .until(&expectation, wait::LONG, |order| {
                condition(order, kind)
                    .is_some_and(|found| found.status == "False" && found.reason == reason)
            })
            .await?;
        Ok(condition(&order, kind)
            .map(|found| found.message.clone())
            .unwrap_or_default())
    }

    /// Waits until the order is as wanted.
    ///
    /// # Errors
    /// When it is not in time.
    pub async fn until(
        &self,
        expectation: &str,
        within: Duration,
        met: impl FnMut(&InferenceService) -> bool,
    ) -> anyhow::Result<InferenceService> {
        wait::until(&self.api(), &self.name, expectation, within, met).await
    }

    /// Deletes the order and waits until it and its first copy are gone.
    ///
    /// # Errors
    /// When they are still there after a while.
    pub async fn delete(&self) -> anyhow::Result<()> {
        let orders: Api<InferenceService> = self.api();
        orders.delete(&self.name, &DeleteParams::default()).await?;
        wait::gone(&orders, &self.name, wait::LONG).await?;
        wait::gone(&self.api::<Pod>(), &format!("{}-0", self.name), wait::LONG).await
    }

    /// The first copy's container, running.
    ///
    /// # Errors
    /// When it does not run.
    pub async fn first_copy(&self) -> anyhow::Result<Copy> {
        let pod = self.api::<Pod>().get(&format!("{}-0", self.name)).await?;
        let node = pod
            .spec
            .and_then(|spec| spec.node_name)
            .context("the copy has no node")?;
        let container_id = pod
            .status
            .and_then(|status| status.container_statuses)
            .and_then(|statuses| statuses.into_iter().next())
            .and_then(|status| status.container_id)
            .context("the copy's container does not run")?;
        let environment = container_environment(&self.cluster, &node, &container_id).await?;
        Ok(Copy {
            node,
            container_id,
            environment,
        })
    }

    /// The devices allocated to the order's copies, as `(pool, device)`.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn devices(&self) -> anyhow::Result<Vec<(String, String)>> {
        let prefix = format!("{}-", self.name);
        let devices = self.cluster.allocated_devices(&self.namespace).await?;
        Ok(devices
            .into_iter()
            .filter(|(claim, _, _)| claim.starts_with(&prefix))
            .map(|(_, pool, device)| (pool, device))
            .collect())
    }

    /// Asks the order's Service, at its cluster address, from a node. Waits for kube-proxy where the
    /// Service has just got its copy (back).
    ///
    /// # Errors
    /// When it does not answer with success; the message holds the answer.
    pub async fn chat(&self, question: &str) -> anyhow::Result<String> {
        let token = self.token().await?;
        let address = self.service_address().await?;
        let options = ["--retry", "10", "--retry-delay", "1", "--retry-connrefused"];
        content(
            self.post(&address, question, Some(&token), &options)
                .await?,
        )
    }

    /// Asks the first copy itself, at its pod's address, from its node: once.
    ///
    /// # Errors
    /// When it does not answer with success; the message holds the answer.
    pub async fn chat_with_first_copy(&self, question: &str) -> anyhow::Result<String> {
        let token = self.token().await?;
        let pod = self.api::<Pod>().get(&format!("{}-0", self.name)).await?;
        let address = pod
            .status
            .and_then(|status| status.pod_ip)
            .context("no pod address")?;
        content(
            self.post(
                &format!("{address}:{RUNTIME_PORT}"),
                question,
                Some(&token),
                &[],
            )
            .await?,
        )
    }

    /// The HTTP status that the order's Service answers a question without a token with.
    ///
    /// # Errors
    /// When nothing answers.
    pub async fn status_without_token(&self) -> anyhow::Result<String> {
        let address = self.service_address().await?;
        Ok(self.post(&address, "Who am I?", None, &[]).await?.0)
    }

    /// The HTTP status that the order's Service answers a question with this token with.
    ///
    /// # Errors
    /// When nothing answers.
    pub async fn status_with_token(&self, token: &str) -> anyhow::Result<String> {
        let address = self.service_address().await?;
        let options = ["--retry", "10", "--retry-delay", "1", "--retry-connrefused"];
        Ok(self
            .post(&address, "Who am I?", Some(token), &options)
            .await?
            .0)
    }

    async fn service_address(&self) -> anyhow::Result<String> {
        let service = self.api::<Service>().get(&self.name).await?;
        service
            .spec
            .and_then(|spec| spec.cluster_ip)
            .context("the Service has no address")
    }

    /// What the order's Service makes of a text: its embedding.
    ///
    /// # Errors
    /// When it does not answer with success; the message holds the answer.
    pub async fn embed(&self, text: &str) -> anyhow::Result<Vec<f64>> {
        let token = self.token().await?;
        let address = self.service_address().await?;
        let options = ["--retry", "10", "--retry-delay", "1", "--retry-connrefused"];
        let url = format!("http://{address}/v1/embeddings");
        let body = json!({ "model": self.served_name().await?, "input": text });
        let (status, answer) = self.send(&url, &body, Some(&token), &options).await?;
        ensure!(status == "200", "the order answered {status}: {answer}");
        let answer: Value = serde_json::from_str(&answer)?;
        let vector = answer["data"][0]["embedding"].as_array();
        let vector = vector.context("the answer holds no vector")?;
        Ok(vector.iter().filter_map(Value::as_f64).collect())
    }

    async fn served_name(&self) -> anyhow::Result<String> {
        let order = self.api::<InferenceService>().get(&self.name).await?;
        let model = order.status.and_then(|status| status.model);
        let name = model.and_then(|model| model.served_name);
        name.context("status names no served model")
    }

    /// The HTTP status and body that `address` answers a question with.
    async fn post(
        &self,
        address: &str,
        question: &str,
        token: Option<&str>,
        options: &[&str],
    ) -> anyhow::Result<(String, String)> {
        let body = json!({
            "model": self.served_name().await?,
            "messages": [{ "role": "user", "content": question }],
            "temperature": 0,
            "max_tokens": 32,
        });
        let url = format!("http://{address}/v1/chat/completions");
        self.send(&url, &body, token, options).await
    }

    /// The HTTP status and body that a URL answers a request with, sent from the first copy's node.
    async fn send(
        &self,
        url: &str,
        body: &Value,
        token: Option<&str>,
        options: &[&str],
    ) -> anyhow::Result<(String, String)> {
        let body = body.to_string();
        let authorization = format!("Authorization: Bearer {}", token.unwrap_or_default());
        let mut command = vec!["curl", "--silent", "--show-error", "--max-time", "60"];
        command.extend([
            "--write-out",
            "\n%{http_code}",
            "--header",
            "Content-Type: application/json",
        ]);
        command.extend(options);
        if token.is_some() {
            command.extend(["--header", &authorization]);
        }
        command.extend(["--data", &body, url]);
        let node = self.first_copy().await?.node;
        let answer = self.cluster.on_node(&node, &command).await?;
        let (body, status) = answer.rsplit_once('\n').context("curl printed no status")?;
        Ok((status.to_owned(), body.to_owned()))
    }

    /// The order's token.
    ///
    /// # Errors
    /// When there is none.
    pub async fn token(&self) -> anyhow::Result<String> {
        let name = format!("{}-token", self.name);
        let secret = self.api::<Secret>().get(&name).await?;
        let token = secret.data.and_then(|mut data| data.remove("token"));
        let token = token.with_context(|| format!("Secret {name} has no key token"))?;
        Ok(String::from_utf8(token.0)?)
    }
}

/// What the model said, from the status and body of an answer.
fn content((status, answer): (String, String)) -> anyhow::Result<String> {
    ensure!(status == "200", "the order answered {status}: {answer}");
    let answer: Value = serde_json::from_str(&answer)?;
    let content = answer["choices"][0]["message"]["content"].as_str();
    Ok(content.context("the answer holds no message")?.to_owned())
}

/// A condition of an order by its type.
pub fn condition<'a>(order: &'a InferenceService, kind: &str) -> Option<&'a Condition> {
    order
        .status
        .as_ref()?
        .conditions
        .iter()
        .find(|condition| condition.type_ == kind)
}

/// Makes or replaces a class with this accelerator policy, open to every namespace.
///
/// # Errors
/// When the API server refuses it.
pub async fn put_class(client: &Client, name: &str, policy: Value) -> anyhow::Result<()> {
    let spec = json!({
        "modelPolicy": { "allowedEndpointTypes": ["Chat"] },
        "acceleratorPolicy": policy,
    });
    put_class_of(client, name, spec).await
}

/// Makes or replaces a class of this specification, with endpoints for the cluster alone unless it
/// says otherwise.
///
/// # Errors
/// When the API server refuses it: the server's own answer is in the chain.
pub async fn put_class_of(client: &Client, name: &str, mut spec: Value) -> anyhow::Result<()> {
    let classes: Api<InferenceServiceClass> = Api::all(client.clone());
    match classes.delete(name, &DeleteParams::default()).await {
        Ok(_) => wait::gone(&classes, name, wait::SHORT).await?,
        Err(kube::Error::Api(status)) if status.is_not_found() => {}
        Err(error) => return Err(error.into()),
    }
    if spec["exposurePolicy"].is_null() {
        spec["exposurePolicy"] = json!({ "type": "ClusterLocal", "authentication": "Token" });
    }
    let class: InferenceServiceClass = serde_json::from_value(json!({
        "apiVersion": "ai.deckhouse.io/v1alpha1",
        "kind": "InferenceServiceClass",
        "metadata": { "name": name },
        "spec": spec,
    }))?;
    classes.create(&PostParams::default(), &class).await?;
    Ok(())
}
