//! Decisions, and the objects that follow from them. Pure but for what the
//! context holds as values (recipes, settings).

use super::copies::{self, Copy};
use super::dereference::{Seen, is_owned};
use super::moves::{self, Step, Wanted};
use super::rebuild;
use super::settle::{self, Ask, Inputs, Settlement, Terms, settle};
use super::settled::{SETTLED, Settled, Stage, VERSION, stripped};
use super::{Context, Refusal, validate};
use crate::model::ModelFacts;
use crate::recipe::{Recipe, memory};
use crate::render::{self, Input, StandingVolume};
use inference_api::{
    EndpointType, InferenceService, InferenceServiceClass, OrderCondition as C, OrderReason as R,
};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::{Resource, ResourceExt};
use planner::{Demand, Plan};
use std::time::Duration;

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
    /// Hash of the terms that copies are raised under; none where they are not known.
    pub class_terms: Option<String>,
    /// What a change of the class would have done, had the copies not been kept.
    pub held: Option<String>,
    /// Why the new release reaches no copy before the order is edited, if it is so.
    pub too_small: Option<String>,
    /// What is to stand.
    pub objects: Option<Objects>,
    /// Copies as they are.
    pub copies: Vec<Copy>,
    /// How they are moved.
    pub step: Step,
    /// Whether requests need the order's token.
    pub token: bool,
    /// Whether the class publishes outside the cluster, which this version does not.
    pub external: bool,
    /// StorageClass that the class names and the standing volume is not of.
    pub kept_in_spite_of: Option<String>,
    /// Why the workload must be removed first; none where it stays.
    pub rebuild: Option<String>,
    /// What is left of an earlier workload, and waited for.
    pub leftovers: Vec<String>,
    /// How far the decision got.
    pub stage: Option<Stage>,
    /// When it was decided, in seconds of the epoch.
    pub now: i64,
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

    /// When to look again, though nothing happens: a move may wait no longer then, or
    /// have to be reported as stopped.
    pub fn again(&self) -> Option<Duration> {
        let waited = self
            .copies
            .iter()
            .filter(|c| self.step.waits_for.contains(&c.name));
        waited
            .filter_map(|c| c.judged_in(self.now))
            .chain(self.step.again)
            .min()
            .and_then(|seconds| u64::try_from(seconds).ok())
            .map(Duration::from_secs)
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
    /// The disruption budget; none for a single copy.
    pub budget: Option<PodDisruptionBudget>,
}

/// Decides what is to stand for the order, at `now` (seconds of the epoch).
pub fn decide(order: &InferenceService, seen: &Seen, cx: &Context, now: i64) -> Decision {
    let settled = seen.settled.as_ref();
    let mut decision = Decision {
        copies: copies_of(order, seen, cx),
        stage: settled.map(|s| s.stage),
        now,
        ..Decision::default()
    };
    let class = match validate::class(order, seen.class.as_ref()) {
        Ok(class) => class,
        Err(refusal) => return decision.stop(refusal),
    };
    decision.class = Some((class.name_any(), class.meta().generation));
    let exposure = &class.spec.exposure_policy;
    decision.external = exposure.type_ == inference_api::ExposureType::External;
    let scaling = class.spec.scaling();
    decision.replicas = scaling.min_replicas;
    decision.bounds = Some((scaling.min_replicas, scaling.max_replicas));
    decision.kept_in_spite_of = standing_volume(order, seen)
        .and_then(|v| diverges(class.spec.model_storage_class_name.as_deref(), &v));
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
    let (terms, held) = Terms::of(&class.spec, contract).in_force(order, settled, &decision.copies);
    decision.contract = Some(terms.contract);
    decision.token = terms.token;
    decision.class_terms = Some(terms.hash.clone());
    decision.held = held;
    let (recipe, why) = match cx.recipes.choose(facts.format, terms.contract) {
        Ok(choice) => (choice.recipe.clone(), choice.reason),
        Err(why) => return decision.stop(Refusal::new(C::Planned, R::NoRecipe, why)),
    };
    decision.recipe = Some((recipe.clone(), why));
    if !cx.device_api {
        return decision.stop(Refusal::new(
            C::Planned,
            R::DeviceApiUnavailable,
            "the cluster does not serve resource.k8s.io/v1; it must be Kubernetes 1.34 or later",
        ));
    }
    let demand = validate::demand(order, &class.spec, &recipe, &facts);
    let settlement = settle(&Ask {
        order,
        demand: &demand,
        inputs: &Inputs::of(&demand, &terms, &recipe, &facts),
        settled,
        held: decision.held.is_some(),
        copies: &decision.copies,
        replicas: decision.replicas,
        snapshot: &seen.snapshot,
    });
    decision.replanned = settlement.replanned;
    decision.stopped.clone_from(&settlement.refusal);
    let Some(plan) = settlement.plan.clone() else {
        return decision;
    };
    decision.plan = Some(plan.clone());
    let made = Made {
        class,
        facts: &facts,
        recipe: &recipe,
        terms: &terms,
        demand: &demand,
        plan: &plan,
        settlement: &settlement,
    };
    construct(order, seen, cx, &made, decision)
}

