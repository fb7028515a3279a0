//! The kubelet's gRPC contracts for DRA drivers: registration, node service, health.
