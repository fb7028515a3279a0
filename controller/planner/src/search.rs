//! Chooses: the whole way from a snapshot and a demand to an outcome.

use std::collections::{BTreeMap, BTreeSet};

use dra_cel::Quantity;

use crate::broken::distinct;
use crate::candidates::{self, Candidate};
use crate::demand::{Demand, PlacementType, SharingMode};
use crate::explanation::{BrokenSelector, Explanation, Rejection, RejectionReason};
use crate::inventory::Inventory;
use crate::kinds::{self, Kind, KindKey, Kinds, SelectorCache};
use crate::narrow::{self, Held};
use crate::nodes;
use crate::occupancy::{Occupancy, Spot, physical};
use crate::plan::{DeviceRef, Outcome, Placement, Plan};
use crate::shares::{self, NoShare};
use crate::snapshot::{DeviceClass, Snapshot};
use crate::wording;

/// What a candidate can hold now.
struct Trial<'k> {
    candidate: Candidate<'k>,
    spots: Vec<Spot>,
}

/// Plans one order; compiled selectors are kept in the cache.
pub(crate) fn plan(snapshot: &Snapshot, demand: &Demand, cache: &mut SelectorCache) -> Outcome {
    let classes = allowed_classes(snapshot, demand);
    if classes.is_empty() {
        return Outcome::NoDeviceClass(Explanation::summary(wording::no_device_class(demand)));
    }
    if demand.memory.is_empty() {
        return Outcome::Exhausted(Explanation::summary(wording::no_count()));
    }
    let usable: Vec<bool> = snapshot
        .nodes
        .iter()
        .map(|node| nodes::usable(node, demand).is_ok())
        .collect();
    let inventory = Inventory::new(snapshot, &usable);
    let kinds = kinds::sort(&inventory, &classes, demand, cache);
    let search = Search {
        snapshot,
        demand,
        inventory: &inventory,
        kinds: &kinds,
    };
    search.run(&classes)
}

/// The device classes that the demand allows and the cluster has.
pub(crate) fn allowed_classes<'s>(
    snapshot: &'s Snapshot,
    demand: &Demand,
) -> Vec<(usize, &'s DeviceClass)> {
    let allowed = |class: &DeviceClass| {
        demand
            .device_class_names
            .as_ref()
            .is_none_or(|names| names.contains(&class.name))
    };
    snapshot
        .device_classes
        .iter()
        .enumerate()
        .filter(|(_, class)| allowed(class))
        .collect()
}

struct Search<'a> {
    snapshot: &'a Snapshot,
    demand: &'a Demand,
    inventory: &'a Inventory<'a>,
    kinds: &'a Kinds,
}

impl<'a> Search<'a> {
    fn run(&self, classes: &[(usize, &DeviceClass)]) -> Outcome {
        let now = Occupancy::new(self.inventory, self.snapshot, &self.demand.order);
        let singles = candidates::single(self.inventory, self.kinds, self.demand);
        let minimum = self.demand.replicas.min.max(1) as usize;

        let trials: Vec<Trial<'_>> = singles.iter().map(|c| self.attempt(&now, c)).collect();
        let mut chosen = self.smallest(&now, &trials, minimum);
        let combined: Vec<Trial<'_>> = if chosen.is_none() {
            candidates::combined(&singles)
                .iter()
                .map(|c| self.attempt(&now, c))
                .collect()
        } else {
            Vec::new()
        };
        chosen = chosen.or_else(|| combined.iter().find(|t| t.spots.len() >= minimum));
        chosen = chosen.or_else(|| {
            let any = trials
                .iter()
                .chain(&combined)
                .filter(|t| !t.spots.is_empty());
            // The first of those that hold most.
            any.rev().max_by_key(|t| t.spots.len())
        });

