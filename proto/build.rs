//! Compiles `protos/` with protox: no protoc on the machine is needed.

const PROTOS: [&str; 5] = [
    "protos/dra-v1.proto",
    "protos/dra-v1beta1.proto",
    "protos/registration-v1.proto",
    "protos/health-v1.proto",
    "protos/health-v1alpha1.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for proto in PROTOS {
        println!("cargo:rerun-if-changed={proto}");
    }
    let descriptors = protox::compile(PROTOS, ["protos"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
