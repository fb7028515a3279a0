//! Reconciles InferenceService orders into served endpoints on planned GPU placements.
