//! Shares of a device: what each claim may use of it, and who sees to it.
//!
//! In: the portions that the scheduler granted, and the claims that hold them. Out: an
//! MPS control daemon for each device that claims share, with limits no larger than what
//! was granted. Never: more granted than the device has, a daemon without a claim, or
//! a claim on one GPU that waits for the daemon of another.
//!
//! Pure: [`limits`] (sums and checks), [`decide`] (MPS or time-slicing). On the host:
//! [`daemons`] (start, adopt, supervise, stop), [`process`] (one daemon and its control
//! commands), [`launch`] (what runs in the child before it becomes the daemon).
//! `docs/sharing.md` says what is isolated and what is not.

pub mod amount;
pub mod daemons;
mod error;
mod grant;
pub mod launch;
pub mod limits;
pub mod process;
mod ready;
mod state;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use gpu::{Gpu, Inventory, PciAddress, Placement};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

pub use self::error::SharingError;
pub(super) use self::grant::{grant, refuse_over_commit, refuse_several_daemons};
use super::record::Target;
use crate::slices::SharingKind;

/// The control daemon's path below the driver root, by the places where drivers put it.
const PROGRAMS: [&str; 3] = [
    "usr/bin/nvidia-cuda-mps-control",
    "bin/nvidia-cuda-mps-control",
    "usr/local/bin/nvidia-cuda-mps-control",
];

/// MPS limits a client's memory and threads from Volta on (NVIDIA, Multi-Process
/// Service, "Volta MPS").
const MPS_COMPUTE_CAPABILITY: (u32, u32) = (7, 0);

/// How devices may be shared on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Policy {
    /// By MPS where it can run, else by time-slicing.
    #[default]
    Auto,
    /// By MPS; a GPU on which it cannot run is not shared.
    Mps,
    /// By time-slicing.
    TimeSlicing,
    /// Not at all.
    Off,
}

/// How a GPU is shared; `None` where it is not. `program` says whether the driver has
/// the MPS control daemon.
#[must_use]
pub fn decide(
    policy: Policy,
    compute_capability: (u32, u32),
    program: bool,
) -> Option<SharingKind> {
    let mps = program && compute_capability >= MPS_COMPUTE_CAPABILITY;
    match policy {
        Policy::Auto if mps => Some(SharingKind::Mps),
        Policy::Auto | Policy::TimeSlicing => Some(SharingKind::TimeSlicing),
        Policy::Mps => mps.then_some(SharingKind::Mps),
        Policy::Off => None,
    }
}

/// How this node shares its devices.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What the administrator allows.
    pub policy: Policy,
    /// The folder of the daemons' pipes and states, the same here and on the host. It
    /// belongs on a tmpfs: all of it describes processes of this boot, clients and
    /// daemons share memory in it, and a socket's path may have 107 bytes only.
    pub folder: PathBuf,
    /// The executable that [`launch::main`] is in: this process's own.
    pub launcher: PathBuf,
    /// The root of the host's cgroups. A daemon leaves its pod's cgroup for one below
    /// it, because a container runtime kills by cgroup. `None` where a daemon may end
    /// with the plugin.
    pub cgroups: Option<PathBuf>,
    /// Where what happens to daemons is told. Nobody waits for it: what does not fit is
    /// dropped.
    pub reports: Option<mpsc::Sender<Report>>,
}

impl Settings {
    /// How each GPU of an inventory is shared. `driver_root` is the driver's folder as
    /// this process sees it.
    #[must_use]
    pub fn kinds(
        &self,
        inventory: &Inventory,
        driver_root: &std::path::Path,
    ) -> BTreeMap<PciAddress, SharingKind> {
        let program = program(driver_root).is_some();
        let kind = |gpu: &Gpu| decide(self.policy, gpu.compute_capability, program);
        let gpus = inventory.gpus.iter();
        gpus.filter_map(|gpu| Some((gpu.pci, kind(gpu)?))).collect()
    }

    /// Where the pipes and the shared memory of a device's daemon are.
    #[must_use]
    pub fn places(&self, device: SharedDevice) -> Places {
        Places {
            folder: self.folder.join(device.to_string()),
        }
    }
}

/// The control daemon's path below the driver root, where the driver has one.
#[must_use]
pub fn program(driver_root: &std::path::Path) -> Option<&'static str> {
    PROGRAMS
        .into_iter()
        .find(|program| driver_root.join(program).is_file())
}

/// The folders of one device's daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// What the others are in.
    pub folder: PathBuf,
}

impl Places {
    /// The sockets on which clients and control commands reach the daemon.
    #[must_use]
    pub fn pipe(&self) -> PathBuf {
        self.folder.join("pipe")
    }

