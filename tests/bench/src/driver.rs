//! A driver as a process of its own, on a control plane without a kubelet.
//!
//! In: the built programs and what to run them on. Out: a [`Driver`] that has registered with the
//! simulated kubelet and published its devices, and what the kernel says of its process. Both drivers get
//! the same: a folder on the same disk, the administrator's kubeconfig, a log file.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use e2e::control_plane::ControlPlane;
use e2e::kubelet::{Kubelet, Plugin};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::topology;

/// Name of the node plugin in tables.
pub(crate) const OURS: &str = "node-plugin";
/// Name of the peer in tables.
pub(crate) const PEER: &str = "dra-example-driver v0.4.0";
/// The node plugin's name as a driver.
const OUR_DRIVER: &str = "gpu.ai.deckhouse.io";
/// The peer's name as a driver.
const PEER_DRIVER: &str = "gpu.example.com";
/// Stands for the pod's UID, which names the sockets; the `@` is for the simulated kubelet, whose
/// HTTP/2 is Rust's.
const POD_UID: &str = "bench@0";
/// A file system in memory, as a node's `/var/run/cdi` is.
const MEMORY: &str = "/dev/shm";
/// How long a driver may take to register and to publish its devices.
const START: Duration = Duration::from_secs(60);
/// How long a driver has to be without work to count as settled.
const CALM: Duration = Duration::from_secs(1);
/// How often slices are looked at while a driver starts: the resolution of that measurement.
const LOOK: Duration = Duration::from_millis(10);
/// The unit of processor time in `/proc/<pid>/stat`; Linux tells no other to programs.
const TICKS_PER_SECOND: f64 = 100.0;

/// The programs that are measured, built with the release profile.
#[derive(Debug, Args)]
pub(crate) struct Programs {
    /// The node plugin.
    #[arg(long)]
    node_plugin: Option<PathBuf>,
    /// Makes the folder that stands for a GPU node's driver.
    #[arg(long)]
    fake_gpu_node: Option<PathBuf>,
    /// Makes something happen to the GPUs of such a folder.
    #[arg(long)]
    fake_nvml: Option<PathBuf>,
    /// dra-example-kubeletplugin.
    #[arg(long)]
    example_plugin: Option<PathBuf>,
    /// Compares dra-example-driver with itself: how far the ratios stray from 1 is the noise.
    #[arg(long)]
    pub(crate) control: bool,
}

impl Programs {
    /// The names of the two sides.
    pub(crate) fn sides(&self) -> [&'static str; 2] {
        [if self.control { PEER } else { OURS }, PEER]
    }
}

/// Which driver to start.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    /// Ours, on the GPUs of a folder that [`Stage::fake_gpus`] made.
    NodePlugin(PathBuf),
    /// The peer, which simulates as many devices.
    Example(u32),
}

/// Where drivers run: a control plane and a folder.
pub(crate) struct Stage<'a> {
    pub(crate) client: Client,
    control_plane: ControlPlane,
    programs: &'a Programs,
    work: PathBuf,
    cdi: TempDir,
    started: AtomicU32,
}

/// A running driver; it ends when this is dropped.
pub(crate) struct Driver {
    /// Its name in the API.
    pub(crate) name: &'static str,
    /// The simulated kubelet's connection.
    pub(crate) plugin: Plugin,
    /// Its pool, which is its node.
    pub(crate) pool: String,
    /// Its devices by type, in the order in which it published them.
    pub(crate) devices: BTreeMap<String, Vec<String>>,
    /// From the start of the process to the end of its registration, in ms.
    pub(crate) registered: f64,
    /// From the start of the process to the last of its slices, in ms.
    pub(crate) published: f64,
    process: Process,
}

/// The process of a driver.
struct Process {
    child: Child,
    id: u32,
    log: PathBuf,
}

impl<'a> Stage<'a> {
    pub(crate) fn new(programs: &'a Programs, work: &Path) -> Result<Self> {
        tracing::info!("Starting a control plane.");
        let control_plane = ControlPlane::start()?;
        Ok(Self {
            client: control_plane.client()?,
            control_plane,
            programs,
            work: work.to_owned(),
            cdi: tempfile::tempdir_in(MEMORY).with_context(|| MEMORY.to_owned())?,
            started: AtomicU32::new(0),
        })
    }

    pub(crate) async fn namespace(&self) -> Result<String> {
        self.control_plane.namespace("bench").await
    }

