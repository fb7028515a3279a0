//! `nvml-compare`: what a real NVML answers, and where the fake one differs.
//!
//! In: an NVML by path, or a topology for the fake one. Out: every call that is used here,
//! with its code and its value, as JSON; and the differences between two such records.
//! Never: a change of a GPU, unless it is asked for.

#![allow(unsafe_code)]

mod compare;
mod instances;
mod walk;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use fake_nvml::node::{self, DeviceNodes};

const HELP: &str = "\
usage: nvml-compare record LIBRARY [--change]
       nvml-compare compare RECORD TOPOLOGY|RECORD

record   asks the NVML in the file LIBRARY (such as /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1)
         everything that the node plugin asks, and prints calls, codes and values as JSON.
         --change also sets modes and creates and destroys MIG instances on the first GPU; it
         takes root and a GPU that nobody uses, and leaves the GPU as it was.
compare  asks the fake NVML of TOPOLOGY the same, and prints where it differs from RECORD. What
         differs between any two cards (identity, readings) does not count. Fails when
         anything does.";

fn main() -> ExitCode {
    match run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(differences) if differences.is_empty() => ExitCode::SUCCESS,
        Ok(differences) => {
            for difference in &differences {
                println!("{difference}");
            }
            println!("{} differences", differences.len());
            ExitCode::FAILURE
        }
        Err(reason) => {
            eprintln!("nvml-compare: {reason}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &[String]) -> Result<Vec<String>, String> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] | ["-h" | "--help"] => println!("{HELP}"),
        ["record", library] => print(&walk::record(Path::new(library), false)?)?,
        ["record", library, "--change"] => print(&walk::record(Path::new(library), true)?)?,
        ["compare", real, fake] => {
            let real = read(real)?;
            let fake = if Path::new(fake).extension().is_some_and(|end| end == "json") {
                read(fake)?
            } else {
                of_topology(Path::new(fake), real.changed)?
            };
            return Ok(compare::differences(&real, &fake));
        }
        _ => return Err(HELP.to_owned()),
    }
    Ok(Vec::new())
}

fn print(record: &walk::Record) -> Result<(), String> {
    let text = serde_json::to_string_pretty(record).map_err(|error| error.to_string())?;
    println!("{text}");
    Ok(())
}

fn read(path: &str) -> Result<walk::Record, String> {
    let text = std::fs::read(path).map_err(|error| format!("{path} cannot be read: {error}"))?;
    serde_json::from_slice(&text).map_err(|error| format!("{path} is no record: {error}"))
}

/// The record of the fake NVML of a topology, in a driver root of its own.
fn of_topology(topology: &Path, change: bool) -> Result<walk::Record, String> {
    let root = Scratch::new()?;
    let library = node::library_beside_executable()
        .ok_or("the fake library is not built; run cargo build -p fake-nvml")?;
    node::build(topology, &root.0, &library, None, DeviceNodes::Files)
        .map_err(|error| error.to_string())?;
    walk::record(&root.0.join("lib/libnvidia-ml.so.1"), change)
}

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self, String> {
        let folder = std::env::temp_dir().join(format!("nvml-compare-{}", std::process::id()));
        std::fs::create_dir(&folder)
            .map_err(|error| format!("{} cannot be made: {error}", folder.display()))?;
        Ok(Self(folder))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
