//! The two sockets of an instance, and those that dead instances left.
//!
//! In: the kubelet's folders and this pod's UID. Out: paths and listeners. Never: the
//! socket of an instance that lives.
//!
//! The registration socket's name contains `@`. The kubelet dials it without an
//! authority, so grpc-go sends the escaped path as `:authority`, and its `%2F` is
//! refused by every HTTP/2 server built on the `http` crate, unless an `@`, which is
//! not escaped, makes it user information. A test keeps that so.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tokio::net::{UnixListener, UnixStream};

use super::Settings;
use crate::DRIVER;

/// The longest path that a Unix socket can have, without the final zero byte.
const MAX_PATH: usize = 107;

/// How much of a hash names a pod: there are two of them on a node at most.
const HASH_BYTES: usize = 6;

/// A socket that cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The path does not fit a socket address.
    #[error("the socket path {0} is longer than {MAX_PATH} bytes; use a shorter kubelet folder")]
    TooLong(PathBuf),
    /// The folder or socket cannot be made.
    #[error(
        "cannot serve {path}: {source}; the kubelet's folders have to be mounted writable at the same path as on the host"
    )]
    Io {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The paths of one instance's sockets.
#[derive(Debug, Clone)]
pub struct Sockets {
    /// The node service.
    pub endpoint: PathBuf,
    /// Registration.
    pub registration: PathBuf,
}

impl Sockets {
    /// Names the sockets and clears the folders of those that nobody serves.
    ///
    /// # Errors
    /// When a folder cannot be used or a path is too long.
    pub async fn prepare(settings: &Settings) -> Result<Self, SocketError> {
        let folder = settings.plugins.join(DRIVER);
        for path in [&folder, &settings.registry] {
            std::fs::create_dir_all(path).map_err(|source| SocketError::Io {
                path: path.clone(),
                source,
            })?;
        }
        let uid = &settings.pod_uid;
        let sockets = Self {
            endpoint: named(&folder, "dra-", uid, ".sock")?,
            registration: named(&settings.registry, &format!("{DRIVER}@"), uid, "-reg.sock")?,
        };
        // A dead instance's registration goes first, or the kubelet would dial on.
        remove_dead(&settings.registry, &format!("{DRIVER}@"), "-reg.sock").await;
        remove_dead(&folder, "dra-", ".sock").await;
        Ok(sockets)
    }

    /// Whether no other instance of the driver serves this node. A rolling update ends the
    /// old instance only when the new one is ready, so the new one's socket is there.
    pub async fn alone(&self) -> bool {
        let Some(registry) = self.registration.parent() else {
            return true;
        };
        for path in own_sockets(registry, &format!("{DRIVER}@"), "-reg.sock") {
            if path != self.registration && UnixStream::connect(&path).await.is_ok() {
                return false;
            }
        }
        true
    }

    /// Removes the registration socket: the kubelet deregisters the plugin.
    pub fn remove_registration(&self) {
        remove(&self.registration);
    }

    /// Removes the node service's socket.
    pub fn remove_endpoint(&self) {
        remove(&self.endpoint);
    }
}

/// The path of this pod's socket; where the UID makes it too long, a part of its hash
/// takes its place.
fn named(folder: &Path, prefix: &str, uid: &str, suffix: &str) -> Result<PathBuf, SocketError> {
    let path = folder.join(format!("{prefix}{uid}{suffix}"));
    if path.as_os_str().len() <= MAX_PATH {
        return Ok(path);
    }
    let hash: String = Sha256::digest(uid.as_bytes())
        .iter()
        .take(HASH_BYTES)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let path = folder.join(format!("{prefix}{hash}{suffix}"));
    if path.as_os_str().len() <= MAX_PATH {
        Ok(path)
    } else {
        Err(SocketError::TooLong(path))
    }
}

/// Binds a socket that only root can open. What lies there was found dead.
pub(super) fn bind(path: &Path) -> Result<UnixListener, SocketError> {
    let error = |source| SocketError::Io {
        path: path.to_owned(),
        source,
    };
    let listener = UnixListener::bind(path).map_err(error)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(error)?;
    Ok(listener)
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "A socket cannot be removed.");
    }
}

/// Removes our driver's sockets that nobody listens on: an instance that was killed
/// leaves its own, and with a UID in the name nobody else ever binds it again.
async fn remove_dead(folder: &Path, prefix: &str, suffix: &str) {
    for path in own_sockets(folder, prefix, suffix) {
        let dead = match UnixStream::connect(&path).await {
            Ok(_) => false,
            Err(error) => error.kind() == io::ErrorKind::ConnectionRefused,
        };
        if dead {
            tracing::info!(path = %path.display(), "The socket of a dead instance was removed.");
            remove(&path);
        }
    }
}

