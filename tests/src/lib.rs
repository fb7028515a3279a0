//! Harness and tests on a real API server and a real cluster.

pub mod hub;
