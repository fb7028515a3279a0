//! What a replica could be placed on, from the least wasteful to the most.
//!
//! In: kinds of devices and the demand. Out: candidates in the order in which a
//! plan prefers them. The order:
//! 1. fewer devices per replica;
//! 2. proper partitions and shares, then whole devices, then partitions and shares
//!    that take a whole GPU (they strand as much as the whole device and lose what
//!    dividing it costs, so they serve classes that allow nothing else);
//! 3. less memory: a share is exactly as large as the need, a partition as large as
//!    its profile;
//! 4. held alone before shared, then a smaller part of the GPU (`1g.20gb` before `2g.20gb`: same memory, one
//!    compute slice less);
//! 5. the shorter name (`1g.10gb` before `1g.10gb+me`), then the device class.

use crate::demand::{Demand, MemoryNeed, PlacementType};
use crate::inventory::{ALL_PARTS, Inventory};
use crate::kinds::{Kind, KindKey, Kinds};
use crate::shares::{self, Share};

/// Kinds of devices that one claim could be narrowed to.
#[derive(Debug, Clone)]
pub(crate) struct Candidate<'k> {
    pub(crate) need: MemoryNeed,
    pub(crate) kinds: Vec<&'k KindKey>,
    /// Usable devices of all its kinds, in published order.
    pub(crate) devices: Vec<usize>,
    /// How much of a device a replica takes; `None` where it holds it alone.
    pub(crate) share: Option<Share>,
    rank: Rank,
}

/// What candidates are ordered by.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    devices: u32,
    tier: u8,
    memory: u64,
    shared: bool,
    footprint: u32,
    name_length: usize,
    kind: KindKey,
}

/// What takes at least this much of its GPU, in parts per million, takes it whole.
const WHOLE: u32 = ALL_PARTS;

/// Candidates of one kind (of one profile, where devices have profiles), in
/// order of preference. All have enough memory; whether any is free is not
/// looked at.
pub(crate) fn single<'k>(
    inventory: &Inventory<'_>,
    kinds: &'k Kinds,
    demand: &Demand,
) -> Vec<Candidate<'k>> {
    let mut candidates: Vec<Candidate<'k>> = Vec::new();
    for need in &demand.memory {
        for (key, kind) in &kinds.kinds {
            if !demand.placement_types.contains(&key.placement)
                || key.memory < need.bytes_per_device
                || key.memory == 0
                || kind.usable.is_empty()
                || (need.devices > 1 && key.placement == PlacementType::Partition)
            {
                continue;
            }
            if key.shared {
                candidates.extend(share_of_kind(inventory, key, kind, *need, demand));
                continue;
            }
            let same_profile = |c: &&mut Candidate<'k>| {
                c.need == *need
                    && c.share.is_none()
                    && key.profile.is_some()
                    && c.kinds.iter().all(|k| alike(k, key))
            };
            if let Some(candidate) = candidates.iter_mut().find(same_profile) {
                candidate.kinds.push(key);
                candidate.devices.extend(&kind.usable);
                continue;
            }
            let partition = key.placement == PlacementType::Partition;
            let tier = match (partition, kind.footprint >= WHOLE) {
                (true, false) => 0,
                (false, _) => 1,
                (true, true) => 2,
            };
            candidates.push(Candidate {
                need: *need,
                kinds: vec![key],
                devices: kind.usable.clone(),
                share: None,
                rank: Rank {
                    devices: need.devices,
                    tier,
                    memory: key.memory,
                    shared: false,
                    footprint: kind.footprint,
                    name_length: key.profile.as_deref().map_or(0, str::len),
                    kind: key.clone(),
                },
            });
        }
    }
    for candidate in &mut candidates {
        candidate.devices.sort_unstable();
    }
    candidates.sort_by(|a, b| a.rank.cmp(&b.rank));
    candidates
}

/// The candidate that takes a share of devices of one kind. A replica on several
/// devices has them alone: MPS cannot span GPUs that others use.
fn share_of_kind<'k>(
    inventory: &Inventory<'_>,
    key: &'k KindKey,
    kind: &'k Kind,
    need: MemoryNeed,
    demand: &Demand,
) -> Option<Candidate<'k>> {
    if need.devices > 1 {
        return None;
    }
    let view = &inventory.devices[*kind.usable.first()?];
    let share = shares::smallest(view, need.bytes_per_device, &demand.share_bounds).ok()?;
    let footprint = u64::from(share.part) * u64::from(kind.footprint) / u64::from(WHOLE);
    let footprint = u32::try_from(footprint).unwrap_or(WHOLE);
    Some(Candidate {
        need,
        kinds: vec![key],
        devices: kind.usable.clone(),
        rank: Rank {
            devices: need.devices,
            tier: if footprint >= WHOLE { 2 } else { 0 },
            memory: share.bytes,
            shared: true,
            footprint,
            name_length: key.profile.as_deref().map_or(0, str::len),
            kind: key.clone(),
        },
        share: Some(share),
    })
}

fn alike(a: &KindKey, b: &KindKey) -> bool {
    a.class == b.class
        && a.driver == b.driver
        && a.placement == b.placement
        && a.profile == b.profile
}

/// Candidates that admit several kinds of one device class at once, growing one
/// kind at a time: for demands that no kind alone has room for.
pub(crate) fn combined<'k>(singles: &[Candidate<'k>]) -> Vec<Candidate<'k>> {
    let mut combined: Vec<Candidate<'k>> = Vec::new();
    for (index, single) in singles.iter().enumerate() {
        let family = |other: &&Candidate<'k>| {
            other.need == single.need
                && other.share.is_none()
                && single.share.is_none()
                && other.rank.tier == single.rank.tier
                && other.rank.kind.class == single.rank.kind.class
                && other.rank.kind.driver == single.rank.kind.driver
        };
        let smaller: Vec<&Candidate<'k>> = singles[..index].iter().filter(family).collect();
        if smaller.is_empty() {
            continue;
        }
        let mut union = single.clone();
        for other in smaller {
            union.kinds.extend(&other.kinds);
            union.devices.extend(&other.devices);
        }
        union.kinds.sort();
        union.devices.sort_unstable();
        combined.push(union);
    }
    combined
}

impl Candidate<'_> {
    /// What it is placed on.
    pub(crate) fn placement(&self) -> PlacementType {
        self.rank.kind.placement
    }

    /// Its device class, as an index into the snapshot.
    pub(crate) fn class(&self) -> usize {
        self.rank.kind.class
    }

    /// Driver of its devices.
    pub(crate) fn driver(&self) -> &str {
        &self.rank.kind.driver
    }

    /// Whether it takes only a part of a GPU.
    pub(crate) fn is_part(&self) -> bool {
        self.rank.tier == 0
    }

    /// The least memory that a replica gets on a device, in bytes.
    pub(crate) fn memory(&self) -> u64 {
        self.share
            .as_ref()
            .map_or_else(|| self.device_memory(), |share| share.bytes)
    }

    /// The least memory of its devices, in bytes.
    pub(crate) fn device_memory(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.memory).min().unwrap_or(0)
    }

    /// The profile, when all its devices have the same one.
    pub(crate) fn profile(&self) -> Option<&str> {
        let first = self.kinds.first()?.profile.as_deref()?;
        self.kinds
            .iter()
            .all(|kind| kind.profile.as_deref() == Some(first))
            .then_some(first)
    }
}
