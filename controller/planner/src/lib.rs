//! Snapshot and demand in, plan and explanation out; pure.
