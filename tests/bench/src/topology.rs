//! Topologies for the fake NVML that no real node has.
//!
//! In: the 8×H100 topology of the tests. Out: the same card more often, without MIG, so that many claims
//! can hold whole devices at once: the node plugin refuses a device twice.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// The topology that figures are taken with where a real node suffices.
pub(crate) fn h100() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/topologies/h100-80gb-8.yaml")
}

/// Writes a topology of `count` cards to `path`.
pub(crate) fn write_many(count: u32, path: &Path) -> Result<()> {
    let source = h100();
    let text = std::fs::read_to_string(&source).with_context(|| source.display().to_string())?;
    let many = repeat(&text, count).with_context(|| source.display().to_string())?;
    std::fs::write(path, many).with_context(|| path.display().to_string())
}

fn repeat(topology: &str, count: u32) -> Result<String> {
    let mut topology: Value = serde_saphyr::from_str(topology)?;
    let (name, model) = topology["models"]
        .as_object_mut()
        .and_then(|models| models.iter_mut().next())
        .context("there is no model")?;
    let name = name.clone();
    model
        .as_object_mut()
        .context("a model is no object")?
        .remove("mig");
    let devices: Vec<Value> = (0..count)
        .map(|index| {
            let (domain, bus) = (index / 256, index % 256);
            json!({
                "pci": format!("{domain:04x}:{bus:02x}:00.0"),
                "root": format!("pci{domain:04x}:{bus:02x}"),
                "numa": index % 2,
            })
        })
        .collect();
    topology["gpus"] = json!([{ "model": name, "devices": devices }]);
    // JSON is YAML.
    Ok(serde_json::to_string_pretty(&topology)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_cards_have_an_address_each_and_no_mig() {
        let text = std::fs::read_to_string(h100()).unwrap();
        let many: Value = serde_json::from_str(&repeat(&text, 300).unwrap()).unwrap();
        let devices = many["gpus"][0]["devices"].as_array().unwrap();
        let addresses: std::collections::BTreeSet<_> = devices
            .iter()
            .map(|device| device["pci"].as_str().unwrap())
            .collect();
        assert_eq!(addresses.len(), 300);
        assert!(addresses.contains("0001:2b:00.0"));
        assert!(many["models"]["h100-80gb"].get("mig").is_none());
        assert_eq!(many["driver"]["version"], "580.82.07");
    }
}
