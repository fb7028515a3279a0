//! Harness and tests on a real API server and a real cluster.

pub mod charts;
pub mod cluster;
pub mod configuration;
pub mod control_plane;
pub mod guides;
pub mod hub;
pub mod kubelet;
pub mod requirements;
