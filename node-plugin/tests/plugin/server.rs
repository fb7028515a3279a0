//! The whole plugin against a real API server.
