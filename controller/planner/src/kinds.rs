//! Sorts devices into kinds: what a plan chooses between.
//!
//! In: the inventory, device classes, the demand's selectors. Out: for each
//! device class the kinds of devices that belong to it, with the usable devices
//! of each and the number ruled out, by reason. A kind's devices are
//! interchangeable: same driver, type, profile and memory.
//!
//! What a device is, is read as any driver writes it: attribute `type` in the
//! driver's domain (`gpu` or `mig`); without it, or with another one, a device that
//! takes only a part of its counter set is a partition. Memory is the capacity
//! `memory`. A device that allows multiple allocations is held in shares.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use dra_cel::{CompileError, DeviceFacts, EvaluationError, Selector};

use crate::demand::{Demand, PlacementType, SharingMode};
use crate::explanation::{BrokenSelector, SelectorHolder};
use crate::inventory::{ALL_PARTS, DeviceView, Inventory, PoolProblem};
use crate::nodes;
use crate::snapshot::DeviceClass;

/// Compiled selectors by expression.
pub(crate) type SelectorCache = HashMap<String, Result<Selector, CompileError>>;

/// What makes devices interchangeable, within one device class.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct KindKey {
    pub(crate) class: usize,
    pub(crate) driver: String,
    pub(crate) placement: PlacementType,
    pub(crate) profile: Option<String>,
    /// Several claims may hold it at once, each an amount of it.
    pub(crate) shared: bool,
    /// In bytes; zero when the devices publish none.
    pub(crate) memory: u64,
}

/// The devices of one kind.
#[derive(Debug, Default)]
pub(crate) struct Kind {
    /// Devices that the demand may have, if they are free.
    pub(crate) usable: Vec<usize>,
    /// How many are ruled out, by reason.
    pub(crate) excluded: BTreeMap<Exclusion, u32>,
    /// What one of them takes of a GPU, in parts per million.
    pub(crate) footprint: u32,
    /// Domain of the capacity `memory`.
    pub(crate) memory_domain: Option<String>,
}

/// Why a device is ruled out, used or not.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Exclusion {
    /// The order's class has a selector that it does not match.
    Selector,
    /// A selector of the order's class cannot be judged on it.
    Undecidable,
    /// It has a taint that is not tolerated.
    Tainted(String),
    /// The order may use none of the nodes that reach it.
    Node,
    /// Its pool is incomplete.
    PoolIncomplete(String),
    /// Its pool is invalid.
    PoolInvalid(String),
    /// The class does not allow how it is held: alone or in shares.
    SharingMode(SharingMode),
}

/// All that was found out.
#[derive(Debug, Default)]
pub(crate) struct Kinds {
    pub(crate) kinds: BTreeMap<KindKey, Kind>,
    /// Selectors that do not compile.
    pub(crate) uncompiled: Vec<BrokenSelector>,
    /// Selectors that could not be judged on a device, and that device's memory
    /// if nobody else vouches for the device.
    pub(crate) unjudged: Vec<(BrokenSelector, Option<u64>)>,
    /// Devices in each allowed class, by class.
    pub(crate) members: BTreeMap<usize, u32>,
}

/// Sorts the devices that belong to the given device classes.
pub(crate) fn sort(
    inventory: &Inventory<'_>,
    classes: &[(usize, &DeviceClass)],
    demand: &Demand,
    cache: &mut SelectorCache,
) -> Kinds {
    let mut kinds = Kinds::default();
    let own = compile(
        &demand.selectors,
        &SelectorHolder::ServiceClass,
        cache,
        &mut kinds,
    );
    let mut compiled = Vec::new();
    for &(index, class) in classes {
        kinds.members.insert(index, 0);
        let holder = SelectorHolder::DeviceClass(class.name.clone());
        if compile(&class.selectors, &holder, cache, &mut kinds) {
            compiled.push((index, class, holder));
        }
    }
    if !own {
        // Without the class's policy no device can be judged.
        return kinds;
    }

    let mut unjudged = Vec::new();
    let mut judged = BTreeSet::new();
    for (device, view) in inventory.devices.iter().enumerate() {
        let facts = facts(view);
        // Judged once, whatever the number of device classes.
        let mut policy = None;
        for (index, class, holder) in &compiled {
            match judge(&class.selectors, &facts, cache) {
                Ok(false) => continue,
                Ok(true) => {}
                Err((expression, error)) => {
                    unjudged.push((device, broken(holder, expression, &error, view, inventory)));
                    continue;
                }
            }
            *kinds.members.entry(*index).or_insert(0) += 1;
            let verdict = policy.get_or_insert_with(|| judge(&demand.selectors, &facts, cache));
            let exclusion = match verdict {
                Ok(true) => exclusion(inventory, view, demand),
                Ok(false) => Some(Exclusion::Selector),
                Err((expression, error)) => {
                    let holder = SelectorHolder::ServiceClass;
                    unjudged.push((device, broken(&holder, expression, error, view, inventory)));
                    Some(Exclusion::Undecidable)
                }
            };
            if exclusion != Some(Exclusion::Undecidable) {
                judged.insert(device);
            }
            kinds.add(*index, device, view, exclusion);
        }
    }
    for (device, selector) in unjudged {
        if judged.contains(&device) {
            continue;
        }
        let memory = inventory.devices[device]
            .memory()
            .and_then(|(_, m)| m.to_bytes());
        kinds.unjudged.push((selector, memory));
    }
    kinds
}