/// Pods carry the order's labels; only those that the order's StatefulSet made count.
/// One whose deletion was asked for is on its way out, though the watch may tell of it
/// later.
fn copies_of(order: &InferenceService, seen: &Seen, cx: &Context) -> Vec<Copy> {
    let owned = seen.statefulset.as_deref().filter(|s| is_owned(order, *s));
    let Some(uid) = owned.and_then(|s| s.metadata.uid.as_ref()) else {
        return Vec::new();
    };
    let made = seen
        .pods
        .iter()
        .filter(|p| p.owner_references().iter().any(|o| o.uid == *uid));
    let mut copies: Vec<Copy> = made.map(|p| copies::read(p)).collect();
    cx.mark_ending(order, &mut copies);
    copies
}

fn standing_volume(order: &InferenceService, seen: &Seen) -> Option<StandingVolume> {
    let owned = seen
        .statefulset
        .as_deref()
        .filter(|s| is_owned(order, *s))?;
    StandingVolume::of(owned)
}

/// The StorageClass that the class names, where the standing volume is of another
/// . With none named, any standing one is as good as the cluster's default.
fn diverges(wanted: Option<&str>, volume: &StandingVolume) -> Option<String> {
    wanted
        .filter(|w| Some(*w) != volume.storage_class.as_deref())
        .map(str::to_owned)
}

/// What was found out on the way to the objects.
struct Made<'a> {
    class: &'a InferenceServiceClass,
    facts: &'a ModelFacts,
    recipe: &'a Recipe,
    terms: &'a Terms,
    demand: &'a Demand,
    plan: &'a Plan,
    settlement: &'a Settlement,
}

fn construct(
    order: &InferenceService,
    seen: &Seen,
    cx: &Context,
    made: &Made<'_>,
    mut decision: Decision,
) -> Decision {
    let Made {
        class,
        facts,
        recipe,
        terms,
        demand,
        plan,
        settlement,
    } = *made;
    let settled = seen.settled.as_ref();
    let volume = standing_volume(order, seen);
    let needed = memory::volume(recipe, facts);
    if settlement.follows {
        decision.rebuild = rebuild::reason(
            settled.map(|s| &s.plan),
            plan,
            settlement.moved,
            volume.as_ref(),
            needed,
        );
    } else if settled.is_some() && !settlement.replanned {
        let bytes = volume.as_ref().and_then(StandingVolume::bytes);
        decision.too_small = settle::too_small(plan, recipe, facts, bytes);
    }
    decision.leftovers = rebuild::leftovers(
        order,
        seen.statefulset.as_deref(),
        &seen.pods,
        &seen.volumes,
        needed,
    );
    let mut input = Input {
        order,
        facts,
        recipe,
        contract: terms.contract,
        class_terms: &terms.hash,
        plan,
        replicas: decision.replicas,
        token: terms.token,
        storage_class: class.spec.model_storage_class_name.as_deref(),
        installation: &cx.settings.installation,
    };
    let template = render::claim_template(&input);
    let name = template.name_any();
    if decision.rebuild.is_none() {
        let wanted = Wanted {
            generation: order.meta().generation.unwrap_or_default(),
            class_terms: &terms.hash,
            claim_template: &name,
            strategy: class.spec.update_policy.strategy,
            replicas: decision.replicas,
        };
        decision.step = moves::step(
            &decision.copies,
            &wanted,
            settled.and_then(|s| s.roll.as_ref()),
            || settle::fit(&seen.snapshot, demand, plan, wanted.replicas),
            decision.now,
        );
        input.replicas = decision.step.replicas;
    }
    let stage = stage(order, settled, &decision.copies);
    decision.stage = Some(stage);
    let mut statefulset = render::statefulset(&input, &name, volume.as_ref());
    if decision.too_small.is_some()
        && let Some(standing) = &seen.statefulset
    {
        // Another release does not fit where the copies are: one that is raised anew
        // comes up as the others are.
        statefulset.spec.template = standing.spec.template.clone();
    }
    let record = Settled {
        version: VERSION,
        inputs: settlement.inputs.whole.clone(),
        parts: Some(settlement.inputs.parts.clone()),
        generation: order.meta().generation.unwrap_or_default(),
        contract: Some(terms.contract),
        token: Some(terms.token),
        stage,
        roll: decision.step.roll.clone(),
        plan: stripped(plan),
        facts: facts.clone(),
    };
    statefulset
        .metadata
        .annotations
        .get_or_insert_default()
        .insert(SETTLED.to_owned(), record.to_json());
    decision.objects = Some(Objects {
        template,
        statefulset,
        service: render::service(&input),
        budget: (decision.replicas > 1).then(|| render::budget(&input)),
    });
    decision
}

fn stage(order: &InferenceService, settled: Option<&Settled>, copies: &[Copy]) -> Stage {
    if copies.iter().any(|c| c.ready && !c.ending) {
        return Stage::Serving;
    }
    match settled {
        Some(settled) => settled.stage,
        None if rebuild::is_announced(order) => Stage::Rebuilding,
        None => Stage::New,
    }
}
