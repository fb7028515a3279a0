//! A libnvidia-ml.so.1 with the NVML C ABI, driven by a topology file.
