//! The hub as its clients see it, through its router.

use axum::body::to_bytes;
use serde_json::Value;
use tower::ServiceExt as _;

use super::*;

fn hub() -> (Arc<Hub>, Router) {
    let contents = BTreeMap::from([
        ("config.json".to_owned(), Content::Memory(b"{}".to_vec())),
        (
            "model.gguf".to_owned(),
            Content::Memory(b"0123456789".to_vec()),
        ),
    ]);
    let public = Repository::new("acme/small", contents.clone(), None).unwrap();
    let gated = Repository::new("acme/gated", contents, Some("secret".into())).unwrap();
    let all = [public, gated]
        .into_iter()
        .map(|one| (one.id.clone(), one))
        .collect();
    let hub = Hub::new(all);
    (hub.clone(), router(hub))
}

async fn ask(router: &Router, method: &str, path: &str, headers: &[(&str, &str)]) -> Response {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    router
        .clone()
        .oneshot(request.body(Body::empty()).unwrap())
        .await
        .unwrap()
}

async fn text(response: Response) -> String {
    String::from_utf8(
        to_bytes(response.into_body(), usize::MAX)
            .await
            .unwrap()
            .to_vec(),
    )
    .unwrap()
}

#[tokio::test]
async fn model_information_names_the_commit_and_the_files() {
    let (_, router) = hub();
    let answer = ask(&router, "GET", "/api/models/acme/small/revision/main", &[]).await;
    let model: Value = serde_json::from_str(&text(answer).await).unwrap();
    assert_eq!(model["sha"].as_str().unwrap().len(), 40);
    assert_eq!(model["siblings"][1]["rfilename"], "model.gguf");
    let tree = format!(
        "/api/models/acme/small/tree/{}?recursive=true",
        model["sha"].as_str().unwrap()
    );
    let tree: Value =
        serde_json::from_str(&text(ask(&router, "GET", &tree, &[]).await).await).unwrap();
    assert_eq!(tree[1]["size"], 10);
    assert_eq!(tree[1]["lfs"]["oid"].as_str().unwrap().len(), 64);
}

#[tokio::test]
async fn head_tells_size_etag_and_commit_without_a_body() {
    let (_, router) = hub();
    let answer = ask(&router, "HEAD", "/acme/small/resolve/main/model.gguf", &[]).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(answer.headers()["x-linked-size"], "10");
    assert_eq!(answer.headers()["etag"], answer.headers()["x-linked-etag"]);
    assert_eq!(answer.headers()["x-repo-commit"].len(), 40);
    assert_eq!(text(answer).await, "");
}

#[tokio::test]
async fn a_download_resumes_from_a_range_unless_the_file_changed() {
    let (_, router) = hub();
    let path = "/acme/small/resolve/main/model.gguf";
    let whole = ask(&router, "GET", path, &[]).await;
    let etag = whole.headers()["etag"].to_str().unwrap().to_owned();
    assert_eq!(text(whole).await, "0123456789");
    let rest = ask(
        &router,
        "GET",
        path,
        &[("range", "bytes=4-"), ("if-range", &etag)],
    )
    .await;
    assert_eq!(rest.status(), StatusCode::PARTIAL_CONTENT);
    assert_eq!(rest.headers()["content-range"], "bytes 4-9/10");
    assert_eq!(text(rest).await, "456789");
    let changed = ask(
        &router,
        "GET",
        path,
        &[("range", "bytes=4-"), ("if-range", "\"x\"")],
    )
    .await;
    assert_eq!(changed.status(), StatusCode::OK);
    let past = ask(&router, "GET", path, &[("range", "bytes=10-")]).await;
    assert_eq!(past.status(), StatusCode::RANGE_NOT_SATISFIABLE);
}

#[tokio::test]
async fn a_gated_repository_wants_its_token() {
    let (_, router) = hub();
    let path = "/acme/gated/resolve/main/config.json";
    let refused = ask(&router, "GET", path, &[]).await;
    assert_eq!(refused.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(refused.headers()["x-error-code"], "GatedRepo");
    let served = ask(&router, "GET", path, &[("authorization", "Bearer secret")]).await;
    assert_eq!(served.status(), StatusCode::OK);
}

#[tokio::test]
async fn what_does_not_exist_is_refused_by_its_name() {
    let (_, router) = hub();
    for (path, code) in [
        ("/api/models/acme/none", "RepoNotFound"),
        ("/api/models/acme/small/revision/v2", "RevisionNotFound"),
        ("/acme/small/resolve/main/none.json", "EntryNotFound"),
    ] {
        let answer = ask(&router, "GET", path, &[]).await;
        assert_eq!(answer.status(), StatusCode::NOT_FOUND, "{path}");
        assert_eq!(answer.headers()["x-error-code"], code, "{path}");
    }
}

#[tokio::test]
async fn a_cut_breaks_one_download_after_its_bytes_and_the_next_one_is_whole() {
    let (hub, router) = hub();
    let path = "/acme/small/resolve/main/model.gguf";
    hub.faults.arm(Fault {
        path_contains: "model.gguf".into(),
        times: 1,
        cut_after_bytes: Some(4),
        ..Fault::default()
    });
    let cut = ask(&router, "GET", path, &[]).await;
    assert_eq!(cut.headers()["content-length"], "10");
    assert!(to_bytes(cut.into_body(), usize::MAX).await.is_err());
    assert_eq!(
        text(ask(&router, "GET", path, &[]).await).await,
        "0123456789"
    );
    let journal = hub.faults.journal();
    assert_eq!(journal.len(), 2);
    assert_eq!(
        (journal[0].method.as_str(), journal[0].status),
        ("GET", 200)
    );
}

#[tokio::test]
async fn an_uploaded_repository_is_served_with_the_size_that_it_claims() {
    let (_, router) = hub();
    let upload = json!({ "files": { "model.safetensors": { "size": 1_u64 << 42 } } });
    let request = Request::builder()
        .method("PUT")
        .uri("/admin/repositories/acme/huge")
        .header("content-type", "application/json")
        .body(Body::from(upload.to_string()))
        .unwrap();
    assert_eq!(
        router.clone().oneshot(request).await.unwrap().status(),
        StatusCode::OK
    );
    let head = ask(
        &router,
        "HEAD",
        "/acme/huge/resolve/main/model.safetensors",
        &[],
    )
    .await;
    assert_eq!(head.headers()["content-length"], "4398046511104");
}
