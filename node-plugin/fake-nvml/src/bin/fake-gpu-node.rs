//! `fake-gpu-node TOPOLOGY OUT_DIR [--library FILE] [--name NODE]`: makes the driver
//! root of a fake-GPU node, with the tool `bin/fake-nvml` in it.

use std::path::PathBuf;
use std::process::ExitCode;

use fake_nvml::node::{self, DeviceNodes};

const USAGE: &str = "usage: fake-gpu-node TOPOLOGY OUT_DIR [--library FILE] [--name NODE]";

fn main() -> ExitCode {
    match run(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("fake-gpu-node: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut arguments: impl Iterator<Item = String>) -> Result<(), String> {
    let mut places = Vec::new();
    let mut library = None;
    let mut name = None;
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--library" => library = Some(PathBuf::from(arguments.next().ok_or(USAGE)?)),
            "--name" => name = Some(arguments.next().ok_or(USAGE)?),
            option if option.starts_with('-') => return Err(USAGE.to_owned()),
            _ => places.push(PathBuf::from(argument)),
        }
    }
    let [topology, out] = places.as_slice() else {
        return Err(USAGE.to_owned());
    };
    let library = library
        .or_else(node::library_beside_executable)
        .ok_or("the library is not built; run cargo build -p fake-nvml, or name it by --library")?;
    node::build(
        topology,
        out,
        &library,
        name.as_deref(),
        DeviceNodes::Character,
    )
    .map_err(|error| error.to_string())?;
    // Built by the same command; a library from elsewhere may come without them.
    let tool = std::env::current_exe()
        .ok()
        .map(|program| program.with_file_name("fake-nvml"))
        .filter(|tool| tool.exists());
    if let Some(tool) = tool {
        node::place_tool(&tool, out).map_err(|error| error.to_string())?;
    }
    match node::mps_control_beside_executable() {
        Some(control) => node::place_mps_control(&control, out).map_err(|error| error.to_string()),
        None => Ok(()),
    }
}
