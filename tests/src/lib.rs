//! Harness and tests on a real API server and a real cluster.
