//! The sums: what is granted of a device, and whether it has so much.
//!
//! In: records of claims and the GPU as it is. Out: a claim's portion, the limits that
//! its device's daemon gets, or the claims that stand in the way. Never: the disk or the
//! hardware.

use gpu::Gpu;

use super::{Portion, SharedDevice};
use crate::claims::allocation::Allocated;
use crate::claims::record::{ClaimRef, PreparedDevice, Record, Stage, Target};
use crate::slices::SharingKind;

/// All of a device's compute, in percent.
const ALL_CORES: u32 = 100;

/// All that there is of a device, in the amounts that are published: memory in whole
/// MiB. `None` for a partition of a profile that the GPU does not have.
#[must_use]
pub fn whole(gpu: &Gpu, of: &Target) -> Option<Portion> {
    let memory_bytes = match of {
        Target::Partition { profile_id, .. } => {
            let mut profiles = gpu.profiles.iter();
            profiles.find(|p| p.id == *profile_id)?.memory_bytes
        }
        Target::Whole { .. } | Target::Share { .. } => gpu.memory_bytes,
    };
    Some(Portion {
        memory_bytes: memory_bytes >> 20 << 20,
        cores_percent: ALL_CORES,
    })
}

/// What an allocation grants of a device. An amount that it does not name is all there
/// is: so the API has it for a request that names none, and a server that does not keep
/// amounts gives the device to one claim only.
#[must_use]
pub fn granted(wanted: &Allocated, whole: Portion) -> Portion {
    Portion {
        memory_bytes: wanted.memory_bytes.unwrap_or(whole.memory_bytes),
        cores_percent: wanted.cores_percent.unwrap_or(whole.cores_percent),
    }
}

/// The shares of a device that a record holds.
fn shares(
    record: &Record,
    device: SharedDevice,
) -> impl Iterator<Item = (&PreparedDevice, Portion, SharingKind)> {
    // A claim that has ended may have left an instance, never a share.
    let ended = record.stage == Stage::Unprepared;
    let devices = record
        .devices
        .iter()
        .filter(move |d| !d.admin_access && !ended);
    devices.filter_map(move |prepared| match &prepared.target {
        Target::Share {
            of,
            memory_bytes,
            cores_percent,
            kind,
        } if SharedDevice::shared_out(of) == device => {
            let portion = Portion {
                memory_bytes: *memory_bytes,
                cores_percent: *cores_percent,
            };
            Some((prepared, portion, *kind))
        }
        _ => None,
    })
}

/// How a device is shared already: all of its shares are of one kind.
pub fn kind_in_use<'a>(
    records: impl IntoIterator<Item = &'a Record>,
    device: SharedDevice,
) -> Option<SharingKind> {
    let mut kinds = records
        .into_iter()
        .flat_map(|record| shares(record, device).map(|(_, _, kind)| kind));
    kinds.next()
}

/// A device that has less than its shares add up to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverCommitted {
    /// The name of the device.
    pub device: String,
    /// What the claim would have of it.
    pub wanted: Portion,
    /// What other claims have of it.
    pub held: Portion,
    /// What there is.
    pub whole: Portion,
    /// The claims that have it.
    pub holders: Vec<ClaimRef>,
}

impl std::fmt::Display for OverCommitted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            device,
            wanted,
            held,
            whole,
            holders,
        } = self;
        write!(
            f,
            "device {device} has {} MiB and {} %, of which the claim would get {} MiB and {} %, and ",
            whole.memory_mib(),
            whole.cores_percent,
            wanted.memory_mib(),
            wanted.cores_percent,
        )?;
        if holders.is_empty() {
            return write!(f, "that is more than there is");
        }
        let holders: Vec<String> = holders.iter().map(ToString::to_string).collect();
        write!(
            f,
            "{} MiB and {} % are held by {}; the claim can be prepared when enough of them are unprepared",
            held.memory_mib(),
            held.cores_percent,
            holders.join(", "),
        )
    }
}

/// The last line of defence: the scheduler should never have granted more than there is.
///
/// # Errors
/// With the claims that hold the rest.
pub fn refuse_over_commit<'a>(
    others: impl IntoIterator<Item = &'a Record> + Clone,
    record: &Record,
    whole_of: impl Fn(&Target) -> Option<Portion>,
) -> Result<(), OverCommitted> {
    for prepared in &record.devices {
        let Target::Share { of, .. } = &prepared.target else {
            continue;
        };
        let Some(whole) = whole_of(of).filter(|_| !prepared.admin_access) else {
            continue;
        };
        let device = SharedDevice::shared_out(of);
        let wanted = sum(shares(record, device).map(|(_, portion, _)| portion));
        let mut holders = Vec::new();
        let mut held = Portion {
            memory_bytes: 0,
            cores_percent: 0,
        };
        for other in others.clone() {
            let mut theirs = shares(other, device)
                .map(|(_, portion, _)| portion)
                .peekable();
            if theirs.peek().is_some() {
                holders.push(other.claim.clone());
                held = sum(theirs.chain([held]));
            }
        }
        let all = sum([wanted, held].into_iter());
        if all.memory_bytes > whole.memory_bytes || all.cores_percent > whole.cores_percent {
            return Err(OverCommitted {
                device: prepared.device.clone(),
                wanted,
                held,
                whole,
                holders,
            });
        }
    }
    Ok(())
}