        let mut rejections = self.rejections(classes, &now, &trials, chosen);
        if let Some(trial) = chosen {
            return Outcome::Planned(Box::new(self.planned(trial, rejections)));
        }
        let broken = self.decisive_broken_selectors();
        if !broken.is_empty() {
            return Outcome::Undecidable(Explanation {
                summary: wording::undecidable(&broken),
                rejections,
                broken_selectors: broken,
            });
        }
        let summary = self.exhausted_summary(&now, &singles, &mut rejections);
        Outcome::Exhausted(Explanation {
            summary,
            rejections,
            broken_selectors: Vec::new(),
        })
    }

    /// The first candidate that holds enough. A share is as small as the need and so
    /// usually the first; but where it would break into a GPU of which nothing is held,
    /// and a partition or a share elsewhere would not, that strands less.
    fn smallest<'t, 'k>(
        &self,
        now: &Occupancy,
        trials: &'t [Trial<'k>],
        minimum: usize,
    ) -> Option<&'t Trial<'k>> {
        let first = trials.iter().find(|t| t.spots.len() >= minimum)?;
        if first.candidate.share.is_none() || !first.candidate.is_part() {
            return Some(first);
        }
        let same_need = |t: &&Trial<'_>| {
            t.spots.len() >= minimum
                && t.candidate.is_part()
                && t.candidate.need == first.candidate.need
        };
        let untouched = |t: &&Trial<'_>| {
            let needed = t.spots.get(..minimum).unwrap_or(&t.spots);
            now.untouched(self.inventory, needed)
        };
        trials.iter().filter(same_need).min_by_key(untouched)
    }

    fn attempt<'k>(&self, now: &Occupancy, candidate: &Candidate<'k>) -> Trial<'k> {
        let limit = self
            .demand
            .replicas
            .max
            .max(self.demand.replicas.min)
            .max(1);
        let per_replica = candidate.need.devices;
        let spots = now.clone().place(
            self.inventory,
            &candidate.devices,
            per_replica,
            limit,
            candidate.share.as_ref(),
        );
        Trial {
            candidate: candidate.clone(),
            spots,
        }
    }

    fn planned(&self, trial: &Trial<'_>, rejections: Vec<Rejection>) -> Plan {
        let candidate = &trial.candidate;
        let class = &self.snapshot.device_classes[candidate.class()].name;
        let fit = u32::try_from(trial.spots.len()).unwrap_or(u32::MAX);
        let below_minimum = fit < self.demand.replicas.min;
        let memory_domain = candidate
            .kinds
            .first()
            .and_then(|key| self.kinds.kinds[*key].memory_domain.as_deref())
            .unwrap_or_else(|| candidate.driver());
        let name = self.describe(candidate);
        let reference = |device: &usize| {
            let view = &self.inventory.devices[*device];
            DeviceRef {
                driver: view.driver.to_owned(),
                pool: self.inventory.pools[view.pool].name.to_owned(),
                device: view.device.name.clone(),
            }
        };
        let placements = trial.spots.iter().map(|spot| Placement {
            node: self.snapshot.nodes[spot.node].name.clone(),
            devices: spot.devices.iter().map(reference).collect(),
        });
        Plan {
            device_class_name: class.clone(),
            driver: candidate.driver().to_owned(),
            sharing_mode: match candidate.share {
                Some(_) => SharingMode::Shared,
                None => SharingMode::Dedicated,
            },
            placement_type: candidate.placement(),
            profile: candidate.profile().map(str::to_owned),
            devices_per_replica: candidate.need.devices,
            memory_needed_bytes: candidate.need.bytes_per_device,
            memory_bytes: candidate.memory(),
            device_memory_bytes: candidate.device_memory(),
            selectors: narrow::selectors(
                &candidate.kinds,
                memory_domain,
                candidate.need.bytes_per_device,
                candidate
                    .share
                    .as_ref()
                    .map_or_else(|| self.dedicated(candidate.class()), |_| Held::Shared),
                &self.demand.selectors,
            ),
            capacity_requests: candidate
                .share
                .as_ref()
                .map_or_else(BTreeMap::new, |share| {
                    let amounts = share.requests.iter();
                    amounts
                        .map(|(key, nano)| (key.clone(), Quantity::from_nano(*nano)))
                        .collect()
                }),
            replicas_that_fit: fit,
            below_minimum,
            placements: placements.collect(),
            explanation: Explanation {
                summary: wording::planned(&name, &candidate.need, fit, &self.demand.replicas),
                rejections,
                broken_selectors: self.broken_selectors(),
            },
        }
    }

    /// How a claim of the class says that it wants a device alone.
    fn dedicated(&self, class: usize) -> Held {
        let kinds = self
            .kinds
            .kinds
            .iter()
            .filter(|(key, _)| key.class == class);
        if kinds.into_iter().any(|(key, _)| key.shared) {
            Held::Alone
        } else {
            Held::Unspoken
        }
    }

    fn describe(&self, candidate: &Candidate<'_>) -> String {
        let class = &self.snapshot.device_classes[candidate.class()].name;
        wording::kinds(class, &candidate.kinds, candidate.need.devices)
    }

    fn broken_selectors(&self) -> Vec<BrokenSelector> {
        let unjudged = self.kinds.unjudged.iter().map(|(broken, _)| broken);
        distinct(self.kinds.uncompiled.iter().chain(unjudged))
    }

    /// Broken selectors that might have hidden room: those that do not compile,
    /// and those that failed on a device that is large enough.
    fn decisive_broken_selectors(&self) -> Vec<BrokenSelector> {
        let least = self
            .demand
            .memory
            .iter()
            .map(|need| need.bytes_per_device)
            .min();
        let large = |memory: &Option<u64>| match (memory, least) {
            (Some(memory), Some(least)) => *memory >= least,
            _ => true,
        };
        let unjudged = self
            .kinds
            .unjudged
            .iter()
            .filter(|(_, m)| large(m))
            .map(|(b, _)| b);
        distinct(self.kinds.uncompiled.iter().chain(unjudged))
    }

    /// Why each kind other than the chosen was not chosen.
    fn rejections(
        &self,
        classes: &[(usize, &DeviceClass)],
        now: &Occupancy,
        trials: &[Trial<'_>],
        chosen: Option<&Trial<'_>>,
    ) -> Vec<Rejection> {
        let mut rejections = Vec::new();
        for (index, class) in classes {
            if self.kinds.members.get(index) == Some(&0) {
                rejections.push(Rejection {
                    candidate: class.name.clone(),
                    device_class_name: class.name.clone(),
                    placement_type: None,
                    profile: None,
                    reason: RejectionReason::NoDevices,
                    message: "no published device belongs to it".to_owned(),
                    detail: None,
                });
            }
        }
        let taken: BTreeSet<&KindKey> = chosen
            .iter()
            .flat_map(|t| t.candidate.kinds.iter().copied())
            .collect();
        let tried: BTreeSet<&KindKey> = trials
            .iter()
            .flat_map(|t| t.candidate.kinds.iter().copied())
            .collect();
        let mut before_chosen = true;
        for trial in trials {
            let is_chosen = chosen.is_some_and(|c| {
                c.candidate.need == trial.candidate.need
                    && trial.candidate.kinds.iter().all(|k| taken.contains(k))
            });
            if is_chosen {
                before_chosen = false;
                continue;
            }
            rejections.push(self.not_chosen(now, trial, before_chosen));
        }
        for (key, kind) in &self.kinds.kinds {
            if !tried.contains(key) {
                rejections.push(self.not_tried(key, kind));
            }
        }
        rejections
    }

    /// A candidate that has enough memory but was not chosen.
    fn not_chosen(&self, now: &Occupancy, trial: &Trial<'_>, before_chosen: bool) -> Rejection {
        let candidate = &trial.candidate;
        let fit = trial.spots.len();
        let mut detail = None;
        let (reason, message) = if fit == 0 {
            let mut empty = Occupancy::empty(self.inventory);
            let per_replica = candidate.need.devices;
            if empty
                .place(
                    self.inventory,
                    &candidate.devices,
                    per_replica,
                    1,
                    candidate.share.as_ref(),
                )
                .is_empty()
            {
                (
                    RejectionReason::TooFewPerNode,
                    wording::too_few_per_node(per_replica),
                )
            } else {
                let claims =
                    now.in_the_way(self.inventory, &candidate.devices, candidate.share.as_ref());
                let physical = physical(self.inventory, &candidate.devices);
                detail = Some(wording::taken_long(self.snapshot, physical, &claims));
                (
                    RejectionReason::Taken,
                    wording::taken(self.snapshot, self.demand, physical, &claims),
                )
            }
        } else if before_chosen {
            (
                RejectionReason::FewerReplicas,
                wording::fewer(fit, self.demand.replicas.min),
            )
        } else {
            (RejectionReason::LargerThanNeeded, wording::larger(fit))
        };
        Rejection {
            candidate: self.describe(candidate),
            device_class_name: self.snapshot.device_classes[candidate.class()].name.clone(),
            placement_type: Some(candidate.placement()),
            profile: candidate.profile().map(str::to_owned),
            reason,
            message,
            detail,
        }
    }

    /// A kind that could not be a candidate.
    fn not_tried(&self, key: &KindKey, kind: &Kind) -> Rejection {
        let class = &self.snapshot.device_classes[key.class].name;
        let need = self
            .demand
            .memory
            .iter()
            .map(|need| need.bytes_per_device)
            .min();
        let single = self.demand.memory.iter().filter(|need| need.devices == 1);
        let single = single.map(|need| need.bytes_per_device).min();
        let mut detail = None;
        let (reason, message) = if !self.demand.placement_types.contains(&key.placement) {
            (
                RejectionReason::PlacementTypeNotAllowed,
                wording::placement_type(key.placement),
            )
        } else if kind.usable.is_empty() {
            wording::excluded(&kind.excluded)
        } else if key.memory == 0 {
            (
                RejectionReason::MemoryUnknown,
                "its devices publish no memory".to_owned(),
            )
        } else if key.placement == PlacementType::Partition
            && single.is_none_or(|need| key.memory < need)
            && need.is_some_and(|need| key.memory >= need)
        {
            (
                RejectionReason::PartitionsNotCombined,
                wording::partitions_not_combined(),
            )
        } else if let Some((reason, message, long)) = self.no_share(key, kind, single) {
            detail = long;
            (reason, message)
        } else {
            (
                RejectionReason::TooSmall,
                wording::too_small(key.memory, need.unwrap_or(0)),
            )
        };
        Rejection {
            candidate: wording::kinds(class, &[key], 1),
            device_class_name: class.clone(),
            placement_type: Some(key.placement),
            profile: key.profile.clone(),
            reason,
            message,
            detail,
        }
    }

    /// Why a kind that is held in shares gives none that is large enough.
    fn no_share(
        &self,
        key: &KindKey,
        kind: &Kind,
        need: Option<u64>,
    ) -> Option<(RejectionReason, String, Option<String>)> {
        let device = kind.usable.first().filter(|_| key.shared)?;
        let Some(need) = need else {
            let message = wording::shares_not_combined();
            return Some((RejectionReason::PartitionsNotCombined, message, None));
        };
        let view = &self.inventory.devices[*device];
        match shares::smallest(view, need, &self.demand.share_bounds).err()? {
            NoShare::TooSmall => None,
            NoShare::AboveMaximum { bytes, maximum } => Some((
                RejectionReason::ShareTooLarge,
                wording::share_above_maximum(bytes),
                Some(wording::share_above_maximum_long(bytes, maximum)),
            )),
            NoShare::NotAllowed => Some((
                RejectionReason::ShareTooLarge,
                wording::share_not_allowed(need),
                None,
            )),
        }
    }

    /// Why nothing fits: never, or not now.
    fn exhausted_summary(
        &self,
        now: &Occupancy,
        singles: &[Candidate<'_>],
        rejections: &mut [Rejection],
    ) -> String {
        let mut empty_fit = None;
        for candidate in singles {
            let mut empty = Occupancy::empty(self.inventory);
            let per_replica = candidate.need.devices;
            if !empty
                .place(
                    self.inventory,
                    &candidate.devices,
                    per_replica,
                    1,
                    candidate.share.as_ref(),
                )
                .is_empty()
            {
                empty_fit = Some(candidate);
                break;
            }
        }
        // What decided comes first.
        rejections.sort_by_key(|r| r.reason != RejectionReason::Taken);
        if empty_fit.is_none() {
            return wording::never_fits(self.snapshot, self.demand, self.kinds);
        }
        let devices: BTreeSet<usize> = singles
            .iter()
            .flat_map(|c| c.devices.iter().copied())
            .collect();
        let devices: Vec<usize> = devices.into_iter().collect();
        let claims = singles.iter().flat_map(|candidate| {
            now.in_the_way(self.inventory, &candidate.devices, candidate.share.as_ref())
        });
        let claims: BTreeSet<usize> = claims.collect();
        wording::taken_short(
            self.snapshot,
            self.demand,
            physical(self.inventory, &devices),
            &claims,
        )
    }
}
