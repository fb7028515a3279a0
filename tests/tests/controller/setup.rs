//! One control plane, one hub and one controller for all tests of this binary.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use controller::component::Component;
use controller::order::Settings;
use controller::recipe::RecipeBook;
use controller::render::Installation;
use controller::run::{Options, run};
use e2e::control_plane::{ControlPlane, asset};
use e2e::hub::repository::{Content, Repository};
use inference_api::InferenceService;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio_util::sync::CancellationToken;

pub(crate) const PLATFORM: &str = "d8-ai-inference";
/// For what a controller does at once.
const SOON: Duration = Duration::from_secs(30);

/// A control plane of its own, for tests that end the controller and start another: one
/// after the other, since each controller takes all orders there are.
pub(crate) struct Platform {
    pub(crate) plane: &'static ControlPlane,
    client: Client,
    hub: String,
    running: Option<(CancellationToken, std::thread::JoinHandle<Result<()>>)>,
    _alone: tokio::sync::MutexGuard<'static, ()>,
}

impl Platform {
    /// The platform, without a controller.
    pub(crate) async fn new() -> Result<Self> {
        static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
        static PLANE: OnceLock<Result<(ControlPlane, String), String>> = OnceLock::new();
        let alone = ALONE.lock().await;
        let plane = PLANE.get_or_init(|| plane_with_a_hub().map_err(|e| format!("{e:#}")));
        let (plane, hub) = plane.as_ref().map_err(|message| anyhow!("{message}"))?;
        Ok(Self {
            plane,
            client: rights(plane).await?,
            hub: hub.clone(),
            running: None,
            _alone: alone,
        })
    }

    /// Runs a controller, with what the test changes of its options.
    pub(crate) async fn start(&mut self, change: impl FnOnce(&mut Options)) -> Result<()> {
        self.stop().await?;
        let mut options = options(self.hub.clone())?;
        change(&mut options);
        let (client, stop) = (self.client.clone(), CancellationToken::new());
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?
                .block_on(run(client, options, stopped))
        });
        self.running = Some((stop, thread));
        Ok(())
    }

    /// Ends the controller that runs.
    pub(crate) async fn stop(&mut self) -> Result<()> {
        let Some((stop, thread)) = self.running.take() else {
            return Ok(());
        };
        stop.cancel();
        let ended = tokio::task::spawn_blocking(move || thread.join()).await?;
        ended.map_err(|_| anyhow!("the controller panicked"))?
    }

    /// A corner of it.
    pub(crate) async fn corner(&self, name: &str) -> Result<Corner> {
        Corner::on(self.plane, name, None).await
    }
}

impl Drop for Platform {
    fn drop(&mut self) {
        if let Some((stop, _)) = &self.running {
            stop.cancel();
        }
    }
}

fn plane_with_a_hub() -> Result<(ControlPlane, String)> {
    let plane = ControlPlane::start()?;
    let (ready, started) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let Ok(runtime) = runtime else { return };
        runtime.block_on(async {
            let _ = ready.send(serve_hub().await);
            std::future::pending::<()>().await;
        });
    });
    let hub = started.recv().context("the hub's thread ended")??;
    Ok((plane, hub))
}

/// Everything that tests share.
pub(crate) struct Setup {
    pub(crate) plane: &'static ControlPlane,
}

/// The shared set-up, made by the first test.
pub(crate) fn setup() -> Result<Setup> {
    static SHARED: OnceLock<Result<&'static ControlPlane, String>> = OnceLock::new();
    let plane = SHARED
        .get_or_init(|| start().map_err(|error| format!("{error:#}")))
        .as_ref()
        .map_err(|message| anyhow!("{message}"))?;
    Ok(Setup { plane })
}

fn start() -> Result<&'static ControlPlane> {
    let plane = ControlPlane::shared()?;
    // The controller outlives every test's own runtime.
    let (ready, started) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build();
        let Ok(runtime) = runtime else { return };
        runtime.block_on(async {
            match prepare(plane).await {
                Ok((client, options)) => {
                    let _ = ready.send(Ok(()));
                    let ended = run(client, options, CancellationToken::new()).await;
                    eprintln!("the controller ended: {ended:?}");
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        });
    });
    started.recv().context("the controller's thread ended")??;
    Ok(plane)
}

async fn prepare(plane: &'static ControlPlane) -> Result<(Client, Options)> {
    let client = rights(plane).await?;
    Ok((client, options(serve_hub().await?)?))
}

