//! The stand-in for `nvidia-cuda-mps-control` in a fake driver root; see [`fake_nvml::mps`].

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    fake_nvml::mps::main(&arguments)
}
