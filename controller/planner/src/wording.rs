//! The sentences of explanations.
//!
//! Short forms are read by tenants: they name no other tenant's order, and neither
//! an expression nor a bound of the class. Long forms are for the administrator.

use std::collections::{BTreeMap, BTreeSet};

use crate::demand::{Demand, MemoryNeed, PlacementType, ReplicaBounds, SharingMode};
use crate::explanation::{BrokenSelector, RejectionReason};
use crate::kinds::{Exclusion, KindKey, Kinds};
use crate::snapshot::Snapshot;

/// Most orders that a sentence names.
const NAMED_ORDERS: usize = 3;

/// Bytes as people read them.
pub(crate) fn gib(bytes: u64) -> String {
    const GIB: u128 = 1 << 30;
    // Rounded to two places without floating point.
    let hundredths = (u128::from(bytes) * 100 + GIB / 2) / GIB;
    format!("{}.{:02} GiB", hundredths / 100, hundredths % 100)
}

fn count(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// Names kinds of one device class: `mig.example.com 1g.10gb (9.75 GiB)`.
pub(crate) fn kinds(class: &str, kinds: &[&KindKey], devices: u32) -> String {
    let names = kinds.iter().map(|key| match (&key.profile, key.placement) {
        (Some(profile), _) if key.shared => format!("share of {profile}"),
        (Some(profile), _) => profile.clone(),
        (None, _) if key.shared => "share".to_owned(),
        (None, PlacementType::WholeDevice) => "whole device".to_owned(),
        (None, PlacementType::Partition) => "partition".to_owned(),
    });
    let mut distinct: Vec<String> = Vec::new();
    for name in names {
        if !distinct.contains(&name) {
            distinct.push(name);
        }
    }
    let least = kinds.iter().map(|key| key.memory).min().unwrap_or(0);
    let times = if devices > 1 {
        format!("{devices} × ")
    } else {
        String::new()
    };
    format!("{times}{class} {} ({})", distinct.join(" or "), gib(least))
}

pub(crate) fn planned(kind: &str, need: &MemoryNeed, fit: u32, replicas: &ReplicaBounds) -> String {
    let each = if need.devices > 1 {
        " on each device"
    } else {
        ""
    };
    let shortage = if fit < replicas.min {
        format!(", fewer than the minimum of {}", replicas.min)
    } else {
        String::new()
    };
    format!(
        "Planned on {kind}: the smallest that holds {}{each}; {} now{shortage}.",
        gib(need.bytes_per_device),
        if fit == 1 {
            "1 replica fits".to_owned()
        } else {
            format!("{fit} replicas fit")
        },
    )
}

pub(crate) fn no_device_class(demand: &Demand) -> String {
    match &demand.device_class_names {
        Some(_) => "The cluster has none of the device classes that the class allows.".to_owned(),
        None => "The cluster has no DeviceClass: no DRA driver for accelerators is installed."
            .to_owned(),
    }
}

pub(crate) fn no_count() -> String {
    "Nothing was searched: the class and the runtime have no number of devices per replica in \
     common."
        .to_owned()
}

pub(crate) fn undecidable(broken: &[BrokenSelector]) -> String {
    let Some(first) = broken.first() else {
        return String::new();
    };
    let more = match broken.len() {
        1 => String::new(),
        n => format!(", and {} more", n - 1),
    };
    format!(
        "A selector of {} cannot be judged on the cluster's devices{more}; the class's conditions \
         hold the expression and the error.",
        first.holder
    )
}

pub(crate) fn too_few_per_node(devices: u32) -> String {
    format!("no node has {devices} of them")
}

pub(crate) fn fewer(fit: usize, minimum: u32) -> String {
    format!("only {fit} of at least {minimum} replicas fit now")
}

pub(crate) fn larger(fit: usize) -> String {
    format!(
        "would also do ({} now), but strands more",
        count(fit, "replica")
    )
}

pub(crate) fn placement_type(placement: PlacementType) -> String {
    let name = match placement {
        PlacementType::Partition => "Partition",
        PlacementType::WholeDevice => "WholeDevice",
    };
    format!("the class does not allow the placement type {name}")
}

pub(crate) fn partitions_not_combined() -> String {
    "partitions are not combined to hold one replica".to_owned()
}

pub(crate) fn too_small(memory: u64, need: u64) -> String {
    format!("{} of {} needed", gib(memory), gib(need))
}

/// Why none of a kind's devices may be used: the most frequent reason decides,
/// the message names all.
pub(crate) fn excluded(excluded: &BTreeMap<Exclusion, u32>) -> (RejectionReason, String) {
    let decisive = excluded
        .iter()
        .max_by_key(|(_, n)| **n)
        .map(|(exclusion, _)| exclusion);
    let reason = match decisive {
        Some(Exclusion::Undecidable) => RejectionReason::SelectorUndecidable,
        Some(Exclusion::Tainted(_)) => RejectionReason::Tainted,
        Some(Exclusion::Node) => RejectionReason::NodeNotUsable,
        Some(Exclusion::PoolIncomplete(_) | Exclusion::PoolInvalid(_)) => {
            RejectionReason::PoolUnusable
        }
        Some(Exclusion::SharingMode(_)) => RejectionReason::SharingModeNotAllowed,
        Some(Exclusion::Selector) | None => RejectionReason::SelectorMismatch,
    };
    let parts: Vec<String> = excluded
        .iter()
        .map(|(e, n)| format!("{n} {}", exclusion(e)))
        .collect();
    (reason, parts.join(", "))
}

fn exclusion(exclusion: &Exclusion) -> String {
    match exclusion {
        Exclusion::Selector => "do not match the class's selectors".to_owned(),
        Exclusion::Undecidable => "cannot be judged by the class's selectors".to_owned(),
        Exclusion::Tainted(key) => format!("have the taint {key}"),
        Exclusion::Node => "are on nodes that the order may not use".to_owned(),
        Exclusion::PoolIncomplete(detail) => format!("are in an incomplete pool ({detail})"),
        Exclusion::PoolInvalid(detail) => format!("are in an invalid pool ({detail})"),
        Exclusion::SharingMode(mode) => sharing_mode(*mode).to_owned(),
    }
}

fn sharing_mode(mode: SharingMode) -> &'static str {
    match mode {
        SharingMode::Shared => "are handed out in shares, which the class does not allow",
        SharingMode::Dedicated => "are held alone, and the class allows only shares",
    }
}

