//! What the scheduler does with slices, as far as order matters: the first device that fits.
//!
//! In: published slices, and claims one after the other. Out: the device of each. The rules are
//! those of the structured allocator: slices by name, devices by position; counters are charged
//! once for each device in use; a shared device is given as long as its capacity lasts.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::Device;
use node_plugin::slices::SliceContent;

/// A pool and what is in use of it.
#[derive(Debug, Clone)]
pub(crate) struct FirstFit {
    devices: Vec<Device>,
    left: BTreeMap<(String, String), i64>,
    used: BTreeSet<String>,
    /// What is left of the capacities of shared devices that are in use, in mebibytes.
    memory: BTreeMap<String, u64>,
}

impl FirstFit {
    pub(crate) fn new(content: &[SliceContent]) -> Self {
        let mut this = Self {
            devices: Vec::new(),
            left: BTreeMap::new(),
            used: BTreeSet::new(),
            memory: BTreeMap::new(),
        };
        for slice in content {
            match slice {
                SliceContent::Devices(devices) => this.devices.extend(devices.iter().cloned()),
                SliceContent::Counters(sets) => {
                    for set in sets {
                        for (name, counter) in &set.counters {
                            let key = (set.name.clone(), name.clone());
                            this.left.insert(key, counter.value.0.parse().unwrap());
                        }
                    }
                }
            }
        }
        this
    }

    /// The same pool with its devices in the order of their names.
    pub(crate) fn by_name(mut self) -> Self {
        self.devices.sort_by(|a, b| a.name.cmp(&b.name));
        self
    }

    /// Gives the first free device that matches to a claim that names no amount: of a shared
    /// device it gets everything.
    pub(crate) fn take(&mut self, matches: impl Fn(&Device) -> bool) -> Option<String> {
        let fits = |device: &&Device| matches(device) && self.has_room(device);
        let device = self.devices.iter().find(fits)?.clone();
        self.charge(&device);
        Some(device.name)
    }

    /// Gives so many devices to one claim, all with the same value of an attribute
    /// (`matchAttribute`); a device without it matches none.
    pub(crate) fn take_together(
        &mut self,
        count: usize,
        attribute: &str,
        matches: impl Fn(&Device) -> bool,
    ) -> Option<Vec<String>> {
        let values: Vec<String> = self
            .devices
            .iter()
            .map(|d| text(d, attribute).to_owned())
            .collect();
        for value in values.iter().filter(|value| !value.is_empty()) {
            let mut attempt = self.clone();
            let all = |device: &Device| text(device, attribute) == value && matches(device);
            let taken: Option<Vec<String>> = (0..count).map(|_| attempt.take(all)).collect();
            if taken.is_some() {
                *self = attempt;
                return taken;
            }
        }
        None
    }

    /// Gives a share of the first shared device that has so much memory left.
    pub(crate) fn take_share(&mut self, mebibytes: u64) -> Option<String> {
        let fits = |device: &&Device| {
            device.allow_multiple_allocations == Some(true)
                && match self.memory.get(&device.name) {
                    Some(left) => *left >= mebibytes,
                    None => memory(device) >= mebibytes && self.has_room(device),
                }
        };
        let device = self.devices.iter().find(fits)?.clone();
        if !self.used.contains(&device.name) {
            self.charge(&device);
        }
        let left = self.memory.entry(device.name.clone());
        *left.or_insert_with(|| memory(&device)) -= mebibytes;
        Some(device.name)
    }

    /// Gives a partition of a profile to a claim.
    pub(crate) fn take_profile(&mut self, profile: &str) -> Option<String> {
        self.take(|device| text(device, "profile") == profile && text(device, "type") == "mig")
    }

    /// Whether a claim of a profile would get a partition now.
    pub(crate) fn has_profile(&self, profile: &str) -> bool {
        self.clone().take_profile(profile).is_some()
    }

    /// What is left of each counter; a negative number would be a counter charged too often.
    pub(crate) fn left(&self) -> impl Iterator<Item = i64> {
        self.left.values().copied()
    }

    fn has_room(&self, device: &Device) -> bool {
        !self.used.contains(&device.name)
            && consumed(device).all(|(counter, amount)| self.left[&counter] >= amount)
    }

    fn charge(&mut self, device: &Device) {
        self.used.insert(device.name.clone());
        for (counter, amount) in consumed(device) {
            *self.left.get_mut(&counter).unwrap() -= amount;
        }
    }
}

fn consumed(device: &Device) -> impl Iterator<Item = ((String, String), i64)> {
    let consumptions = device.consumes_counters.iter().flatten();
    consumptions.flat_map(|of| {
        of.counters.iter().map(|(name, counter)| {
            let key = (of.counter_set.clone(), name.clone());
            (key, counter.value.0.parse().unwrap())
        })
    })
}

/// A text attribute of a device; empty where it has none.
pub(crate) fn text<'a>(device: &'a Device, attribute: &str) -> &'a str {
    let value = device.attributes.iter().flatten();
    let mut value = value.filter(|(name, _)| *name == attribute);
    value
        .next()
        .and_then(|(_, value)| value.string.as_deref())
        .unwrap_or_default()
}

fn memory(device: &Device) -> u64 {
    let memory = &device.capacity.as_ref().unwrap()["memory"].value.0;
    match memory.strip_suffix("Gi") {
        Some(gibibytes) => gibibytes.parse::<u64>().unwrap() * 1024,
        None => memory.strip_suffix("Mi").unwrap().parse().unwrap(),
    }
}
