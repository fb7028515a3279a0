//! A `libnvidia-ml.so.1` with the NVML C ABI, driven by a topology file.
//!
//! In: the calls of any NVML client, a topology file (`FAKE_NVML_TOPOLOGY`, else
//! `topology.yaml` in the folder above the library's), and a state file
//! (`FAKE_NVML_STATE`, else `state.json` beside that topology).
//! Out: the answers, return codes and struct layouts of the real library, and
//! MIG instances that outlive the process in the state file.
//! Never: a table of GPU models. Everything a GPU is comes from the topology, so
//! that a new card is a new file.
//!
//! What hardware does by itself (an XID, ECC errors, heat, a GPU that falls off the bus, a
//! driver that hangs, a process that dies in a call) is made to happen by [`control`] or
//! the tool `fake-nvml`, and kept in the state file too. A boot ends it. As on hardware, a
//! hung call keeps no other thread's call waiting.
//!
//! The crate is built twice: as the `cdylib` that clients load, and as an `rlib`
//! through which tests and `fake-gpu-node` reach [`node`] and [`topology`].
//!
//! Tests of other crates name it as a dev-dependency. Cargo then builds the
//! `cdylib` too and puts it beside the test executable, where
//! [`node::library_beside_executable`] finds it; [`node::build`] makes a driver
//! root from it. One process can hold several such roots: each copy of the
//! library is loaded on its own and finds its topology by its own path.

mod abi;
mod call;
pub mod control;
mod mig;
pub mod mps;
pub mod node;
mod session;
mod state;
pub mod topology;
