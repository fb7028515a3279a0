//! A Hugging Face-compatible hub on a folder of repositories, for tests and for the demo.
//!
//! In: repositories ([`repository`]) and faults ([`faults`]). Out: an HTTP service with the routes
//! that hub clients use: model information, file tree, and files with `ETag`, `X-Repo-Commit`,
//! `X-Linked-Size`, `X-Linked-Etag` and ranges. It has one revision per repository and no writes
//! but the admin routes; it must never be reachable from outside a test cluster.

pub mod faults;
pub mod range;
pub mod repository;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Extension, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use serde_json::json;

use faults::{Fault, FaultBook, JournalEntry};
use range::{Part, requested_part};
use repository::{Content, Repository, RepositoryFile, RepositoryUpload};

/// Bytes read and sent at a time.
const CHUNK_BYTES: usize = 256 << 10;

/// The hub's state: what it serves and how it misbehaves.
#[derive(Debug, Default)]
pub struct Hub {
    repositories: RwLock<BTreeMap<String, Arc<Repository>>>,
    faults: FaultBook,
}

impl Hub {
    /// A hub that serves these repositories.
    pub fn new(repositories: BTreeMap<String, Repository>) -> Arc<Self> {
        let repositories = repositories
            .into_iter()
            .map(|(id, one)| (id, Arc::new(one)))
            .collect();
        Arc::new(Self {
            repositories: RwLock::new(repositories),
            faults: FaultBook::default(),
        })
    }

    fn repository(&self, id: &str) -> Option<Arc<Repository>> {
        self.repositories
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(id)
            .cloned()
    }

    fn put(&self, repository: Repository) {
        self.repositories
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(repository.id.clone(), Arc::new(repository));
    }

    /// The readable repository of `owner/name`, or the answer that a real hub gives.
    fn open(
        &self,
        owner: &str,
        name: &str,
        revision: &str,
        headers: &HeaderMap,
    ) -> Result<Arc<Repository>, Refusal> {
        let id = format!("{owner}/{name}");
        let repository = self.repository(&id).ok_or(Refusal::repository(&id))?;
        let bearer = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.strip_prefix("Bearer "));
        if repository.token.is_some() && repository.token.as_deref() != bearer {
            return Err(Refusal {
                status: StatusCode::UNAUTHORIZED,
                code: "GatedRepo",
                message: format!("Access to model {id} is restricted."),
            });
        }
        if !repository.has_revision(revision) {
            return Err(Refusal {
                status: StatusCode::NOT_FOUND,
                code: "RevisionNotFound",
                message: format!("Invalid rev id: {revision}"),
            });
        }
        Ok(repository)
    }
}

/// An error answer in the hub's form: `X-Error-Code`, `X-Error-Message` and a JSON body.
#[derive(Debug)]
struct Refusal {
    status: StatusCode,
    code: &'static str,
    message: String,
}

impl Refusal {
    fn repository(id: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            code: "RepoNotFound",
            message: format!("Repository {id} not found"),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let headers = [
            ("x-error-code", self.code.to_owned()),
            ("x-error-message", self.message.clone()),
        ];
        (
            self.status,
            headers,
            axum::Json(json!({ "error": self.message })),
        )
            .into_response()
    }
}

/// The hub's routes, admin routes included.
pub fn router(hub: Arc<Hub>) -> Router {
    let clients = Router::new()
        .route("/api/models/{owner}/{name}", get(model))
        .route(
            "/api/models/{owner}/{name}/revision/{revision}",
            get(model_at_revision),
        )
        .route("/api/models/{owner}/{name}/tree/{revision}", get(tree))
        .route("/{owner}/{name}/resolve/{revision}/{*file}", get(file))
        .layer(from_fn_with_state(hub.clone(), misbehave));
    let admin = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/admin/repositories/{owner}/{name}", put(upload))
        .route("/admin/faults", post(arm_fault))
        .route("/admin/faults", delete(disarm_faults))
        .route("/admin/requests", get(requests));
    clients.merge(admin).with_state(hub)
}