pub(crate) fn shares_not_combined() -> String {
    "shares are not combined to hold one replica".to_owned()
}

pub(crate) fn share_above_maximum(bytes: u64) -> String {
    format!(
        "a share of {} is needed, more than the class allows of these devices",
        gib(bytes)
    )
}

/// The same for the administrator.
pub(crate) fn share_above_maximum_long(bytes: u64, maximum: u64) -> String {
    format!(
        "a share of {} is needed, the class allows {} of these devices (maxSharePercent)",
        gib(bytes),
        gib(maximum)
    )
}

pub(crate) fn share_not_allowed(bytes: u64) -> String {
    format!(
        "the device's request policy allows no share that holds {}",
        gib(bytes)
    )
}

/// Nothing fits even on an empty cluster.
pub(crate) fn never_fits(snapshot: &Snapshot, demand: &Demand, kinds: &Kinds) -> String {
    let allowed = |key: &&KindKey| demand.placement_types.contains(&key.placement);
    let usable = |key: &&KindKey| !kinds.kinds[*key].usable.is_empty();
    let keys: Vec<&KindKey> = kinds.kinds.keys().filter(allowed).collect();
    let mut best: Option<(u64, &MemoryNeed, &KindKey)> = None;
    for need in &demand.memory {
        let fits_count = |key: &&&KindKey| {
            need.devices == 1 || (!key.shared && key.placement == PlacementType::WholeDevice)
        };
        for key in keys
            .iter()
            .copied()
            .filter(usable)
            .filter(|k| fits_count(&k))
        {
            let missing = need.bytes_per_device.saturating_sub(most(key, demand));
            if best.is_none_or(|(least, ..)| missing < least) {
                best = Some((missing, need, key));
            }
        }
    }
    match best {
        Some((0, need, key)) => format!(
            "No node has {} devices that a replica could use together; {} of {} on each are needed.",
            need.devices,
            gib(need.bytes_per_device),
            snapshot.device_classes[key.class].name,
        ),
        // The shortage would tell the bound.
        Some((_, need, key)) if key.memory >= need.bytes_per_device => format!(
            "A share of {} is needed, more than the class allows of any device.",
            gib(need.bytes_per_device),
        ),
        Some((_, need, key)) => format!(
            "Fits no device of the allowed device classes: the largest, {}, is {} short of the \
             {} needed{}.",
            kinds_of(snapshot, key),
            gib(need.bytes_per_device.saturating_sub(key.memory)),
            gib(need.bytes_per_device),
            if need.devices > 1 {
                format!(" on each of {} devices", need.devices)
            } else {
                String::new()
            },
        ),
        None => {
            let mut reasons: BTreeMap<&'static str, u32> = BTreeMap::new();
            for key in &keys {
                for (exclusion, number) in &kinds.kinds[*key].excluded {
                    *reasons.entry(short_exclusion(exclusion)).or_insert(0) += number;
                }
            }
            let parts: Vec<String> = reasons
                .iter()
                .map(|(reason, n)| format!("{n} {reason}"))
                .collect();
            if parts.is_empty() {
                "No published device belongs to the allowed device classes and placement types."
                    .to_owned()
            } else {
                format!(
                    "No device of the allowed device classes can be used: {}.",
                    parts.join(", ")
                )
            }
        }
    }
}

