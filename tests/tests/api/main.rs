//! The two kinds on a real API server: what is accepted, what is refused and with which words, what
//! `kubectl` shows, and who may write what in status.
//!
//! Every rule of the schema has an object that keeps it and one that breaks it alone. The names of
//! the tests carry the numbers of the requirements that they prove.

mod charts;
mod class_rules;
mod columns;
mod coverage;
mod documentation;
mod guides;
mod harness;
mod images;
mod module;
mod order_rules;
mod policies;
mod roles;
mod rule;
mod status;
mod vocabulary;
