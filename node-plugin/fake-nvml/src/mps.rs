//! A stand-in for `nvidia-cuda-mps-control`, the daemon of NVIDIA's Multi-Process Service.
//!
//! In: what the real one takes from its environment (`CUDA_MPS_PIPE_DIRECTORY`,
//! `CUDA_MPS_LOG_DIRECTORY`, `CUDA_VISIBLE_DEVICES`), the driver root that the executable
//! lies in, and control commands on standard input. Out: a socket in the pipe directory that
//! answers them, and in the log directory each command with its answer. Never: a limit larger
//! than the device, a daemon where the real one could not start, or any work on a GPU.
//!
//! For tests there are two more things: while a file `mps-hold/<UUID>` is in the driver root,
//! the daemon of that device waits before it opens its socket; and the command `attach
//! <MiB>M <percent>` answers what a client that asks for so much would get.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use nvml_wrapper_sys::bindings as sys;

use crate::session::Code;
use crate::state::Store;
use crate::topology::Node;

/// Runs the program with these arguments.
#[must_use]
pub fn main(arguments: &[String]) -> ExitCode {
    let result = match arguments {
        [] => command(&mut io::stdin(), &mut io::stdout()),
        [first, rest @ ..] if first == "-f" && rest.iter().all(|a| a == "-multiuser-server") => {
            Daemon::start().and_then(Daemon::serve)
        }
        _ => Err(format!("unsupported arguments: {}", arguments.join(" "))),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}

fn variable(name: &str) -> Result<String, String> {
    std::env::var(name).map_err(|_| format!("{name} is not set"))
}

fn folder(name: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(variable(name)?);
    let meta = fs::metadata(&path).map_err(|e| format!("{name}={}: {e}", path.display()))?;
    meta.is_dir()
        .then_some(path)
        .ok_or_else(|| format!("{name} is not a folder"))
}

/// Hands the commands on standard input to the daemon of the pipe directory.
fn command(input: &mut impl Read, output: &mut impl Write) -> Result<(), String> {
    let socket = folder("CUDA_MPS_PIPE_DIRECTORY")?.join("control");
    let mut daemon = UnixStream::connect(socket)
        .map_err(|error| format!("Cannot find MPS control daemon process: {error}"))?;
    let mut talk = || {
        io::copy(input, &mut daemon)?;
        daemon.shutdown(std::net::Shutdown::Write)?;
        io::copy(&mut daemon, output)
    };
    talk().map(drop).map_err(|error| error.to_string())
}

/// What a client may use at most.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// In MiB; none is no limit.
    memory: Option<u64>,
    /// In percent.
    threads: f64,
}

struct Daemon {
    listener: UnixListener,
    pipe: PathBuf,
    log: PathBuf,
    /// The device's memory in MiB.
    memory: u64,
    defaults: Limits,
    /// By process id.
    servers: BTreeMap<u32, Limits>,
}

