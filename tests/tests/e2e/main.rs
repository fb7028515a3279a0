//! The platform on a real cluster: scheduler, kubelets, container runtime, two workers with fake
//! GPUs. Run by `hack/test e2e`; each test says what it needs where that is missing.
//!
//! The tests share the cluster's GPUs, so they run one at a time.

mod acceptance;
mod crash;
mod deletion;
mod docs;
mod health;
mod metadata;
mod orders;
mod reboot;
mod restarts;
mod rollout;
mod scene;
mod sharing;
mod storage;
mod upgrade;
mod whole;
