//! Decisions, and the objects that follow from them. Pure but for what the
//! context holds as values (recipes, settings).

use super::copies::{self, Copy, Current};
use super::dereference::{Seen, is_owned};
use super::settled::{SETTLED, Settled, same_placement};
use super::{Context, Refusal, validate};
use crate::model::ModelFacts;
use crate::recipe::{Recipe, memory};
use crate::render::{self, Input, StandingVolume};
use inference_api::{
    Authentication, EndpointType, InferenceService, InferenceServiceClass, OrderCondition as C,
    OrderReason as R,
};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::{Resource, ResourceExt};
use planner::{Demand, Outcome, Plan, Snapshot};

/// What was decided for an order.
#[derive(Default)]
pub struct Decision {
    /// The first thing in the way, if any.
    pub stopped: Option<Refusal>,
    /// The class, where the order may use it.
    pub class: Option<(String, Option<i64>)>,
    /// The contract.
    pub contract: Option<EndpointType>,
    /// The model.
    pub facts: Option<ModelFacts>,
    /// The recipe and why.
    pub recipe: Option<(Recipe, String)>,
    /// The plan that copies are raised by.
    pub plan: Option<Plan>,
    /// Whether the plan was made now, and not kept.
    pub replanned: bool,
    /// What a change of the class would have done, had the copies not been kept.
    pub held: Option<String>,
    /// What is to stand.
    pub objects: Option<Objects>,
    /// Copies as they are.
    pub copies: Vec<Copy>,
    /// Copies to take down.
    pub moved: Vec<String>,
    /// Whether requests need the order's token.
    pub token: bool,
    /// Whether the class publishes outside the cluster, which this version does not.
    pub external: bool,
    /// StorageClass that the class names and the standing volume is not of.
    pub kept_in_spite_of: Option<String>,
    /// Whether the workload must be removed first, since its volume is too small.
    pub rebuild: bool,
    /// Copies wanted.
    pub replicas: i32,
    /// Fewest and most copies that the class allows.
    pub bounds: Option<(i32, i32)>,
}

impl Decision {
    /// What is in the way.
    pub fn refusal(&self) -> Option<&Refusal> {
        self.stopped.as_ref()
    }

    fn stop(mut self, refusal: Refusal) -> Self {
        self.stopped = Some(refusal);
        self
    }
}

/// The objects of a workload.
pub struct Objects {
    /// The claim template; its name holds the hash of the plan.
    pub template: ResourceClaimTemplate,
    /// The StatefulSet.
    pub statefulset: StatefulSet,
    /// The Service.
    pub service: Service,
}

/// Decides what is to stand for the order.
pub fn decide(order: &InferenceService, seen: &Seen, cx: &Context) -> Decision {
    let mut decision = Decision {
        copies: seen
            .pods
            .iter()
            .filter(|p| is_of_workload(order, seen, p))
            .map(|p| copies::read(p))
            .collect(),
        ..Decision::default()
    };
    let class = match validate::class(order, seen.class.as_ref()) {
        Ok(class) => class,
        Err(refusal) => return decision.stop(refusal),
    };
    decision.class = Some((class.name_any(), class.meta().generation));
    let exposure = &class.spec.exposure_policy;
    decision.token = exposure.authentication == Authentication::Token;
    decision.external = exposure.type_ == inference_api::ExposureType::External;
    let scaling = class.spec.scaling();
    decision.replicas = scaling.min_replicas;
    decision.bounds = Some((scaling.min_replicas, scaling.max_replicas));
    let facts = match &seen.facts {
        Some(Ok(facts)) => facts.clone(),
        Some(Err(refusal)) => return decision.stop(refusal.clone()),
        None => {
            return decision.stop(Refusal::new(
                C::ModelResolved,
                R::ModelResolving,
                "the model was not read yet",
            ));
        }
    };
    decision.facts = Some(facts.clone());
    // A bare Hugging Face source says nothing about contracts.
    let contract = match validate::contract(&class.spec.model_policy.allowed_endpoint_types, None) {
        Ok(contract) => contract,
        Err(refusal) => return decision.stop(refusal),
    };
    decision.contract = Some(contract);
    let (recipe, why) = match cx.recipes.choose(facts.format, contract) {
        Ok(choice) => (choice.recipe.clone(), choice.reason),
        Err(why) => return decision.stop(Refusal::new(C::Planned, R::NoRecipe, why)),
    };
    decision.recipe = Some((recipe.clone(), why));
    let demand = validate::demand(order, &class.spec, &recipe, &facts);
    if !cx.device_api {
        return decision.stop(Refusal::new(
            C::Planned,
            R::DeviceApiUnavailable,
            "the cluster does not serve resource.k8s.io/v1; it must be Kubernetes 1.34 or later",
        ));
    }
    let settlement = settle(
        order,
        &demand,
        seen.settled.as_ref(),
        &decision.copies,
        &seen.snapshot,
    );
    decision.replanned = settlement.replanned;
    decision.held = settlement.held;
    decision.stopped = settlement.refusal;
    let Some(plan) = settlement.plan else {
        return decision;
    };
    decision.plan = Some(plan.clone());
    construct(
        order,
        class,
        &facts,
        &recipe,
        contract,
        plan,
        settlement.inputs,
        seen,
        cx,
        decision,
    )
}

