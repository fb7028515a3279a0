//! What a client asks of the API server, and what its roles grant.
//!
//! In: a client's requests, as a layer beneath it; the manifests of a chart. Out: the rights that
//! were used, the requests that were refused, the rights that are granted. It never changes a request,
//! but it can keep those that renew a lease from ever being answered.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use axum::http::{Method, Request, Response, StatusCode};
use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde_json::Value;
use tower::{Layer, Service};

/// A right: API group, resource with subresource, verb.
pub type Right = (String, String, String);

/// A right from its parts.
#[must_use]
pub fn right(group: &str, resource: &str, verb: &str) -> Right {
    (group.to_owned(), resource.to_owned(), verb.to_owned())
}

/// Every right of the roles among `manifests` whose name `of` picks.
///
/// # Errors
/// If the manifests are none, or a role grants what no request can be held against: everything, or
/// paths that are of no resource.
pub fn granted(manifests: &str, of: impl Fn(&str) -> bool) -> Result<BTreeSet<Right>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(manifests)?;
    let mut rights = BTreeSet::new();
    for document in documents {
        let name = document["metadata"]["name"].as_str().unwrap_or_default();
        if !matches!(document["kind"].as_str(), Some("ClusterRole" | "Role")) || !of(name) {
            continue;
        }
        let rules: Vec<PolicyRule> = serde_json::from_value(document["rules"].clone())?;
        for rule in rules {
            ensure!(
                rule.non_resource_urls.is_none(),
                "{name} grants what is no resource"
            );
            for group in rule.api_groups.iter().flatten() {
                for resource in rule.resources.iter().flatten() {
                    for verb in &rule.verbs {
                        ensure!(
                            ![group, resource, verb].iter().any(|part| *part == "*"),
                            "{name} grants everything"
                        );
                        rights.insert(right(group, resource, verb));
                    }
                }
            }
        }
    }
    Ok(rights)
}

/// One request and its answer.
#[derive(Debug, Clone)]
pub struct Asked {
    /// When it was made.
    pub at: Instant,
    /// Its method.
    pub method: Method,
    /// Its path and query.
    pub uri: String,
    /// The answer.
    pub status: StatusCode,
}

impl Asked {
    /// Whether it would change something.
    #[must_use]
    pub fn writes(&self) -> bool {
        self.method != Method::GET
    }

    /// The rights that the server asked for.
    ///
    /// # Errors
    /// If it was of no resource.
    pub fn rights(&self) -> Result<Vec<Right>> {
        let (group, resource, named, watched) =
            parts(&self.uri).with_context(|| format!("{} is of no resource", self.uri))?;
        let verb = match (self.method.as_str(), named) {
            ("GET", _) if watched => "watch",
            ("GET", true) => "get",
            ("GET", false) => "list",
            ("POST", _) => "create",
            ("PUT", _) => "update",
            ("PATCH", _) => "patch",
            ("DELETE", true) => "delete",
            ("DELETE", false) => "deletecollection",
            _ => bail!("{} {}", self.method, self.uri),
        };
        let mut rights = vec![right(&group, &resource, verb)];
        // Server-side apply of an object that was not there needs both.
        if self.method == Method::PATCH && self.status == StatusCode::CREATED {
            rights.push(right(&group, &resource, "create"));
        }
        Ok(rights)
    }
}

/// What was asked of the API server.
#[derive(Debug, Clone, Default)]
pub struct Recorder {
    asked: Arc<Mutex<Vec<Asked>>>,
    leases_hang: Arc<AtomicBool>,
}

