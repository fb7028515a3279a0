//! A child process that never outlives the tests.
//!
//! In: a program and its arguments. Out: the process, with a folder of its own for data and log. A
//! test binary may be killed or leave its statics undropped, so a small shell stands between: it waits
//! for the end of its standard input, which the kernel brings about however this process ends, then
//! kills the program and removes the folder.

use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

/// `$1` is the program's folder, the rest its command line.
const WATCHDOG: &str = r#"
folder=$1; shift
"$@" >"$folder/log" 2>&1 </dev/null &
program=$!
echo "$program" >"$folder/pid"
cat >/dev/null
kill -KILL "$program" 2>/dev/null
wait "$program" 2>/dev/null
rm -rf "$folder"
"#;
/// Lines of a log that an error shows.
const TAIL: usize = 25;

/// A program that runs until this is dropped or this process ends.
#[derive(Debug)]
pub(crate) struct Supervised {
    name: &'static str,
    watchdog: Child,
    folder: PathBuf,
}

impl Supervised {
    /// Starts `program` with the arguments that `arguments` gives for the program's own folder.
    pub(crate) fn spawn(
        name: &'static str,
        program: &Path,
        arguments: impl FnOnce(&Path) -> Result<Vec<String>>,
    ) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix(&format!("ai-inference-{name}-"))
            .tempdir()
            .with_context(|| format!("making a folder for {name}"))?
            // From here on the watchdog removes it.
            .keep();
        let arguments = arguments(&folder)?;
        let watchdog = Command::new("/bin/sh")
            .args(["-c", WATCHDOG, "watchdog"])
            .arg(&folder)
            .arg(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A Ctrl-C is for the tests; the shell must live to clean up after them.
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {name} from {}", program.display()))?;
        Ok(Self {
            name,
            watchdog,
            folder,
        })
    }

    /// The program's own folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// An error with the end of the log if the program has ended.
    pub(crate) fn still_runs(&self) -> Result<()> {
        // Not written yet: the shell is about to start it.
        let Ok(pid) = std::fs::read_to_string(self.folder.join("pid")) else {
            return Ok(());
        };
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        // The state follows the name, which is in parentheses and may hold any character.
        let state = stat
            .rsplit(')')
            .next()
            .and_then(|rest| rest.trim().chars().next());
        match state {
            None | Some('Z' | 'X') => bail!(
                "{} ended; its log ends with\n{}",
                self.name,
                self.log_tail()
            ),
            Some(_) => Ok(()),
        }
    }

    /// The last lines that the program wrote.
    pub(crate) fn log_tail(&self) -> String {
        let log = std::fs::read(self.folder.join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(TAIL)..].join("\n")
    }
}

impl Supervised {
    /// Ends the program; its folder is gone then, and its ports are free.
    pub(crate) fn end(&mut self) {
        // The end of its input is the watchdog's sign.
        drop(self.watchdog.stdin.take());
        let _ = self.watchdog.wait();
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        self.end();
    }
}

/// A TCP port of the loopback interface that nobody listens on now.
pub(crate) fn free_port() -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("looking for a free port")?;
    Ok(listener.local_addr()?.port())
}
