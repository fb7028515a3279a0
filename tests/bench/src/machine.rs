//! What the figures were taken on: one line, without which they mean nothing.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// Processor, cores, memory, kernel, and the disk that holds `work`.
pub(crate) fn describe(work: &Path) -> Result<String> {
    let processors = read("/proc/cpuinfo")?;
    let field = |name: &str| {
        let line = processors.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let model = field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let cores = std::thread::available_parallelism()?;
    let memory = read("/proc/meminfo")?;
    let kibibytes: f64 = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))
        .and_then(|rest| rest.split_whitespace().next())
        .context("/proc/meminfo has no MemTotal")?
        .parse()?;
    let kernel = read("/proc/sys/kernel/osrelease")?;
    Ok(format!(
        "{model}, {cores} cores, {:.0} GiB, Linux {}, {}",
        kibibytes / f64::from(1 << 20),
        kernel.trim(),
        file_system(work)?,
    ))
}

/// The load averages of 1, 5 and 15 minutes, as text.
pub(crate) fn load() -> Result<String> {
    let load = read("/proc/loadavg")?;
    Ok(load
        .split_whitespace()
        .take(3)
        .collect::<Vec<_>>()
        .join(" "))
}

/// The type of the file system that holds `path`.
fn file_system(path: &Path) -> Result<String> {
    let path = path
        .canonicalize()
        .with_context(|| path.display().to_string())?;
    let mounts = read("/proc/self/mounts")?;
    let holding = mounts
        .lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace().skip(1);
            Some((fields.next()?, fields.next()?))
        })
        .filter(|(point, _)| path.starts_with(point))
        // Of two mounts on one point the later hides the earlier.
        .max_by_key(|(point, _)| point.len());
    Ok(holding
        .map_or("an unknown file system", |(_, kind)| kind)
        .to_owned())
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).with_context(|| path.to_owned())
}