/// The rights that the chart gives the controller, and a client with these and no others.
async fn rights(plane: &ControlPlane) -> Result<Client> {
    let namespace = serde_json::from_value::<Namespace>(json!({"metadata": {"name": PLATFORM}}))?;
    let namespaces: Api<Namespace> = Api::all(plane.client()?);
    if namespaces.get_opt(PLATFORM).await?.is_none() {
        namespaces
            .create(&PostParams::default(), &namespace)
            .await?;
    }
    plane
        .apply_yaml(PLATFORM, &rendered("templates/rbac.yaml")?)
        .await
        .context("applying the chart's rights")?;
    plane
        .apply_yaml(PLATFORM, &rendered("templates/admission.yaml")?)
        .await
        .context("applying the chart's policies")?;
    let client = plane
        .client_for_service_account(PLATFORM, "ai-inference-controller")
        .await?;
    Ok(client)
}

/// What the controller is run with.
pub(crate) fn options(hub: String) -> Result<Options> {
    Ok(Options {
        components: Component::ALL.into(),
        settings: Settings {
            installation: Installation {
                fetch_image: "ai-inference/controller:dev".into(),
                image_pull_policy: None,
                image_pull_secrets: vec![],
                hub_endpoint: hub.clone(),
            },
            catalog: true,
            service_account: format!("{PLATFORM}:ai-inference-controller"),
        },
        hub: hub.parse().map_err(|error| anyhow!("{error}"))?,
        recipes: RecipeBook::shipped()?,
        admin: None,
        election: Some((PLATFORM.into(), "test".into())),
        default_class: true,
    })
}

