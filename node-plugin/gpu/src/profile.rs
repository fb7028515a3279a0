//! MIG profiles: what NVML says of each, made whole.
//!
//! In: NVML's profile infos and placements. Out: [`MigProfile`]s. Never: a table of
//! cards; names and numbers are NVML's, or follow from them.

use nvml_wrapper::Nvml;

use crate::error::NvmlCode;
use crate::raw::{self, DeviceHandle, Failed, ProfileInfo};
use crate::{MigProfile, Placement};

/// Values of the profile enum that are asked for. `nvml.h` ends at 18 now; newer
/// drivers add values, and NVML refuses those it does not know.
const ENUM_VALUES: std::ops::Range<u32> = 0..32;

/// Values of the profile enum whose name ends in `+me`, where NVML tells no name.
const WITH_MEDIA: [u32; 2] = [7, 8];

/// The profiles that a GPU offers, with the enum value each was found under.
pub(crate) fn infos(nvml: &Nvml, device: DeviceHandle) -> raw::Result<Vec<(u32, ProfileInfo)>> {
    let mut infos: Vec<(u32, ProfileInfo)> = Vec::new();
    for value in ENUM_VALUES {
        match raw::profile_info(nvml, device, value) {
            Ok(info) if infos.iter().all(|(_, other)| other.id != info.id) => {
                infos.push((value, info));
            }
            Ok(_) => {}
            Err(Failed {
                code: NvmlCode::NotSupported | NvmlCode::InvalidArgument,
                ..
            }) => {}
            Err(failed) => return Err(failed),
        }
    }
    Ok(infos)
}

/// The slices of the profile with this id.
pub(crate) fn slices(nvml: &Nvml, device: DeviceHandle, id: u32) -> raw::Result<Option<u32>> {
    for value in ENUM_VALUES {
        match raw::profile_info(nvml, device, value) {
            Ok(info) if info.id == id => return Ok(Some(info.slices)),
            Ok(_) => {}
            Err(Failed {
                code: NvmlCode::NotSupported | NvmlCode::InvalidArgument,
                ..
            }) => {}
            Err(failed) => return Err(failed),
        }
    }
    Ok(None)
}

/// The compute instance profile that covers a GPU instance of so many slices; its enum
/// value in `nvml.h` is also its id on every card seen so far.
pub(crate) fn spanning_compute_profile(slices: u32) -> Option<u32> {
    Some(match slices {
        1 => 0,
        2 => 1,
        3 => 2,
        4 => 3,
        6 => 6,
        7 => 4,
        8 => 5,
        _ => return None,
    })
}

/// A profile with its placements, or `None` where it cannot be used: the GPU has no
/// place for it now, or no compute instance would cover it.
pub(crate) fn profile(
    nvml: &Nvml,
    device: DeviceHandle,
    gpu_memory_bytes: u64,
    (value, info): &(u32, ProfileInfo),
) -> raw::Result<Option<MigProfile>> {
    let Some(compute_instance_profile_id) = spanning_compute_profile(info.slices) else {
        return Ok(None);
    };
    let mut placements = match raw::placements(nvml, device, info.id) {
        Ok(placements) => placements,
        // nvml.h lets a driver refuse this while MIG is off.
        Err(Failed {
            code: NvmlCode::NotSupported,
            ..
        }) => Vec::new(),
        Err(failed) => return Err(failed),
    };
    placements.sort_unstable();
    let Some(Placement { size, .. }) = placements.first().copied() else {
        return Ok(None);
    };
    let memory_bytes = info.memory_mib << 20;
    let told = info.name.strip_prefix("MIG ").unwrap_or(&info.name);
    let name = if told.is_empty() {
        name(
            info.slices,
            memory_bytes,
            gpu_memory_bytes,
            WITH_MEDIA.contains(value),
        )
    } else {
        told.to_owned()
    };
    Ok(Some(MigProfile {
        id: info.id,
        name,
        memory_bytes,
        compute_slices: info.slices,
        memory_slices: size,
        multiprocessors: info.multiprocessors,
        copy_engines: info.copy_engines,
        decoders: info.decoders,
        encoders: info.encoders,
        jpeg_engines: info.jpeg_engines,
        ofa_engines: info.ofa_engines,
        max_instances: info.max_instances,
        compute_instance_profile_id,
        placements,
    }))
}

/// The name that nvidia-smi prints: slices, then the profile's eighths of the card's
/// memory in GiB, the card's rounded up and the result rounded half up.
pub(crate) fn name(slices: u32, memory_bytes: u64, gpu_memory_bytes: u64, media: bool) -> String {
    let gpu_memory_bytes = gpu_memory_bytes.max(1);
    let eighths = (memory_bytes * 8).div_ceil(gpu_memory_bytes);
    let gpu_gib = gpu_memory_bytes.div_ceil(1 << 30);
    let gib = (eighths * gpu_gib + 4) / 8;
    let media = if media { "+me" } else { "" };
    format!("{slices}g.{gib}gb{media}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn computed_names_are_those_that_nvidia_smi_prints() {
        // Card MiB, slices, profile MiB, name (real `nvidia-smi mig -lgip` outputs).
        for (card, slices, memory, want) in [
            (81559, 1, 9984, "1g.10gb"),
            (81559, 1, 20096, "1g.20gb"),
            (81559, 3, 40448, "3g.40gb"),
            (81559, 7, 81152, "7g.80gb"),
            (143771, 1, 16384, "1g.18gb"),
            (143771, 2, 33280, "2g.35gb"),
            (24576, 1, 5836, "1g.6gb"),
            (24576, 4, 24064, "4g.24gb"),
        ] {
            assert_eq!(name(slices, memory * MIB, card * MIB, false), want);
        }
        assert_eq!(name(1, 9984 * MIB, 81559 * MIB, true), "1g.10gb+me");
    }

    #[test]
    fn a_slice_count_without_a_compute_profile_spans_nothing() {
        assert_eq!(spanning_compute_profile(5), None);
        assert_eq!(spanning_compute_profile(7), Some(4));
    }
}
