//! Whether a copy's runtime serves its model by name.
//!
//! In: the runtime's list of models, over the pod's own loopback, with the endpoint's
//! token. Out: `GET /ready` for the kubelet's readiness probe: 200, or 503 with what is
//! wrong. Never: a verdict that is remembered, or the token in an answer.
//!
//! A probe of the kubelet cannot do this: it does not read an answer, and its headers,
//! and so the token, would stand in the pod's specification. The runtime's own health
//! path says that a process is up, not that it serves this model.

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use serde::Deserialize;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Shorter than the kubelet's own patience, so that it hears the reason.
const PATIENCE: Duration = Duration::from_secs(4);
/// Most bytes of the runtime's list.
const MAX_LIST: usize = 1 << 20;

/// What is asked, and for whom.
#[derive(Clone, Debug)]
pub struct Question {
    /// Where the runtime lists its models: `http://127.0.0.1:8000/v1/models`.
    pub url: String,
    /// Name that the model has to be served by.
    pub model: String,
    /// The endpoint's token, where it asks for one.
    pub token: Option<String>,
}

/// Why the copy is not ready.
#[derive(Debug, thiserror::Error)]
pub enum NotServed {
    /// Nothing answers, or not in time.
    #[error("the runtime does not answer at {url}: {words}")]
    Silent {
        /// What was asked.
        url: String,
        /// What the connection said.
        words: String,
    },
    /// It answers, and not with its models.
    #[error("the runtime answers {url} with {status}")]
    Status {
        /// What was asked.
        url: String,
        /// The answer's status.
        status: u16,
    },
    /// What it answers is no list of models.
    #[error("the runtime's list of models can't be read: {0}")]
    Unreadable(String),
    /// It serves, and not this model.
    #[error("the runtime serves {served}, not the model {wanted}")]
    OtherModel {
        /// What it serves.
        served: String,
        /// What the order's users ask for.
        wanted: String,
    },
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

/// Asks the runtime once.
///
/// # Errors
/// [`NotServed`], in the words that the kubelet repeats.
pub async fn ask(client: &reqwest::Client, question: &Question) -> Result<(), NotServed> {
    let url = &question.url;
    let silent = |error: reqwest::Error| NotServed::Silent {
        url: url.clone(),
        words: error.without_url().to_string(),
    };
    let mut request = client.get(url);
    if let Some(token) = &question.token {
        request = request.bearer_auth(token);
    }
    let mut response = request.send().await.map_err(silent)?;
    let status = response.status();
    if status != reqwest::StatusCode::OK {
        return Err(NotServed::Status {
            url: url.clone(),
            status: status.as_u16(),
        });
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(silent)? {
        if body.len() + chunk.len() > MAX_LIST {
            return Err(NotServed::Unreadable(format!(
                "it is longer than {MAX_LIST} bytes"
            )));
        }
        body.extend_from_slice(&chunk);
    }
    let models: Models =
        serde_json::from_slice(&body).map_err(|e| NotServed::Unreadable(e.to_string()))?;
    if models.data.iter().any(|m| m.id == question.model) {
        return Ok(());
    }
    let served: Vec<&str> = models.data.iter().map(|m| m.id.as_str()).collect();
    Err(NotServed::OtherModel {
        served: if served.is_empty() {
            "no model".to_owned()
        } else {
            served.join(", ")
        },
        wanted: question.model.clone(),
    })
}

/// A client for the pod's own loopback.
///
/// # Errors
/// Where the client cannot be made.
pub fn client() -> Result<reqwest::Client, reqwest::Error> {
    reqwest::Client::builder()
        .tls_certs_only([])
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .timeout(PATIENCE)
        .build()
}

/// Serves `GET /ready` until the process ends; each request asks the runtime anew.
///
/// # Errors
/// When the address cannot be listened on.
pub async fn serve(
    address: SocketAddr,
    client: reqwest::Client,
    question: Question,
) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind(address).await?;
    axum::serve(listener, router(client, question)).await
}

fn router(client: reqwest::Client, question: Question) -> Router {
    Router::new()
        .route("/ready", get(ready))
        .with_state(Arc::new((client, question)))
}

async fn ready(State(asked): State<Arc<(reqwest::Client, Question)>>) -> (StatusCode, String) {
    let (client, question) = &*asked;
    match ask(client, question).await {
        Ok(()) => (StatusCode::OK, format!("{} is served\n", question.model)),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderMap;
    use rstest::rstest;

    /// A runtime that asks for a token and lists these models.
    async fn runtime(list: &'static str) -> String {
        crate::test_hub::install_crypto();
        let answer = move |headers: HeaderMap| async move {
            let token = headers.get("authorization").and_then(|h| h.to_str().ok());
            match token {
                Some("Bearer secret") => (StatusCode::OK, list),
                _ => (StatusCode::UNAUTHORIZED, "no"),
            }
        };
        let app = Router::new().route("/v1/models", get(answer));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        format!("http://{address}/v1/models")
    }

    /// What the kubelet is answered.
    async fn answer(url: String, token: Option<&str>) -> (StatusCode, String) {
        let question = Question {
            url,
            model: "support-llm".into(),
            token: token.map(str::to_owned),
        };
        ready(State(Arc::new((client().unwrap(), question)))).await
    }

    #[rstest]
    // As llama.cpp and as vLLM list it.
    #[case::served(r#"{"object":"list","data":[{"id":"support-llm","object":"model","owned_by":"llamacpp"}],"models":[{"name":"support-llm"}]}"#, 200, "is served")]
    #[case::one_of_several(
        r#"{"object":"list","data":[{"id":"lora"},{"id":"support-llm","max_model_len":4096}]}"#,
        200,
        "is served"
    )]
    #[case::another(
        r#"{"data":[{"id":"/models/abc"}]}"#,
        503,
        "serves /models/abc, not the model support-llm"
    )]
    #[case::none(r#"{"data":[]}"#, 503, "serves no model")]
    #[case::a_part_of_the_name(
        r#"{"data":[{"id":"support-llm-2"}]}"#,
        503,
        "not the model support-llm"
    )]
    #[case::no_list("<html>", 503, "can't be read")]
    #[tokio::test]
    async fn a_copy_is_ready_when_its_runtime_lists_the_model_by_name(
        #[case] list: &'static str,
        #[case] status: u16,
        #[case] words: &str,
    ) {
        let (got, text) = answer(runtime(list).await, Some("secret")).await;
        assert_eq!(got.as_u16(), status, "{text}");
        assert!(text.contains(words), "{text}");
    }

    #[tokio::test]
    async fn a_runtime_that_refuses_the_token_or_does_not_answer_is_not_ready() {
        let list = r#"{"data":[{"id":"support-llm"}]}"#;
        let (status, text) = answer(runtime(list).await, Some("wrong")).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(text.contains("401") && !text.contains("wrong"), "{text}");
        let (status, _) = answer(runtime(list).await, None).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        let (status, text) = answer("http://127.0.0.1:1/v1/models".into(), None).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(text.contains("does not answer"), "{text}");
    }
}
