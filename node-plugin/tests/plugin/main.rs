//! The plugin against its neighbours: a fake NVML, the kubelet's wire protocol, a real
//! API server.

mod chart;
mod claims;
mod crash;
mod golden;
mod kubelet;
mod limits;
mod node;
mod server;
