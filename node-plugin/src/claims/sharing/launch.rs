//! The child between the plugin and a control daemon, or a control command.
//!
//! In: one argument, a [`Launch`] as JSON. Out: this process becomes the daemon or the
//! command. Never: a thread, and nothing after the last step but `exec`.
//!
//! A daemon must outlive the plugin's container, because clients in other pods depend on
//! it. A container runtime ends a container by its PID namespace and by its cgroup, and
//! takes its root file system away. So the chart puts the plugin into the host's PID
//! namespace, and this process, before it becomes the daemon:
//! - starts a session of its own, so that no signal to the plugin's group reaches it;
//! - moves to a cgroup of its own, outside every pod's;
//! - enters the host's mount namespace and makes a copy of it, in which the daemon's
//!   shared memory is at `/dev/shm`. What the daemon is executed from, and what it executes
//!   later (`nvidia-cuda-mps-server`), is then the host's, and not of an image that an
//!   upgrade removes.
//!
//! The plugin does not run it in a forked copy of itself: that could not be done without
//! `unsafe`, and entering a mount namespace takes a process with one thread.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use rustix::fs::FlockOperation;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::{Deserialize, Serialize};

use super::Places;
use super::process::{Process, started};

/// The first argument with which this executable is a launcher.
pub const COMMAND: &str = "mps-launch";

/// The exit code where another daemon of the device runs.
pub const TAKEN: u8 = 75;

/// Where a daemon finds its folders when its root is not the host's.
const PIPE_IN_ROOT: &str = "/tmp/nvidia-mps";
const LOG_IN_ROOT: &str = "/tmp/nvidia-log";

/// Loaders by which a folder is told to be a whole root file system, and not just a
/// folder of the driver's files.
const LOADERS: [&str; 3] = [
    "lib64/ld-linux-x86-64.so.2",
    "lib/ld-linux-aarch64.so.1",
    "bin/sh",
];

/// Folders with the driver's libraries, below the driver root.
const LIBRARIES: [&str; 6] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib",
    "usr/local/nvidia/lib64",
];

/// What this process becomes.
#[derive(Debug, Serialize, Deserialize)]
#[serde(
    rename_all = "camelCase",
    rename_all_fields = "camelCase",
    tag = "become"
)]
pub enum Launch {
    /// The control daemon of a device.
    Daemon {
        /// The folder of [`Places`].
        folder: PathBuf,
        /// The program's path below the driver root.
        program: String,
        /// The driver root as this process sees it.
        driver_root: PathBuf,
        /// The driver root as the host sees it.
        host_driver_root: PathBuf,
        /// The UUID of the GPU or the MIG instance.
        uuid: String,
        /// The root of the host's cgroups, and the daemon's own below it.
        cgroup: Option<(PathBuf, PathBuf)>,
    },
    /// A command to a control daemon, read from standard input.
    Command {
        /// The daemon.
        process: Process,
    },
}

/// Becomes what the argument says.
#[must_use]
pub fn main(argument: Option<&str>) -> ExitCode {
    let launch = argument
        .ok_or_else(|| "no argument".to_owned())
        .and_then(|text| serde_json::from_str(text).map_err(|error| error.to_string()));
    let failed = match launch {
        Ok(Launch::Daemon {
            folder,
            program,
            driver_root,
            host_driver_root,
            uuid,
            cgroup,
        }) => {
            let daemon = Daemon {
                places: Places { folder },
                program,
                driver_root,
                host_driver_root,
                uuid,
            };
            match daemon.run(cgroup.as_ref()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return ExitCode::from(TAKEN);
                }
                Err(error) => error.to_string(),
                Ok(never) => match never {},
            }
        }
        Ok(Launch::Command { process }) => match command(&process) {
            Err(error) => error.to_string(),
            Ok(never) => match never {},
        },
        Err(error) => error,
    };
    eprintln!("The MPS launcher failed: {failed}.");
    ExitCode::FAILURE
}

/// A value of this type cannot be made: the process has become another program.
enum Never {}

struct Daemon {
    places: Places,
    program: String,
    driver_root: PathBuf,
    host_driver_root: PathBuf,
    uuid: String,
}

impl Daemon {
    fn run(self, cgroup: Option<&(PathBuf, PathBuf)>) -> io::Result<Never> {
        // A session of its own; it has one already where it leads a group.
        rustix::process::setsid().ok();
        // Held by the daemon and its servers as long as they live: never two of a device.
        let lock = File::options()
            .create(true)
            .append(true)
            .open(self.places.folder.join("lock"))?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        fcntl_setfd(lock.as_fd(), FdFlags::empty())?;
        std::mem::forget(lock);
        if let Some((root, below)) = cgroup {
            leave_cgroup(root, below);
        }

        let process = match enter(Path::new("/proc/1/ns/mnt")).and_then(|()| private_mounts()) {
            Ok(()) => self.on_host()?,
            Err(error) => {
                eprintln!(
                    "The daemon stays in the plugin's own file system ({error}); that is \
                     meant for fake-GPU nodes."
                );
                self.process(self.driver_root.clone())
            }
        };
        // The folder has the same path here and on the host.
        process.write(&self.places)?;
        Err(exec(&process, &["-f", "-multiuser-server"]))
    }

