//! The DRA kubelet plugin: GPUs as ResourceSlices, claims as devices.
