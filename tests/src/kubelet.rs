//! The kubelet's side of a DRA driver, without a kubelet.
//!
//! In: the folder of registration sockets. Out: a registered [`Plugin`] whose claims can be prepared and
//! unprepared. It does what Kubernetes 1.37's plugin manager and DRA manager do on the wire: the same
//! authorities, the same deadlines, the same checks of every answer. It never reads a claim, an
//! allocation or a device: what a driver does with them is the driver's.

mod health;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use hyper_util::rt::TokioIo;
use kubelet_api::dra::v1 as dra;
use kubelet_api::dra::v1::dra_plugin_client::DraPluginClient;
use kubelet_api::registration::v1 as registration;
use kubelet_api::registration::v1::registration_client::RegistrationClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

pub use dra::{Claim, Device};
pub use health::{DeviceHealth, HealthVersion, HealthWatch};

/// The plugin manager's deadline for a connection.
const DIAL: Duration = Duration::from_secs(10);
/// The plugin manager's deadline for `GetInfo`.
const GET_INFO: Duration = Duration::from_secs(1);
/// The plugin manager's deadline for `NotifyRegistrationStatus`.
const NOTIFY: Duration = Duration::from_secs(5);
/// The DRA manager's deadline for a call to the node service.
const CALL: Duration = Duration::from_secs(45);
/// How soon a folder is looked at again; the kubelet's first retry is later.
const POLL: Duration = Duration::from_millis(20);
/// The longest name of a driver.
const NAME_LIMIT: usize = 63;

/// The kubelet's plugin manager, for one folder of registration sockets.
#[derive(Debug, Clone)]
pub struct Kubelet {
    registry: PathBuf,
}

/// A driver that told its name and was told that it is registered.
///
/// A clone shares the connection, as all calls of the kubelet do.
#[derive(Debug, Clone)]
pub struct Plugin {
    /// What the driver said of itself.
    pub info: registration::PluginInfo,
    /// The socket it registered through.
    pub socket: PathBuf,
    client: DraPluginClient<Channel>,
    channel: Channel,
}

impl Kubelet {
    /// A kubelet that looks for sockets in `registry` (a node's is
    /// `/var/lib/kubelet/plugins_registry`).
    pub fn new(registry: impl Into<PathBuf>) -> Self {
        Self {
            registry: registry.into(),
        }
    }

    /// The sockets that the plugin manager would dial now, in order of their names. It skips those
    /// whose name begins with a dot.
    ///
    /// # Errors
    /// When the folder cannot be read; one that is not there yet is empty.
    pub fn sockets(&self) -> Result<Vec<PathBuf>> {
        let entries = match std::fs::read_dir(&self.registry) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error).with_context(|| self.registry.display().to_string()),
        };
        let mut sockets = Vec::new();
        for entry in entries {
            let entry = entry?;
            let hidden = entry.file_name().to_string_lossy().starts_with('.');
            if !hidden && !entry.file_type()?.is_dir() {
                sockets.push(entry.path());
            }
        }
        sockets.sort();
        Ok(sockets)
    }

    /// Waits until a socket of `driver` is there and registers it, trying again after a failure as
    /// the kubelet does.
    ///
    /// # Errors
    /// When that does not happen within `limit`; the message says what happened last.
    pub async fn register(&self, driver: &str, limit: Duration) -> Result<Plugin> {
        let deadline = tokio::time::Instant::now() + limit;
        let mut last = anyhow!("there is no socket");
        while tokio::time::Instant::now() < deadline {
            for socket in self.sockets()? {
                match self.register_socket(&socket).await {
                    Ok(plugin) if plugin.info.name == driver => return Ok(plugin),
                    Ok(plugin) => last = anyhow!("there is the driver {}", plugin.info.name),
                    Err(error) => last = error,
                }
            }
            // A socket's file is there before anybody listens on it, so a watch would not do.
            tokio::time::sleep(POLL).await;
        }
        Err(last.context(format!(
            "{driver} did not register in {} within {} s",
            self.registry.display(),
            limit.as_secs()
        )))
    }

    /// Registers the driver behind one socket, once.
    ///
    /// # Errors
    /// When it does not answer in time, when the kubelet would refuse what it says (it is told so
    /// first), and when it refuses to be registered.
    pub async fn register_socket(&self, socket: &Path) -> Result<Plugin> {
        let what = || format!("registration socket {}", socket.display());
        let authority = grpc_go_authority(socket);
        let channel = dial(socket, &authority).await.with_context(what)?;
        let mut client = RegistrationClient::new(channel);
        let asked = client.get_info(registration::InfoRequest {});
        let info = tokio::time::timeout(GET_INFO, asked)
            .await
            .map_err(|_| anyhow!("GetInfo took longer than {} s", GET_INFO.as_secs()))
            .and_then(|answer| answer.context("GetInfo failed"))
            .with_context(what)?
            .into_inner();
        let refused = check(&info).err();
        let status = registration::RegistrationStatus {
            plugin_registered: refused.is_none(),
            error: refused
                .as_ref()
                .map(|error| format!("{error:#}"))
                .unwrap_or_default(),
        };
        let told = client.notify_registration_status(status);
        let told = tokio::time::timeout(NOTIFY, told)
            .await
            .map_err(|_| {
                anyhow!(
                    "NotifyRegistrationStatus took longer than {} s",
                    NOTIFY.as_secs()
                )
            })
            .and_then(|answer| answer.context("NotifyRegistrationStatus failed"));
        if let Some(refused) = refused {
            return Err(refused.context(what()));
        }
        told.with_context(what)?;
        Plugin::connect(info, socket).await
    }
}

