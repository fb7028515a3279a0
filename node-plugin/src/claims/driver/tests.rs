//! The driver's files below a made-up root.

use super::*;

fn root() -> (tempfile::TempDir, Driver) {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    for sub in [
        "dev/nvidia-caps",
        "proc/driver/nvidia-caps",
        "usr/lib64",
        "usr/bin",
    ] {
        fs::create_dir_all(at.join(sub)).unwrap();
    }
    for node in [
        "nvidia0",
        "nvidiactl",
        "nvidia-caps/nvidia-cap12",
        "nvidia-caps/nvidia-cap13",
    ] {
        fs::write(at.join("dev").join(node), "").unwrap();
    }
    fs::write(
        at.join("proc/driver/nvidia-caps/mig-minors"),
        "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi11/access 102\n",
    )
    .unwrap();
    let libraries = at.join("usr/lib64");
    fs::write(libraries.join("libcuda.so.580.82.07"), "").unwrap();
    std::os::unix::fs::symlink("libcuda.so.580.82.07", libraries.join("libcuda.so.1")).unwrap();
    fs::write(libraries.join("libnvidia-ml.so.580.82.07"), "").unwrap();
    std::os::unix::fs::symlink(
        "libnvidia-ml.so.580.82.07",
        libraries.join("libnvidia-ml.so.1"),
    )
    .unwrap();
    fs::write(libraries.join("libcuda.so.550.1"), "").unwrap();
    fs::write(libraries.join("libc.so.6"), "").unwrap();
    fs::write(at.join("usr/bin/nvidia-smi"), "").unwrap();
    let roots = Roots {
        driver: at.to_owned(),
        host_driver: "/run/nvidia/driver".into(),
        dev: at.join("dev"),
        proc: at.join("proc"),
    };
    (folder, Driver::new(roots))
}

#[test]
fn libraries_are_mounted_from_whichever_folder_nvml_is_loaded_from() {
    let folder = tempfile::tempdir().unwrap();
    let libraries = folder.path().join("usr/local/nvidia/lib64");
    fs::create_dir_all(&libraries).unwrap();
    for name in ["libnvidia-ml.so.1", "libcuda.so.580.82.07"] {
        fs::write(libraries.join(name), "").unwrap();
    }
    let driver = Driver::new(Roots {
        driver: folder.path().to_owned(),
        host_driver: "/home/kubernetes/bin".into(),
        dev: folder.path().join("dev"),
        proc: folder.path().join("proc"),
    });
    // libcuda under its own name and the two by which it is loaded.
    assert_eq!(driver.driver_files("580.82.07").len(), 3);
}

fn partition(gpu_instance: u32) -> Target {
    Target::partition_for_test(Some(InstanceIds {
        gpu_instance,
        compute_instance: 0,
        uuid: "MIG-1".into(),
    }))
}

#[test]
fn a_partition_gets_its_gpu_and_its_two_capabilities() {
    let (_folder, driver) = root();
    let nodes = driver.nodes_of(&partition(1)).unwrap();
    let paths: Vec<_> = nodes
        .iter()
        .map(|n| n.container.to_str().unwrap())
        .collect();
    assert_eq!(
        paths,
        [
            "/dev/nvidia0",
            "/dev/nvidia-caps/nvidia-cap12",
            "/dev/nvidia-caps/nvidia-cap13"
        ]
    );
    let error = driver.nodes_of(&partition(2)).unwrap_err().to_string();
    assert!(error.contains("gpu0/gi2/ci0/access"), "{error}");
}

#[test]
fn a_missing_node_is_an_error_that_a_later_call_does_not_remember() {
    let (folder, driver) = root();
    let whole = Target::Whole {
        pci: "0000:66:00.0".parse().unwrap(),
        uuid: "GPU-2".into(),
        minor: 1,
    };
    assert!(matches!(
        driver.nodes_of(&whole),
        Err(DriverError::MissingNode(_))
    ));
    fs::write(folder.path().join("dev/nvidia1"), "").unwrap();
    assert_eq!(driver.nodes_of(&whole).unwrap().len(), 1);
}

#[test]
fn only_files_of_this_driver_version_are_mounted_and_under_the_names_that_programs_load() {
    let (folder, driver) = root();
    // As Debian has it: the links lead through the root's own /etc/alternatives.
    let link = |target: &str, at: &str| {
        std::os::unix::fs::symlink(target, folder.path().join(at)).unwrap();
    };
    fs::create_dir_all(folder.path().join("etc/alternatives")).unwrap();
    fs::create_dir_all(folder.path().join("usr/lib/firmware/nvidia/580.82.07")).unwrap();
    link("usr/lib", "lib");
    link("/etc/alternatives/nvcuvid", "usr/lib64/libnvcuvid.so.1");
    link(
        "/usr/lib64/libnvcuvid.so.580.82.07",
        "etc/alternatives/nvcuvid",
    );
    link("/proc/version", "usr/lib64/libnvidia-stray.so.580.82.07");
    for file in [
        "usr/lib64/libnvcuvid.so.580.82.07",
        "usr/lib/firmware/nvidia/580.82.07/gsp_ga10x.bin",
        "usr/lib/firmware/nvidia/580.82.07/notes.txt",
        "usr/bin/nvidia-cuda-mps-control",
    ] {
        fs::write(folder.path().join(file), "").unwrap();
    }
    let files = driver.driver_files("580.82.07");
    let pairs: Vec<_> = files
        .iter()
        .map(|f| (f.container.to_str().unwrap(), f.host.to_str().unwrap()))
        .collect();
    let (at, host) = ("/usr/local/nvidia/lib64", "/run/nvidia/driver/usr/lib64");
    let library = |name: &str, real: &str| (format!("{at}/{name}"), format!("{host}/{real}"));
    let firmware = "lib/firmware/nvidia/580.82.07/gsp_ga10x.bin";
    let expected = [
        (
            format!("/{firmware}"),
            format!("/run/nvidia/driver/usr/{firmware}"),
        ),
        library("libcuda.so", "libcuda.so.580.82.07"),
        library("libcuda.so.1", "libcuda.so.580.82.07"),
        library("libcuda.so.580.82.07", "libcuda.so.580.82.07"),
        library("libnvcuvid.so.1", "libnvcuvid.so.580.82.07"),
        library("libnvcuvid.so.580.82.07", "libnvcuvid.so.580.82.07"),
        library("libnvidia-ml.so.1", "libnvidia-ml.so.580.82.07"),
        library("libnvidia-ml.so.580.82.07", "libnvidia-ml.so.580.82.07"),
        (
            "/usr/local/nvidia/bin/nvidia-smi".to_owned(),
            "/run/nvidia/driver/usr/bin/nvidia-smi".to_owned(),
        ),
    ];
    let expected: Vec<_> = expected
        .iter()
        .map(|(a, b)| (a.as_str(), b.as_str()))
        .collect();
    assert_eq!(pairs, expected);
}
