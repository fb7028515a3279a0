//! InferenceService and InferenceServiceClass: types, conditions, reasons, events.
