//! Reconciles InferenceService orders into served endpoints on planned GPU placements.
//!
//! In: orders, classes, slices and claims from the API server; a model hub. Out:
//! claim templates, workloads, Services, conditions. Never: an allocation (the
//! kube-scheduler makes those), a placement that the planner did not decide, or
//! a condition reason that `inference-api` does not list.

pub mod admin;
pub mod class;
pub mod component;
mod delete;
pub mod device_api;
pub mod fetch;
pub mod lease;
pub mod metrics;
pub mod model;
pub mod order;
pub mod recipe;
pub mod render;
pub mod run;
pub mod uninstall;
pub mod verify;
pub mod view;
pub mod watches;

#[cfg(test)]
mod golden_pool_tests;
#[cfg(test)]
mod test_hub;

/// Field manager of everything that the controller applies; the planner's is
/// [`component::Component::name`].
pub const FIELD_MANAGER: &str = "ai-inference-controller";
