//! The devices of a snapshot, pool by pool, in the scheduler's order.
//!
//! In: slices. Out: every device of each pool's highest generation with its
//! counters resolved to indexes, and why nothing may be taken from a pool that
//! is incomplete or invalid: the rules of the structured allocator.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use dra_cel::Quantity;

use crate::nodes;
use crate::snapshot::{Capacity, Device, Node, Scope, Slice, Snapshot};

/// Everything published.
#[derive(Debug)]
pub(crate) struct Inventory<'s> {
    pub(crate) pools: Vec<PoolView<'s>>,
    pub(crate) devices: Vec<DeviceView<'s>>,
    /// Device by driver, pool and name.
    pub(crate) by_name: HashMap<(&'s str, &'s str, &'s str), usize>,
}

/// One pool.
#[derive(Debug)]
pub(crate) struct PoolView<'s> {
    pub(crate) name: &'s str,
    /// Why nothing may be taken from it.
    pub(crate) problem: Option<PoolProblem>,
    /// What each of its counters has in total, in nano-units.
    pub(crate) totals: Vec<i128>,
    /// Devices that draw on each counter set, by set.
    pub(crate) sets: Vec<CounterSetView>,
}

/// One counter set of a pool: usually one physical GPU.
#[derive(Debug, Default)]
pub(crate) struct CounterSetView {
    /// Its counters' indexes in [`PoolView::totals`].
    pub(crate) counters: Vec<usize>,
    /// Devices that draw on it.
    pub(crate) devices: Vec<usize>,
}

/// Why nothing may be taken from a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PoolProblem {
    /// Fewer slices than the pool says it has.
    Incomplete { present: usize, expected: i64 },
    /// Its slices contradict each other.
    Invalid(String),
}

/// One device.
#[derive(Debug)]
pub(crate) struct DeviceView<'s> {
    pub(crate) device: &'s Device,
    pub(crate) driver: &'s str,
    pub(crate) pool: usize,
    /// Nodes that reach it and that the caller may use, as indexes.
    pub(crate) nodes: Arc<[usize]>,
    /// What it draws: index in the pool's totals and amount in nano-units.
    pub(crate) draws: Vec<(usize, i128)>,
    /// The counter set it draws on first.
    pub(crate) set: Option<usize>,
    /// The part of its counter sets that it takes, in parts per million,
    /// averaged over their counters; everything when it draws on none.
    pub(crate) footprint: u32,
}

impl<'s> Inventory<'s> {
    /// Reads the slices; `usable` says which nodes may be used.
    pub(crate) fn new(snapshot: &'s Snapshot, usable: &'s [bool]) -> Self {
        let mut pools: BTreeMap<(&str, &str), Vec<&'s Slice>> = BTreeMap::new();
        for slice in &snapshot.slices {
            pools
                .entry((&slice.driver, &slice.pool.name))
                .or_default()
                .push(slice);
        }
        let mut inventory = Self {
            pools: Vec::new(),
            devices: Vec::new(),
            by_name: HashMap::new(),
        };
        let mut reach = Reach {
            nodes: &snapshot.nodes,
            usable,
            known: HashMap::new(),
        };
        for ((driver, name), slices) in pools {
            inventory.add_pool(driver, name, slices, &mut reach);
        }
        inventory
    }

    fn add_pool(
        &mut self,
        driver: &'s str,
        name: &'s str,
        mut slices: Vec<&'s Slice>,
        reach: &mut Reach<'s>,
    ) {
        let generation = slices.iter().map(|s| s.pool.generation).max().unwrap_or(0);
        slices.retain(|s| s.pool.generation == generation);
        slices.sort_by(|a, b| a.name.cmp(&b.name));

        let mut problem = None;
        let expected = slices.first().map_or(0, |s| s.pool.slice_count);
        if i64::try_from(slices.len()) != Ok(expected) {
            problem = Some(PoolProblem::Incomplete {
                present: slices.len(),
                expected,
            });
        }
        let invalid = |reason: String| Some(PoolProblem::Invalid(reason));

        let mut totals = Vec::new();
        let mut sets = Vec::new();
        let mut set_index = HashMap::new();
        let mut counter_index = HashMap::new();
        for set in slices.iter().flat_map(|s| &s.counter_sets) {
            if set_index.insert(set.name.as_str(), sets.len()).is_some() {
                problem = problem.or_else(|| invalid(format!("two counter sets {}", set.name)));
                continue;
            }
            let mut view = CounterSetView::default();
            for (counter, total) in &set.counters {
                counter_index.insert((set.name.as_str(), counter.as_str()), totals.len());
                view.counters.push(totals.len());
                totals.push(total.nano());
            }
            sets.push(view);
        }

        let pool = self.pools.len();
        let mut names = BTreeSet::new();
        for slice in &slices {
            for device in &slice.devices {
                if !names.insert(device.name.as_str()) {
                    problem = problem.or_else(|| invalid(format!("two devices {}", device.name)));
                    continue;
                }
                let mut draws = Vec::new();
                let mut set = None;
                for consumption in &device.consumes {
                    let Some(&index) = set_index.get(consumption.counter_set.as_str()) else {
                        let reason = format!("no counter set {}", consumption.counter_set);
                        problem = problem.or_else(|| invalid(reason));
                        continue;
                    };
                    set = set.or(Some(index));
                    for (counter, amount) in &consumption.counters {
                        let key = (consumption.counter_set.as_str(), counter.as_str());
                        match counter_index.get(&key) {
                            Some(&counter) => draws.push((counter, amount.nano())),
                            None => {
                                let reason = format!("no counter {counter} in set {}", key.0);
                                problem = problem.or_else(|| invalid(reason));
                            }
                        }
                    }
                }
                let index = self.devices.len();
                if let Some(set) = set {
                    sets[set].devices.push(index);
                }
                let nodes = reach.of(slice, device);
                self.by_name.insert((driver, name, &device.name), index);
                self.devices.push(DeviceView {
                    device,
                    driver,
                    pool,
                    nodes,
                    footprint: footprint(&draws, &totals, set.map(|s: usize| &sets[s])),
                    draws,
                    set,
                });
            }
        }
        self.pools.push(PoolView {
            name,
            problem,
            totals,
            sets,
        });
    }
}

