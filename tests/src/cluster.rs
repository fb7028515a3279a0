//! The kind cluster of `hack/cluster`, as tests use it.
//!
//! In: a running cluster with the platform and the hub installed (`hack/install`). Out: a client,
//! namespaces of a test's own, commands on nodes, and waits that say what they saw last. It never
//! creates or deletes a cluster: where there is none, the error says which command makes one.

pub mod devices;
pub mod hub;
pub mod order;
pub mod wait;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};

/// What to run where no cluster answers.
const REMEDY: &str =
    "run: hack/test e2e (or hack/cluster up && hack/images --load && hack/install)";
/// Label of every namespace that a test makes; the next test removes what a failed one left.
const TEST_LABEL: &str = "ai.deckhouse.io/e2e";
/// Namespace of the platform.
pub const PLATFORM_NAMESPACE: &str = "d8-ai-inference";

/// A connection to the cluster.
#[derive(Clone)]
pub struct Cluster {
    /// A client with the administrator's rights.
    pub client: Client,
    kubeconfig: PathBuf,
    kubectl: PathBuf,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Cluster")
            .field("kubeconfig", &self.kubeconfig)
            .finish()
    }
}

impl Cluster {
    /// Connects to the cluster and removes what an earlier test left behind.
    ///
    /// # Errors
    /// When there is no cluster, or it does not answer; the message says what to run.
    pub async fn connect() -> anyhow::Result<Self> {
        let kubeconfig = hack_cluster(&["kubeconfig"]).await.context(REMEDY)?;
        let kubeconfig = PathBuf::from(kubeconfig.trim());
        let assets = hack_cluster(&["assets", "--cluster"])
            .await
            .context("build kubectl")?;
        let options = KubeConfigOptions::default();
        let config =
            Config::from_custom_kubeconfig(Kubeconfig::read_from(&kubeconfig)?, &options).await?;
        let client = Client::try_from(config)?;
        let kubectl = Path::new(assets.trim()).join("kubectl");
        let cluster = Self {
            client,
            kubeconfig,
            kubectl,
        };
        cluster.remove_leftovers().await?;
        Ok(cluster)
    }

    async fn remove_leftovers(&self) -> anyhow::Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let left = namespaces
            .list(&ListParams::default().labels(TEST_LABEL))
            .await?;
        for namespace in &left {
            if let Some(name) = &namespace.metadata.name {
                self.delete_namespace(name).await?;
            }
        }
        hub::disarm_faults(self).await
    }

    /// Makes a namespace for one test; its name starts with `prefix`.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn create_namespace(&self, prefix: &str) -> anyhow::Result<String> {
        let namespace: Namespace = serde_json::from_value(serde_json::json!({
            "metadata": { "generateName": format!("{prefix}-"), "labels": { TEST_LABEL: "true" } },
        }))?;
        let made = Api::all(self.client.clone())
            .create(&PostParams::default(), &namespace)
            .await?;
        made.metadata
            .name
            .context("the API server made a namespace without a name")
    }

    /// Makes a namespace of this name for one test.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn create_named_namespace(&self, name: &str) -> anyhow::Result<()> {
        let namespace: Namespace = serde_json::from_value(serde_json::json!({
            "metadata": { "name": name, "labels": { TEST_LABEL: "true" } },
        }))?;
        Api::all(self.client.clone())
            .create(&PostParams::default(), &namespace)
            .await?;
        Ok(())
    }

    /// The administrator's kubeconfig, and the folder of `kubectl` and `helm`.
    ///
    /// # Errors
    /// When there is no such folder.
    pub fn tools(&self) -> anyhow::Result<(PathBuf, PathBuf)> {
        let folder = self.kubectl.parent().context("kubectl lies nowhere")?;
        Ok((self.kubeconfig.clone(), folder.to_owned()))
    }

    /// Deletes a namespace and waits until its orders, pods and claims are gone with it.
    ///
    /// # Errors
    /// When something in it does not go away in time.
    pub async fn delete_namespace(&self, name: &str) -> anyhow::Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        match namespaces.delete(name, &DeleteParams::default()).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(()),
            Err(error) => return Err(error).with_context(|| format!("delete namespace {name}")),
        }
        wait::gone(&namespaces, name, wait::LONG).await
    }

    /// The allocated devices of every claim in a namespace, as `(claim, pool, device)`.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn allocated_devices(
        &self,
        namespace: &str,
    ) -> anyhow::Result<Vec<(String, String, String)>> {
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        let mut devices = Vec::new();
        for claim in claims.list(&ListParams::default()).await? {
            let name = claim.metadata.name.unwrap_or_default();
            let results = claim
                .status
                .and_then(|status| status.allocation)
                .and_then(|allocation| allocation.devices)
                .and_then(|devices| devices.results)
                .unwrap_or_default();
            for result in results {
                devices.push((name.clone(), result.pool, result.device));
            }
        }
        Ok(devices)
    }

    /// A client of a user who has no right but those granted to them.
    ///
    /// # Errors
    /// When the client cannot be built.
    pub async fn client_as(&self, user: &str) -> anyhow::Result<Client> {
        let kubeconfig = Kubeconfig::read_from(&self.kubeconfig)?;
        let options = KubeConfigOptions::default();
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
        config.auth_info.impersonate = Some(user.to_owned());
        Ok(Client::try_from(config)?)
    }

    /// Runs helm with the administrator's rights and answers what it printed.
    ///
    /// # Errors
    /// When it fails; the message holds its own.
    pub async fn helm(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let kubeconfig = self.kubeconfig.to_string_lossy().into_owned();
        let program = self.kubectl.with_file_name("helm");
        let mut command = vec!["--kubeconfig", &kubeconfig];
        command.extend(arguments);
        output(&program.to_string_lossy(), &command).await
    }

    /// Runs kubectl with the administrator's rights and answers what it printed.
    ///
    /// # Errors
    /// When it fails; the message holds its own.
    pub async fn kubectl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let kubeconfig = self.kubeconfig.to_string_lossy().into_owned();
        let program = self.kubectl.to_string_lossy().into_owned();
        let mut command = vec!["--kubeconfig", &kubeconfig];
        command.extend(arguments);
        output(&program, &command).await
    }

    /// Runs a command on a node of the cluster, as root, and answers what it printed.
    ///
    /// # Errors
    /// When it fails; the message holds its own.
    pub async fn on_node(&self, node: &str, command: &[&str]) -> anyhow::Result<String> {
        let mut arguments = vec!["exec", node];
        arguments.extend(command);
        hack_cluster(&arguments).await
    }

    /// Cuts a node's power and starts it again, as `hack/cluster reboot` says.
    ///
    /// # Errors
    /// When it does not start; the message holds its own.
    pub async fn reboot(&self, node: &str) -> anyhow::Result<()> {
        hack_cluster(&["reboot", node]).await.map(drop)
    }
}

