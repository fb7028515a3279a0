//! The controller on a real API server, with the rights that its chart gives it and no others:
//! classes and orders in, objects and status out.
//!
//! There is no scheduler, no kubelet and no garbage collection, but where a test starts Kubernetes' own
//! controllers: slices, claims and pods are made by the tests as those would make them.

mod deletion;
mod device_api;
mod election;
mod honest;
mod lifecycle;
mod orders;
mod policy;
mod processes;
mod release;
mod rights;
mod rollout;
mod setup;
mod uninstall;
mod workload;
