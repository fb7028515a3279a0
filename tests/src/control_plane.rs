//! A real control plane for tests: etcd and kube-apiserver as bare processes, ready in three seconds.
//!
//! In: the binaries' folder (`KUBE_ASSETS`, or else `hack/cluster assets`). Out: clients for the
//! administrator, for other users and for ServiceAccounts, a kubeconfig for kubectl, a namespace for
//! each test, and the project's CustomResourceDefinitions installed. There is no scheduler, no
//! controller-manager and no kubelet: nothing is garbage-collected and namespaces do not go away, so
//! each test takes a namespace of its own and names its cluster-scoped objects after it.
//!
//! One control plane serves a test binary ([`ControlPlane::shared`]); it ends with the process, however
//! that ends. A missing binary fails the test, it is never skipped.

mod access;
mod assets;
mod process;
pub mod recorder;

use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use axum::http::Request;
use axum::http::header::ACCEPT;
use inference_api::names;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::core::gvk::GroupVersionKind;
use kube::discovery::Scope;
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, Config, Discovery, ResourceExt};

use access::Access;
pub use assets::{asset, assets};
use process::Supervised;

/// How long the API server may take to get ready, and a definition to be served.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// Field manager of what tests apply.
pub const FIELD_MANAGER: &str = "e2e";

/// A running etcd and kube-apiserver; both end when this is dropped or the process ends.
#[derive(Debug)]
pub struct ControlPlane {
    access: Access,
    etcd_port: u16,
    namespaces: AtomicU32,
    // The API server's folder holds the credentials; it is declared, and so dropped, before etcd.
    api_server: Supervised,
    _etcd: Supervised,
}

/// Some of Kubernetes' own controllers at work.
#[derive(Debug)]
pub struct Controllers {
    process: Supervised,
}

impl Controllers {
    /// The last lines of their log, for the message of a test that waited in vain.
    #[must_use]
    pub fn log_tail(&self) -> String {
        self.process.log_tail()
    }
}

