//! Shares: amounts of a device that several claims hold at once.
//!
//! In: a device that allows multiple allocations, the bytes that a replica needs, the
//! bounds of its class. Out: what to request of each capacity, and what the scheduler
//! will charge for it. The arithmetic is that of the structured allocator
//! (`consumable_capacity.go` of Kubernetes 1.37): an amount that is not requested is the
//! policy's default or everything, requests are rounded up to the policy's step, and an
//! amount that the policy does not allow rules the device out. All amounts are in
//! nano-units, as quantities are compared.

use std::collections::BTreeMap;

use dra_cel::Quantity;

use crate::demand::ShareBounds;
use crate::inventory::{ALL_PARTS, DeviceView, parts_per_million};
use crate::snapshot::{Capacity, RequestPolicy};

const NANO: i128 = 1_000_000_000;

/// What a claim requests of each capacity, by the name under which it is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Share {
    /// Amounts as they are granted: rounding them again changes nothing.
    pub(crate) requests: BTreeMap<String, i128>,
    /// Memory that is granted, in bytes.
    pub(crate) bytes: u64,
    /// The largest part that it takes of any capacity, in parts per million.
    pub(crate) part: u32,
}

/// Why a kind of device gives no share for a need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoShare {
    /// The device has less memory than is needed.
    TooSmall,
    /// The share would exceed what the class allows; in bytes.
    AboveMaximum { bytes: u64, maximum: u64 },
    /// The device's request policy allows no such amount.
    NotAllowed,
}

/// The smallest share of a device that holds the bytes within the bounds.
///
/// Memory decides. Every further capacity (compute, in whatever unit the driver counts
/// it) is requested in proportion: a claim that names no amount would get the default,
/// which is usually everything, and leave no room for a second one.
pub(crate) fn smallest(
    device: &DeviceView<'_>,
    needed: u64,
    bounds: &ShareBounds,
) -> Result<Share, NoShare> {
    let (memory_key, memory) = device.capacity("memory").ok_or(NoShare::TooSmall)?;
    let total = memory.value.to_bytes().unwrap_or(0);
    if total < needed || total == 0 {
        return Err(NoShare::TooSmall);
    }
    let percent = |percent: u32| u128::from(total) * u128::from(percent);
    let least = bounds.min_percent.map_or(0, |p| percent(p).div_ceil(100));
    let wanted = u128::from(needed).max(least);
    let wanted = i128::try_from(wanted).unwrap_or(i128::MAX);
    let granted = charge(Some(wanted.saturating_mul(NANO)), memory).ok_or(NoShare::NotAllowed)?;
    let bytes = u64::try_from(granted / NANO).unwrap_or(u64::MAX);
    if let Some(maximum) = bounds.max_percent.map(|p| percent(p) / 100)
        && u128::from(bytes) > maximum
    {
        let maximum = u64::try_from(maximum).unwrap_or(u64::MAX);
        return Err(NoShare::AboveMaximum { bytes, maximum });
    }

    let mut share = Share {
        requests: BTreeMap::from([(memory_key.to_owned(), granted)]),
        bytes,
        part: part_of(granted, memory.value),
    };
    for (key, capacity) in &device.device.capacity {
        if key == memory_key {
            continue;
        }
        let units = capacity.value.nano() / NANO;
        let amount = (units.saturating_mul(i128::from(bytes)) + i128::from(total) - 1)
            / i128::from(total).max(1);
        let granted = charge(Some(amount.saturating_mul(NANO)), capacity);
        let granted = granted.ok_or(NoShare::NotAllowed)?;
        share.part = share.part.max(part_of(granted, capacity.value));
        share.requests.insert(key.clone(), granted);
    }
    Ok(share)
}

fn part_of(amount: i128, total: Quantity) -> u32 {
    let part = parts_per_million(amount, total.nano());
    u32::try_from(part.clamp(0, ALL_PARTS.into())).unwrap_or(0)
}