impl Recorder {
    /// Every answered request so far.
    #[must_use]
    pub fn asked(&self) -> Vec<Asked> {
        self.asked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The rights that were used.
    ///
    /// # Errors
    /// If a request was of no resource.
    pub fn used(&self) -> Result<BTreeSet<Right>> {
        let mut used = BTreeSet::new();
        for asked in self.asked() {
            // Discovery needs no right that a role would have to grant.
            if asked.status != StatusCode::FORBIDDEN && !is_discovery(&asked.uri) {
                used.extend(asked.rights()?);
            }
        }
        Ok(used)
    }

    /// The requests that were refused for want of a right.
    #[must_use]
    pub fn refused(&self) -> Vec<String> {
        let refused = self.asked().into_iter();
        refused
            .filter(|asked| asked.status == StatusCode::FORBIDDEN)
            .map(|asked| format!("{} {}", asked.method, asked.uri))
            .collect()
    }

    /// From now on no request about a lease is answered, as if the network lost just those.
    pub fn let_leases_hang(&self) {
        self.leases_hang.store(true, Ordering::Release);
    }
}

fn is_discovery(uri: &str) -> bool {
    uri.starts_with("/apis/") && uri.trim_end_matches('/').split('/').count() <= 4
}

/// Group, resource with subresource, whether one object is named, whether it is a watch.
fn parts(uri: &str) -> Option<(String, String, bool, bool)> {
    let (path, query) = uri.split_once('?').unwrap_or((uri, ""));
    let mut words = path.trim_start_matches('/').split('/');
    let group = match words.next()? {
        "api" => "",
        "apis" => words.next()?,
        _ => return None,
    };
    words.next()?; // The version.
    let mut words: Vec<&str> = words.collect();
    if words.first() == Some(&"namespaces") && words.len() > 2 {
        words.drain(..2);
    }
    let mut resource = (*words.first()?).to_owned();
    if let Some(sub) = words.get(2) {
        resource = format!("{resource}/{sub}");
    }
    let watched = query
        .split('&')
        .any(|pair| pair == "watch=true" || pair == "watch=1");
    Some((group.to_owned(), resource, words.len() > 1, watched))
}

impl<S> Layer<S> for Recorder {
    type Service = Recorded<S>;

    fn layer(&self, inner: S) -> Recorded<S> {
        let recorder = self.clone();
        Recorded { inner, recorder }
    }
}

/// A client whose requests are recorded.
#[derive(Debug, Clone)]
pub struct Recorded<S> {
    inner: S,
    recorder: Recorder,
}

impl<S, A, B> Service<Request<A>> for Recorded<S>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    B: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<A>) -> Self::Future {
        let at = Instant::now();
        let method = request.method().clone();
        let uri = request.uri().path_and_query();
        let uri = uri.map_or_else(String::new, ToString::to_string);
        let recorder = self.recorder.clone();
        if uri.contains("/leases") && recorder.leases_hang.load(Ordering::Acquire) {
            return std::future::pending().boxed();
        }
        let answer = self.inner.call(request);
        async move {
            let answer = answer.await?;
            let asked = Asked {
                at,
                method,
                uri,
                status: answer.status(),
            };
            let mut all = recorder
                .asked
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            all.push(asked);
            drop(all);
            Ok(answer)
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rights(method: Method, uri: &str, status: u16) -> Vec<Right> {
        let asked = Asked {
            at: Instant::now(),
            method,
            uri: uri.to_owned(),
            status: StatusCode::from_u16(status).unwrap(),
        };
        asked.rights().unwrap()
    }

    #[test]
    fn requests_are_told_by_the_right_that_they_need() {
        let apply = rights(
            Method::PATCH,
            "/apis/apps/v1/namespaces/n/statefulsets/s",
            201,
        );
        let both = [
            right("apps", "statefulsets", "patch"),
            right("apps", "statefulsets", "create"),
        ];
        assert_eq!(apply, both);
        let uri =
            "/apis/ai.deckhouse.io/v1alpha1/namespaces/n/inferenceservices/o/status?force=true";
        let status = right("ai.deckhouse.io", "inferenceservices/status", "patch");
        assert_eq!(rights(Method::PATCH, uri, 200), [status]);
        assert_eq!(
            rights(Method::GET, "/api/v1/nodes?watch=true", 200),
            [right("", "nodes", "watch")]
        );
        assert_eq!(
            rights(Method::GET, "/api/v1/namespaces/n", 200),
            [right("", "namespaces", "get")]
        );
        assert!(
            is_discovery("/apis/resource.k8s.io/v1") && !is_discovery("/apis/apps/v1/statefulsets")
        );
    }
}
