//! What holds for every cluster and demand.

use proptest::prelude::*;

use crate::fixtures::*;
use crate::*;

/// A cluster on which random claims were placed by the planner itself.
fn crowded(sizes: &[u64]) -> Snapshot {
    let mut cluster = with_shares(h100_cluster(2, 2));
    for (n, gib) in sizes.iter().enumerate() {
        let mut demand = demand(*gib);
        demand.order.name = format!("order-{n}");
        // Some classes allow only one mode.
        match gib % 3 {
            0 => demand.sharing_modes = vec![SharingMode::Dedicated],
            1 => demand.sharing_modes = vec![SharingMode::Shared],
            _ => {}
        }
        if let Outcome::Planned(plan) = plan(&cluster, &demand) {
            cluster.claims.push(claim_of(&plan, &demand.order, n));
        }
    }
    cluster
}

/// Whether the claims of a cluster overdraw any counter of any pool, or any capacity of
/// a device that they share.
fn oversubscribed(cluster: &Snapshot) -> bool {
    let mut charged = std::collections::HashSet::new();
    let mut used: std::collections::HashMap<(String, String, String), i128> = Default::default();
    let mut left: std::collections::HashMap<(String, String, String), i128> = Default::default();
    for slice in &cluster.slices {
        for set in &slice.counter_sets {
            for (counter, total) in &set.counters {
                let key = (slice.pool.name.clone(), set.name.clone(), counter.clone());
                left.insert(key, total.nano());
            }
        }
    }
    for held in cluster.claims.iter().flat_map(|c| &c.devices) {
        let device = cluster
            .slices
            .iter()
            .filter(|s| s.pool.name == held.pool)
            .flat_map(|s| &s.devices)
            .find(|d| d.name == held.device)
            .unwrap();
        for (capacity, amount) in &held.consumed_capacity {
            let key = (held.pool.clone(), held.device.clone(), capacity.clone());
            let sum = used.entry(key).or_default();
            *sum += amount.nano();
            if *sum > device.capacity[capacity].value.nano() {
                return true;
            }
        }
        let first = charged.insert((held.pool.clone(), held.device.clone()));
        if !first {
            if held.share_id.is_none() {
                return true;
            }
            continue;
        }
        for consumption in &device.consumes {
            for (counter, amount) in &consumption.counters {
                let key = (
                    held.pool.clone(),
                    consumption.counter_set.clone(),
                    counter.clone(),
                );
                *left.get_mut(&key).unwrap() -= amount.nano();
            }
        }
    }
    left.values().any(|left| *left < 0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn no_history_of_plans_oversubscribes_a_counter(sizes in prop::collection::vec(1u64..80, 0..14)) {
        prop_assert!(!oversubscribed(&crowded(&sizes)));
    }

    #[test]
    fn a_free_node_never_makes_a_feasible_demand_infeasible(
        sizes in prop::collection::vec(1u64..80, 0..14),
        gib in 1u64..90,
    ) {
        let mut cluster = crowded(&sizes);
        let before = matches!(plan(&cluster, &demand(gib)), Outcome::Planned(_));
        let mut node_new = h100_cluster(1, 1);
        node_new.slices = h100_slices("node-new", 1);
        cluster.slices.extend(with_shares(node_new).slices);
        cluster.nodes.push(node("node-new"));
        let after = matches!(plan(&cluster, &demand(gib)), Outcome::Planned(_));
        prop_assert!(!before || after);
    }

    #[test]
    fn a_plan_is_deterministic_and_its_short_form_short(
        sizes in prop::collection::vec(1u64..80, 0..14),
        gib in 1u64..90,
    ) {
        let cluster = crowded(&sizes);
        let outcome = plan(&cluster, &demand(gib));
        prop_assert_eq!(&outcome, &plan(&cluster, &demand(gib)));
        let short = match &outcome {
            Outcome::Planned(plan) => plan.explanation.to_string(),
            Outcome::Exhausted(e) | Outcome::Undecidable(e) | Outcome::NoDeviceClass(e) => e.to_string(),
        };
        prop_assert!(!short.is_empty() && short.chars().count() <= SHORT_FORM_LIMIT);
    }
}