impl Kinds {
    fn add(
        &mut self,
        class: usize,
        device: usize,
        view: &DeviceView<'_>,
        exclusion: Option<Exclusion>,
    ) {
        let memory = view.memory();
        let key = KindKey {
            class,
            driver: view.driver.to_owned(),
            placement: placement_type(view),
            profile: view.text("profile").map(str::to_owned),
            shared: view.device.allow_multiple_allocations,
            memory: memory
                .and_then(|(_, amount)| amount.to_bytes())
                .unwrap_or(0),
        };
        let kind = self.kinds.entry(key).or_insert_with(|| Kind {
            footprint: view.footprint,
            memory_domain: memory.map(|(domain, _)| domain.to_owned()),
            ..Kind::default()
        });
        match exclusion {
            Some(exclusion) => *kind.excluded.entry(exclusion).or_insert(0) += 1,
            None => kind.usable.push(device),
        }
    }
}

fn placement_type(view: &DeviceView<'_>) -> PlacementType {
    match view.text("type") {
        Some("gpu") => PlacementType::WholeDevice,
        Some("mig") => PlacementType::Partition,
        _ if view.footprint < ALL_PARTS => PlacementType::Partition,
        _ => PlacementType::WholeDevice,
    }
}

/// What rules a device out that all selectors match.
fn exclusion(
    inventory: &Inventory<'_>,
    view: &DeviceView<'_>,
    demand: &Demand,
) -> Option<Exclusion> {
    let pool = &inventory.pools[view.pool];
    let mode = if view.device.allow_multiple_allocations {
        SharingMode::Shared
    } else {
        SharingMode::Dedicated
    };
    if !demand.sharing_modes.contains(&mode) {
        return Some(Exclusion::SharingMode(mode));
    }
    match &pool.problem {
        Some(PoolProblem::Incomplete { present, expected }) => {
            let detail = format!("pool {} has {present} of {expected} slices", pool.name);
            return Some(Exclusion::PoolIncomplete(detail));
        }
        Some(PoolProblem::Invalid(reason)) => {
            return Some(Exclusion::PoolInvalid(format!(
                "pool {}: {reason}",
                pool.name
            )));
        }
        None => {}
    }
    if let Some(taint) = nodes::intolerable(&view.device.taints, &demand.device_tolerations) {
        return Some(Exclusion::Tainted(taint.key.clone()));
    }
    view.nodes.is_empty().then_some(Exclusion::Node)
}

fn facts(view: &DeviceView<'_>) -> DeviceFacts {
    let device = view.device;
    DeviceFacts::new(
        view.driver,
        device.allow_multiple_allocations,
        device
            .attributes
            .iter()
            .map(|(name, value)| (name.as_str(), value)),
        device
            .capacity
            .iter()
            .map(|(name, capacity)| (name.as_str(), capacity.value)),
    )
}

/// Compiles an object's selectors; whether all of them do.
fn compile(
    expressions: &[String],
    holder: &SelectorHolder,
    cache: &mut SelectorCache,
    kinds: &mut Kinds,
) -> bool {
    let mut all = true;
    for expression in expressions {
        let compiled = cache
            .entry(expression.clone())
            .or_insert_with(|| Selector::compile(expression));
        if let Err(error) = compiled {
            all = false;
            kinds.uncompiled.push(BrokenSelector {
                holder: holder.clone(),
                expression: expression.clone(),
                error: error.to_string(),
                device: None,
            });
        }
    }
    all
}

/// Whether all expressions match, in order, up to the first that does not.
fn judge<'e>(
    expressions: &'e [String],
    facts: &DeviceFacts,
    cache: &SelectorCache,
) -> Result<bool, (&'e str, EvaluationError)> {
    for expression in expressions {
        // All of them compiled: see `compile`.
        let Some(Ok(selector)) = cache.get(expression) else {
            return Ok(false);
        };
        match selector.matches(facts) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) => return Err((expression, error)),
        }
    }
    Ok(true)
}

fn broken(
    holder: &SelectorHolder,
    expression: &str,
    error: &EvaluationError,
    view: &DeviceView<'_>,
    inventory: &Inventory<'_>,
) -> BrokenSelector {
    let pool = inventory.pools[view.pool].name;
    BrokenSelector {
        holder: holder.clone(),
        expression: expression.to_owned(),
        error: error.to_string(),
        device: Some(format!("{}/{pool}/{}", view.driver, view.device.name)),
    }
}
