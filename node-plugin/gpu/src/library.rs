//! Where NVML is.
//!
//! In: a path, or the root of a driver installation. Out: the library's path.
//! Never: a search of the running container's own folders, whose library would not
//! match the host's kernel driver.

use std::path::{Path, PathBuf};

use crate::{Error, resolve};

/// Which NVML to load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Library {
    /// This file.
    Path(PathBuf),
    /// The first `libnvidia-ml.so.1` in the usual folders under this root, which is `/`
    /// for a driver on the host and `/run/nvidia/driver` for one in a container.
    InDriverRoot(PathBuf),
}

/// The file name under which NVML is loaded.
const NVML: &str = "libnvidia-ml.so.1";

/// `nvidia/current` is Debian's own folder.
const FOLDERS: [&str; 11] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib",
    "usr/local/nvidia/lib64",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib",
];

impl Library {
    /// The file to load: links are followed inside the driver root, also those that a
    /// distribution leads through `/etc/alternatives`.
    ///
    /// # Errors
    /// [`Error::NoDriver`] with the places that were searched when there is none.
    pub fn locate(&self) -> Result<PathBuf, Error> {
        let found = match self {
            Self::Path(path) => path.is_file().then(|| path.clone()),
            Self::InDriverRoot(root) => FOLDERS.iter().find_map(|folder| {
                let file = resolve(root, &Path::new(folder).join(NVML))?;
                Some(root.join(file)).filter(|path| path.is_file())
            }),
        };
        found.ok_or_else(|| Error::NoDriver {
            searched: match self {
                Self::Path(path) => vec![path.clone()],
                Self::InDriverRoot(root) => FOLDERS.iter().map(|f| root.join(f)).collect(),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_in_a_usual_folder_of_the_driver_root() {
        for usual in [
            "usr/lib/x86_64-linux-gnu",
            "usr/lib/x86_64-linux-gnu/nvidia/current",
        ] {
            let root = tempfile::tempdir().unwrap();
            let folder = root.path().join(usual);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(NVML), "").unwrap();
            let found = Library::InDriverRoot(root.path().to_owned())
                .locate()
                .unwrap();
            assert_eq!(found, folder.join(NVML));
        }
    }

    #[test]
    fn a_missing_library_names_what_was_searched() {
        let error = Library::InDriverRoot("/nowhere".into())
            .locate()
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("no NVIDIA driver on this node"),
            "{error}"
        );
        assert!(error.contains("/nowhere/usr/lib64"), "{error}");
    }
}
