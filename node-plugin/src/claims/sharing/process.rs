//! One control daemon as a process of the host.
//!
//! In: the file that the launcher left. Out: whether the daemon lives, its end, its
//! answers to commands. Never: a signal to a process that only has the daemon's number.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt as _;

use super::super::files::{self, Flush, step};
use super::launch::{self, Launch};
use super::ready::readable;
use super::{Places, Portion};

/// How long a control command may take.
const ANSWER: Duration = Duration::from_secs(10);

/// A control daemon, as its launcher described it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Process {
    /// Its number in the host's PID namespace.
    pub pid: u32,
    /// When it was started, in clock ticks since boot: with the number it names one
    /// process and no later one.
    pub started: u64,
    /// The driver root that it was executed from, in its own mount namespace.
    pub root: PathBuf,
    /// Whether that root is the daemon's `/`.
    pub chroot: bool,
    /// Whether it has mounts of its own, made from the host's. One that stayed in its
    /// plugin's file system is reached by the same paths from every other instance.
    pub own_mounts: bool,
    /// The program below that root.
    pub program: String,
    /// Its pipe directory, as it sees it.
    pub pipe: PathBuf,
    /// Its log directory, as it sees it.
    pub log: PathBuf,
    /// The UUID of its device.
    pub uuid: String,
}

/// A control command that did not do what it says.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// It could not be run.
    #[error("the MPS control command {command:?} cannot be run: {source}")]
    Run {
        /// The command.
        command: String,
        /// Why.
        source: io::Error,
    },
    /// The daemon does not answer.
    #[error("the MPS control daemon did not answer {command:?} within {} s", ANSWER.as_secs())]
    Silent {
        /// The command.
        command: String,
    },
    /// The daemon refused.
    #[error("the MPS control daemon refused {command:?}: {answer}")]
    Refused {
        /// The command.
        command: String,
        /// What it said.
        answer: String,
    },
}

/// When a process was started, in clock ticks since boot; `None` where there is none or
/// it has ended and waits for its parent.
#[must_use]
pub fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; the third field follows it.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

impl Process {
    /// The daemon that was last launched in a folder, dead or alive.
    #[must_use]
    pub fn read(places: &Places) -> Option<Self> {
        let bytes = fs::read(places.folder.join("process.json")).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Leaves the description in the folder, whole or not at all.
    ///
    /// # Errors
    /// When the folder is not writable.
    pub fn write(&self, places: &Places) -> io::Result<()> {
        let path = places.folder.join("process.json");
        files::replace(&path, &serde_json::to_vec(self)?, Flush::None)
    }

    /// Whether it is the process that was started, and lives.
    #[must_use]
    pub fn alive(&self) -> bool {
        started(self.pid) == Some(self.started)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub async fn ended(&self) -> io::Result<()> {
        let Some(pidfd) = self.open()? else {
            return Ok(());
        };
        readable(pidfd).await
    }

    /// Sends it a signal; one that has ended needs none.
    pub fn signal(&self, signal: Signal) {
        if let Ok(Some(pidfd)) = self.open() {
            pidfd_send_signal(&pidfd, signal).ok();
        }
    }

    /// A descriptor of this very process; `None` where it has ended.
    fn open(&self) -> io::Result<Option<std::os::fd::OwnedFd>> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let Some(pid) = pid else {
            return Ok(None);
        };
        match pidfd_open(pid, PidfdFlags::NONBLOCK) {
            // Opened first, then looked at: the number cannot be used anew while the
            // descriptor is open.
            Ok(pidfd) => Ok(self.alive().then_some(pidfd)),
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives the daemon one command and returns what it says.
    ///
    /// # Errors
    /// When it does not answer or refuses.
    pub async fn control(&self, launcher: &Path, command: &str) -> Result<String, ControlError> {
        let failed = |source| ControlError::Run {
            command: command.to_owned(),
            source,
        };
        let launch = Launch::Command {
            process: self.clone(),
        };
        let argument = serde_json::to_string(&launch).map_err(|e| failed(e.into()))?;
        let mut child = tokio::process::Command::new(launcher)
            .arg(launch::COMMAND)
            .arg(argument)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        if let Some(mut stdin) = child.stdin.take() {
            let line = format!("{command}\n");
            // Where it has ended already, its exit says why.
            stdin.write_all(line.as_bytes()).await.ok();
        }
        let output = tokio::time::timeout(ANSWER, child.wait_with_output())
            .await
            .map_err(|_| ControlError::Silent {
                command: command.to_owned(),
            })?
            .map_err(failed)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let answer = text(&output.stdout);
        // The program's exit code does not tell of a command that was not understood.
        let lower = answer.to_ascii_lowercase();
        let refused = [
            "invalid",
            "error",
            "cannot",
            "failed",
            "unknown",
            "not found",
        ]
        .iter()
        .any(|word| lower.contains(word));
        step("daemon told");
        if output.status.success() && !refused {
            return Ok(answer);
        }
        let said = [answer, text(&output.stderr)].join(" ");
        Err(ControlError::Refused {
            command: command.to_owned(),
            answer: said.trim().to_owned(),
        })
    }

    /// Sets the most that any client may use: for the servers that will be started, and
    /// for new clients of those that run. Device 0 is the daemon's only one.
    ///
    /// # Errors
    /// When the daemon does not answer or refuses.
    pub async fn limit(&self, launcher: &Path, limits: Portion) -> Result<(), ControlError> {
        let (memory, threads) = (limits.memory_mib(), limits.cores_percent);
        for command in [
            format!("set_default_device_pinned_mem_limit 0 {memory}M"),
            format!("set_default_active_thread_percentage {threads}"),
        ] {
            self.control(launcher, &command).await?;
        }
        let servers = self.control(launcher, "get_server_list").await?;
        for server in servers.lines().filter_map(|l| l.trim().parse::<u32>().ok()) {
            for command in [
                format!("set_device_pinned_mem_limit {server} 0 {memory}M"),
                format!("set_active_thread_percentage {server} {threads}"),
            ] {
                self.control(launcher, &command).await?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_number_and_its_start() {
        let mut process = Process {
            pid: std::process::id(),
            started: started(std::process::id()).unwrap(),
            root: "/".into(),
            chroot: false,
            own_mounts: false,
            program: "p".into(),
            pipe: "/p".into(),
            log: "/l".into(),
            uuid: "GPU-1".into(),
        };
        assert!(process.alive());
        process.started += 1;
        assert!(!process.alive(), "another process with the same number");
        assert!(process.open().unwrap().is_none());
    }
}
