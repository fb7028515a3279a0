//! How a GPU is connected and how fast its memory is.
//!
//! In: a GPU's handle. Out: NVLinks, fabric, memory bandwidth, PCIe link; what the card or
//! its driver does not tell is empty. Never: a group of GPUs; `slices` makes cliques of it.

use nvml_wrapper::Nvml;
use serde::{Deserialize, Serialize};

use crate::PciAddress;
use crate::error::NvmlCode;
use crate::raw::{self, DeviceHandle, Failed};

/// An active NVLink of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvLink {
    /// The link's number on this GPU.
    pub link: u32,
    /// The NVLink generation: 3 on Ampere, 4 on Hopper, 5 on Blackwell.
    pub version: Option<u32>,
    /// What is at the other end.
    pub remote: NvLinkRemote,
    /// The link's speed in one direction, in MB/s; 0 where the driver does not tell.
    pub mbps: u64,
}

/// What is at the other end of an NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NvLinkRemote {
    /// A GPU of this node.
    Gpu(PciAddress),
    /// An `NVSwitch`.
    Switch,
    /// A CPU, or something that the driver does not name (as in some virtual machines).
    Other,
}

/// A PCIe link at its best: the most that card and slot can do together. What it does now is
/// of no use, for idle cards lower it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pcie {
    /// The generation.
    pub generation: u32,
    /// The number of lanes.
    pub width: u32,
}

/// How a GPU is connected, all parts optional.
#[derive(Debug, Clone, Default)]
pub(crate) struct Topology {
    pub(crate) nvlinks: Vec<NvLink>,
    pub(crate) fabric_clique: Option<(String, u32)>,
    pub(crate) memory_bandwidth_mbps: Option<u64>,
    pub(crate) pcie: Option<Pcie>,
}

/// More links than any GPU has (`NVML_NVLINK_MAX_LINKS` is 36 in the newest `nvml.h`).
const MOST_LINKS: u32 = 36;

/// Reads it all. Only a lost GPU is an error: nothing here is needed to use a GPU.
pub(crate) fn read(nvml: &Nvml, device: DeviceHandle) -> raw::Result<Topology> {
    Ok(Topology {
        nvlinks: nvlinks(nvml, device)?,
        fabric_clique: told(raw::fabric_clique(nvml, device))?.flatten(),
        memory_bandwidth_mbps: memory_bandwidth(nvml, device)?,
        pcie: told(raw::pcie_link(nvml, device))?
            .map(|(generation, width)| Pcie { generation, width }),
    })
}

/// A fact that cannot be had is none, whatever the reason, unless the GPU is lost.
fn told<T>(fact: raw::Result<T>) -> raw::Result<Option<T>> {
    match fact {
        Ok(value) => Ok(Some(value)),
        Err(
            failed @ Failed {
                code: NvmlCode::GpuLost,
                ..
            },
        ) => Err(failed),
        Err(_) => Ok(None),
    }
}

fn nvlinks(nvml: &Nvml, device: DeviceHandle) -> raw::Result<Vec<NvLink>> {
    let mut active = Vec::new();
    for link in 0..MOST_LINKS {
        match raw::nvlink_is_active(nvml, device, link) {
            Ok(true) => active.push(link),
            Ok(false) => {}
            Err(
                failed @ Failed {
                    code: NvmlCode::GpuLost,
                    ..
                },
            ) => return Err(failed),
            // There is no such link, and none after it.
            Err(Failed {
                code: NvmlCode::InvalidArgument | NvmlCode::MissingSymbol,
                ..
            }) => break,
            Err(_) => {}
        }
    }
    if active.is_empty() {
        return Ok(Vec::new());
    }
    let speeds = told(raw::nvlink_speeds_mbps(nvml, device, &active))?.unwrap_or_default();
    let mut links = Vec::new();
    for (position, link) in active.into_iter().enumerate() {
        let version = told(raw::nvlink_version(nvml, device, link))?.and_then(generation);
        links.push(NvLink {
            link,
            version,
            remote: told(raw::nvlink_remote(nvml, device, link))?.unwrap_or(NvLinkRemote::Other),
            mbps: speeds.get(position).copied().flatten().unwrap_or(0),
        });
    }
    Ok(links)
}

/// The NVLink generation of `nvmlNvlinkVersion_t`, which counts half generations too.
fn generation(version: u32) -> Option<u32> {
    Some(match version {
        1 => 1,
        2 | 3 => 2,
        4 | 5 => 3,
        6 => 4,
        7 => 5,
        8 => 6,
        _ => return None,
    })
}

/// Bits of the bus times its clock, twice: every memory in use transfers on both edges, and
/// NVML's clock is the bus's. 5120 bits at 2619 MHz are the 3.35 TB/s of an H100 SXM.
fn memory_bandwidth(nvml: &Nvml, device: DeviceHandle) -> raw::Result<Option<u64>> {
    let bits = told(raw::memory_bus_bits(nvml, device))?;
    let clock = told(raw::memory_clock_mhz(nvml, device))?;
    Ok(bits
        .zip(clock)
        .map(|(bits, mhz)| u64::from(bits) / 8 * u64::from(mhz) * 2)
        .filter(|mbps| *mbps > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_are_those_of_nvml_h() {
        let generations: Vec<_> = (0..10).map(generation).collect();
        let want = [
            None,
            Some(1),
            Some(2),
            Some(2),
            Some(3),
            Some(3),
            Some(4),
            Some(5),
            Some(6),
            None,
        ];
        assert_eq!(generations, want);
    }
}
