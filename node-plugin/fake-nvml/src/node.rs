//! fake GPU node