impl Daemon {
    fn start() -> Result<Self, String> {
        let pipe = folder("CUDA_MPS_PIPE_DIRECTORY")?;
        let log = folder("CUDA_MPS_LOG_DIRECTORY")?;
        let device = variable("CUDA_VISIBLE_DEVICES")?;
        let root = driver_root()?;
        let memory = device_memory(&root, &device)?;
        while root.join("mps-hold").join(&device).exists() {
            std::thread::sleep(Duration::from_millis(20));
        }
        let socket = pipe.join("control");
        if UnixStream::connect(&socket).is_ok() {
            return Err("An instance of this daemon is already running".to_owned());
        }
        fs::remove_file(&socket).ok();
        let failed = |error: io::Error| format!("{}: {error}", socket.display());
        let listener = UnixListener::bind(&socket).map_err(failed)?;
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).map_err(failed)?;
        let pid = format!("{}\n", std::process::id());
        fs::write(pipe.join("nvidia-cuda-mps-control.pid"), pid).map_err(failed)?;
        Ok(Self {
            listener,
            pipe,
            log,
            memory,
            defaults: Limits {
                memory: None,
                threads: 100.0,
            },
            servers: BTreeMap::new(),
        })
    }

    fn serve(mut self) -> Result<(), String> {
        loop {
            let (mut stream, _) = self.listener.accept().map_err(|e| e.to_string())?;
            let Ok(reading) = stream.try_clone() else {
                continue;
            };
            for line in BufReader::new(reading).lines().map_while(Result::ok) {
                let command = line.trim();
                let answer = self.answer(command).unwrap_or_else(|error| error);
                self.note(command, &answer);
                if !answer.is_empty() {
                    writeln!(stream, "{answer}").ok();
                }
                if command == "quit" {
                    fs::remove_file(self.pipe.join("control")).ok();
                    fs::remove_file(self.pipe.join("nvidia-cuda-mps-control.pid")).ok();
                    return Ok(());
                }
            }
        }
    }

    fn note(&self, command: &str, answer: &str) {
        let file = fs::File::options()
            .create(true)
            .append(true)
            .open(self.log.join("control.log"));
        if let Ok(mut file) = file {
            writeln!(file, "{command} -> {}", answer.replace('\n', " ")).ok();
        }
    }

    fn answer(&mut self, command: &str) -> Result<String, String> {
        let words: Vec<&str> = command.split_whitespace().collect();
        match words.as_slice() {
            ["quit"] => Ok(String::new()),
            ["get_server_list"] => {
                let servers: Vec<String> = self.servers.keys().map(u32::to_string).collect();
                Ok(servers.join("\n"))
            }
            ["start_server", "-uid", uid] => {
                let uid: u32 = uid.parse().map_err(|_| "Invalid user id".to_owned())?;
                self.servers.insert(100_000 + uid, self.defaults);
                Ok(String::new())
            }
            ["set_default_device_pinned_mem_limit", "0", value] => {
                self.defaults.memory = Some(self.memory_limit(value)?);
                Ok(String::new())
            }
            ["get_default_device_pinned_mem_limit", "0"] => Ok(shown(self.defaults.memory)),
            ["set_default_active_thread_percentage", value] => {
                self.defaults.threads = percentage(value)?;
                Ok(format!("{:.1}", self.defaults.threads))
            }
            ["get_default_active_thread_percentage"] => Ok(format!("{:.1}", self.defaults.threads)),
            ["set_device_pinned_mem_limit", server, "0", value] => {
                let limit = self.memory_limit(value)?;
                self.server(server)?.memory = Some(limit);
                Ok(String::new())
            }
            ["get_device_pinned_mem_limit", server, "0"] => {
                let memory = self.server(server)?.memory;
                Ok(shown(memory))
            }
            ["set_active_thread_percentage", server, value] => {
                let threads = percentage(value)?;
                self.server(server)?.threads = threads;
                Ok(format!("{threads:.1}"))
            }
            ["get_active_thread_percentage", server] => {
                let threads = self.server(server)?.threads;
                Ok(format!("{threads:.1}"))
            }
            ["attach", memory, threads] => {
                let memory = self.memory_limit(memory)?;
                let threads = percentage(threads)?;
                let server = self.servers.values().next().copied();
                let most = server.unwrap_or(self.defaults);
                let memory = memory.min(most.memory.unwrap_or(self.memory));
                Ok(format!("{memory}M {:.1}", threads.min(most.threads)))
            }
            _ => Err(format!("Invalid command: {command}")),
        }
    }

    fn server(&mut self, pid: &str) -> Result<&mut Limits, String> {
        let known = pid.parse().ok().and_then(|pid| self.servers.get_mut(&pid));
        known.ok_or_else(|| format!("Invalid server PID {pid}"))
    }

    /// `<n>M` or `<n>G`, in MiB; more than the device has is refused.
    fn memory_limit(&self, value: &str) -> Result<u64, String> {
        let invalid = || format!("Invalid memory limit {value}");
        let (number, unit) = value
            .split_at_checked(value.len().saturating_sub(1))
            .ok_or_else(invalid)?;
        let number: u64 = number.parse().map_err(|_| invalid())?;
        let limit = match unit {
            "M" => number,
            "G" => number * 1024,
            _ => return Err(invalid()),
        };
        if limit == 0 || limit > self.memory {
            return Err(format!("{}: the device has {}M", invalid(), self.memory));
        }
        Ok(limit)
    }
}

fn percentage(value: &str) -> Result<f64, String> {
    let number = value.parse().ok().filter(|n| *n > 0.0 && *n <= 100.0);
    number.ok_or_else(|| format!("Invalid percentage {value}"))
}

fn shown(memory: Option<u64>) -> String {
    memory.map_or_else(|| "No limit".to_owned(), |mib| format!("{mib}M"))
}

/// The driver root that this executable lies in: `<root>/usr/bin/…`.
fn driver_root() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let root = program.ancestors().nth(3).map(Path::to_owned);
    root.ok_or_else(|| format!("{} is in no driver root", program.display()))
}

/// The memory in MiB of the GPU or MIG instance that a daemon would serve, where it could.
fn device_memory(root: &Path, device: &str) -> Result<u64, String> {
    if device.contains(',') {
        return Err(format!(
            "CUDA_VISIBLE_DEVICES={device}: one device for each daemon"
        ));
    }
    let node = Node::read(&root.join("topology.yaml")).map_err(|error| error.to_string())?;
    let state = Store::file(root.join("state.json"))
        .read(&node)
        .map_err(|Code(code)| format!("the state cannot be read: {code}"))?;
    for gpu in &node.gpus {
        let Some(now) = state.gpus.get(&gpu.uuid) else {
            continue;
        };
        if gpu.uuid == device {
            let exclusive = sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS;
            if now.compute_mode != exclusive {
                return Err(format!(
                    "the compute mode of {device} is not EXCLUSIVE_PROCESS"
                ));
            }
            if now.mig {
                return Err(format!("MIG is on on {device}"));
            }
            return Ok(gpu.model.memory_mib);
        }
        for instance in now.instances.values() {
            let mut parts = instance.compute_instances.values();
            if parts.any(|part| part.uuid == device) {
                let mig = gpu.model.mig.as_ref();
                let profile = mig.and_then(|mig| mig.profile(instance.profile));
                let profile = profile.ok_or("the instance has no profile")?;
                return Ok(profile.memory_mib);
            }
        }
    }
    Err(format!("CUDA_VISIBLE_DEVICES={device}: no such device"))
}
