//! How copies are moved to the current description: one step at a time. Pure.
//!
//! In: the copies as they are, what they should be, what an earlier step recorded.
//! Out: how many copies to keep, which to take down now, what to record. The same
//! input gives the same step, and everything that a step depends on is in the
//! cluster, so a restart at any point goes on where the last one ended. Never: a
//! second old copy while a new one is not ready, fewer copies that answer
//! than the class's minimum where a spare device exists, a wait that nothing ends.

use super::copies::Copy;
use inference_api::{OrderReason as R, UpdateStrategy};
use serde::{Deserialize, Serialize};

/// Seconds within which a copy beside the others must find a node; later the move
/// goes on without it. The planner may see room that a quota does not grant.
pub const SURGE_WITHIN: i64 = 30;

/// A move that has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Roll {
    /// Generation of the order that copies are moved to.
    pub generation: i64,
    /// Since when (seconds of the epoch) one copy more is raised, so that none is
    /// missed; none where copies go one out, one in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub surge_since: Option<i64>,
}

/// What copies should be.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Generation of the order.
    pub generation: i64,
    /// Terms of the class.
    pub class_terms: &'a str,
    /// Claim template that copies are raised with now.
    pub claim_template: &'a str,
    /// How the class moves copies.
    pub strategy: UpdateStrategy,
    /// Copies wanted.
    pub replicas: i32,
}

impl Wanted<'_> {
    /// Whether a copy was raised by an earlier description. Its release does not
    /// count: a new one moves nothing by itself. Nor does its placement.
    pub fn is_outdated(&self, copy: &Copy) -> bool {
        is_outdated(copy, self.generation, Some(self.class_terms))
    }

    /// Without a node, and waiting for what is not asked for any more.
    fn is_stranded(&self, copy: &Copy) -> bool {
        let claim = copy.claim_template.as_deref();
        let other_claim = claim.is_some_and(|t| t != self.claim_template);
        !copy.scheduled && (other_claim || self.is_outdated(copy))
    }
}

/// Whether a copy was raised for an earlier generation of the order, or under other
/// terms of its class; unknown terms (of a class out of reach, of a copy older than
/// the record) are taken as the same.
pub fn is_outdated(copy: &Copy, generation: i64, class_terms: Option<&str>) -> bool {
    let other_terms = copy
        .class_terms
        .as_deref()
        .zip(class_terms)
        .is_some_and(|(raised, now)| raised != now);
    copy.generation < generation || other_terms
}

/// One step of a move, or of none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Copies that the StatefulSet is to have.
    pub replicas: i32,
    /// Copies to take down now, by name.
    pub moved: Vec<String>,
    /// What to record.
    pub roll: Option<Roll>,
    /// New copies that the next step waits for, by name.
    pub waits_for: Vec<String>,
    /// Seconds until the step is another one, though nothing happens.
    pub again: Option<i64>,
}

/// The step to take at `now`. `fit` tells how many copies the cluster has room for,
/// these included and at most one more than wanted.
///
/// Without a node and outdated: gone at once, for it serves nobody and holds nothing.
/// Outdated otherwise: as the class asks. `Recreate` takes all. `RollingUpdate`
/// takes one while all others answer, those first that do not answer; with a spare
/// device a copy more is raised before and goes last. A move is over when each copy
/// answers that there is room for.
pub fn step(
    copies: &[Copy],
    wanted: &Wanted<'_>,
    roll: Option<&Roll>,
    fit: impl Fn() -> i32,
    now: i64,
) -> Step {
    let n = wanted.replicas;
    let live: Vec<&Copy> = copies.iter().filter(|c| !c.ending).collect();
    let old = |c: &Copy| wanted.is_outdated(c);
    let names = |keep: &dyn Fn(&Copy) -> bool| -> Vec<String> {
        let kept = live.iter().filter(|c| keep(c));
        kept.map(|c| c.name.clone()).collect()
    };
    let mut step = Step {
        replicas: n,
        moved: names(&|c| wanted.is_stranded(c)),
        ..Step::default()
    };
    let recreate = wanted.strategy == UpdateStrategy::Recreate;
    let moving = live.iter().any(|c| c.ordinal < n && old(c));
    let whole = (0..n).all(|i| live.iter().any(|c| c.ordinal == i && c.ready && !old(c)));
    let begun = match roll {
        // On until each new copy answers, though no old one is left.
        Some(roll) if !moving || roll.generation == wanted.generation => Some(roll.clone()),
        // Edited once more; the copy beside the others stays and moves first.
        Some(roll) if roll.surge_since.is_some() => Some(Roll {
            generation: wanted.generation,
            surge_since: Some(now),
        }),
        _ if moving => {
            let serves = live.iter().any(|c| c.ordinal < n && c.ready);
            Some(Roll {
                generation: wanted.generation,
                surge_since: (serves && !recreate && fit() > n).then_some(now),
            })
        }
        _ => None,
    };
    let Some(mut roll) = begun else {
        return step;
    };
    if recreate {
        roll.surge_since = None;
    }
    if let Some(since) = roll.surge_since
        && !live.iter().any(|c| c.ordinal >= n && c.scheduled)
    {
        let left = since + SURGE_WITHIN - now;
        if left > 0 {
            step.again = Some(left);
        } else {
            roll.surge_since = None;
        }
    }
    step.replicas = n + i32::from(roll.surge_since.is_some());
    let inside = || copies.iter().filter(|c| c.ordinal < step.replicas);
    let unready: Vec<&Copy> = inside()
        .filter(|c| !c.ending && !c.ready && !old(c) && !wanted.is_stranded(c))
        .collect();
    let missing = i32::try_from(inside().count()).unwrap_or(i32::MAX) < step.replicas;
    // Where the cluster has room for fewer copies than are wanted, those without a
    // node are no reason to stop: an old one that goes makes the room.
    let roomless = |c: &&Copy| matches!(c.problem, Some((R::ReplicasUnschedulable, _)));
    let excused = || unready.iter().all(roomless) && excused(&unready, step.replicas, fit());
    if !unready.is_empty() && !excused() {
        step.waits_for = unready.iter().map(|c| c.name.clone()).collect();
    }
    let rests = !missing && !inside().any(|c| c.ending) && step.moved.is_empty();
    let free = rests && step.waits_for.is_empty();
    if whole || (free && !moving && roll.surge_since.is_none()) {
        return Step {
            replicas: n,
            moved: step.moved,
            ..Step::default()
        };
    }
    step.roll = Some(roll);
    if recreate {
        step.moved = names(&|c| wanted.is_stranded(c) || old(c));
    } else if free {
        let next = inside()
            .filter(|c| old(c))
            .max_by_key(|c| (!c.ready, c.ordinal));
        step.moved.extend(next.map(|c| c.name.clone()));
    }
    step
}

fn excused(unready: &[&Copy], wanted: i32, fit: i32) -> bool {
    let roomless = i32::try_from(unready.len()).unwrap_or(i32::MAX);
    fit >= 1 && roomless <= wanted - fit
}

#[cfg(test)]
#[path = "moves_tests.rs"]
mod tests;
