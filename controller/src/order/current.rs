//! The condition RuntimeCurrent: by which description and on which release the copies
//! serve. Pure; every word is counted from the copies themselves.

use super::apply::Applied;
use super::build::Decision;
use super::copies::Copy;
use super::moves::is_outdated;
use super::rebuild;
use super::settled::Stage;
use crate::recipe::Limits;
use inference_api::{ConditionUpdate, InferenceService, OrderCondition as C, OrderReason as R};
use std::collections::{BTreeMap, BTreeSet};

/// The condition as it is now.
pub fn runtime_current(
    order: &InferenceService,
    decision: &Decision,
    applied: &Applied,
) -> ConditionUpdate {
    let current = C::RuntimeCurrent;
    if let Some(words) = rebuilding(order, decision, applied) {
        return current.unmet(R::WorkloadRebuilding, words);
    }
    if applied.statefulset.is_none() {
        return current.unmet(R::WorkloadNotCreated, "there are no copies yet");
    }
    if let Some(moving) = moving(order, decision, &applied.copies) {
        return moving;
    }
    if applied.copies.is_empty() {
        return current.unmet(R::WorkloadNotCreated, "there are no copies yet");
    }
    if let Some(words) = held(decision, &applied.copies) {
        return current.unmet(R::ReplicasHeldOnPreviousRuntime, words);
    }
    if let Some(held) = &decision.held {
        return current.unmet(R::ClassChangeHeld, held);
    }
    current.met(
        R::RuntimeCurrent,
        format!("{} copies by the current description", applied.copies.len()),
    )
}

/// What the workload's being raised anew is at; none where it is not.
pub fn rebuilding(
    order: &InferenceService,
    decision: &Decision,
    applied: &Applied,
) -> Option<String> {
    if let Some(why) = &decision.rebuild {
        return Some(format!(
            "{why}, so they cannot be kept: they are taken down, and raised anew when that is done"
        ));
    }
    if applied.statefulset.is_none() {
        if !rebuild::is_announced(order) {
            return None;
        }
        return Some(match decision.leftovers.as_slice() {
            [] if decision.stopped.is_some() => {
                "the earlier workload is gone; the other conditions say what the new one waits for"
                    .to_owned()
            }
            [] => "the earlier workload is gone and the new one is being made".to_owned(),
            left => waits_for(left),
        });
    }
    (decision.stage == Some(Stage::Rebuilding))
        .then(|| "the earlier workload is gone, and no copy of the new one answers yet".to_owned())
}

/// What is left of an earlier workload, for people.
pub fn waits_for(left: &[String]) -> String {
    format!(
        "the new copies are made when these of the earlier ones are gone: {}",
        left.join(", ")
    )
}

/// A move that is on, or that has stopped.
fn moving(
    order: &InferenceService,
    decision: &Decision,
    copies: &[Copy],
) -> Option<ConditionUpdate> {
    let current = C::RuntimeCurrent;
    let generation = order.metadata.generation.unwrap_or_default();
    let outdated = |c: &Copy| is_outdated(c, generation, decision.class_terms.as_deref());
    let live = || copies.iter().filter(|c| !c.ending);
    if decision.step.roll.is_none() && !copies.iter().any(outdated) {
        return None;
    }
    // One that is raised beside the others is not counted: it goes again.
    let n = decision.replicas.max(1);
    let reached = live().filter(|c| c.ordinal < n && !outdated(c)).count();
    let counted = format!("{reached} of {n} copies are on the current description");
    if decision.objects.is_none() {
        return Some(current.unmet(
            R::MoveStopped,
            format!("{counted}; the others stay until the order can be followed, and its other conditions say why it can't be now"),
        ));
    }
    let stuck = live()
        .filter(|c| decision.step.waits_for.contains(&c.name))
        // Whether there is room beside the others is not decided yet.
        .filter(|c| c.ordinal < n || c.scheduled)
        .find_map(|c| c.stuck(decision.now));
    if let Some(words) = stuck {
        return Some(current.unmet(
            R::MoveStopped,
            format!("{counted}; no other one is taken down before this one answers: {words}"),
        ));
    }
    let beside = decision.step.roll.as_ref().and_then(|r| r.surge_since);
    let how = if i32::try_from(reached).is_ok_and(|r| r >= n) {
        ", and not all of them answer yet"
    } else if beside.is_some() {
        "; there is room for one more, which is raised first and goes last"
    } else {
        ""
    };
    Some(current.unmet(R::ReplicasMoving, format!("{counted}{how}")))
}

/// What the copies are held on, where that is not the release that the platform ships.
fn held(decision: &Decision, copies: &[Copy]) -> Option<String> {
    let shipped = &decision.recipe.as_ref()?.0.release;
    let limits = decision.limits();
    let mut earlier: BTreeMap<&str, (usize, BTreeSet<Option<Limits>>)> = BTreeMap::new();
    for copy in copies.iter().filter(|c| c.release != *shipped) {
        let (count, accepted) = earlier.entry(&copy.release).or_default();
        *count += 1;
        accepted.insert(copy.limits);
    }
    if earlier.is_empty() {
        return None;
    }
    let n = copies.len();
    let reached = copies.iter().filter(|c| c.release == *shipped).count();
    let others: Vec<String> = earlier
        .iter()
        .map(|(release, (count, _))| format!("{count} on {release}"))
        .collect();
    let mut words = format!(
        "{reached} of {n} copies are on release {shipped}, which the platform ships; {}",
        others.join(", ")
    );
    let mut differing: Vec<String> = Vec::new();
    for (release, (_, accepted)) in &earlier {
        let other = accepted.iter().flatten().filter(|l| Some(**l) != limits);
        differing.extend(other.map(|l| format!("{release} accepts {l}")));
    }
    let known = earlier
        .values()
        .all(|(_, accepted)| !accepted.contains(&None));
    match limits {
        Some(limits) if !differing.is_empty() => words.push_str(&format!(
            "; copies answer differently near their limits: {shipped} accepts {limits}, {}",
            differing.join(", ")
        )),
        Some(limits) if known => words.push_str(&format!("; all of them accept {limits}")),
        _ => {}
    }
    match &decision.too_small {
        Some(why) => words.push_str(&format!(
            "; edit the order to raise all of them anew on {shipped}: {why}, so none can move alone"
        )),
        None => words
            .push_str("; edit the order to move all of them, or delete a copy to move that one"),
    }
    if let Some(held) = &decision.held {
        words.push_str(&format!("; also, {held}"));
    }
    Some(words)
}

impl Decision {
    /// What a copy that is raised now accepts.
    pub fn limits(&self) -> Option<Limits> {
        let (recipe, _) = self.recipe.as_ref()?;
        Some(Limits::of(recipe, self.facts.as_ref()?))
    }
}

#[cfg(test)]
#[path = "current_tests.rs"]
mod tests;
