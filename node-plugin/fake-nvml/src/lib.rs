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
//! Two keys of a GPU in the state file are there for tests to write: `"lost": true`
//! makes every call on it answer GPU_IS_LOST, and `"faults": {"nvmlGpuInstanceDestroy":
//! 19}` makes a function that changes something answer with a code (19 is IN_USE)
//! instead of acting. A boot ends both.
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
mod mig;
pub mod node;
mod session;
mod state;
pub mod topology;