/// A whole, in parts per million.
pub(crate) const ALL_PARTS: u32 = 1_000_000;

/// What an amount is of a total, in parts per million; nothing of nothing.
pub(crate) fn parts_per_million(amount: i128, total: i128) -> i128 {
    if total > 0 {
        amount.saturating_mul(ALL_PARTS.into()) / total
    } else {
        0
    }
}

/// The average part, in parts per million, of a set's counters that is drawn.
fn footprint(draws: &[(usize, i128)], totals: &[i128], set: Option<&CounterSetView>) -> u32 {
    let Some(set) = set else { return ALL_PARTS };
    let parts: i128 = draws
        .iter()
        .filter(|(counter, _)| set.counters.contains(counter))
        .map(|(counter, amount)| {
            let total = totals.get(*counter).copied().unwrap_or(0);
            parts_per_million(*amount, total).clamp(0, ALL_PARTS.into())
        })
        .sum();
    let counters = i128::try_from(set.counters.len())
        .unwrap_or(i128::MAX)
        .max(1);
    u32::try_from(parts / counters).unwrap_or(u32::MAX)
}

/// Resolves scopes to nodes; node-local scopes, which are nearly all, by name.
struct Reach<'s> {
    nodes: &'s [Node],
    usable: &'s [bool],
    known: HashMap<&'s str, Arc<[usize]>>,
}

impl<'s> Reach<'s> {
    fn of(&mut self, slice: &'s Slice, device: &'s Device) -> Arc<[usize]> {
        let name = match (&slice.scope, &device.scope) {
            (Scope::NodeName(name), _) | (Scope::PerDevice, Some(Scope::NodeName(name))) => name,
            _ => return self.search(&slice.scope, device.scope.as_ref()),
        };
        if let Some(known) = self.known.get(name.as_str()) {
            return known.clone();
        }
        let found = self.search(&slice.scope, device.scope.as_ref());
        self.known.insert(name, found.clone());
        found
    }

    fn search(&self, slice: &Scope, device: Option<&Scope>) -> Arc<[usize]> {
        (0..self.nodes.len())
            .filter(|&n| self.usable[n] && nodes::in_scope(&self.nodes[n], slice, device))
            .collect()
    }
}

impl DeviceView<'_> {
    /// What the driver publishes under an unqualified name, wherever it wrote the
    /// domain, with the name as it is published.
    fn own<'m, T>(&self, map: &'m BTreeMap<String, T>, name: &str) -> Option<(&'m str, &'m T)> {
        let found = map.get_key_value(name).or_else(|| {
            map.iter().find(|(key, _)| {
                key.split_once('/')
                    .is_some_and(|(d, n)| d == self.driver && n == name)
            })
        });
        found.map(|(key, value)| (key.as_str(), value))
    }

    /// A capacity of the driver's domain, with the name as it is published.
    pub(crate) fn capacity(&self, name: &str) -> Option<(&str, &Capacity)> {
        self.own(&self.device.capacity, name)
    }

    /// A text attribute in the driver's domain.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.own(&self.device.attributes, name)
            .and_then(|(_, value)| value.as_str())
    }

    /// The capacity `memory` of the driver's domain, else of any domain; with
    /// the domain that it is in.
    pub(crate) fn memory(&self) -> Option<(&str, Quantity)> {
        if let Some((_, capacity)) = self.capacity("memory") {
            return Some((self.driver, capacity.value));
        }
        self.device.capacity.iter().find_map(|(key, capacity)| {
            let (domain, name) = key.split_once('/')?;
            (name == "memory").then_some((domain, capacity.value))
        })
    }
}