fn sum(portions: impl Iterator<Item = Portion>) -> Portion {
    let none = Portion {
        memory_bytes: 0,
        cores_percent: 0,
    };
    portions.fold(none, |a, b| Portion {
        memory_bytes: a.memory_bytes.saturating_add(b.memory_bytes),
        cores_percent: a.cores_percent.saturating_add(b.cores_percent),
    })
}

/// What a device's daemon should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needed {
    /// The UUID of the GPU or the MIG instance.
    pub uuid: String,
    /// The most that any client may use: the daemon knows its clients no better, so
    /// these are the largest memory and the largest compute of all shares.
    pub limits: Portion,
}

/// What a device's daemon should be for the claims that share it; `None` where no claim
/// needs one.
pub fn needed<'a>(
    records: impl IntoIterator<Item = &'a Record>,
    device: SharedDevice,
) -> Option<Needed> {
    let mut needed: Option<Needed> = None;
    for record in records {
        for (prepared, portion, kind) in shares(record, device) {
            let uuid = prepared.target.device_uuid();
            let (SharingKind::Mps, Some(uuid)) = (kind, uuid) else {
                continue;
            };
            let before = needed.take().map(|n| n.limits).unwrap_or(portion);
            needed = Some(Needed {
                uuid: uuid.to_owned(),
                limits: Portion {
                    memory_bytes: before.memory_bytes.max(portion.memory_bytes),
                    cores_percent: before.cores_percent.max(portion.cores_percent),
                },
            });
        }
    }
    needed
}

/// The devices whose daemons a record needs.
pub fn daemons_of(record: &Record) -> std::collections::BTreeSet<SharedDevice> {
    if record.stage == Stage::Unprepared {
        return std::collections::BTreeSet::new();
    }
    let devices = record.devices.iter().filter(|d| !d.admin_access);
    devices
        .filter(|d| {
            let kind = match &d.target {
                Target::Share { kind, .. } => Some(*kind),
                Target::Whole { .. } | Target::Partition { .. } => None,
            };
            kind == Some(SharingKind::Mps)
        })
        .filter_map(|d| SharedDevice::of(&d.target))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn record(uid: &str, portions: &[(u64, u32)]) -> Record {
        let device = |(memory_bytes, cores_percent): &(u64, u32)| PreparedDevice {
            device: "gpu-0000-65-00-0-shared".into(),
            share_id: Some("share".into()),
            target: Target::Share {
                of: Box::new(Target::Whole {
                    pci: "0000:65:00.0".parse().unwrap(),
                    uuid: "GPU-1".into(),
                    minor: 0,
                }),
                memory_bytes: *memory_bytes,
                cores_percent: *cores_percent,
                kind: SharingKind::Mps,
            },
            ..PreparedDevice::for_test()
        };
        Record {
            claim: ClaimRef {
                namespace: "team".into(),
                name: uid.into(),
                uid: uid.into(),
            },
            stage: Stage::PrepareCompleted,
            devices: portions.iter().map(device).collect(),
            ..Record::for_test()
        }
    }

    fn device() -> SharedDevice {
        SharedDevice {
            pci: "0000:65:00.0".parse().unwrap(),
            placement: None,
        }
    }

    #[test]
    fn shares_that_add_up_to_the_device_are_taken_and_one_more_mib_or_percent_names_the_holders() {
        let whole = |_: &Target| {
            Some(Portion {
                memory_bytes: 16 * GIB,
                cores_percent: 100,
            })
        };
        let others = [record("a", &[(8 * GIB, 50)]), record("b", &[(4 * GIB, 25)])];
        let check =
            |portions: &[(u64, u32)]| refuse_over_commit(&others, &record("c", portions), whole);
        assert_eq!(check(&[(4 * GIB, 25)]), Ok(()));
        assert_eq!(check(&[(2 * GIB, 12), (2 * GIB, 13)]), Ok(()));
        for too_much in [(4 * GIB + (1 << 20), 25), (4 * GIB, 26)] {
            let text = check(&[too_much]).unwrap_err().to_string();
            for part in ["team/a", "team/b", "12288 MiB and 75 %", "16384 MiB"] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
        let alone = record("c", &[(17 * GIB, 1)]);
        let text = refuse_over_commit([], &alone, whole)
            .unwrap_err()
            .to_string();
        assert!(text.contains("more than there is"), "{text}");
    }

    #[test]
    fn a_daemon_gets_the_largest_memory_and_the_largest_compute_of_its_shares() {
        let records = [record("a", &[(8 * GIB, 10)]), record("b", &[(2 * GIB, 60)])];
        let needed = needed(&records, device()).unwrap();
        assert_eq!(needed.uuid, "GPU-1");
        assert_eq!(needed.limits.memory_mib(), 8192);
        assert_eq!(needed.limits.cores_percent, 60);
        assert_eq!(super::needed(&records[..0], device()), None);
        let other = SharedDevice {
            placement: Some(gpu::Placement { start: 4, size: 4 }),
            ..device()
        };
        assert_eq!(super::needed(&records, other), None);
    }

    #[test]
    fn an_amount_that_is_not_named_is_all_there_is() {
        let whole = Portion {
            memory_bytes: 16 * GIB,
            cores_percent: 100,
        };
        let wanted = |memory_bytes, cores_percent| Allocated {
            memory_bytes,
            cores_percent,
            ..Allocated::for_test()
        };
        assert_eq!(granted(&wanted(None, None), whole), whole);
        let some = granted(&wanted(Some(GIB), None), whole);
        assert_eq!((some.memory_bytes, some.cores_percent), (GIB, 100));
    }
}
