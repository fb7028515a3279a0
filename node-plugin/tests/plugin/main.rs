//! The plugin against its neighbours: a fake NVML, the kubelet's wire protocol, a real
//! API server.

// A test that cannot go on fails; only `#[test]` functions are exempt by themselves.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod admin;
mod chart;
mod claims;
mod damage;
mod disk;
mod double;
mod first_fit;
mod golden;
mod health;
mod held;
mod histories;
mod killed;
mod kubelet;
mod limits;
mod logs;
mod metadata;
mod metrics;
mod mig;
mod node;
mod nvlink;
mod order;
mod probes;
mod random;
mod rights;
mod server;
mod shares;
mod sharing;
mod status;
mod unlucky;
mod views;
mod waiting;