async fn hack_cluster(arguments: &[&str]) -> anyhow::Result<String> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../hack/cluster");
    output(&program.to_string_lossy(), arguments).await
}

/// What a command printed.
///
/// # Errors
/// When it cannot be started or fails; the message holds what it wrote to standard error.
async fn output(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let command = format!("{program} {}", arguments.join(" "));
    let result = tokio::process::Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .with_context(|| format!("start {command}"))?;
    let errors = String::from_utf8_lossy(&result.stderr);
    if !result.status.success() {
        bail!("{command}: {}: {}", result.status, errors.trim());
    }
    Ok(String::from_utf8(result.stdout)?)
}

/// The environment of a running container, read in the container by the kernel's own list, since
/// the image holds no shell.
///
/// # Errors
/// When the pod has no such container running or its node cannot be asked.
pub async fn container_environment(
    cluster: &Cluster,
    node: &str,
    container_id: &str,
) -> anyhow::Result<Vec<(String, String)>> {
    let pid = process_of(cluster, node, container_id).await?;
    let environment = cluster
        .on_node(node, &["cat", &format!("/proc/{pid}/environ")])
        .await?;
    ensure!(
        !environment.is_empty(),
        "process {pid} of container {container_id} has no environment"
    );
    Ok(environment
        .split('\0')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect())
}

/// A file as a running container sees it, with what is mounted there. The path must not lead over an
/// absolute link.
///
/// # Errors
/// When the container does not run on the node, or has no such file.
pub async fn container_file(
    cluster: &Cluster,
    node: &str,
    container_id: &str,
    path: &str,
) -> anyhow::Result<String> {
    let pid = process_of(cluster, node, container_id).await?;
    cluster
        .on_node(node, &["cat", &format!("/proc/{pid}/root{path}")])
        .await
}

/// The process id, on its node, of a running container.
async fn process_of(cluster: &Cluster, node: &str, container_id: &str) -> anyhow::Result<i64> {
    let id = container_id.rsplit('/').next().unwrap_or(container_id);
    let inspected = cluster
        .on_node(node, &["crictl", "inspect", "--output", "json", id])
        .await?;
    let inspected: serde_json::Value = serde_json::from_str(&inspected)?;
    inspected["info"]["pid"]
        .as_i64()
        .context("crictl tells no process id")
}