/// The sockets of our driver in a folder, whoever serves them.
fn own_sockets(folder: &Path, prefix: &str, suffix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let own = entries.filter(|entry| {
        let name = entry.file_name();
        name.to_str()
            .is_some_and(|name| name.starts_with(prefix) && name.ends_with(suffix))
    });
    own.map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What grpc-go makes of a target path without an authority: Go's
    /// `url.PathEscape`, but for `/`, which it also escapes.
    fn grpc_go_escape(path: &str) -> String {
        path.bytes()
            .map(|b| match b {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(b).to_string(),
                b'-' | b'_' | b'.' | b'~' | b'$' | b'&' | b'+' | b':' | b'=' | b'@' => {
                    char::from(b).to_string()
                }
                _ => format!("%{b:02X}"),
            })
            .collect()
    }

    fn settings(root: &Path, uid: &str) -> Settings {
        Settings {
            plugins: root.join("p"),
            registry: root.join("r"),
            pod_uid: uid.to_owned(),
            pool: "node".to_owned(),
        }
    }

    #[tokio::test]
    async fn the_kubelets_authority_for_the_registration_socket_is_valid_http() {
        let folder = tempfile::tempdir().unwrap();
        let uid = "5f0c1f3e-6f0e-4d53-a0a9-0d3f6c2d8d3a";
        let sockets = Sockets::prepare(&settings(folder.path(), uid))
            .await
            .unwrap();
        let path = sockets.registration.to_str().unwrap();
        let authority = grpc_go_escape(path);
        assert!(tonic::codegen::http::uri::Authority::try_from(authority.as_str()).is_ok());
        let plain = grpc_go_escape("/var/lib/kubelet/plugins_registry/gpu-reg.sock");
        assert!(tonic::codegen::http::uri::Authority::try_from(plain.as_str()).is_err());

        let on_a_node = format!("/var/lib/kubelet/plugins_registry/{DRIVER}@{uid}-reg.sock");
        assert!(on_a_node.len() <= MAX_PATH, "{}", on_a_node.len());
    }

    #[tokio::test]
    async fn a_folder_too_deep_for_the_uid_gets_sockets_named_by_its_hash() {
        let folder = tempfile::tempdir().unwrap();
        let uid = "5f0c1f3e-6f0e-4d53-a0a9-0d3f6c2d8d3a";
        let room = MAX_PATH - folder.path().as_os_str().len();
        // Room for the short names, and not for the long ones.
        let deep = "d".repeat(room - "//r/@-reg.sock".len() - DRIVER.len() - uid.len() + 8);
        let root = folder.path().join(deep);
        let sockets = Sockets::prepare(&settings(&root, uid)).await.unwrap();
        let other = Sockets::prepare(&other_settings(&root)).await.unwrap();
        assert!(!sockets.registration.to_string_lossy().contains(uid));
        assert_ne!(sockets.registration, other.registration);
        assert_eq!(
            Sockets::prepare(&settings(&root, uid))
                .await
                .unwrap()
                .registration,
            sockets.registration,
            "a restarted container finds its own socket"
        );
        drop(bind(&sockets.registration).unwrap());
        Sockets::prepare(&other_settings(&root)).await.unwrap();
        assert!(
            !sockets.registration.exists(),
            "a dead one is removed by either name"
        );

        let deeper = folder.path().join("d".repeat(room));
        let error = Sockets::prepare(&settings(&deeper, uid)).await.unwrap_err();
        assert!(matches!(error, SocketError::TooLong(_)), "{error}");
    }

    fn other_settings(root: &Path) -> Settings {
        settings(root, "5f0c1f3e-6f0e-4d53-a0a9-0d3f6c2d8d3b")
    }

    #[tokio::test]
    async fn sockets_of_dead_instances_are_removed_and_living_ones_stay() {
        let folder = tempfile::tempdir().unwrap();
        let dead = Sockets::prepare(&settings(folder.path(), "dead"))
            .await
            .unwrap();
        drop(bind(&dead.endpoint).unwrap());
        drop(bind(&dead.registration).unwrap());
        let alive = Sockets::prepare(&settings(folder.path(), "alive"))
            .await
            .unwrap();
        let _served = (
            bind(&alive.endpoint).unwrap(),
            bind(&alive.registration).unwrap(),
        );

        Sockets::prepare(&settings(folder.path(), "new"))
            .await
            .unwrap();
        assert!(!dead.endpoint.exists() && !dead.registration.exists());
        assert!(alive.endpoint.exists() && alive.registration.exists());
        let new = Sockets::prepare(&settings(folder.path(), "new"))
            .await
            .unwrap();
        assert!(alive.alone().await && !new.alone().await);
    }
}