/// What a claim with these requests takes of each capacity of a device, in the order in
/// which they are published; `None` where the device does not give that.
pub(crate) fn charges(
    device: &DeviceView<'_>,
    requests: &BTreeMap<String, i128>,
) -> Option<Vec<i128>> {
    let capacities = &device.device.capacity;
    if requests.keys().any(|key| !capacities.contains_key(key)) {
        return None;
    }
    capacities
        .iter()
        .map(|(key, capacity)| charge(requests.get(key).copied(), capacity))
        .collect()
}

/// What is taken of one capacity; `None` where its policy does not allow the amount.
fn charge(requested: Option<i128>, capacity: &Capacity) -> Option<i128> {
    let default = capacity.request_policy.as_ref().and_then(|p| p.default);
    let Some(requested) = requested else {
        // Also judged by the policy, which lets its own default pass.
        return Some(default.unwrap_or(capacity.value).nano());
    };
    let Some(policy) = &capacity.request_policy else {
        return Some(requested);
    };
    let amount = round_up(requested, policy);
    let is_default = default.is_some_and(|default| default.nano() == amount);
    (is_default || allowed(amount, policy)).then_some(amount)
}

fn round_up(requested: i128, policy: &RequestPolicy) -> i128 {
    if let Some(range) = &policy.valid_range {
        let least = range.min.nano();
        if requested < least {
            return least;
        }
        let step = range.step.map_or(0, |step| step.nano());
        if step <= 0 {
            return requested;
        }
        let over = (requested - least).rem_euclid(step);
        return if over == 0 {
            requested
        } else {
            requested.saturating_add(step - over)
        };
    }
    let valid = policy.valid_values.iter().map(|value| value.nano());
    valid
        .into_iter()
        .find(|value| *value >= requested)
        .unwrap_or(requested)
}

fn allowed(amount: i128, policy: &RequestPolicy) -> bool {
    if let Some(range) = &policy.valid_range {
        let below = range.max.is_none_or(|max| amount <= max.nano());
        let step = range.step.map_or(0, |step| step.nano());
        let whole_steps = step <= 0 || (amount - range.min.nano()).rem_euclid(step) == 0;
        return below && whole_steps;
    }
    policy.valid_values.is_empty() || policy.valid_values.iter().any(|v| v.nano() == amount)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::CapacityRange;

    fn units(units: i64) -> Quantity {
        Quantity::from_units(units)
    }

    fn capacity(value: i64, request_policy: Option<RequestPolicy>) -> Capacity {
        Capacity {
            value: units(value),
            request_policy,
        }
    }

    fn range(min: i64, max: Option<i64>, step: Option<i64>, default: i64) -> Option<RequestPolicy> {
        Some(RequestPolicy {
            default: Some(units(default)),
            valid_values: Vec::new(),
            valid_range: Some(CapacityRange {
                min: units(min),
                max: max.map(units),
                step: step.map(units),
            }),
        })
    }

    fn charged(requested: Option<i64>, capacity: &Capacity) -> Option<i128> {
        charge(requested.map(|r| i128::from(r) * NANO), capacity).map(|nano| nano / NANO)
    }

    #[test]
    fn amounts_are_rounded_and_refused_as_the_scheduler_does() {
        let stepped = capacity(100, range(10, Some(90), Some(20), 50));
        assert_eq!(charged(None, &stepped), Some(50)); // the default
        assert_eq!(charged(Some(1), &stepped), Some(10)); // up to the least
        assert_eq!(charged(Some(11), &stepped), Some(30)); // up to min + n × step
        assert_eq!(charged(Some(90), &stepped), Some(90));
        assert_eq!(charged(Some(91), &stepped), None); // above the most
        let free = capacity(100, None);
        assert_eq!(charged(None, &free), Some(100)); // everything
        assert_eq!(charged(Some(7), &free), Some(7));
        let listed = capacity(
            100,
            Some(RequestPolicy {
                default: Some(units(5)),
                valid_values: vec![units(10), units(40)],
                valid_range: None,
            }),
        );
        assert_eq!(charged(Some(11), &listed), Some(40));
        assert_eq!(charged(Some(41), &listed), None);
        assert_eq!(charged(None, &listed), Some(5));
    }
}
