//! The memory formula: what a copy needs on each of its devices.
//!
//! need(t) = W·f/t + A + G + S·KV(ctx, t) + R, with W the weights' bytes, f the
//! recipe's factor, t the devices of a copy, A activations, G what is fixed, KV
//! the cache of one sequence of full length, S how many such sequences must fit,
//! R the process's own. Pure, saturating; docs/memory.md explains the terms.

use super::{DeviceCounts, Recipe};
use crate::model::ModelFacts;
use planner::MemoryNeed;

/// Context that copies of this model are started with, in tokens.
pub fn context_length(recipe: &Recipe, facts: &ModelFacts) -> u64 {
    recipe.context.limit.min(facts.context_length).max(1)
}

/// Bytes on each of `devices` devices, without the cache.
pub fn without_cache(recipe: &Recipe, facts: &ModelFacts, devices: u32) -> u64 {
    let devices = u64::from(devices.max(1));
    let terms = &recipe.memory;
    let weights =
        (u128::from(facts.weights_bytes) * u128::from(terms.weights_percent)).div_ceil(100);
    let weights = u64::try_from(weights.div_ceil(u128::from(devices))).unwrap_or(u64::MAX);
    let activations = recipe
        .batch_tokens
        .saturating_mul(facts.hidden_size)
        .saturating_mul(2)
        .saturating_mul(terms.activation_factor);
    weights
        .saturating_add(activations)
        .saturating_add(terms.fixed.0)
        .saturating_add(terms.process.0)
}

/// Bytes of cache on each of `devices` devices.
pub fn cache(recipe: &Recipe, facts: &ModelFacts, devices: u32) -> u64 {
    facts
        .kv
        .bytes_per_sequence(
            context_length(recipe, facts),
            u64::from(devices.max(1)),
            recipe.memory.cache_element_bytes,
        )
        .saturating_mul(u64::from(recipe.full_context_sequences))
}

/// Bytes that a copy needs on each of `devices` devices.
pub fn per_device(recipe: &Recipe, facts: &ModelFacts, devices: u32) -> u64 {
    without_cache(recipe, facts, devices).saturating_add(cache(recipe, facts, devices))
}

/// One row for each number of devices that the class and the recipe allow.
pub fn needs(recipe: &Recipe, facts: &ModelFacts, max_devices: u32) -> Vec<MemoryNeed> {
    (1..=max_devices.min(recipe.max_devices))
        .filter(|n| match recipe.device_counts {
            DeviceCounts::Any => true,
            DeviceCounts::PowersOfTwo => n.is_power_of_two(),
        })
        .map(|devices| MemoryNeed {
            devices,
            bytes_per_device: per_device(recipe, facts, devices),
        })
        .collect()
}

/// Bytes that the cache may take of what was granted on each device.
pub fn granted_cache(recipe: &Recipe, facts: &ModelFacts, devices: u32, granted: u64) -> u64 {
    granted
        .saturating_sub(without_cache(recipe, facts, devices))
        .max(cache(recipe, facts, devices))
}

/// Memory of the runtime container, in bytes.
pub fn container(recipe: &Recipe, facts: &ModelFacts) -> u64 {
    let resources = &recipe.resources;
    let weights =
        u128::from(facts.weights_bytes) * u128::from(resources.memory_weights_percent) / 100;
    resources
        .memory_base
        .0
        .saturating_add(resources.shared_memory.0)
        .saturating_add(u64::try_from(weights).unwrap_or(u64::MAX))
}

/// Bytes of the volume: the model, the runtime's own, and a twentieth for the
/// file system; whole GiB, so that a small change of the model moves nothing.
pub fn volume(recipe: &Recipe, facts: &ModelFacts) -> u64 {
    let files = facts.download_bytes();
    files
        .saturating_add(files / 20)
        .saturating_add(recipe.storage_extra.0)
        .div_ceil(1 << 30)
        .saturating_mul(1 << 30)
}