impl Plugin {
    async fn connect(info: registration::PluginInfo, socket: &Path) -> Result<Self> {
        // The DRA manager dials `unix:<path>`, for which grpc-go says `localhost`.
        let channel = dial(Path::new(&info.endpoint), "localhost")
            .await
            .with_context(|| format!("endpoint {} of {}", info.endpoint, info.name))?;
        Ok(Self {
            info,
            socket: socket.to_owned(),
            client: DraPluginClient::new(channel.clone()),
            channel,
        })
    }

    /// Connects anew, as a kubelet does that was restarted and finds the same sockets.
    ///
    /// # Errors
    /// When nobody listens on the endpoint.
    pub async fn reconnect(&self) -> Result<Self> {
        Self::connect(self.info.clone(), &self.socket).await
    }

    /// Prepares the claims of one pod. One entry for each claim by its UID: its devices, or the
    /// driver's error.
    ///
    /// # Errors
    /// When the call fails as a whole, or the answer misses a claim or holds one that was not asked
    /// for: the kubelet takes that as a failure, too.
    pub async fn prepare(
        &self,
        claims: &[Claim],
    ) -> Result<BTreeMap<String, Result<Vec<Device>, String>>> {
        let request = dra::NodePrepareResourcesRequest {
            claims: claims.to_vec(),
        };
        let mut client = self.client.clone();
        let answer = in_time(
            "NodePrepareResources",
            client.node_prepare_resources(request),
        )
        .await?;
        let answers = answer.claims.into_iter().map(|(uid, answer)| {
            let failed = !answer.error.is_empty();
            (
                uid,
                if failed {
                    Err(answer.error)
                } else {
                    Ok(answer.devices)
                },
            )
        });
        complete("NodePrepareResources", claims, answers.collect())
    }

    /// Prepares one claim.
    ///
    /// # Errors
    /// When the call or the claim fails.
    pub async fn prepare_claim(&self, claim: &Claim) -> Result<Vec<Device>> {
        let answer = self
            .prepare(std::slice::from_ref(claim))
            .await?
            .remove(&claim.uid);
        flatten(answer, "prepare", claim)
    }

    /// Undoes the claims of one pod. One entry for each claim by its UID.
    ///
    /// # Errors
    /// As [`Plugin::prepare`].
    pub async fn unprepare(
        &self,
        claims: &[Claim],
    ) -> Result<BTreeMap<String, Result<(), String>>> {
        let request = dra::NodeUnprepareResourcesRequest {
            claims: claims.to_vec(),
        };
        let mut client = self.client.clone();
        let answer = in_time(
            "NodeUnprepareResources",
            client.node_unprepare_resources(request),
        )
        .await?;
        let answers = answer.claims.into_iter().map(|(uid, answer)| {
            (
                uid,
                if answer.error.is_empty() {
                    Ok(())
                } else {
                    Err(answer.error)
                },
            )
        });
        complete("NodeUnprepareResources", claims, answers.collect())
    }