/// The most memory that one replica may have of a device of this kind, in bytes.
fn most(key: &KindKey, demand: &Demand) -> u64 {
    match demand.share_bounds.max_percent {
        Some(percent) if key.shared => {
            let most = u128::from(key.memory) * u128::from(percent) / 100;
            u64::try_from(most).unwrap_or(u64::MAX)
        }
        _ => key.memory,
    }
}

fn kinds_of(snapshot: &Snapshot, key: &KindKey) -> String {
    kinds(&snapshot.device_classes[key.class].name, &[key], 1)
}

fn short_exclusion(exclusion: &Exclusion) -> &'static str {
    match exclusion {
        Exclusion::Selector => "do not match the class's selectors",
        Exclusion::Undecidable => "cannot be judged",
        Exclusion::Tainted(_) => "are tainted",
        Exclusion::Node => "are on nodes that cannot be used",
        Exclusion::PoolIncomplete(_) | Exclusion::PoolInvalid(_) => "are in unusable pools",
        Exclusion::SharingMode(mode) => sharing_mode(*mode),
    }
}

/// Who holds devices, for tenants: orders of the own namespace by name, others by
/// number.
fn holders(snapshot: &Snapshot, demand: &Demand, claims: &BTreeSet<usize>) -> String {
    let (mut own, mut others, mut foreign) = (BTreeSet::new(), BTreeSet::new(), 0);
    for claim in claims
        .iter()
        .filter_map(|&claim| snapshot.claims.get(claim))
    {
        match &claim.order {
            Some(order) if order.namespace == demand.order.namespace => {
                own.insert(order.name.as_str());
            }
            Some(order) => {
                others.insert(order);
            }
            None => foreign += 1,
        }
    }
    let mut parts = Vec::new();
    if !own.is_empty() {
        let named: Vec<&str> = own.iter().copied().take(NAMED_ORDERS).collect();
        let dots = if own.len() > NAMED_ORDERS {
            ", …"
        } else {
            ""
        };
        let total = count(own.len(), "order");
        parts.push(format!(
            "{total} of this namespace ({}{dots})",
            named.join(", ")
        ));
    }
    if !others.is_empty() {
        parts.push(format!(
            "{} of other namespaces",
            count(others.len(), "order")
        ));
    }
    if foreign > 0 {
        parts.push(count(foreign, "other claim"));
    }
    if parts.is_empty() {
        "claims".to_owned()
    } else {
        parts.join(", ")
    }
}

/// Nothing has room, for tenants.
pub(crate) fn taken_short(
    snapshot: &Snapshot,
    demand: &Demand,
    physical: usize,
    claims: &BTreeSet<usize>,
) -> String {
    let holders = holders(snapshot, demand, claims);
    let need = demand
        .memory
        .iter()
        .min_by_key(|need| need.bytes_per_device);
    let (together, bytes) = need.map_or((1, 0), |need| (need.devices, need.bytes_per_device));
    let large = format!(
        "{} with at least {}",
        count(physical, "accelerator"),
        gib(bytes)
    );
    if together > 1 {
        format!("No node has {together} free of the {large}: taken by {holders}.")
    } else {
        format!("None of the {large} in the allowed device classes has room: taken by {holders}.")
    }
}

/// One candidate has no room, for tenants.
pub(crate) fn taken(
    snapshot: &Snapshot,
    demand: &Demand,
    physical: usize,
    claims: &BTreeSet<usize>,
) -> String {
    format!(
        "none has room on {}; taken by {}",
        count(physical, "accelerator"),
        holders(snapshot, demand, claims)
    )
}

/// The same for the administrator.
pub(crate) fn taken_long(snapshot: &Snapshot, physical: usize, claims: &BTreeSet<usize>) -> String {
    let mut names = BTreeSet::new();
    for claim in claims
        .iter()
        .filter_map(|&claim| snapshot.claims.get(claim))
    {
        names.insert(match &claim.order {
            Some(order) => format!("order {order}"),
            None => format!("claim {}/{}", claim.namespace, claim.name),
        });
    }
    let names: Vec<String> = names.into_iter().collect();
    let listed = names
        .iter()
        .take(20)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    let more = names.len().saturating_sub(20);
    let more = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    format!(
        "none has room on {}; held by {listed}{more}",
        count(physical, "accelerator")
    )
}
