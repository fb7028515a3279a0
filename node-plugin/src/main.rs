//! The thin shell around the library.

fn main() {}