    /// Makes what stands for a GPU node's driver from a topology.
    pub(crate) async fn fake_gpus(&self, name: &str, topology: &Path) -> Result<PathBuf> {
        let program = self
            .programs
            .fake_gpu_node
            .as_ref()
            .context("name --fake-gpu-node")?;
        let folder = self.work.join(name);
        let output = Command::new(program)
            .arg(topology)
            .arg(&folder)
            .output()
            .await;
        let output = output.with_context(|| program.display().to_string())?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}: {errors}", program.display());
        Ok(folder)
    }

    /// The two sides on one real node's GPUs: ours, or the peer again as a control, and the peer
    /// with as many `devices`.
    pub(crate) async fn kinds(&self, devices: u32) -> Result<[Kind; 2]> {
        let first = if self.programs.control {
            Kind::Example(devices)
        } else {
            Kind::NodePlugin(self.fake_gpus("gpus", &topology::h100()).await?)
        };
        Ok([first, Kind::Example(devices)])
    }

    /// Gives a GPU of a running node plugin a critical error.
    pub(crate) async fn xid(
        &self,
        driver: &Driver,
        fake_gpus: &Path,
        gpu: &str,
        xid: u32,
    ) -> Result<()> {
        let mut command = program(&self.programs.fake_nvml, "--fake-nvml")?;
        let output = command
            .env("FAKE_NVML_STATE", self.state(&driver.pool))
            .arg("xid")
            .arg(fake_gpus)
            .args([gpu, &xid.to_string()])
            .output()
            .await?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "fake-nvml xid {gpu}: {errors}");
        Ok(())
    }

    /// The file that keeps the state of a node plugin's fake GPUs.
    fn state(&self, pool: &str) -> PathBuf {
        self.work.join(pool).join("state.json")
    }

    /// A path in the folder for the drivers' state.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.work.join(name)
    }

    /// Starts a driver with an empty folder on a node of its own, and waits until it has registered
    /// and published all of its devices.
    pub(crate) async fn start(&self, kind: &Kind) -> Result<Driver> {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let (name, pool) = match kind {
            Kind::NodePlugin(_) => (OUR_DRIVER, format!("ours-{number}")),
            Kind::Example(_) => (PEER_DRIVER, format!("peer-{number}")),
        };
        self.create_node(&pool).await?;
        let folder = self.work.join(&pool);
        let [plugins, registry] = ["plugins", "registry"].map(|name| folder.join(name));
        let cdi = self.cdi.path().join(&pool);
        for path in [&plugins, &registry, &cdi] {
            std::fs::create_dir_all(path).with_context(|| path.display().to_string())?;
        }
        let mut command = match kind {
            Kind::NodePlugin(fake_gpus) => {
                let mut command = program(&self.programs.node_plugin, "--node-plugin")?;
                command
                    .env("FAKE_NVML_STATE", self.state(&pool))
                    // As the chart sets it.
                    .env("MALLOC_ARENA_MAX", "1")
                    .arg("--driver-root")
                    .arg(fake_gpus)
                    .arg("--dev-root")
                    .arg(fake_gpus.join("dev"))
                    .arg("--proc-root")
                    .arg(fake_gpus.join("proc"))
                    .arg("--sys-root")
                    .arg(fake_gpus.join("sys"))
                    .arg("--kubelet-plugins-dir")
                    .arg(&plugins)
                    .arg("--kubelet-registry-dir")
                    .arg(&registry)
                    .arg("--cdi-dir")
                    .arg(&cdi)
                    .args(["--admin-address", "127.0.0.1:0"]);
                command
            }
            Kind::Example(devices) => {
                let mut command = program(&self.programs.example_plugin, "--example-plugin")?;
                command
                    .args(["--device-profile", "gpu", "--driver-name", PEER_DRIVER])
                    .args(["--num-devices", &devices.to_string()])
                    // Its default of 5 requests a second would be all that is measured.
                    .args(["--kube-api-qps", "1000", "--kube-api-burst", "1000"])
                    .arg("--kubelet-plugins-directory-path")
                    .arg(&plugins)
                    .arg("--kubelet-registrar-directory-path")
                    .arg(&registry)
                    .arg("--cdi-root")
                    .arg(&cdi);
                command
            }
        };
        command
            .args(["--node-name", &pool, "--pod-uid", POD_UID])
            .env("KUBECONFIG", self.control_plane.kubeconfig());
        let begin = Instant::now();
        let mut process = Process::spawn(command, &folder.join("log"))?;
        let kubelet = Kubelet::new(registry);
        let register = async {
            let plugin = kubelet.register(name, START).await?;
            anyhow::Ok((plugin, milliseconds(begin)))
        };
        let publish = async {
            let devices = self.published(name, &pool).await?;
            anyhow::Ok((devices, milliseconds(begin)))
        };
        let started = async { tokio::try_join!(register, publish) };
        let ((plugin, registered), (devices, published)) = tokio::select! {
            started = started => started.with_context(|| process.tell(name))?,
            ended = process.child.wait() => {
                return Err(anyhow!("{}: {}", ended?, process.tell(name)));
            }
        };
        Ok(Driver {
            name,
            plugin,
            pool,
            devices,
            registered,
            published,
            process,
        })
    }

    async fn create_node(&self, name: &str) -> Result<()> {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
        Api::<Node>::all(self.client.clone())
            .patch(name, &PatchParams::apply("bench"), &Patch::Apply(node))
            .await
            .with_context(|| format!("create node {name}"))?;
        Ok(())
    }

    /// Waits until the pool is complete; its devices by their attribute `type`.
    async fn published(&self, driver: &str, pool: &str) -> Result<BTreeMap<String, Vec<String>>> {
        let slices: Api<ResourceSlice> = Api::all(self.client.clone());
        let own =
            ListParams::default().fields(&format!("spec.driver={driver},spec.nodeName={pool}"));
        let deadline = Instant::now() + START;
        while Instant::now() < deadline {
            let found = slices.list(&own).await?.items;
            let newest = found.iter().map(|slice| slice.spec.pool.generation).max();
            let current: Vec<_> = found
                .iter()
                .filter(|slice| Some(slice.spec.pool.generation) == newest)
                .collect();
            let expected = current
                .first()
                .map_or(0, |slice| slice.spec.pool.resource_slice_count);
            let devices = devices(&current);
            if !devices.is_empty() && i64::try_from(current.len())? == expected {
                return Ok(devices);
            }
            tokio::time::sleep(LOOK).await;
        }
        Err(anyhow!(
            "{driver} did not publish its devices within {} s",
            START.as_secs()
        ))
    }

    /// Ends a driver and removes its slices, so that the next one begins as this one did.
    pub(crate) async fn stop(&self, mut driver: Driver) -> Result<()> {
        driver.process.child.kill().await?;
        let own = ListParams::default().fields(&format!("spec.nodeName={}", driver.pool));
        let slices: Api<ResourceSlice> = Api::all(self.client.clone());
        slices
            .delete_collection(&DeleteParams::default(), &own)
            .await?;
        Ok(())
    }
}

