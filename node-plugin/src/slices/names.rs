//! Device names: the PCI address, then the partition.
//!
//! In: a GPU and a profile with a placement. Out: a DNS label, and the way back.
//! Never: NVML's index or a minor number in a name: both move when a card is
//! drained or a node reboots, and a device name must mean the same card for ever.

use gpu::{Gpu, MigProfile, PciAddress, Placement};

/// What the name of a shared device ends with.
const SHARED: &str = "-shared";

/// The device and counter set name of a whole GPU: `gpu-0000-65-00-0`.
#[must_use]
pub fn whole(pci: PciAddress) -> String {
    format!("gpu-{}", pci.dns_label())
}

/// The device name of a partition: `gpu-0000-65-00-0-mig-1g10gb-6`.
#[must_use]
pub fn partition(pci: PciAddress, profile: &str, start: u32) -> String {
    format!("{}-mig-{}-{start}", whole(pci), profile_label(profile))
}

/// The shared device of a whole device or a partition: `gpu-0000-65-00-0-shared`.
#[must_use]
pub fn shared(device: &str) -> String {
    format!("{device}{SHARED}")
}

/// Whether a device name is that of a shared device.
#[must_use]
pub fn is_shared(device: &str) -> bool {
    device.ends_with(SHARED)
}

/// A profile's name as part of a DNS label: `1g.10gb+me` is `1g10gb-me`, and
/// Blackwell's `1g.24gb-me` (without media engines) is `1g24gb-no-me`, so that the
/// two never share a name.
#[must_use]
pub fn profile_label(profile: &str) -> String {
    let (size, suffix) = match profile.find(['+', '-']) {
        Some(at) => profile.split_at(at),
        None => (profile, ""),
    };
    let suffix = match suffix.split_at_checked(1) {
        Some(("-", rest)) => format!("-no-{rest}"),
        Some((_, rest)) => format!("-{rest}"),
        None => String::new(),
    };
    let label = |text: &str| -> String {
        text.chars()
            .filter(|c| *c != '.')
            .map(|c| c.to_ascii_lowercase())
            .collect()
    };
    format!("{}{}", label(size), label(&suffix))
}

/// What a device name stands for on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named<'a> {
    /// A whole GPU.
    Whole(&'a Gpu),
    /// A partition of a GPU, whether it exists now or not.
    Partition(&'a Gpu, &'a MigProfile, Placement),
    /// A shared device, of which a claim holds a share.
    Share(Shared<'a>),
}

/// What a shared device shares out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared<'a> {
    /// A whole GPU.
    Whole(&'a Gpu),
    /// A partition, whether it exists now or not. Only administrators' partitions are
    /// published as shared devices.
    Partition(&'a Gpu, &'a MigProfile, Placement),
}

/// Finds the hardware that a device name stands for, by making each name again:
/// there is one rule for names and no second one for reading them.
#[must_use]
pub fn resolve<'a>(gpus: &'a [Gpu], device: &str) -> Option<Named<'a>> {
    // No other name ends like this: all end with a number.
    if let Some(of) = device.strip_suffix(SHARED) {
        return resolve_alone(gpus, of).map(Named::Share);
    }
    Some(match resolve_alone(gpus, device)? {
        Shared::Whole(gpu) => Named::Whole(gpu),
        Shared::Partition(gpu, profile, placement) => Named::Partition(gpu, profile, placement),
    })
}

/// The same for the name of a device that one claim has alone.
fn resolve_alone<'a>(gpus: &'a [Gpu], device: &str) -> Option<Shared<'a>> {
    for gpu in gpus {
        let name = whole(gpu.pci);
        if device == name {
            return Some(Shared::Whole(gpu));
        }
        if !device.starts_with(&name) {
            continue;
        }
        for profile in &gpu.profiles {
            for placement in &profile.placements {
                if device == partition(gpu.pci, &profile.name, placement.start) {
                    return Some(Shared::Partition(gpu, profile, *placement));
                }
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_labels_are_distinct_dns_label_parts() {
        assert_eq!(profile_label("1g.10gb"), "1g10gb");
        assert_eq!(profile_label("1g.10gb+me"), "1g10gb-me");
        assert_eq!(profile_label("1g.24gb+me.all"), "1g24gb-meall");
        assert_eq!(profile_label("1g.24gb-me"), "1g24gb-no-me");
    }

    #[test]
    fn a_name_does_not_depend_on_index_or_minor() -> Result<(), gpu::PciAddressError> {
        assert_eq!(whole("0000:65:00.0".parse()?), "gpu-0000-65-00-0");
        assert_eq!(
            partition("00000000:65:00.0".parse()?, "1g.10gb+me", 3),
            "gpu-0000-65-00-0-mig-1g10gb-me-3"
        );
        Ok(())
    }
}
