//! The client against a hub in memory.

use super::*;
use crate::test_hub::{COMMIT, Hub as StubHub};
use serde_json::json;

fn request(repository: &str, revision: &str, file: Option<&str>) -> ModelRequest {
    ModelRequest {
        repository: repository.into(),
        revision: revision.into(),
        file: file.map(str::to_owned),
    }
}

fn tensor_file(bytes: usize) -> Vec<u8> {
    let header = json!({"w": {"dtype": "BF16", "shape": [bytes / 2], "data_offsets": [0, bytes]}})
        .to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(vec![7u8; bytes]);
    out
}

fn config() -> Vec<u8> {
    json!({"architectures":["LlamaForCausalLM"],"model_type":"llama","num_hidden_layers":2,"num_attention_heads":4,
        "num_key_value_heads":2,"hidden_size":64,"max_position_embeddings":4096,"torch_dtype":"bfloat16"})
    .to_string()
    .into_bytes()
}

async fn resolve(
    stub: StubHub,
    request: ModelRequest,
    token: Option<&str>,
) -> Result<ModelFacts, ModelError> {
    let (address, _) = stub.serve().await;
    Hub::new(address.parse().unwrap())
        .unwrap()
        .resolve(&request, None, token)
        .await
}

#[tokio::test]
async fn a_safetensors_model_is_pinned_and_measured_by_its_header() {
    let stub = StubHub::with(
        "acme/small",
        &[
            ("config.json", &config()),
            ("model.safetensors", &tensor_file(4096)),
            ("tokenizer.json", b"{}"),
            ("pytorch_model.bin", &[0; 9000]),
        ],
    );
    let facts = resolve(stub, request("acme/small", "main", None), None)
        .await
        .unwrap();
    assert_eq!(facts.commit, COMMIT);
    assert_eq!(facts.weights_bytes, 4096);
    assert_eq!(
        facts
            .files
            .iter()
            .map(|f| f.path.as_str())
            .collect::<Vec<_>>(),
        ["config.json", "tokenizer.json", "model.safetensors"]
    );
    assert_eq!(facts.kv.bytes_per_token(1, 2), 2 * 2 * 32 * 2);
    assert!(matches!(
        facts.files[2].checksum,
        crate::model::Checksum::Sha256(_)
    ));
    assert!(matches!(
        facts.files[0].checksum,
        crate::model::Checksum::GitBlob(_)
    ));
}

