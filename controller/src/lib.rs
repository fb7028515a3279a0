//! Reconciles InferenceService orders into served endpoints on planned GPU placements.
//!
//! In: orders, classes, slices and claims from the API server; a model hub. Out:
//! claim templates, workloads, Services, conditions. Never: an allocation (the
//! kube-scheduler makes those), a placement that the planner did not decide, or
//! a condition reason that `inference-api` does not list.

pub mod fetch;
pub mod model;

#[cfg(test)]
mod test_hub;