impl ControlPlane {
    /// The control plane that the tests of this binary share, started by the first of them.
    ///
    /// # Errors
    /// If a binary is missing or a process does not get ready; every later call gives the same error.
    pub fn shared() -> Result<&'static Self> {
        static SHARED: OnceLock<Result<ControlPlane, String>> = OnceLock::new();
        SHARED
            .get_or_init(|| Self::start().map_err(|error| format!("{error:#}")))
            .as_ref()
            .map_err(|message| anyhow!("{message}"))
    }

    /// A control plane of the test's own, for tests that stop or break it.
    ///
    /// Blocks until the API server is ready and the project's definitions are served.
    ///
    /// # Errors
    /// If a binary is missing or a process does not get ready; the message holds the end of its log.
    pub fn start() -> Result<Self> {
        Self::start_with("")
    }

    /// The same, without the API group version `api`, such as `resource.k8s.io/v1`.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_without(api: &str) -> Result<Self> {
        Self::started(&[&without(api)])
    }

    /// The same, with feature gates of the API server, as its flag `--feature-gates` takes them.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with(gates: &str) -> Result<Self> {
        Self::started(&[&format!("--feature-gates={gates}")])
    }

    fn started(flags: &[&str]) -> Result<Self> {
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        // A runtime must not block inside another, and the caller may be in one.
        std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .context("building a runtime to start the control plane in")?
                .block_on(Self::start_processes(&flags))
        })
        .join()
        .map_err(|_| anyhow!("starting the control plane panicked"))?
    }

    async fn start_processes(flags: &[String]) -> Result<Self> {
        let assets = assets()?;
        let etcd_port = process::free_port()?;
        let etcd = etcd(assets, etcd_port)?;
        let port = process::free_port()?;
        let api_server = api_server(assets, port, etcd_port, flags)?;
        let access = Access::new(port, api_server.folder())?;
        let plane = Self {
            access,
            etcd_port,
            namespaces: AtomicU32::new(0),
            api_server,
            _etcd: etcd,
        };
        plane
            .ready_in_time()
            .await
            .with_context(|| format!("etcd's log ends with\n{}", plane._etcd.log_tail()))?;
        plane.install_definitions().await?;
        Ok(plane)
    }

    /// Ends the API server and starts another one in its place, with other feature gates: same data,
    /// same port. Clients of the administrator go on; ServiceAccounts need new tokens, and the file of
    /// [`Self::kubeconfig`] is a new one.
    ///
    /// # Errors
    /// If it does not get ready.
    pub async fn replace_api_server(&mut self, gates: &str) -> Result<()> {
        let gates = format!("--feature-gates={gates}");
        self.replace_api_server_with(&[gates]).await
    }

    async fn replace_api_server_with(&mut self, flags: &[String]) -> Result<()> {
        self.api_server.end();
        self.api_server = api_server(assets()?, self.access.port(), self.etcd_port, flags)?;
        self.access = Access::new(self.access.port(), self.api_server.folder())?;
        self.ready_in_time().await
    }

    async fn ready_in_time(&self) -> Result<()> {
        tokio::time::timeout(READY_WITHIN, self.ready())
            .await
            .map_err(|_| anyhow!("not ready within {} s", READY_WITHIN.as_secs()))
            .flatten()
            .with_context(|| {
                format!(
                    "kube-apiserver: its log ends with\n{}",
                    self.api_server.log_tail()
                )
            })
    }

    /// Waits until the API server says that it is ready; ends early if it has ended.
    async fn ready(&self) -> Result<()> {
        let client = self.client()?;
        loop {
            self.api_server.still_runs()?;
            self._etcd.still_runs()?;
            let request = get("/readyz", "text/plain")?;
            if client
                .request_text(request)
                .await
                .is_ok_and(|body| body == "ok")
            {
                return Ok(());
            }
            // The server offers nothing to wait on before it answers.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Installs the project's CustomResourceDefinitions and waits until they are served.
    async fn install_definitions(&self) -> Result<()> {
        let client = self.client()?;
        let definitions: Api<CustomResourceDefinition> = Api::all(client);
        for definition in inference_api::crds() {
            let name = definition.name_any();
            definitions
                .patch(
                    &name,
                    &PatchParams::apply(FIELD_MANAGER),
                    &Patch::Apply(&definition),
                )
                .await
                .with_context(|| format!("installing CustomResourceDefinition {name}"))?;
            let established =
                await_condition(definitions.clone(), &name, conditions::is_crd_established());
            tokio::time::timeout(READY_WITHIN, established)
                .await
                .with_context(|| {
                    format!("CustomResourceDefinition {name} was not established")
                })??;
        }
        tokio::time::timeout(READY_WITHIN, self.definitions_published())
            .await
            .context("the API server does not publish the schemas of the definitions")?
    }

    /// Waits until kubectl can find the schemas, which are published some time after the kinds are
    /// served.
    async fn definitions_published(&self) -> Result<()> {
        let client = self.client()?;
        let path = format!("/openapi/v3/apis/{}/{}", names::GROUP, names::VERSION);
        let kinds = ["InferenceService", "InferenceServiceClass"]
            .map(|kind| format!(".{}.{kind}\"", names::VERSION));
        loop {
            let document = client.request_text(get(&path, "application/json")?).await;
            if document.is_ok_and(|text| kinds.iter().all(|kind| text.contains(kind))) {
                return Ok(());
            }
            // Nothing announces the publication.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Runs some of Kubernetes' own controllers, named as kube-controller-manager's flag
    /// `--controllers` takes them, until what is returned is dropped.
    ///
    /// # Errors
    /// If the program is missing.
    pub fn controllers(&self, names: &[&str]) -> Result<Controllers> {
        let program = asset("kube-controller-manager")?;
        let process = Supervised::spawn("kube-controller-manager", &program, |_| {
            Ok(vec![
                format!("--kubeconfig={}", self.kubeconfig().display()),
                format!("--controllers={}", names.join(",")),
                "--leader-elect=false".to_owned(),
                // Nobody asks it anything.
                "--secure-port=0".to_owned(),
                "--use-service-account-credentials=false".to_owned(),
            ])
        })?;
        Ok(Controllers { process })
    }

    /// A client of the administrator. A client belongs to the runtime it was made in: every test
    /// makes its own.
    ///
    /// # Errors
    /// If the client cannot be built.
    pub fn client(&self) -> Result<Client> {
        self.access.client(&self.access.administrator())
    }

    /// A client of the user `user` in `groups`, who has no right but those granted to them.
    ///
    /// # Errors
    /// If the client cannot be built.
    pub fn client_as(&self, user: &str, groups: &[&str]) -> Result<Client> {
        self.access.client(&self.access.impersonating(user, groups))
    }

    /// A client that carries a token of the ServiceAccount `name` in `namespace`, which is created
    /// if it is absent.
    ///
    /// # Errors
    /// If the ServiceAccount or its token cannot be made.
    pub async fn client_for_service_account(&self, namespace: &str, name: &str) -> Result<Client> {
        let config = self.config_for_service_account(namespace, name).await?;
        Ok(Client::try_from(config)?)
    }

    /// The same, for those that put something beneath the client.
    ///
    /// # Errors
    /// As there.
    pub async fn config_for_service_account(&self, namespace: &str, name: &str) -> Result<Config> {
        let token = access::service_account_token(self.client()?, namespace, name).await?;
        self.access.config(&self.access.bearer(&token))
    }

    /// Path of the administrator's kubeconfig.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        self.access.kubeconfig_path()
    }

    /// Address of the API server.
    #[must_use]
    pub fn address(&self) -> String {
        self.access.address()
    }

    /// `kubectl` of the API server's version, as the administrator; arguments are the caller's.
    ///
    /// # Errors
    /// If there is no kubectl among the assets.
    pub fn kubectl(&self) -> Result<std::process::Command> {
        let mut command = std::process::Command::new(asset("kubectl")?);
        command
            .env("KUBECONFIG", self.kubeconfig())
            // The discovery cache must not outlive this server or be shared with another.
            .args([
                "--cache-dir".as_ref(),
                self.api_server.folder().join("kubectl").as_os_str(),
            ]);
        Ok(command)
    }

    /// A new namespace for one test; its name begins with `test`, which names what it tests.
    ///
    /// # Errors
    /// If it cannot be created.
    pub async fn namespace(&self, test: &str) -> Result<String> {
        let number = self.namespaces.fetch_add(1, Ordering::Relaxed);
        let name = format!("{test}-{number}");
        let mut namespace = Namespace::default();
        namespace.metadata.name = Some(name.clone());
        Api::<Namespace>::all(self.client()?)
            .create(&PostParams::default(), &namespace)
            .await
            .with_context(|| format!("creating namespace {name}"))?;
        Ok(name)
    }

    /// Applies every document of `yaml` (server-side, unknown fields refused) and returns the objects
    /// as stored. A namespaced object that names no namespace goes to `namespace`.
    ///
    /// # Errors
    /// If the YAML is none, a kind is not served, or the server refuses an object: then the server's
    /// own answer is in the chain.
    pub async fn apply_yaml(&self, namespace: &str, yaml: &str) -> Result<Vec<DynamicObject>> {
        apply_yaml(self.client()?, namespace, yaml).await
    }

    /// The same without storing anything: the server judges each document by itself.
    ///
    /// # Errors
    /// As [`Self::apply_yaml`].
    pub async fn try_yaml(&self, namespace: &str, yaml: &str) -> Result<Vec<DynamicObject>> {
        let parameters = PatchParams::apply(FIELD_MANAGER).dry_run();
        apply_with(self.client()?, namespace, yaml, parameters).await
    }
}

/// Applies every document of `yaml` with `client`: see [`ControlPlane::apply_yaml`].
///
/// # Errors
/// As there.
pub async fn apply_yaml(client: Client, namespace: &str, yaml: &str) -> Result<Vec<DynamicObject>> {
    apply_with(client, namespace, yaml, PatchParams::apply(FIELD_MANAGER)).await
}

async fn apply_with(
    client: Client,
    namespace: &str,
    yaml: &str,
    parameters: PatchParams,
) -> Result<Vec<DynamicObject>> {
    let parameters = parameters.force().validation_strict();
    let documents: Vec<serde_json::Value> =
        serde_saphyr::from_multiple(yaml).context("reading the YAML to apply")?;
    let discovery = Discovery::new(client.clone()).run().await?;
    let mut applied = Vec::new();
    for document in documents.into_iter().filter(|document| !document.is_null()) {
        let object: DynamicObject =
            serde_json::from_value(document).context("a document is no Kubernetes object")?;
        let types = object
            .types
            .clone()
            .context("a document has no apiVersion and kind")?;
        let kind = GroupVersionKind::try_from(&types)?;
        let (resource, capabilities) = discovery
            .resolve_gvk(&kind)
            .with_context(|| format!("{} {} is not served", types.api_version, types.kind))?;
        let api: Api<DynamicObject> = match capabilities.scope {
            Scope::Cluster => Api::all_with(client.clone(), &resource),
            Scope::Namespaced => {
                let named = object.namespace();
                Api::namespaced_with(
                    client.clone(),
                    named.as_deref().unwrap_or(namespace),
                    &resource,
                )
            }
        };
        let name = object.name_any();
        applied.push(
            api.patch(&name, &parameters, &Patch::Apply(&object))
                .await
                .with_context(|| format!("applying {} {name}", types.kind))?,
        );
    }
    Ok(applied)
}

/// A GET of `path` that asks for `accept`.
///
/// # Errors
/// If `path` is none.
pub fn get(path: &str, accept: &str) -> Result<Request<Vec<u8>>> {
    Ok(Request::get(path).header(ACCEPT, accept).body(Vec::new())?)
}

/// The API server's flag that leaves an API out.
fn without(api: &str) -> String {
    format!("--runtime-config={api}=false")
}

fn etcd(assets: &Path, port: u16) -> Result<Supervised> {
    let client = format!("http://127.0.0.1:{port}");
    // Nobody joins, so the peers' port may be any.
    let peers = "http://127.0.0.1:0";
    Supervised::spawn("etcd", &assets.join("etcd"), |folder| {
        Ok(vec![
            format!("--data-dir={}", folder.join("data").display()),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--listen-peer-urls={peers}"),
            "--unsafe-no-fsync".to_owned(),
            "--log-level=warn".to_owned(),
        ])
    })
}

fn api_server(assets: &Path, port: u16, etcd_port: u16, flags: &[String]) -> Result<Supervised> {
    Supervised::spawn("kube-apiserver", &assets.join("kube-apiserver"), |folder| {
        let tokens = access::write_tokens(folder)?;
        // The server makes this key pair for its own certificate before it reads it as the key of
        // ServiceAccount tokens: no tool is needed to make one.
        let key = folder.join("apiserver.key");
        let mut arguments = vec![
            format!("--etcd-servers=http://127.0.0.1:{etcd_port}"),
            format!("--secure-port={port}"),
            "--bind-address=127.0.0.1".to_owned(),
            "--advertise-address=127.0.0.1".to_owned(),
            "--endpoint-reconciler-type=none".to_owned(),
            "--service-cluster-ip-range=10.96.0.0/24".to_owned(),
            format!("--cert-dir={}", folder.display()),
            format!("--token-auth-file={}", tokens.display()),
            "--authorization-mode=RBAC".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!("--service-account-key-file={}", key.display()),
            format!("--service-account-signing-key-file={}", key.display()),
            // Nobody makes the namespaces' default ServiceAccounts here.
            "--disable-admission-plugins=ServiceAccount".to_owned(),
            "--allow-privileged=true".to_owned(),
        ];
        arguments.extend_from_slice(flags);
        Ok(arguments)
    })
}
