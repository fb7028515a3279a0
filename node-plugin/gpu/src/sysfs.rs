//! What the kernel knows about a PCI device.
//!
//! In: the root of a sysfs and a PCI address. Out: NUMA node and PCIe root, where the
//! kernel tells them (some virtual machines do not). Never: an error; both are optional.

use std::path::{Component, Path, PathBuf};

use crate::PciAddress;

fn device(sys: &Path, pci: PciAddress) -> PathBuf {
    sys.join("bus/pci/devices").join(pci.to_string())
}

/// The NUMA node; the kernel's -1 means none.
pub(crate) fn numa_node(sys: &Path, pci: PciAddress) -> Option<u32> {
    let text = std::fs::read_to_string(device(sys, pci).join("numa_node")).ok()?;
    text.trim().parse().ok()
}

/// The PCIe root complex: the device's link leads to `…/devices/pci0000:64/…`.
pub(crate) fn pcie_root(sys: &Path, pci: PciAddress) -> Option<String> {
    let target = std::fs::read_link(device(sys, pci)).ok()?;
    target
        .components()
        .find_map(|component| match component {
            Component::Normal(name) => name
                .to_str()
                .filter(|name| name.starts_with("pci") && name.contains(':')),
            _ => None,
        })
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_sysfs_entries_has_neither_numa_node_nor_root() {
        let sys = tempfile::tempdir().unwrap();
        let pci = "0000:65:00.0".parse().unwrap();
        assert_eq!(numa_node(sys.path(), pci), None);
        assert_eq!(pcie_root(sys.path(), pci), None);
    }

    #[test]
    fn minus_one_is_no_numa_node() {
        let sys = tempfile::tempdir().unwrap();
        let pci: PciAddress = "0000:65:00.0".parse().unwrap();
        std::fs::create_dir_all(device(sys.path(), pci)).unwrap();
        std::fs::write(device(sys.path(), pci).join("numa_node"), "-1\n").unwrap();
        assert_eq!(numa_node(sys.path(), pci), None);
    }
}
