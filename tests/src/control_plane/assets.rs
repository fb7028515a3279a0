//! Where the control plane's binaries are.
//!
//! In: `KUBE_ASSETS`, or else `hack/cluster assets`, which builds them once and prints their folder.
//! Out: the folder, asked for once a process.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow, ensure};

/// Binaries that the harness needs.
const NEEDED: [&str; 3] = ["etcd", "kube-apiserver", "kubectl"];
/// Says how to get what is missing.
const REMEDY: &str = "run `hack/cluster assets` and read its output, or set KUBE_ASSETS to a folder that holds etcd, kube-apiserver and kubectl";

/// The folder that holds etcd, kube-apiserver and kubectl.
///
/// # Errors
/// If there is none: the tests that need it fail.
pub fn assets() -> Result<&'static Path> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    FOLDER
        .get_or_init(|| {
            find().map_err(|error| format!("no Kubernetes binaries: {error:#}: {REMEDY}"))
        })
        .as_deref()
        .map_err(|message| anyhow!("{message}"))
}

/// The path of one of the binaries.
///
/// # Errors
/// If it is not among them.
pub fn asset(name: &str) -> Result<PathBuf> {
    let path = assets()?.join(name);
    ensure!(path.is_file(), "{} is missing: {REMEDY}", path.display());
    Ok(path)
}

fn find() -> Result<PathBuf> {
    let folder = match std::env::var_os("KUBE_ASSETS") {
        Some(folder) => PathBuf::from(folder),
        None => build()?,
    };
    for name in NEEDED {
        let path = folder.join(name);
        ensure!(path.is_file(), "{} is missing", path.display());
    }
    Ok(folder)
}

fn build() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("the crate lies in no workspace")?;
    let output = Command::new(root.join("hack/cluster"))
        .arg("assets")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("running hack/cluster assets")?;
    ensure!(
        output.status.success(),
        "hack/cluster assets ended with {}",
        output.status
    );
    let printed =
        String::from_utf8(output.stdout).context("hack/cluster assets printed no text")?;
    let folder = printed.lines().last().map(str::trim).unwrap_or_default();
    ensure!(!folder.is_empty(), "hack/cluster assets printed no folder");
    Ok(PathBuf::from(folder))
}
