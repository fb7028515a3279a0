//! Paths below the root of another file system tree.
//!
//! In: a root, such as `/run/nvidia/driver` or a mounted host, and a path below it. Out:
//! the file that a process with that root would find. Never: a file outside the root: an
//! absolute link in a driver's folder means a file of the driver's own tree, and this
//! process may have another one of that name, or none.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// How many links are followed, as the kernel does.
const MAX_LINKS: usize = 40;

/// The file or folder that `path` is below `root`, with all links followed as they would
/// be after a chroot: relative to `root`, and `None` where there is nothing.
#[must_use]
pub fn resolve(root: &Path, path: &Path) -> Option<PathBuf> {
    let mut left = parts(path);
    let mut at = PathBuf::new();
    let mut links = 0;
    while let Some(part) = left.pop_front() {
        if part == ".." {
            at.pop(); // There is nothing above the root.
            continue;
        }
        let next = at.join(part);
        let Ok(target) = fs::read_link(root.join(&next)) else {
            at = next;
            continue;
        };
        links += 1;
        if links > MAX_LINKS {
            return None;
        }
        if target.is_absolute() {
            at = PathBuf::new();
        }
        let mut rest = parts(&target);
        rest.append(&mut left);
        left = rest;
    }
    root.join(&at).exists().then_some(at)
}

fn parts(path: &Path) -> VecDeque<OsString> {
    let parts = path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some(OsString::from("..")),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_are_followed_as_after_a_chroot_and_never_out_of_the_root() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("usr/lib/current")).unwrap();
        fs::create_dir_all(root.join("etc/alternatives")).unwrap();
        fs::write(root.join("usr/lib/current/libcuda.so.580"), "").unwrap();
        let link = |target: &str, at: &str| symlink(target, root.join(at)).unwrap();
        link("libcuda.so.580", "usr/lib/current/libcuda.so.1");
        link("/usr/lib/current/libcuda.so.1", "etc/alternatives/libcuda");
        link("/etc/alternatives/libcuda", "usr/lib/libcuda.so.1");
        link("/usr/lib", "lib64");
        link("../../../../../usr/lib/libcuda.so.1", "usr/lib/up");
        link("/proc/version", "usr/lib/outside");
        link("loop", "usr/lib/loop");

        let real = Some(PathBuf::from("usr/lib/current/libcuda.so.580"));
        for path in ["usr/lib/libcuda.so.1", "lib64/libcuda.so.1", "lib64/up"] {
            assert_eq!(resolve(root, Path::new(path)), real, "{path}");
        }
        assert!(Path::new("/proc/version").exists());
        for path in ["usr/lib/outside", "usr/lib/loop", "usr/lib/none"] {
            assert_eq!(resolve(root, Path::new(path)), None, "{path}");
        }
    }
}