impl Driver {
    /// The names of its whole devices.
    pub(crate) fn whole_devices(&self) -> Result<&[String]> {
        self.devices_of("gpu")
    }

    /// The names of its devices of one type; the peer's have none and count as whole.
    pub(crate) fn devices_of(&self, kind: &str) -> Result<&[String]> {
        let devices = self.devices.get(kind).with_context(|| {
            format!(
                "{} published no device of type {kind} for {}",
                self.name, self.pool
            )
        })?;
        Ok(devices)
    }

    /// The processor time that its process has used so far, in ms.
    pub(crate) fn processor_time(&self) -> Result<f64> {
        let path = format!("/proc/{}/stat", self.process.id);
        let stat = std::fs::read_to_string(&path).with_context(|| self.process.tell(self.name))?;
        // Fields 14 and 15 of the line; the second, in parentheses, may hold any character.
        let ticks: f64 = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .skip(11)
            .take(2)
            .map(|field| field.parse::<f64>().unwrap_or_default())
            .sum();
        Ok(ticks * 1000.0 / TICKS_PER_SECOND)
    }

    /// Waits until its process has nothing to do for a second.
    pub(crate) async fn settled(&self) -> Result<()> {
        loop {
            let before = self.processor_time()?;
            tokio::time::sleep(CALM).await;
            if self.processor_time()? - before <= 1000.0 / TICKS_PER_SECOND {
                return Ok(());
            }
        }
    }

    /// A line of `/proc/<pid>/status` such as `VmRSS`, in MiB.
    pub(crate) fn memory(&self, line: &str) -> Result<f64> {
        let path = format!("/proc/{}/status", self.process.id);
        let status =
            std::fs::read_to_string(&path).with_context(|| self.process.tell(self.name))?;
        let kibibytes: f64 = status
            .lines()
            .find_map(|text| text.strip_prefix(line)?.strip_prefix(':'))
            .and_then(|rest| rest.split_whitespace().next())
            .with_context(|| format!("{path} has no {line}"))?
            .parse()?;
        Ok(kibibytes / 1024.0)
    }

    /// What its log says, for an error's message.
    pub(crate) fn tell(&self) -> String {
        self.process.tell(self.name)
    }
}

impl Process {
    fn spawn(mut command: Command, log: &Path) -> Result<Self> {
        let file = File::create(log).with_context(|| log.display().to_string())?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {:?}", command.as_std().get_program()))?;
        let id = child.id().context("the driver ended at once")?;
        Ok(Self {
            child,
            id,
            log: log.to_owned(),
        })
    }

    fn tell(&self, name: &str) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(15)..].join("\n");
        format!("{name}; its log ends with\n{tail}\n")
    }
}

fn program(path: &Option<PathBuf>, option: &str) -> Result<Command> {
    let path = path
        .as_ref()
        .with_context(|| format!("name the program by {option}"))?;
    Ok(Command::new(path))
}

/// The devices of a pool by their attribute `type`, slice by slice in the order of their names, which
/// is the scheduler's.
fn devices(slices: &[&ResourceSlice]) -> BTreeMap<String, Vec<String>> {
    let mut slices = slices.to_vec();
    slices.sort_by_key(|slice| slice.metadata.name.clone());
    let mut devices: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for device in slices
        .iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten())
    {
        let kind = device
            .attributes
            .as_ref()
            .and_then(|attributes| attributes.get("type")?.string.clone())
            .unwrap_or_else(|| "gpu".to_owned());
        devices.entry(kind).or_default().push(device.name.clone());
    }
    devices
}

/// The time since `begin`, in ms.
pub(crate) fn milliseconds(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1000.0
}
