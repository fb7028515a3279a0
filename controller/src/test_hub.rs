//! A hub for unit tests: answers the routes that the client uses from memory,
//! and misbehaves on request.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Once};

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the hub holds and how it misbehaves.
#[derive(Default)]
pub(crate) struct Hub {
    pub(crate) repository: String,
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    pub(crate) token: Option<String>,
    pub(crate) page_size: usize,
    /// Answers without looking at the range.
    pub(crate) ignore_ranges: bool,
    /// State that requests change.
    pub(crate) live: Mutex<Live>,
}

#[derive(Default)]
pub(crate) struct Live {
    /// Cut the next answers' bodies after that many bytes each.
    pub(crate) cuts: Vec<usize>,
    /// Answer the next requests with these codes.
    pub(crate) statuses: Vec<u16>,
    /// Send the head of the next that many bodies and then nothing more.
    pub(crate) stalls: usize,
    /// Requests seen: path and range.
    pub(crate) seen: Vec<(String, Option<String>)>,
}

pub(crate) fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

pub(crate) fn git_blob(content: &[u8]) -> String {
    let mut hash = Sha1::new();
    hash.update(format!("blob {}\0", content.len()));
    hash.update(content);
    hex(hash.finalize())
}

pub(crate) fn install_crypto() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

impl Hub {
    pub(crate) fn with(repository: &str, files: &[(&str, &[u8])]) -> Self {
        Hub {
            repository: repository.into(),
            files: files
                .iter()
                .map(|(p, c)| ((*p).to_owned(), c.to_vec()))
                .collect(),
            page_size: 1000,
            ..Hub::default()
        }
    }

    /// Serves until the test's runtime ends; gives the address.
    pub(crate) async fn serve(self) -> (String, Arc<Hub>) {
        install_crypto();
        let hub = Arc::new(self);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let app = Router::new().fallback(answer).with_state(hub.clone());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        (address, hub)
    }

    pub(crate) fn requests_for(&self, end: &str) -> Vec<Option<String>> {
        let live = self.live.lock().unwrap();
        live.seen
            .iter()
            .filter(|(p, _)| p.ends_with(end))
            .map(|(_, r)| r.clone())
            .collect()
    }

    fn entry(&self, path: &str) -> Value {
        let content = &self.files[path];
        let mut entry =
            json!({"type": "file", "path": path, "size": content.len(), "oid": git_blob(content)});
        if path.ends_with(".safetensors") || path.ends_with(".gguf") {
            entry["lfs"] = json!({"oid": hex(Sha256::digest(content)), "size": content.len(), "pointerSize": 134});
        }
        entry
    }
}

fn refuse(status: u16, code: &str) -> Response {
    (
        StatusCode::from_u16(status).unwrap(),
        [("x-error-code", code.to_owned())],
        "no",
    )
        .into_response()
}

async fn answer(State(hub): State<Arc<Hub>>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let headers = request.headers().clone();
    let text = |name| {
        headers
            .get(name)
            .and_then(|v: &header::HeaderValue| v.to_str().ok())
            .map(str::to_owned)
    };
    let range = text(header::RANGE);
    {
        let mut live = hub.live.lock().unwrap();
        live.seen.push((path.clone(), range.clone()));
        if !live.statuses.is_empty() {
            return refuse(live.statuses.remove(0), "");
        }
    }
    if let Some(token) = &hub.token
        && text(header::AUTHORIZATION) != Some(format!("Bearer {token}"))
    {
        return refuse(401, "GatedRepo");
    }
    let info = format!("/api/models/{}/revision/", hub.repository);
    let tree = format!("/api/models/{}/tree/{COMMIT}", hub.repository);
    let resolve = format!("/{}/resolve/{COMMIT}/", hub.repository);
    if let Some(revision) = path.strip_prefix(&info) {
        return match revision {
            "main" | COMMIT => axum::Json(json!({"sha": COMMIT})).into_response(),
            _ => refuse(404, "RevisionNotFound"),
        };
    }
    if path == tree {
        return page(&hub, request.uri().query().unwrap_or(""), &tree);
    }
    match path.strip_prefix(&resolve).and_then(|p| hub.files.get(p)) {
        Some(content) => file(&hub, content, range, &headers),
        None if path.contains(&hub.repository) => refuse(404, "EntryNotFound"),
        None => refuse(404, "RepoNotFound"),
    }
}

fn page(hub: &Hub, query: &str, tree: &str) -> Response {
    let start: usize = query
        .split('&')
        .find_map(|q| q.strip_prefix("cursor="))
        .map_or(0, |c| c.parse().unwrap());
    let entries: Vec<Value> = hub
        .files
        .keys()
        .skip(start)
        .take(hub.page_size)
        .map(|p| hub.entry(p))
        .collect();
    let next = start + entries.len();
    let mut response = axum::Json(entries).into_response();
    if next < hub.files.len() {
        let link = format!("<{tree}?recursive=true&cursor={next}>; rel=\"next\"");
        response
            .headers_mut()
            .insert(header::LINK, link.parse().unwrap());
    }
    response
}

fn file(hub: &Hub, content: &[u8], range: Option<String>, headers: &HeaderMap) -> Response {
    let etag = format!("\"{}\"", hex(Sha256::digest(content)));
    let same = headers
        .get(header::IF_RANGE)
        .is_none_or(|v| v.to_str().unwrap() == etag);
    let asked = range.filter(|_| !hub.ignore_ranges && same).and_then(|r| {
        let (start, end) = r.strip_prefix("bytes=")?.split_once('-')?;
        Some((start.parse::<usize>().ok()?, end.parse::<usize>().ok()))
    });
    let builder = Response::builder()
        .header(header::ETAG, &etag)
        .header("x-repo-commit", COMMIT);
    let (builder, bytes) = match asked {
        Some((start, _)) if start >= content.len() => {
            return builder.status(416).body(Body::empty()).unwrap();
        }
        Some((start, end)) => {
            let end = end.map_or(content.len(), |e| (e + 1).min(content.len()));
            let range = format!("bytes {start}-{}/{}", end - 1, content.len());
            (
                builder.status(206).header(header::CONTENT_RANGE, range),
                &content[start..end],
            )
        }
        None => (builder.status(200), content),
    };
    let mut live = hub.live.lock().unwrap();
    let body = if live.stalls > 0 {
        live.stalls -= 1;
        let head = Ok::<_, std::io::Error>(Bytes::copy_from_slice(&bytes[..bytes.len() / 2]));
        Body::from_stream(futures::stream::once(async { head }).chain(futures::stream::pending()))
    } else if live.cuts.is_empty() {
        Body::from(bytes.to_vec())
    } else {
        let cut = live.cuts.remove(0).min(bytes.len());
        let parts = [
            Ok(Bytes::copy_from_slice(&bytes[..cut])),
            Err(std::io::Error::other("cut")),
        ];
        // The pause lets the head leave before the connection goes down.
        Body::from_stream(
            futures::stream::iter(parts).then(async |p: Result<Bytes, _>| {
                if p.is_err() {
                    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                }
                p
            }),
        )
    };
    builder
        .header(header::CONTENT_LENGTH, bytes.len())
        .body(body)
        .unwrap()
}

use futures::StreamExt;
