//! The controller on a real API server, with the rights that its chart gives it and no others:
//! classes and orders in, objects and status out.
//!
//! There is no scheduler, no kubelet and no garbage collection: slices, claims and pods are made by
//! the tests as those would make them.

mod honest;
mod orders;
mod release;
mod rollout;
mod setup;
mod workload;
