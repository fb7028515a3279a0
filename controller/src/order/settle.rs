//! Whether the decision that a workload stands on is kept, and what it is otherwise.
//! Pure.
//!
//! Kept while nothing asks for another one. An edit of the order asks for one,
//! whatever changed since. A class that changed asks for one until a copy has
//! answered, and afterwards is held. A new release never asks. A
//! copy that finds no node asks for a new placement of the same terms.

use super::copies::Copy;
use super::settled::{Parts, Settled, Stage, same_placement};
use super::{Refusal, validate};
use crate::recipe::{Recipe, memory};
use crate::render::short_hash;
use inference_api::{
    Authentication, EndpointType, InferenceService, InferenceServiceClassSpec, OrderCondition as C,
    OrderReason as R,
};
use kube::Resource;
use planner::{Demand, MemoryNeed, Outcome, Plan, ReplicaBounds, Snapshot};

/// What a class asks for, as far as copies are started by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The contract.
    pub contract: EndpointType,
    /// Whether requests need the order's token.
    pub token: bool,
    /// Hash of these and of what accelerators it allows.
    pub hash: String,
}

impl Terms {
    /// The terms of a class, with the contract that it gives the order.
    pub fn of(class: &InferenceServiceClassSpec, contract: EndpointType) -> Self {
        let token = class.exposure_policy.authentication == Authentication::Token;
        Terms {
            contract,
            token,
            hash: short_hash(&(class.accelerators(), contract, token)),
        }
    }

    /// The terms to serve by: the class's; or those that were settled on, where a
    /// copy has answered by them and the order was not edited since. With it, what
    /// is held.
    pub fn in_force(
        self,
        order: &InferenceService,
        settled: Option<&Settled>,
        copies: &[Copy],
    ) -> (Self, Option<String>) {
        let Some(settled) = settled else {
            return (self, None);
        };
        let contract = settled.contract.unwrap_or(self.contract);
        let token = settled.token.unwrap_or(self.token);
        let changed = match &settled.parts {
            Some(parts) => parts.class != self.hash,
            None => (contract, token) != (self.contract, self.token),
        };
        if !changed || is_edited(order, settled) || !serves(settled, copies) {
            return (self, None);
        }
        let mut news = Vec::new();
        if contract != self.contract {
            news.push(format!(
                "the contract {} instead of {}",
                self.contract.as_str(),
                contract.as_str()
            ));
        }
        match (token, self.token) {
            (true, false) => news.push("no token".to_owned()),
            (false, true) => news.push("a token for each request".to_owned()),
            _ => {}
        }
        if news.is_empty() {
            news.push("other accelerators".to_owned());
        }
        let held = format!(
            "the class was changed and asks for {}; copies that were raised before are kept as they are, edit the order to move it",
            news.join(" and ")
        );
        let terms = Terms {
            contract,
            token,
            // Unknown terms equal none, so they are held until the edit.
            hash: settled
                .parts
                .as_ref()
                .map(|p| p.class.clone())
                .unwrap_or_default(),
        };
        (terms, Some(held))
    }
}

fn is_edited(order: &InferenceService, settled: &Settled) -> bool {
    order.meta().generation.unwrap_or_default() != settled.generation
}

fn serves(settled: &Settled, copies: &[Copy]) -> bool {
    settled.stage == Stage::Serving || copies.iter().any(|c| c.ready)
}

/// What a decision is made from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inputs {
    /// Hash of the demand.
    pub whole: String,
    /// What each contributed.
    pub parts: Parts,
}

impl Inputs {
    /// The inputs of a demand.
    pub fn of(
        demand: &Demand,
        terms: &Terms,
        recipe: &Recipe,
        facts: &crate::model::ModelFacts,
    ) -> Self {
        Inputs {
            whole: validate::inputs(demand),
            parts: Parts {
                class: terms.hash.clone(),
                release: short_hash(&memory::needs(recipe, facts, u32::MAX)),
                source: short_hash(facts),
            },
        }
    }

    fn recorded(settled: &Settled) -> Option<Self> {
        Some(Inputs {
            whole: settled.inputs.clone(),
            parts: settled.parts.clone()?,
        })
    }

    fn are_those_of(&self, settled: &Settled) -> bool {
        match &settled.parts {
            Some(parts) => *parts == self.parts,
            None => settled.inputs == self.whole,
        }
    }
}

/// What is asked.
pub struct Ask<'a> {
    /// The order.
    pub order: &'a InferenceService,
    /// What it needs now.
    pub demand: &'a Demand,
    /// What that was made from.
    pub inputs: &'a Inputs,
    /// What its workload stands on.
    pub settled: Option<&'a Settled>,
    /// Whether a change of the class is held.
    pub held: bool,
    /// Its copies.
    pub copies: &'a [Copy],
    /// Copies wanted.
    pub replicas: i32,
    /// The cluster.
    pub snapshot: &'a Snapshot,
}