/// One template of the controller's chart.
pub(crate) fn rendered(template: &str) -> Result<String> {
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../controller/chart");
    let output = Command::new(asset("helm")?)
        .args([
            "template",
            "controller",
            chart,
            "--namespace",
            PLATFORM,
            "--show-only",
            template,
        ])
        .output()?;
    ensure!(
        output.status.success(),
        "helm: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// A hub with one small GGUF model and one repository that is no model.
pub(crate) async fn serve_hub() -> Result<String> {
    let files = |list: Vec<(&str, Vec<u8>)>| -> BTreeMap<String, Content> {
        list.into_iter()
            .map(|(path, bytes)| (path.to_owned(), Content::Memory(bytes)))
            .collect()
    };
    let mut repositories = BTreeMap::new();
    for repository in [
        Repository::new("acme/tiny", files(vec![("tiny.gguf", gguf())]), None)?,
        Repository::new(
            "acme/notes",
            files(vec![("README.md", b"no model".to_vec())]),
            None,
        )?,
        Repository::new(
            "acme/gated",
            files(vec![("tiny.gguf", gguf())]),
            Some("hf_secret".into()),
        )?,
    ] {
        repositories.insert(repository.id.clone(), repository);
    }
    let app = e2e::hub::router(e2e::hub::Hub::new(repositories));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address)
}

/// A GGUF file of a llama with two layers and one tensor.
fn gguf() -> Vec<u8> {
    let text = |out: &mut Vec<u8>, s: &str| {
        out.extend((s.len() as u64).to_le_bytes());
        out.extend(s.as_bytes());
    };
    let numbers = [
        ("llama.block_count", 2u32),
        ("llama.embedding_length", 64),
        ("llama.attention.head_count", 4),
        ("llama.attention.head_count_kv", 2),
        ("llama.context_length", 2048),
    ];
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend(1u64.to_le_bytes());
    out.extend((1 + numbers.len() as u64).to_le_bytes());
    text(&mut out, "general.architecture");
    out.extend(8u32.to_le_bytes());
    text(&mut out, "llama");
    for (key, value) in numbers {
        text(&mut out, key);
        out.extend(4u32.to_le_bytes());
        out.extend(value.to_le_bytes());
    }
    text(&mut out, "token_embd.weight");
    out.extend(1u32.to_le_bytes());
    out.extend(64u64.to_le_bytes());
    out.extend(0u32.to_le_bytes());
    out.extend(0u64.to_le_bytes());
    out.extend([0u8; 64 * 4 + 64]);
    out
}

/// One test's own corner of the cluster: a namespace, a DeviceClass, a class.
pub(crate) struct Corner {
    pub(crate) plane: &'static ControlPlane,
    pub(crate) client: Client,
    pub(crate) namespace: String,
    /// Name of the DeviceClass, the class and the node.
    pub(crate) name: String,
}

impl Corner {
    /// A namespace and a class `name`, which allows the DeviceClass `name` alone; its selector is
    /// `selector`, or one that takes the slices of [`Corner::slice`].
    pub(crate) async fn new(name: &str, selector: Option<&str>) -> Result<Self> {
        Self::on(setup()?.plane, name, selector).await
    }

    /// The same on a control plane.
    pub(crate) async fn on(
        plane: &'static ControlPlane,
        name: &str,
        selector: Option<&str>,
    ) -> Result<Self> {
        let namespace = plane.namespace(name).await?;
        let own = format!("device.driver == '{name}.example.com'");
        let selector = selector.unwrap_or(&own);
        plane
            .apply_yaml(
                &namespace,
                &format!(
                    r#"
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {{ name: {name} }}
spec:
  selectors: [{{ cel: {{ expression: "{selector}" }} }}]
---
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceServiceClass
metadata: {{ name: {name} }}
spec:
  modelPolicy: {{ allowedEndpointTypes: [Chat] }}
  acceleratorPolicy:
    allowedPlacementTypes: [WholeDevice]
    deviceClassNames: [{name}]
---
apiVersion: v1
kind: Node
metadata: {{ name: {name} }}
"#
                ),
            )
            .await?;
        let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(plane.client()?);
        let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        nodes
            .patch_status(name, &Default::default(), &kube::api::Patch::Merge(&ready))
            .await?;
        // A new node carries this taint until it is initialized; here nobody does that.
        let untainted = json!({"spec": {"taints": null}});
        nodes
            .patch(
                name,
                &Default::default(),
                &kube::api::Patch::Merge(&untainted),
            )
            .await?;
        Ok(Self {
            plane,
            client: plane.client()?,
            namespace,
            name: name.to_owned(),
        })
    }

    /// Publishes one whole device with so much memory, as a driver would.
    pub(crate) async fn slice(&self, memory: &str) -> Result<()> {
        self.devices(1, memory).await
    }

    /// Publishes so many.
    pub(crate) async fn devices(&self, count: usize, memory: &str) -> Result<()> {
        let name = &self.name;
        let devices: String = (0..count)
            .map(|i| {
                format!("  - {{ name: gpu-{i}, attributes: {{ type: {{ string: gpu }} }}, capacity: {{ memory: {{ value: {memory} }} }} }}\n")
            })
            .collect();
        self.plane
            .apply_yaml(
                &self.namespace,
                &format!(
                    r#"
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {{ name: {name} }}
spec:
  driver: {name}.example.com
  nodeName: {name}
  pool: {{ name: {name}, generation: 1, resourceSliceCount: 1 }}
  devices:
{devices}"#
                ),
            )
            .await?;
        Ok(())
    }

    /// Files an order of a repository.
    pub(crate) async fn order(&self, name: &str, repository: &str) -> Result<()> {
        let class = &self.name;
        self.plane
            .apply_yaml(
                &self.namespace,
                &format!(
                    r#"
apiVersion: ai.deckhouse.io/v1alpha1
kind: InferenceService
metadata: {{ name: {name} }}
spec:
  inferenceServiceClassName: {class}
  model: {{ src: HuggingFace, huggingFace: {{ repository: {repository} }} }}
"#
                ),
            )
            .await?;
        Ok(())
    }

    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Waits for the order's condition to have a reason; gives the order then.
    pub(crate) async fn reason(
        &self,
        order: &str,
        condition: &str,
        reason: &str,
    ) -> Result<InferenceService> {
        let api = self.api::<InferenceService>();
        let met = |order: Option<&InferenceService>| {
            let conditions = order
                .and_then(|o| o.status.as_ref())
                .map(|s| s.conditions.as_slice());
            conditions
                .unwrap_or_default()
                .iter()
                .any(|c| c.type_ == condition && c.reason == reason)
        };
        match tokio::time::timeout(SOON, await_condition(api.clone(), order, met)).await {
            Ok(found) => found?.context("the order is gone"),
            Err(_) => {
                let found = api.get(order).await?;
                let status = serde_json::to_string_pretty(&found.status)?;
                Err(anyhow!(
                    "{condition} never had the reason {reason}; the status is {status}"
                ))
            }
        }
    }

    /// Edits an order, and waits until its first copy is moved. The kubelet would end the pod; here
    /// its deletion is asked for and seen.
    pub(crate) async fn edit_moves(&self, order: &str, copy: &Pod) -> Result<()> {
        let edit = json!({"spec": {"model": {"huggingFace": {"revision": "main"}}}});
        self.api::<InferenceService>()
            .patch(order, &PatchParams::default(), &Patch::Merge(&edit))
            .await?;
        let uid = copy.uid();
        let moved = |p: Option<&Pod>| {
            p.is_none_or(|p| p.metadata.deletion_timestamp.is_some() || p.uid() != uid)
        };
        let name = format!("{order}-0");
        tokio::time::timeout(SOON, await_condition(self.api::<Pod>(), &name, moved))
            .await
            .context("the copy was not moved")??;
        Ok(())
    }

    /// Waits until an object is as wanted; gives it then.
    pub(crate) async fn until<K>(
        &self,
        name: &str,
        what: &str,
        met: impl Fn(&K) -> bool,
    ) -> Result<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + Send
            + serde::de::DeserializeOwned
            + 'static,
    {
        let waited = await_condition(self.api::<K>(), name, |o: Option<&K>| o.is_some_and(&met));
        tokio::time::timeout(SOON, waited)
            .await
            .with_context(|| format!("{name} does not {what}"))??
            .context("it is gone")
    }
}