#[tokio::test]
async fn a_credible_index_saves_the_header_reads_and_a_wrong_one_does_not() {
    for (claimed, expected_reads) in [(4096u64 * 2, 0), (1 << 50, 2)] {
        let index = json!({"metadata": {"total_size": claimed}, "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}).to_string();
        let stub = StubHub::with(
            "acme/split",
            &[
                ("config.json", &config()),
                ("model.safetensors.index.json", index.as_bytes()),
                ("m-1.safetensors", &tensor_file(4096)),
                ("m-2.safetensors", &tensor_file(4096)),
                ("extra.safetensors", &tensor_file(64)),
            ],
        );
        let (address, hub) = stub.serve().await;
        let facts = Hub::new(address.parse().unwrap())
            .unwrap()
            .resolve(&request("acme/split", "main", None), None, None)
            .await
            .unwrap();
        assert_eq!(facts.weights_bytes, 8192);
        assert_eq!(hub.requests_for("m-1.safetensors").len(), expected_reads);
        assert!(
            facts.files.iter().all(|f| f.path != "extra.safetensors"),
            "the index names the set"
        );
    }
}

#[tokio::test]
async fn a_list_of_several_pages_is_read_to_its_end() {
    let mut stub = StubHub::with(
        "acme/small",
        &[
            ("a.txt", b"a"),
            ("config.json", &config()),
            ("model.safetensors", &tensor_file(64)),
        ],
    );
    stub.page_size = 1;
    assert_eq!(
        resolve(stub, request("acme/small", "main", None), None)
            .await
            .unwrap()
            .files
            .len(),
        3
    );
}

#[tokio::test]
async fn a_server_without_ranges_is_read_no_further_than_needed() {
    let mut stub = StubHub::with(
        "acme/small",
        &[
            ("config.json", &config()),
            ("model.safetensors", &tensor_file(1 << 20)),
        ],
    );
    stub.ignore_ranges = true;
    assert_eq!(
        resolve(stub, request("acme/small", "main", None), None)
            .await
            .unwrap()
            .weights_bytes,
        1 << 20
    );
}

#[tokio::test]
async fn what_is_missing_is_named() {
    let held = [("config.json", config())];
    let stub = || StubHub::with("acme/small", &[(held[0].0, &held[0].1)]);
    let revision = resolve(stub(), request("acme/small", "v9", None), None)
        .await
        .unwrap_err();
    assert!(
        matches!(&revision, ModelError::NotFound { .. }),
        "{revision}"
    );
    assert!(
        revision.to_string().contains("acme/small at revision v9"),
        "{revision}"
    );
    let repository = resolve(stub(), request("acme/none", "main", None), None)
        .await
        .unwrap_err();
    assert!(
        matches!(repository, ModelError::NotFound { .. }),
        "{repository}"
    );
    let model = resolve(stub(), request("acme/small", "main", None), None)
        .await
        .unwrap_err();
    assert!(matches!(model, ModelError::Rejected { .. }), "{model}");
}

#[tokio::test]
async fn a_gated_model_is_denied_without_its_token_and_read_with_it() {
    let stub = || {
        let mut s = StubHub::with(
            "acme/gated",
            &[
                ("config.json", &config()),
                ("model.safetensors", &tensor_file(64)),
            ],
        );
        s.token = Some("hf_x".into());
        s
    };
    for (token, says) in [(None, "name a Secret"), (Some("wrong"), "has no access")] {
        let error = resolve(stub(), request("acme/gated", "main", None), token)
            .await
            .unwrap_err();
        assert!(
            matches!(&error, ModelError::AccessDenied { .. }) && error.to_string().contains(says),
            "{error}"
        );
        assert!(
            !error.to_string().contains("wrong"),
            "a token never appears in a message"
        );
    }
    assert!(
        resolve(stub(), request("acme/gated", "main", None), Some("hf_x"))
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn a_failing_hub_is_a_transient_error_that_names_it() {
    let stub = StubHub::with("acme/small", &[]);
    stub.live.lock().unwrap().statuses = vec![503];
    let error = resolve(stub, request("acme/small", "main", None), None)
        .await
        .unwrap_err();
    assert!(
        error.is_transient() && error.to_string().contains("answered 503"),
        "{error}"
    );
    crate::test_hub::install_crypto();
    let nobody = Hub::new("http://127.0.0.1:1".parse().unwrap()).unwrap();
    let error = nobody
        .resolve(&request("acme/small", "main", None), None, None)
        .await
        .unwrap_err();
    assert!(
        error.is_transient() && error.to_string().contains("127.0.0.1:1"),
        "{error}"
    );
}

#[test]
fn names_that_would_change_the_address_are_refused() {
    for name in [
        "", "a/b/c", "../x", "a/..", "a b/c", "a/b?x", "-a/b", "a/b#",
    ] {
        assert!(check_repository(name).is_err(), "{name:?}");
    }
    for name in ["gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct", "a_b/c.d-e"] {
        assert!(check_repository(name).is_ok(), "{name:?}");
    }
    assert!(check_revision("refs/pr/1").is_ok() && check_revision("../x").is_err());
    let endpoint: HubEndpoint = "http://hub.example:8080/mirror/".parse().unwrap();
    assert_eq!(
        endpoint.file_url("a/b", COMMIT, "x y/z#1.json").as_str(),
        format!("http://hub.example:8080/mirror/a/b/resolve/{COMMIT}/x%20y/z%231.json")
    );
    assert!(
        "ftp://x".parse::<HubEndpoint>().is_err() && "http://u:p@x".parse::<HubEndpoint>().is_err()
    );
}

/// A server that sends every file elsewhere; gives its address.
async fn redirecting(to: String) -> String {
    use axum::extract::Request;
    use axum::response::{IntoResponse, Redirect};
    crate::test_hub::install_crypto();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let answer = move |request: Request| async move {
        let path = request.uri().path().to_owned();
        if path.contains("/revision/") {
            return axum::Json(json!({"sha": COMMIT})).into_response();
        }
        if path.contains("/tree/") {
            let entry = |path: &str| json!({"type": "file", "path": path, "size": 9, "oid": "a".repeat(40)});
            return axum::Json(json!([entry("config.json"), entry("model.safetensors")]))
                .into_response();
        }
        Redirect::temporary(&format!("{to}{path}?X-Amz-Signature=s3cr3t")).into_response()
    };
    let app = axum::Router::new().fallback(answer);
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    address
}

#[tokio::test]
async fn the_token_does_not_follow_a_redirect_to_another_host() {
    use axum::http::{HeaderMap, StatusCode, header};
    let (sender, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let app = axum::Router::new().fallback(move |headers: HeaderMap| async move {
        let _ = sender.send(headers.contains_key(header::AUTHORIZATION));
        StatusCode::NOT_FOUND
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let elsewhere = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let hub = Hub::new(redirecting(elsewhere).await.parse().unwrap()).unwrap();
    let asked = request("acme/small", "main", None);
    assert!(hub.resolve(&asked, None, Some("hf_x")).await.is_err());
    assert_eq!(seen.recv().await, Some(false));
}

#[tokio::test]
async fn a_signed_address_is_not_in_the_words_of_an_error() {
    // Nothing listens there.
    let hub = Hub::new(
        redirecting("http://127.0.0.1:1".into())
            .await
            .parse()
            .unwrap(),
    )
    .unwrap();
    let error = hub
        .resolve(&request("acme/small", "main", None), None, None)
        .await
        .unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert!(!error.to_string().contains("s3cr3t"), "{error}");
}

#[tokio::test]
async fn what_a_repository_says_of_itself_cannot_make_an_error_longer_than_a_status_holds() {
    let index = json!({"weight_map": {"w": "x".repeat(1 << 20)}}).to_string();
    let stub = StubHub::with(
        "acme/small",
        &[
            ("config.json", &config()),
            ("model.safetensors", &tensor_file(64)),
            ("model.safetensors.index.json", index.as_bytes()),
        ],
    );
    let error = resolve(stub, request("acme/small", "main", None), None)
        .await
        .unwrap_err();
    assert!(
        error.to_string().len() < 2_000,
        "{}",
        error.to_string().len()
    );
}

#[tokio::test]
async fn an_index_of_more_files_than_a_model_has_is_refused() {
    let names: serde_json::Map<_, _> = (0..1_000)
        .map(|n| (format!("w{n}"), json!(format!("{n}.safetensors"))))
        .collect();
    let index = json!({"weight_map": names}).to_string();
    let stub = StubHub::with(
        "acme/small",
        &[
            ("config.json", &config()),
            ("model.safetensors", &tensor_file(64)),
            ("model.safetensors.index.json", index.as_bytes()),
        ],
    );
    let error = resolve(stub, request("acme/small", "main", None), None)
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("more than 400 files"), "{error}");
}

#[test]
fn a_list_that_goes_on_elsewhere_is_not_taken_for_whole() {
    let first: Url = "https://hub.example/api/models/a/b/tree/c".parse().unwrap();
    let page = |link: &str| {
        let answer = axum::http::Response::builder()
            .header("link", link)
            .body("")
            .unwrap();
        next_page(&Response::from(answer), &first)
    };
    assert!(page("<http://hub.example/x>; rel=\"next\"").is_err());
    assert_eq!(page("<https://hub.example/x>; rel=\"prev\""), Ok(None));
    let next = page("<https://hub.example/p>; rel=\"prev\", </x?cursor=a,b>; rel=\"next\"");
    assert_eq!(
        next.unwrap().unwrap().as_str(),
        "https://hub.example/x?cursor=a,b"
    );
}