    /// The daemon as a process of the host, in a copy of its mounts.
    fn on_host(&self) -> io::Result<Process> {
        let root = &self.host_driver_root;
        let whole = LOADERS.iter().any(|loader| root.join(loader).exists());
        let chroot = whole && root != Path::new("/");
        let mut process = self.process(root.clone());
        process.own_mounts = true;
        if !chroot {
            mount_bind(self.places.shm(), "/dev/shm")?;
            return Ok(process);
        }
        mount_bind(self.places.shm(), root.join("dev/shm"))?;
        mount(
            "tmpfs",
            root.join("tmp"),
            "tmpfs",
            MountFlags::empty(),
            None,
        )?;
        for (name, from) in [
            (PIPE_IN_ROOT, self.places.pipe()),
            (LOG_IN_ROOT, self.places.log()),
        ] {
            let to = root.join(name.trim_start_matches('/'));
            fs::create_dir(&to)?;
            mount_bind(from, to)?;
        }
        process.chroot = true;
        process.pipe = PIPE_IN_ROOT.into();
        process.log = LOG_IN_ROOT.into();
        Ok(process)
    }

    fn process(&self, root: PathBuf) -> Process {
        let pid = std::process::id();
        Process {
            pid,
            started: started(pid).unwrap_or_default(),
            root,
            chroot: false,
            own_mounts: false,
            program: self.program.clone(),
            pipe: self.places.pipe(),
            log: self.places.log(),
            uuid: self.uuid.clone(),
        }
    }
}

/// Enters a mount namespace, unless this process is in it.
fn enter(namespace: &Path) -> io::Result<()> {
    let there = File::open(namespace)?;
    let here = fs::metadata("/proc/self/ns/mnt")?;
    if there.metadata()?.ino() != here.ino() {
        move_into_link_name_space(there.as_fd(), Some(LinkNameSpaceType::Mount))?;
        std::env::set_current_dir("/")?;
    }
    Ok(())
}

/// Makes what this process mounts invisible to everybody else; what the host mounts
/// later is still seen here.
fn private_mounts() -> io::Result<()> {
    // Of this process nothing is shared with another thread: it has one only.
    #[allow(deprecated)]
    rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNS)?;
    let flags = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change("/", flags)?;
    Ok(())
}

/// Moves this process out of its pod's cgroups, in each hierarchy that is there.
fn leave_cgroup(root: &Path, below: &Path) {
    let hierarchies = hierarchies(root);
    if hierarchies.is_empty() {
        eprintln!(
            "{} holds no cgroups; the daemon ends with the plugin's pod.",
            root.display()
        );
    }
    for hierarchy in hierarchies {
        // A new group of cpuset v1 takes nobody before its CPUs are named.
        let own = hierarchy.join(below);
        let moved = fs::create_dir_all(&own)
            .and_then(|()| fs::write(own.join("cgroup.procs"), "0"))
            .or_else(|_| fs::write(hierarchy.join("cgroup.procs"), "0"));
        if let Err(error) = moved {
            eprintln!(
                "The daemon cannot leave the pod's cgroup in {}: {error}; it may end with the pod.",
                hierarchy.display()
            );
        }
    }
}

/// The cgroup hierarchies of a host: one with v2, one for each controller with v1.
pub(super) fn hierarchies(root: &Path) -> Vec<PathBuf> {
    if root.join("cgroup.controllers").exists() {
        return vec![root.to_owned()];
    }
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.join("cgroup.procs").exists() && !path.is_symlink())
        .collect()
}

/// A command is run where its daemon is.
fn command(process: &Process) -> io::Result<Never> {
    if process.own_mounts {
        let namespace = format!("/proc/{}/ns/mnt", process.pid);
        enter(Path::new(&namespace))?;
    }
    Err(exec(process, &[]))
}

/// Becomes the program.
fn exec(process: &Process, arguments: &[&str]) -> io::Error {
    let (root, program) = if process.chroot {
        let entered = rustix::process::chroot(&process.root)
            .map_err(io::Error::from)
            .and_then(|()| std::env::set_current_dir("/"));
        if let Err(error) = entered {
            return error;
        }
        (PathBuf::from("/"), Path::new("/").join(&process.program))
    } else {
        (process.root.clone(), process.root.join(&process.program))
    };
    let mut environment = BTreeMap::from([
        (
            "CUDA_MPS_PIPE_DIRECTORY",
            process.pipe.clone().into_os_string(),
        ),
        (
            "CUDA_MPS_LOG_DIRECTORY",
            process.log.clone().into_os_string(),
        ),
        ("CUDA_VISIBLE_DEVICES", process.uuid.clone().into()),
        ("PATH", "/usr/bin:/bin:/usr/sbin:/sbin".into()),
    ]);
    if root != Path::new("/") {
        // The daemon looks for its server on the path and beside its libraries.
        let binaries = program.parent().unwrap_or(&root).display();
        let path = format!("{binaries}:/usr/bin:/bin:/usr/sbin:/sbin");
        environment.insert("PATH", path.into());
        let libraries = LIBRARIES.map(|folder| root.join(folder));
        if let Ok(libraries) = std::env::join_paths(libraries) {
            environment.insert("LD_LIBRARY_PATH", libraries);
        }
    }
    Command::new(&program)
        .args(arguments)
        .env_clear()
        .envs(environment)
        .exec()
}
