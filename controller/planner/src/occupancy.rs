//! Who holds what, and what a further allocation would leave.
//!
//! In: the inventory and the allocated claims. Out: whether a device can be
//! taken, a simulation of taking several, and who stands in the way. The rules
//! are those of the structured allocator: counters are charged by *published*
//! devices that are allocated; a device that allows multiple allocations is
//! charged once, with its first share, and each share takes of its capacities; a
//! pool with an overdrawn counter gives out no device that draws on counters.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::inventory::{Inventory, parts_per_million};
use crate::shares::{self, Share};
use crate::snapshot::{AllocatedDevice, OrderRef, Snapshot};

/// The state of all devices and counters.
#[derive(Debug, Clone)]
pub(crate) struct Occupancy {
    /// Claims that hold each device, by device; indexes into the snapshot.
    holders: Vec<Vec<u32>>,
    taken: Vec<bool>,
    /// What shares take of each capacity of a device, in published order and
    /// nano-units; only of devices that have shares.
    used: HashMap<usize, Vec<i128>>,
    /// What is left of each pool's counters, in nano-units.
    left: Vec<Vec<i128>>,
    overdrawn: Vec<bool>,
}

/// Where a simulated replica lies: a node and devices, as indexes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) node: usize,
    pub(crate) devices: Vec<usize>,
}

impl Occupancy {
    /// Nothing is held.
    pub(crate) fn empty(inventory: &Inventory<'_>) -> Self {
        Self {
            holders: vec![Vec::new(); inventory.devices.len()],
            taken: vec![false; inventory.devices.len()],
            used: HashMap::new(),
            left: inventory
                .pools
                .iter()
                .map(|pool| pool.totals.clone())
                .collect(),
            overdrawn: vec![false; inventory.pools.len()],
        }
    }

    /// What every claim holds, those of `own` aside.
    pub(crate) fn new(inventory: &Inventory<'_>, snapshot: &Snapshot, own: &OrderRef) -> Self {
        let mut occupancy = Self::empty(inventory);
        for (index, claim) in snapshot.claims.iter().enumerate() {
            if claim.order.as_ref() == Some(own) {
                continue;
            }
            for held in claim.devices.iter().filter(|held| !held.admin_access) {
                let key = (
                    held.driver.as_str(),
                    held.pool.as_str(),
                    held.device.as_str(),
                );
                let Some(&device) = inventory.by_name.get(&key) else {
                    continue;
                };
                if !occupancy.taken[device] {
                    occupancy.take(inventory, device);
                }
                occupancy.holders[device].push(u32::try_from(index).unwrap_or(u32::MAX));
                if inventory.devices[device].device.allow_multiple_allocations {
                    occupancy.charge(device, &held_amounts(inventory, device, held));
                }
            }
        }
        for (pool, left) in occupancy.left.iter().enumerate() {
            occupancy.overdrawn[pool] = left.iter().any(|left| *left < 0);
        }
        occupancy
    }

    /// Whether a claim could get the device: alone, or this much of it.
    pub(crate) fn available(
        &self,
        inventory: &Inventory<'_>,
        device: usize,
        share: Option<&Share>,
    ) -> bool {
        match share {
            None => self.free(inventory, device),
            Some(share) => self.share_of(inventory, device, share).is_some(),
        }
    }

    /// What a share would take of each capacity; `None` where there is no room.
    fn share_of(
        &self,
        inventory: &Inventory<'_>,
        device: usize,
        share: &Share,
    ) -> Option<Vec<i128>> {
        let view = &inventory.devices[device];
        // Shares beside the first draw on no counter.
        if !self.taken[device] && !self.free(inventory, device) {
            return None;
        }
        let amounts = shares::charges(view, &share.requests)?;
        let used = self.used.get(&device);
        let mut capacities = view.device.capacity.values().zip(&amounts).enumerate();
        let fits = capacities.all(|(index, (capacity, amount))| {
            let before = used.map_or(0, |used| used[index]);
            before.saturating_add(*amount) <= capacity.value.nano()
        });
        fits.then_some(amounts)
    }

    /// Adds what a share takes of a device's capacities.
    fn charge(&mut self, device: usize, amounts: &[i128]) {
        let used = self
            .used
            .entry(device)
            .or_insert_with(|| vec![0; amounts.len()]);
        for (used, amount) in used.iter_mut().zip(amounts) {
            *used = used.saturating_add(*amount);
        }
    }

    /// Whether a dedicated claim could get the device.
    fn free(&self, inventory: &Inventory<'_>, device: usize) -> bool {
        let view = &inventory.devices[device];
        if self.taken[device] {
            return false;
        }
        if view.draws.is_empty() {
            return true;
        }
        !self.overdrawn[view.pool]
            && view
                .draws
                .iter()
                .all(|&(counter, amount)| self.left[view.pool][counter] >= amount)
    }

    /// Marks the device as held and charges its counters.
    fn take(&mut self, inventory: &Inventory<'_>, device: usize) {
        let view = &inventory.devices[device];
        self.taken[device] = true;
        for &(counter, amount) in &view.draws {
            self.left[view.pool][counter] -= amount;
        }
    }

