//! The planner says "room" exactly where the kube-scheduler finds some.
//!
//! `testdata/scheduler-answers.jsonl` holds a cluster, a demand and, for each
//! node, whether `k8s.io/dynamic-resource-allocation` v0.37.2 (its allocator for
//! the feature gates that Kubernetes 1.37 has on) allocated the same claim
//! there: counters, overdrawn counters, taints, shares, administrators' access,
//! pools of several generations, incomplete and invalid ones, devices reachable
//! from several nodes.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::*;

/// One situation and the allocator's answers.
#[derive(Debug, Deserialize)]
struct Answered {
    case: u32,
    snapshot: Snapshot,
    demand: Demand,
    allocated: BTreeMap<String, bool>,
}

#[test]
fn room_is_where_the_scheduler_finds_it() {
    let mut planner = Planner::default();
    let mut answers = 0;
    for line in include_str!("testdata/scheduler-answers.jsonl").lines() {
        let answered: Answered = serde_json::from_str(line).unwrap();
        for node in &answered.snapshot.nodes {
            // The allocator looks at one node at a time.
            let alone = Snapshot {
                nodes: vec![node.clone()],
                ..answered.snapshot.clone()
            };
            let outcome = planner.plan(&alone, &answered.demand);
            let room = matches!(outcome, Outcome::Planned(_));
            let expected = answered.allocated[&node.name];
            assert_eq!(
                room, expected,
                "case {} on {}: {outcome:#?}",
                answered.case, node.name
            );
            answers += 1;
        }
    }
    assert!(answers > 30, "only {answers} answers");
}