    /// Undoes one claim.
    ///
    /// # Errors
    /// When the call or the claim fails.
    pub async fn unprepare_claim(&self, claim: &Claim) -> Result<()> {
        let answer = self
            .unprepare(std::slice::from_ref(claim))
            .await?
            .remove(&claim.uid);
        flatten(answer, "unprepare", claim)
    }
}

/// The `:authority` that grpc-go sends when it is given a path to dial: the path, with everything
/// escaped that may not stand in an authority.
#[must_use]
pub fn grpc_go_authority(socket: &Path) -> String {
    let mut authority = String::new();
    for byte in socket.as_os_str().as_encoded_bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]@".contains(byte) {
            authority.push(char::from(*byte));
        } else {
            authority.push_str(&format!("%{byte:02X}"));
        }
    }
    authority
}

async fn dial(socket: &Path, authority: &str) -> Result<Channel> {
    let origin: Uri = format!("http://{authority}").parse().with_context(|| {
        format!(
            "a kubelet sends the authority {authority}, which an HTTP/2 server in Rust refuses; \
             put an @ into the socket's name"
        )
    })?;
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost")
        .origin(origin)
        .connect_timeout(DIAL)
        .connect_with_connector(connector)
        .await
        .context("nobody listens")
}

/// What the kubelet checks before it takes a DRA driver.
fn check(info: &registration::PluginInfo) -> Result<()> {
    ensure!(
        info.r#type == registration::DRA_PLUGIN,
        "its type is {:?} and not {:?}",
        info.r#type,
        registration::DRA_PLUGIN
    );
    ensure!(
        !info.name.is_empty() && info.name.len() <= NAME_LIMIT,
        "its name {:?} is not one of 1 to {NAME_LIMIT} characters",
        info.name
    );
    ensure!(
        Path::new(&info.endpoint).is_absolute(),
        "its endpoint {:?} is not an absolute path",
        info.endpoint
    );
    // The kubelet takes the first that it knows, so the order is the driver's wish.
    let known = [dra::SERVICE, kubelet_api::dra::v1beta1::SERVICE];
    match info
        .supported_versions
        .iter()
        .find(|version| known.contains(&version.as_str()))
    {
        Some(version) if version == dra::SERVICE => Ok(()),
        Some(version) => bail!("it prefers {version} to {}", dra::SERVICE),
        None => bail!(
            "none of its services {:?} is one of {known:?}",
            info.supported_versions
        ),
    }
}

async fn in_time<T>(
    call: &str,
    answer: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T> {
    let answer = tokio::time::timeout(CALL, answer)
        .await
        .map_err(|_| anyhow!("{call} took longer than {} s", CALL.as_secs()))?;
    Ok(answer
        .with_context(|| format!("{call} failed"))?
        .into_inner())
}

fn complete<T>(
    call: &str,
    claims: &[Claim],
    answers: BTreeMap<String, T>,
) -> Result<BTreeMap<String, T>> {
    let asked: BTreeSet<&str> = claims.iter().map(|claim| claim.uid.as_str()).collect();
    let answered: BTreeSet<&str> = answers.keys().map(String::as_str).collect();
    let skipped: Vec<_> = asked.difference(&answered).collect();
    ensure!(skipped.is_empty(), "{call} skipped the claims {skipped:?}");
    let unknown: Vec<_> = answered.difference(&asked).collect();
    ensure!(
        unknown.is_empty(),
        "{call} answered for claims that it was not asked for: {unknown:?}"
    );
    Ok(answers)
}

fn flatten<T>(answer: Option<Result<T, String>>, verb: &str, claim: &Claim) -> Result<T> {
    let what = || {
        format!(
            "{verb} claim {}/{} ({})",
            claim.namespace, claim.name, claim.uid
        )
    };
    answer
        .with_context(what)?
        .map_err(|message| anyhow!(message))
        .with_context(what)
}

#[cfg(test)]
mod tests;