    fn release(&mut self, inventory: &Inventory<'_>, device: usize) {
        let view = &inventory.devices[device];
        self.taken[device] = false;
        for &(counter, amount) in &view.draws {
            self.left[view.pool][counter] += amount;
        }
    }

    /// Places up to `limit` replicas of `per_replica` devices each, all on one
    /// node, on the given devices. One device a replica goes where least is
    /// stranded: first on GPUs that are already broken up, and there where it
    /// blocks the fewest other devices. Several go to the node that has the
    /// fewest to spare.
    pub(crate) fn place(
        &mut self,
        inventory: &Inventory<'_>,
        devices: &[usize],
        per_replica: u32,
        limit: u32,
        share: Option<&Share>,
    ) -> Vec<Spot> {
        if let Some(share) = share {
            self.place_shares(inventory, devices, share, limit as usize)
        } else if per_replica == 1 {
            self.place_singly(inventory, devices, limit as usize)
        } else {
            self.place_together(inventory, devices, per_replica as usize, limit as usize)
        }
    }

    /// Shares meet on few devices: first on those that have shares already, the
    /// fullest first, then on untouched ones.
    fn place_shares(
        &mut self,
        inventory: &Inventory<'_>,
        devices: &[usize],
        share: &Share,
        limit: usize,
    ) -> Vec<Spot> {
        let busy = self.busy_nodes(inventory);
        let mut order: Vec<usize> = devices.to_vec();
        order.sort_by_cached_key(|&device| {
            let on_node = busy_on_node(inventory, &busy, device);
            std::cmp::Reverse((self.filled(inventory, device), on_node))
        });
        let mut spots = Vec::new();
        for device in order {
            let Some(&node) = inventory.devices[device].nodes.first() else {
                continue;
            };
            while spots.len() < limit {
                let Some(amounts) = self.share_of(inventory, device, share) else {
                    break;
                };
                if !self.taken[device] {
                    self.take(inventory, device);
                }
                self.charge(device, &amounts);
                spots.push(Spot {
                    node,
                    devices: vec![device],
                });
            }
        }
        spots
    }

    /// How much of a device is held in shares, in parts per million of the capacity
    /// that is held most; at least one where it has any share.
    fn filled(&self, inventory: &Inventory<'_>, device: usize) -> i128 {
        let Some(used) = self.used.get(&device) else {
            return 0;
        };
        let capacities = inventory.devices[device].device.capacity.values();
        let parts = capacities
            .zip(used)
            .map(|(capacity, used)| parts_per_million(*used, capacity.value.nano()));
        parts.max().unwrap_or(0).max(1)
    }

    /// How many GPUs, of which nothing is held, these spots would take from.
    pub(crate) fn untouched(&self, inventory: &Inventory<'_>, spots: &[Spot]) -> usize {
        let devices = spots.iter().flat_map(|spot| &spot.devices);
        let untouched =
            devices.filter(|&&device| !self.taken[device] && self.broken(inventory, device) == 0);
        untouched
            .map(|&device| GpuKey::of(inventory, device))
            .collect::<HashSet<_>>()
            .len()
    }

    fn place_singly(
        &mut self,
        inventory: &Inventory<'_>,
        devices: &[usize],
        limit: usize,
    ) -> Vec<Spot> {
        // Devices of one GPU together, in published order.
        let mut gpus: Vec<Vec<usize>> = Vec::new();
        let mut index = HashMap::new();
        for &device in devices {
            let gpu = *index
                .entry(GpuKey::of(inventory, device))
                .or_insert(gpus.len());
            match gpus.get_mut(gpu) {
                Some(group) => group.push(device),
                None => gpus.push(vec![device]),
            }
        }
        let busy = self.busy_nodes(inventory);
        gpus.sort_by_cached_key(|group| {
            let first = group[0];
            let on_node = busy_on_node(inventory, &busy, first);
            std::cmp::Reverse((self.broken(inventory, first), on_node))
        });

        let mut spots = Vec::new();
        for group in gpus {
            while spots.len() < limit {
                let mut best: Option<(usize, usize)> = None;
                for &device in &group {
                    if self.free(inventory, device) {
                        let blocked = self.blocked_by(inventory, device);
                        if best.is_none_or(|(least, _)| blocked < least) {
                            best = Some((blocked, device));
                        }
                    }
                }
                let Some((_, device)) = best else { break };
                let Some(&node) = inventory.devices[device].nodes.first() else {
                    break;
                };
                self.take(inventory, device);
                spots.push(Spot {
                    node,
                    devices: vec![device],
                });
            }
        }
        spots
    }