/// Pods carry the order's labels; only those that the order's StatefulSet made count.
fn is_of_workload(
    order: &InferenceService,
    seen: &Seen,
    pod: &k8s_openapi::api::core::v1::Pod,
) -> bool {
    let owned = seen.statefulset.as_deref().filter(|s| is_owned(order, *s));
    owned.is_some_and(|s| {
        pod.metadata
            .owner_references
            .iter()
            .flatten()
            .any(|o| Some(&o.uid) == s.metadata.uid.as_ref())
    })
}

/// How the plan was come by.
#[derive(Debug, Default)]
pub struct Settlement {
    /// The plan in force.
    pub plan: Option<Plan>,
    /// Hash of the inputs that it stands on, and the generation.
    pub inputs: (String, i64),
    /// Whether it was made now.
    pub replanned: bool,
    /// Why a change was not followed.
    pub held: Option<String>,
    /// Why there is no room, though the plan in force may be an older one.
    pub refusal: Option<Refusal>,
}

/// Keeps the settled plan, or makes one.
///
/// Kept: while its inputs are the same and each copy found a node. Made anew: for
/// a new order, after an edit, when copies found no node on it, or when the
/// inputs changed and nobody is served. A class that changed under serving copies
/// changes nothing until the order is edited.
pub fn settle(
    order: &InferenceService,
    demand: &Demand,
    settled: Option<&Settled>,
    copies: &[Copy],
    snapshot: &Snapshot,
) -> Settlement {
    let inputs = validate::inputs(demand);
    let generation = order.meta().generation.unwrap_or_default();
    if let Some(settled) = settled {
        let serving = copies.iter().any(|c| c.ready);
        let stranded = copies.iter().any(|c| {
            !c.ending && !c.scheduled && matches!(c.problem, Some((R::ReplicasUnschedulable, _)))
        });
        let kept = |generation| Settlement {
            plan: Some(settled.plan.clone()),
            inputs: (settled.inputs.clone(), generation),
            ..Settlement::default()
        };
        if settled.inputs == inputs {
            if !stranded {
                return kept(generation);
            }
        } else if settled.generation == generation && serving {
            return Settlement {
                held: Some("the class or the runtime's demand changed in a way that would restart the copies; edit the order to move it".into()),
                ..kept(settled.generation)
            };
        }
    }
    let fallback = settled
        .filter(|s| s.inputs == inputs)
        .map(|s| s.plan.clone());
    let refuse = |reason, explanation: &planner::Explanation| Settlement {
        plan: fallback.clone(),
        inputs: (inputs.clone(), generation),
        refusal: Some(Refusal::new(C::Planned, reason, explanation.to_string())),
        ..Settlement::default()
    };
    match planner::plan(snapshot, demand) {
        Outcome::Planned(plan) => {
            let plan = match fallback {
                // The same devices in the same way: nothing about the copies changes.
                Some(standing) if same_placement(&standing, &plan) => standing,
                _ => *plan,
            };
            Settlement {
                plan: Some(plan),
                inputs: (inputs, generation),
                replanned: true,
                ..Settlement::default()
            }
        }
        Outcome::Exhausted(e) => refuse(R::ResourceClaimExhausted, &e),
        Outcome::Undecidable(e) => refuse(R::PlacementUndecidable, &e),
        Outcome::NoDeviceClass(e) => refuse(R::NoDeviceClass, &e),
    }
}

#[allow(clippy::too_many_arguments)]
fn construct(
    order: &InferenceService,
    class: &InferenceServiceClass,
    facts: &ModelFacts,
    recipe: &Recipe,
    contract: EndpointType,
    plan: Plan,
    (inputs, generation): (String, i64),
    seen: &Seen,
    cx: &Context,
    mut decision: Decision,
) -> Decision {
    let input = Input {
        order,
        facts,
        recipe,
        contract,
        plan: &plan,
        replicas: decision.replicas,
        token: decision.token,
        storage_class: class.spec.model_storage_class_name.as_deref(),
        installation: &cx.settings.installation,
    };
    let standing = seen
        .statefulset
        .as_deref()
        .filter(|s| is_owned(order, *s))
        .and_then(StandingVolume::of);
    if let Some(volume) = &standing {
        let needed = memory::volume(recipe, facts);
        decision.rebuild = volume.bytes().is_some_and(|have| have < needed);
        let wanted = input.storage_class.map(str::to_owned);
        // With no class named, any standing one is as good as the cluster's default.
        decision.kept_in_spite_of = wanted.filter(|w| Some(w) != volume.storage_class.as_ref());
    }
    let template = render::claim_template(&input);
    let name = template.name_any();
    let mut statefulset = render::statefulset(&input, &name, standing.as_ref());
    let settled = Settled::new(inputs, generation, &plan, facts);
    statefulset
        .metadata
        .annotations
        .get_or_insert_default()
        .insert(SETTLED.to_owned(), settled.to_json());
    if !decision.rebuild {
        let strategy = class.spec.update_policy.strategy;
        let generation = order.meta().generation.unwrap_or_default();
        decision.moved = copies::to_move(
            &decision.copies,
            Current {
                generation,
                claim_template: &name,
                strategy,
            },
        );
    }
    decision.objects = Some(Objects {
        template,
        statefulset,
        service: render::service(&input),
    });
    decision
}

#[cfg(test)]
#[path = "build_tests.rs"]
mod tests;