    /// The memory that clients and servers share.
    #[must_use]
    pub fn shm(&self) -> PathBuf {
        self.folder.join("shm")
    }

    /// The logs of the daemon and its servers.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.folder.join("log")
    }
}

/// A device that claims share: a GPU, or an administrator's MIG instance on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SharedDevice {
    /// The GPU.
    pub pci: PciAddress,
    /// The MIG instance's place on it; `None` for the whole.
    pub placement: Option<Placement>,
}

impl SharedDevice {
    /// The device that a target is a share of; `None` where it is no share.
    #[must_use]
    pub fn of(target: &Target) -> Option<Self> {
        match target {
            Target::Share { of, .. } => Some(Self::shared_out(of)),
            Target::Whole { .. } | Target::Partition { .. } => None,
        }
    }

    /// The device that is shared out.
    #[must_use]
    pub fn shared_out(of: &Target) -> Self {
        Self {
            pci: of.pci(),
            placement: match of {
                Target::Partition { placement, .. } => Some(*placement),
                Target::Whole { .. } | Target::Share { .. } => None,
            },
        }
    }
}

/// A short text without separators of paths: it names the device's folder, and the
/// path of a socket in it has little room.
impl fmt::Display for SharedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pci.dns_label())?;
        match self.placement {
            Some(Placement { start, size }) => write!(f, "-{start}-{size}"),
            None => Ok(()),
        }
    }
}

impl FromStr for SharedDevice {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let parts: Vec<&str> = text.split('-').collect();
        let (address, rest) = parts.split_at_checked(4).ok_or(())?;
        let [domain, bus, slot, function] = address else {
            return Err(());
        };
        let pci = format!("{domain}:{bus}:{slot}.{function}");
        let number = |text: &str| text.parse::<u32>().map_err(|_| ());
        Ok(Self {
            pci: pci.parse().map_err(|_| ())?,
            placement: match rest {
                [] => None,
                [start, size] => Some(Placement {
                    start: number(start)?,
                    size: number(size)?,
                }),
                _ => return Err(()),
            },
        })
    }
}

/// What one claim may use of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Portion {
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// Compute in percent of the device.
    pub cores_percent: u32,
}

impl Portion {
    /// The memory in MiB, which is what MPS takes; never none, which MPS would take for
    /// no limit.
    #[must_use]
    pub fn memory_mib(&self) -> u64 {
        (self.memory_bytes >> 20).max(1)
    }
}

/// Something that happened to a device's daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The device.
    pub device: SharedDevice,
    /// What.
    pub what: What,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// It was started.
    Started,
    /// It ended although claims use the device. It is started again.
    Died,
    /// It could not be started or told its limits; it is tried again.
    Failed(String),
    /// It was stopped: no claim uses the device.
    Stopped,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mps_is_taken_where_it_can_run_and_the_policy_decides_what_happens_elsewhere() {
        use SharingKind::{Mps, TimeSlicing};
        let volta = (7, 0);
        assert_eq!(decide(Policy::Auto, volta, true), Some(Mps));
        assert_eq!(decide(Policy::Auto, volta, false), Some(TimeSlicing));
        assert_eq!(decide(Policy::Auto, (6, 1), true), Some(TimeSlicing));
        assert_eq!(decide(Policy::Mps, volta, true), Some(Mps));
        assert_eq!(decide(Policy::Mps, (6, 1), true), None);
        assert_eq!(decide(Policy::Mps, volta, false), None);
        assert_eq!(decide(Policy::TimeSlicing, volta, true), Some(TimeSlicing));
        assert_eq!(decide(Policy::Off, volta, true), None);
    }

    #[test]
    fn a_folders_name_stands_for_one_device_and_a_socket_in_it_has_room() {
        let whole = SharedDevice {
            pci: "0000:65:00.0".parse().unwrap(),
            placement: None,
        };
        let part = SharedDevice {
            placement: Some(Placement { start: 4, size: 4 }),
            ..whole
        };
        for device in [whole, part] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        for other in [
            "",
            "0000-65-00",
            "0000-65-00-0-4",
            "0000-65-00-0-4-x",
            "locks",
        ] {
            assert_eq!(other.parse::<SharedDevice>(), Err(()), "{other}");
        }
        // The longest name that a control daemon of driver 580 puts there.
        let socket = PathBuf::from("/run/gpu.ai.deckhouse.io/mps")
            .join(part.to_string())
            .join("pipe/control_privileged");
        assert!(socket.as_os_str().len() <= 107);
    }
}