    fn place_together(
        &mut self,
        inventory: &Inventory<'_>,
        devices: &[usize],
        per_replica: usize,
        limit: usize,
    ) -> Vec<Spot> {
        let mut by_node: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for &device in devices {
            if self.free(inventory, device) {
                for &node in inventory.devices[device].nodes.iter() {
                    by_node.entry(node).or_default().push(device);
                }
            }
        }
        let mut nodes: Vec<(usize, Vec<usize>)> = by_node.into_iter().collect();
        nodes.sort_by_key(|(_, free)| free.len());

        let mut spots = Vec::new();
        for (node, candidates) in nodes {
            let mut chosen = Vec::new();
            for device in candidates {
                if spots.len() == limit {
                    break;
                }
                // Taking one may exhaust counters that the next one needs.
                if self.free(inventory, device) {
                    self.take(inventory, device);
                    chosen.push(device);
                }
                if chosen.len() == per_replica {
                    spots.push(Spot {
                        node,
                        devices: std::mem::take(&mut chosen),
                    });
                }
            }
            for device in chosen {
                self.release(inventory, device);
            }
        }
        spots
    }

    /// How much of the device's GPU is gone, in parts per million of its
    /// counters; zero for an untouched one.
    fn broken(&self, inventory: &Inventory<'_>, device: usize) -> i128 {
        let view = &inventory.devices[device];
        let pool = &inventory.pools[view.pool];
        let Some(set) = view.set.and_then(|set| pool.sets.get(set)) else {
            return 0;
        };
        set.counters
            .iter()
            .map(|&counter| {
                let (total, left) = (pool.totals[counter], self.left[view.pool][counter]);
                parts_per_million(total - left, total)
            })
            .sum()
    }

    /// How many other devices of the GPU could be taken now and no longer could
    /// afterwards.
    fn blocked_by(&mut self, inventory: &Inventory<'_>, device: usize) -> usize {
        let view = &inventory.devices[device];
        let Some(set) = view
            .set
            .and_then(|set| inventory.pools[view.pool].sets.get(set))
        else {
            return 0;
        };
        let free_now: Vec<usize> = set
            .devices
            .iter()
            .copied()
            .filter(|&other| self.free(inventory, other))
            .collect();
        self.take(inventory, device);
        let blocked = free_now
            .iter()
            .filter(|&&other| !self.free(inventory, other))
            .count();
        self.release(inventory, device);
        blocked
    }

    /// How many devices are held on each node.
    fn busy_nodes(&self, inventory: &Inventory<'_>) -> HashMap<usize, usize> {
        let mut busy = HashMap::new();
        for (device, view) in inventory.devices.iter().enumerate() {
            if self.taken[device]
                && let Some(&node) = view.nodes.first()
            {
                *busy.entry(node).or_insert(0) += 1;
            }
        }
        busy
    }

    /// Claims that keep the devices from being free, as indexes.
    pub(crate) fn in_the_way(
        &self,
        inventory: &Inventory<'_>,
        devices: &[usize],
        share: Option<&Share>,
    ) -> BTreeSet<usize> {
        let mut claims = BTreeSet::new();
        for &device in devices {
            if self.available(inventory, device, share) {
                continue;
            }
            claims.extend(self.holders[device].iter().map(|&claim| claim as usize));
            let view = &inventory.devices[device];
            let Some(set) = view
                .set
                .and_then(|set| inventory.pools[view.pool].sets.get(set))
            else {
                continue;
            };
            for &other in &set.devices {
                let overlaps = |counter: usize| {
                    view.draws
                        .iter()
                        .any(|&(own, amount)| own == counter && self.left[view.pool][own] < amount)
                };
                if inventory.devices[other]
                    .draws
                    .iter()
                    .any(|&(counter, _)| overlaps(counter))
                {
                    claims.extend(self.holders[other].iter().map(|&claim| claim as usize));
                }
            }
        }
        claims
    }
}

/// How many devices are held on the node of a device, as [`Occupancy::busy_nodes`] counted.
fn busy_on_node(inventory: &Inventory<'_>, busy: &HashMap<usize, usize>, device: usize) -> usize {
    let node = inventory.devices[device].nodes.first();
    node.map_or(0, |n| busy.get(n).copied().unwrap_or(0))
}

/// What a claim holds of each capacity of a device that allows multiple allocations.
fn held_amounts(inventory: &Inventory<'_>, device: usize, held: &AllocatedDevice) -> Vec<i128> {
    let capacities = inventory.devices[device].device.capacity.iter();
    capacities
        .map(|(key, capacity)| match &held.share_id {
            Some(_) => held.consumed_capacity.get(key).map_or(0, |q| q.nano()),
            // Allocated before the device was handed out in shares: all of it.
            None => capacity.value.nano(),
        })
        .collect()
}

/// How many physical devices these are, whatever their partitions.
pub(crate) fn physical(inventory: &Inventory<'_>, devices: &[usize]) -> usize {
    devices
        .iter()
        .map(|&d| GpuKey::of(inventory, d))
        .collect::<HashSet<_>>()
        .len()
}

/// Identifies a physical GPU: a counter set, or a device that draws on none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum GpuKey {
    Set(usize, usize),
    Device(usize),
}

impl GpuKey {
    fn of(inventory: &Inventory<'_>, device: usize) -> Self {
        let view = &inventory.devices[device];
        view.set
            .map_or(Self::Device(device), |set| Self::Set(view.pool, set))
    }
}