/// How the plan was come by.
#[derive(Debug, Default)]
pub struct Settlement {
    /// The plan in force; none where there is neither room nor an earlier plan that
    /// still counts.
    pub plan: Option<Plan>,
    /// What it was made from.
    pub inputs: Inputs,
    /// Whether it was made now.
    pub replanned: bool,
    /// Whether the copies follow it: an edit, or a class that nobody was served by.
    pub follows: bool,
    /// Whether they cannot do so where they are, since the placement is another.
    pub moved: bool,
    /// Why there is no room, though the plan in force may be an older one.
    pub refusal: Option<Refusal>,
}

/// Keeps the settled plan, or makes one.
pub fn settle(ask: &Ask<'_>) -> Settlement {
    let now = ask.inputs;
    let stranded = ask.copies.iter().any(|c| {
        // One beside the others goes by itself where it finds no room.
        let beside = c.ordinal >= ask.replicas;
        let refused = matches!(c.problem, Some((R::ReplicasUnschedulable, _)));
        !beside && !c.ending && !c.scheduled && refused
    });
    let mut follows = false;
    let mut fallback = None;
    if let Some(settled) = ask.settled {
        let same = now.are_those_of(settled);
        let other_class = settled
            .parts
            .as_ref()
            .is_some_and(|p| p.class != now.parts.class);
        // A class that changed and is not held was one that nobody was served by.
        follows = is_edited(ask.order, settled) || (other_class && !ask.held);
        let kept = || Settlement {
            plan: Some(settled.plan.clone()),
            inputs: if same {
                now.clone()
            } else {
                Inputs::recorded(settled).unwrap_or_else(|| Inputs {
                    whole: settled.inputs.clone(),
                    // A first version that differs differs in its release, as far as
                    // one can tell: a held class is told by its terms.
                    parts: Parts {
                        release: String::new(),
                        ..now.parts.clone()
                    },
                })
            },
            follows,
            ..Settlement::default()
        };
        if ask.held || (!stranded && (same || !follows)) {
            return kept();
        }
        if same || !follows {
            fallback = Some(kept());
        }
    }
    let standing = ask.settled.map(|s| &s.plan);
    // Without room an earlier plan of the same terms stays in force.
    let refuse = |reason, explanation: &planner::Explanation| Settlement {
        refusal: Some(Refusal::new(C::Planned, reason, explanation.to_string())),
        ..fallback.unwrap_or_else(|| Settlement {
            inputs: now.clone(),
            follows,
            ..Settlement::default()
        })
    };
    match planner::plan(ask.snapshot, ask.demand) {
        Outcome::Planned(plan) => {
            let moved = standing.is_some_and(|s| !same_placement(s, &plan));
            let plan = match standing {
                // The same devices in the same way: copies prefer the nodes they are on.
                Some(standing) if !moved => Plan {
                    placements: standing.placements.clone(),
                    ..*plan
                },
                _ => *plan,
            };
            Settlement {
                plan: Some(plan),
                inputs: now.clone(),
                replanned: true,
                follows,
                moved: moved && follows,
                refusal: None,
            }
        }
        Outcome::Exhausted(e) => refuse(R::ResourceClaimExhausted, &e),
        Outcome::Undecidable(e) => refuse(R::PlacementUndecidable, &e),
        Outcome::NoDeviceClass(e) => refuse(R::NoDeviceClass, &e),
    }
}

/// How many copies the cluster has room for on this very placement, the order's own
/// included, and at most one more than wanted.
pub fn fit(snapshot: &Snapshot, demand: &Demand, plan: &Plan, replicas: i32) -> i32 {
    let count = u32::try_from(replicas).unwrap_or(0).saturating_add(1);
    let demand = Demand {
        memory: vec![MemoryNeed {
            devices: plan.devices_per_replica,
            bytes_per_device: plan.memory_needed_bytes,
        }],
        sharing_modes: vec![plan.sharing_mode],
        placement_types: vec![plan.placement_type],
        device_class_names: Some(vec![plan.device_class_name.clone()]),
        selectors: plan.selectors.clone(),
        replicas: ReplicaBounds {
            min: count,
            max: count,
        },
        ..demand.clone()
    };
    match planner::plan(snapshot, &demand) {
        Outcome::Planned(found) if found.capacity_requests == plan.capacity_requests => {
            i32::try_from(found.replicas_that_fit).unwrap_or(i32::MAX)
        }
        _ => 0,
    }
}

/// Why a copy of this release cannot be raised on the placement and the volume that
/// stand; none where it can.
pub fn too_small(
    plan: &Plan,
    recipe: &Recipe,
    facts: &crate::model::ModelFacts,
    volume: Option<u64>,
) -> Option<String> {
    let devices = plan.devices_per_replica;
    let need = memory::needs(recipe, facts, devices)
        .into_iter()
        .find(|n| n.devices == devices);
    let Some(need) = need else {
        return Some(format!("it does not run on {devices} devices"));
    };
    if need.bytes_per_device > plan.memory_bytes {
        return Some(format!(
            "it needs {} bytes of each device and a copy has {}",
            need.bytes_per_device, plan.memory_bytes
        ));
    }
    let needed = memory::volume(recipe, facts);
    volume
        .filter(|have| *have < needed)
        .map(|have| format!("it needs a volume of {needed} bytes and the standing one has {have}"))
}

#[cfg(test)]
#[path = "settle_tests.rs"]
mod tests;
