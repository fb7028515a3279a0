//! The command line.
//!
//! In: flags and environment. Out: plain settings. Never: a default that names a
//! cluster.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;

use crate::claims::sharing::Policy;
use crate::health::Effect;
use crate::slices::MigPolicy;

/// The DRA kubelet plugin of driver gpu.ai.deckhouse.io: publishes a node's GPUs as
/// ResourceSlices and prepares the claims of its pods.
#[derive(Debug, Clone, Parser)]
#[command(name = "node-plugin", version)]
pub struct Options {
    /// This node's name, which is the name of its pool.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,
    /// The UID of this pod; it keeps the sockets of two instances apart during an update.
    #[arg(long, env = "POD_UID")]
    pub pod_uid: String,
    /// The folder that holds the driver's libraries and binaries, as this process sees it.
    #[arg(long, env = "DRIVER_ROOT", default_value = "/")]
    pub driver_root: PathBuf,
    /// The same folder as the host sees it, where that is another path.
    #[arg(long, env = "HOST_DRIVER_ROOT")]
    pub host_driver_root: Option<PathBuf>,
    /// The NVML library, instead of the one below the driver root.
    #[arg(long, env = "NVML_LIBRARY")]
    pub nvml_library: Option<PathBuf>,
    /// The folder of device nodes, the same here and on the host.
    #[arg(long, env = "DEV_ROOT", default_value = "/dev")]
    pub dev_root: PathBuf,
    /// The proc file system.
    #[arg(long, env = "PROC_ROOT", default_value = "/proc")]
    pub proc_root: PathBuf,
    /// The sys file system.
    #[arg(long, env = "SYS_ROOT", default_value = "/sys")]
    pub sys_root: PathBuf,
    /// The kubelet's folder of plugins, the same here and on the host.
    #[arg(
        long,
        env = "KUBELET_PLUGINS_DIR",
        default_value = "/var/lib/kubelet/plugins"
    )]
    pub kubelet_plugins_dir: PathBuf,
    /// The kubelet's folder of registration sockets.
    #[arg(
        long,
        env = "KUBELET_REGISTRY_DIR",
        default_value = "/var/lib/kubelet/plugins_registry"
    )]
    pub kubelet_registry_dir: PathBuf,
    /// The folder from which the container runtime reads CDI files.
    #[arg(long, env = "CDI_DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,
    /// Whether claims may create MIG instances and switch MIG mode (dynamic), or only what an
    /// administrator created is offered (static).
    #[arg(long, env = "MIG_MODE", value_enum, default_value_t)]
    pub mig_mode: MigPolicy,
    /// How devices are shared: by MPS where it can run and else by time-slicing (auto), by
    /// one of them only, or not at all.
    #[arg(long, env = "SHARING", value_enum, default_value_t)]
    pub sharing: Policy,
    /// The folder of the MPS daemons' pipes and states, the same here and on the host; on a
    /// tmpfs.
    #[arg(long, env = "MPS_DIR", default_value = "/run/gpu.ai.deckhouse.io/mps")]
    pub mps_dir: PathBuf,
    /// The root of the host's cgroups: MPS daemons leave the pod's for one of their own, so
    /// that they outlive the pod.
    #[arg(long, env = "CGROUP_ROOT")]
    pub cgroup_root: Option<PathBuf>,
    /// The executable that MPS daemons are launched through: this one, unless a test runs the
    /// plugin in another.
    #[arg(long, hide = true)]
    pub mps_launcher: Option<PathBuf>,
    /// The address of /livez, /readyz and /metrics.
    #[arg(long, env = "ADMIN_ADDRESS", default_value = "0.0.0.0:8080")]
    pub admin_address: SocketAddr,
    /// How many seconds a call of NVML may take before the process counts as hung.
    #[arg(long, env = "NVML_HUNG_SECONDS", default_value_t = 180, value_parser = clap::value_parser!(u64).range(1..))]
    pub nvml_hung_seconds: u64,
    /// What the taint of a fatal fault does: NoExecute evicts the pods that use the device,
    /// NoSchedule keeps new ones off.
    #[arg(
        long,
        env = "HEALTH_FATAL_EFFECT",
        value_enum,
        default_value = "NoExecute"
    )]
    pub health_fatal_effect: Effect,
    /// XIDs that are left aside, with commas between them.
    #[arg(long, env = "HEALTH_IGNORED_XIDS", value_delimiter = ',')]
    pub health_ignored_xids: Vec<u64>,
    /// How many seconds lie between two readings of a GPU's health.
    #[arg(long, env = "HEALTH_INTERVAL_SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub health_interval_seconds: u64,
    /// How many seconds a reading may take until its GPU counts as unreadable.
    #[arg(long, env = "HEALTH_DEADLINE_SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..))]
    pub health_deadline_seconds: u64,
    /// How many seconds a fault that a reset cures lasts at least: the driver needs a
    /// moment to say what has to be done.
    #[arg(long, env = "HEALTH_HOLD_SECONDS", default_value_t = 60)]
    pub health_hold_seconds: u32,
    /// How many seconds lie between two looks at the GPUs and at forgotten claims.
    #[arg(long, env = "RESYNC_SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub resync_seconds: u64,
}