/// Applies the fault that the request meets and writes the journal.
async fn misbehave(State(hub): State<Arc<Hub>>, mut request: Request, next: Next) -> Response {
    let method = request.method().to_string();
    let path = request.uri().to_string();
    let range = request.headers().get(header::RANGE);
    let range = range
        .and_then(|value| value.to_str().ok())
        .map(str::to_owned);
    let authorized = request.headers().contains_key(header::AUTHORIZATION);
    let fault = hub.faults.meet(&method, &path);
    let response = match fault.as_ref().and_then(|fault| fault.status) {
        Some(status) => StatusCode::from_u16(status)
            .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
            .into_response(),
        None => {
            if let Some(fault) = fault {
                request.extensions_mut().insert(fault);
            }
            next.run(request).await
        }
    };
    let status = response.status().as_u16();
    tracing::info!(method, path, range, status, "Answered a request.");
    hub.faults.record(JournalEntry {
        method,
        path,
        range,
        authorized,
        status,
    });
    response
}

async fn model(
    State(hub): State<Arc<Hub>>,
    Path((owner, name)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let repository = hub.open(&owner, &name, "main", &headers)?;
    Ok(model_information(&repository))
}

async fn model_at_revision(
    State(hub): State<Arc<Hub>>,
    Path((owner, name, revision)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let repository = hub.open(&owner, &name, &revision, &headers)?;
    Ok(model_information(&repository))
}

fn model_information(repository: &Repository) -> Response {
    let siblings: Vec<_> = repository
        .files
        .iter()
        .map(|(path, file)| sibling(path, file))
        .collect();
    axum::Json(json!({
        "id": repository.id,
        "modelId": repository.id,
        "sha": repository.commit,
        "private": false,
        "gated": if repository.token.is_some() { json!("manual") } else { json!(false) },
        "disabled": false,
        "tags": [],
        "siblings": siblings,
    }))
    .into_response()
}

/// A file as model information lists it, with what a real hub adds for `?blobs=true`.
fn sibling(path: &str, file: &RepositoryFile) -> serde_json::Value {
    let mut sibling = json!({ "rfilename": path, "size": file.size, "blobId": file.blob_id });
    if file.large {
        sibling["lfs"] = json!({ "sha256": file.sha256, "size": file.size, "pointerSize": 134 });
    }
    sibling
}

async fn tree(
    State(hub): State<Arc<Hub>>,
    Path((owner, name, revision)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let repository = hub.open(&owner, &name, &revision, &headers)?;
    let entries: Vec<_> = repository
        .files
        .iter()
        .map(|(path, file)| entry(path, file))
        .collect();
    Ok(axum::Json(entries).into_response())
}

fn entry(path: &str, file: &RepositoryFile) -> serde_json::Value {
    let mut entry = json!({
        "type": "file",
        "oid": file.blob_id,
        "size": file.size,
        "path": path,
    });
    if file.large {
        entry["lfs"] = json!({ "oid": file.sha256, "size": file.size, "pointerSize": 134 });
    }
    entry
}

async fn file(
    State(hub): State<Arc<Hub>>,
    Path((owner, name, revision, path)): Path<(String, String, String, String)>,
    method: Method,
    headers: HeaderMap,
    fault: Option<Extension<Fault>>,
) -> Result<Response, Refusal> {
    let repository = hub.open(&owner, &name, &revision, &headers)?;
    let file = repository.files.get(&path).ok_or_else(|| Refusal {
        status: StatusCode::NOT_FOUND,
        code: "EntryNotFound",
        message: format!(
            "{path} does not exist on revision {revision} of {}",
            repository.id
        ),
    })?;
    let text = |name| {
        headers
            .get(name)
            .and_then(|value: &HeaderValue| value.to_str().ok())
    };
    let current = text(header::IF_RANGE).is_none_or(|condition| condition == file.etag());
    let part = match requested_part(text(header::RANGE), file.size) {
        _ if !current => Part::Whole,
        part => part,
    };
    let Extension(fault) = fault.unwrap_or_default();
    Ok(answer(
        &repository,
        file,
        part,
        method == Method::HEAD,
        fault,
    ))
}

fn answer(
    repository: &Repository,
    file: &RepositoryFile,
    part: Part,
    head: bool,
    fault: Fault,
) -> Response {
    let mut answer = Response::builder()
        .header(header::ETAG, file.etag())
        .header(header::ACCEPT_RANGES, "bytes")
        .header(header::CONTENT_TYPE, "application/octet-stream")
        .header("x-repo-commit", &repository.commit);
    if file.large {
        answer = answer
            .header("x-linked-size", file.size)
            .header("x-linked-etag", file.etag());
    }
    let bytes = match part {
        Part::Whole => 0..file.size,
        Part::Bytes(bytes) => {
            let range = format!("bytes {}-{}/{}", bytes.start, bytes.end - 1, file.size);
            answer = answer
                .status(StatusCode::PARTIAL_CONTENT)
                .header("content-range", range);
            bytes
        }
        Part::Unsatisfiable => {
            answer = answer
                .status(StatusCode::RANGE_NOT_SATISFIABLE)
                .header("content-range", format!("bytes */{}", file.size));
            0..0
        }
    };
    let body = if head {
        Body::empty()
    } else {
        stream(file.content.clone(), bytes.clone(), fault)
    };
    answer
        .header(header::CONTENT_LENGTH, bytes.end - bytes.start)
        .body(body)
        .unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

/// The bytes of `content`, chunk by chunk, as `fault` lets them through.
fn stream(content: Content, bytes: Range<u64>, fault: Fault) -> Body {
    let start = bytes.start;
    Body::from_stream(futures::stream::try_unfold(start, move |offset| {
        let (content, fault, end) = (content.clone(), fault.clone(), bytes.end);
        async move {
            if offset >= end {
                return Ok(None);
            }
            let mut limit = (end - offset).min(CHUNK_BYTES as u64);
            if let Some(cut) = fault.cut_after_bytes {
                // An error of the body stream makes the server drop the connection.
                if offset - start >= cut {
                    return Err(std::io::Error::other("connection cut by a fault"));
                }
                limit = limit.min(cut - (offset - start));
            }
            if let Some(rate) = fault.bytes_per_second.filter(|rate| *rate > 0) {
                limit = limit.min(rate.div_ceil(10));
                tokio::time::sleep(Duration::from_secs_f64(limit as f64 / rate as f64)).await;
            }
            let mut chunk = read(content, offset, limit).await?;
            if fault.corrupt && offset == start {
                chunk[0] ^= 0xff;
            }
            let next = offset + chunk.len() as u64;
            Ok(Some((Bytes::from(chunk), next)))
        }
    }))
}

async fn read(content: Content, offset: u64, limit: u64) -> std::io::Result<Vec<u8>> {
    let limit = usize::try_from(limit).unwrap_or(CHUNK_BYTES);
    let chunk = tokio::task::spawn_blocking(move || content.read(offset, limit)).await??;
    if chunk.is_empty() {
        return Err(std::io::Error::other(
            "the file became shorter while it was served",
        ));
    }
    Ok(chunk)
}

async fn upload(
    State(hub): State<Arc<Hub>>,
    Path((owner, name)): Path<(String, String)>,
    axum::Json(upload): axum::Json<RepositoryUpload>,
) -> Response {
    match Repository::from_upload(&format!("{owner}/{name}"), upload) {
        Ok(repository) => {
            let answer = model_information(&repository);
            hub.put(repository);
            answer
        }
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error:#}\n")).into_response(),
    }
}

async fn arm_fault(
    State(hub): State<Arc<Hub>>,
    axum::Json(fault): axum::Json<Fault>,
) -> StatusCode {
    hub.faults.arm(fault);
    StatusCode::NO_CONTENT
}

async fn disarm_faults(State(hub): State<Arc<Hub>>) -> StatusCode {
    hub.faults.disarm_all();
    StatusCode::NO_CONTENT
}

async fn requests(State(hub): State<Arc<Hub>>) -> Response {
    axum::Json(hub.faults.journal()).into_response()
}

#[cfg(test)]
mod tests;
