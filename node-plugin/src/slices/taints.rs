//! Faults as taints on the devices that they concern.
//!
//! In: published devices and the faults there are. Out: the same devices with taints, at
//! most one of each key, and with the time that its fault began, which outlives a restart
//! and a wipe of the slices. Never: a device removed or renamed because of a fault.
//!
//! What part of the hardware a device stands for is read from its attributes, so that
//! whole devices, partitions and shares need no rule each.

use std::collections::BTreeMap;

use gpu::{PciAddress, Placement};
use k8s_openapi::api::resource::v1::{Device, DeviceTaint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::Wanted;
use super::devices::Published;
use crate::health::{Effect, Fault, Kind, Scope, Severity};

/// Taints the devices of GPUs that have faults.
pub(super) fn apply(published: &mut [Published], wanted: &Wanted) {
    let faults = wanted.all_faults();
    if faults.is_empty() {
        return;
    }
    let devices = published.iter_mut().flat_map(Published::devices_mut);
    for device in devices {
        let taints = of_device(device, &faults);
        if !taints.is_empty() {
            device.taints.get_or_insert_default().extend(taints);
        }
    }
}

/// The faults that concern a device.
pub(crate) fn affecting<'a>(
    device: &Device,
    faults: &'a [Fault],
) -> impl Iterator<Item = &'a Fault> + use<'a> {
    let place = place(device);
    faults.iter().filter(move |fault| {
        place.is_some_and(|(pci, placement)| fault.scope.overlaps(pci, placement))
    })
}

/// The taints of a device: of each key the strongest, then the oldest.
fn of_device(device: &Device, faults: &[Fault]) -> Vec<DeviceTaint> {
    let mut worst: BTreeMap<Kind, (&Fault, Effect)> = BTreeMap::new();
    for fault in affecting(device, faults) {
        let Some(effect) = fault.effect else { continue };
        let rank = |f: &Fault, effect: Effect| (effect, std::cmp::Reverse(f.since));
        match worst.get(&fault.kind) {
            Some((known, strongest)) if rank(known, *strongest) >= rank(fault, effect) => {}
            _ => {
                worst.insert(fault.kind, (fault, effect));
            }
        }
    }
    let taint = |(fault, effect): (&Fault, Effect)| DeviceTaint {
        key: fault.kind.key(),
        value: (!fault.value.is_empty()).then(|| fault.value.clone()),
        effect: effect.name().to_owned(),
        time_added: (fault.since > 0)
            .then(|| jiff::Timestamp::from_second(fault.since).ok().map(Time))
            .flatten(),
    };
    worst.into_values().map(taint).collect()
}

/// The GPU of a device and, unless it spans the GPU, its memory slices.
fn place(device: &Device) -> Option<(PciAddress, Option<Placement>)> {
    let attributes = device.attributes.as_ref()?;
    let pci = attributes.get("pciAddress")?.string.as_deref()?;
    let number = |name: &str| -> Option<u32> {
        attributes
            .get(name)?
            .int
            .and_then(|value| value.try_into().ok())
    };
    let placement = number("placementStart").zip(number("placementSize"));
    Some((
        pci.parse().ok()?,
        placement.map(|(start, size)| Placement { start, size }),
    ))
}

impl Wanted {
    /// The faults, and those GPUs that NVML does not describe and that nobody has told
    /// more about yet.
    #[must_use]
    pub fn all_faults(&self) -> Vec<Fault> {
        let mut faults = self.faults.clone();
        for pci in &self.unreadable {
            let known = self.faults.iter().any(|fault| {
                fault.scope.pci() == *pci && matches!(fault.kind, Kind::Lost | Kind::Unreadable)
            });
            if !known {
                faults.push(Fault {
                    kind: Kind::Unreadable,
                    value: String::new(),
                    severity: Severity::Degraded,
                    effect: Some(Effect::NoSchedule),
                    scope: Scope::Gpu(*pci),
                    message: format!("GPU {pci}: NVML does not describe it"),
                    since: 0,
                });
            }
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::resource::v1::DeviceAttribute;

    use super::*;

    fn device(placement: Option<(i64, i64)>) -> Device {
        let string = |text: &str| DeviceAttribute {
            string: Some(text.to_owned()),
            ..DeviceAttribute::default()
        };
        let int = |value| DeviceAttribute {
            int: Some(value),
            ..DeviceAttribute::default()
        };
        let mut attributes = BTreeMap::from([("pciAddress".to_owned(), string("0000:65:00.0"))]);
        if let Some((start, size)) = placement {
            attributes.insert("placementStart".to_owned(), int(start));
            attributes.insert("placementSize".to_owned(), int(size));
        }
        Device {
            name: "any".to_owned(),
            attributes: Some(attributes),
            ..Device::default()
        }
    }

    fn fault(kind: Kind, value: &str, effect: Option<Effect>, since: i64) -> Fault {
        Fault {
            kind,
            value: value.to_owned(),
            severity: Severity::Degraded,
            effect,
            scope: Scope::Gpu("0000:65:00.0".parse().unwrap()),
            message: String::new(),
            since,
        }
    }

    fn told(taints: &[DeviceTaint]) -> Vec<String> {
        let text = |t: &DeviceTaint| {
            let key = t.key.strip_prefix("gpu.ai.deckhouse.io/").unwrap();
            format!(
                "{key}={} {}",
                t.value.as_deref().unwrap_or_default(),
                t.effect
            )
        };
        taints.iter().map(text).collect()
    }

    #[test]
    fn each_key_stands_once_with_its_strongest_effect_and_the_time_it_began() {
        let (schedule, execute) = (Some(Effect::NoSchedule), Some(Effect::NoExecute));
        let faults = [
            fault(Kind::Xid, "74", schedule, 100),
            fault(Kind::Xid, "119", execute, 300),
            fault(Kind::Xid, "48", execute, 200),
            fault(Kind::Xid, "31", None, 50),
            fault(Kind::RowRemap, "pending", schedule, 400),
        ];
        let taints = of_device(&device(None), &faults);
        assert_eq!(
            told(&taints),
            ["xid=48 NoExecute", "row-remap=pending NoSchedule"]
        );
        let time = |t: &DeviceTaint| t.time_added.as_ref().map(|time| time.0.as_second());
        assert_eq!(
            taints.iter().map(time).collect::<Vec<_>>(),
            [Some(200), Some(400)]
        );
    }

    #[test]
    fn a_fault_of_an_instance_concerns_what_overlaps_it_and_the_devices_that_span_the_gpu() {
        let pci = "0000:65:00.0".parse().unwrap();
        let placement = Placement { start: 4, size: 2 };
        let mut one = fault(Kind::Xid, "94", Some(Effect::NoSchedule), 1);
        one.scope = Scope::Instance { pci, placement };
        let tainted = |at| !of_device(&device(at), std::slice::from_ref(&one)).is_empty();
        assert!(tainted(None) && tainted(Some((5, 1))) && tainted(Some((4, 4))));
        assert!(!tainted(Some((6, 1))) && !tainted(Some((0, 4))));
        one.scope = Scope::Gpu("0000:66:00.0".parse().unwrap());
        assert!(of_device(&device(None), &[one]).is_empty());
    }
}
