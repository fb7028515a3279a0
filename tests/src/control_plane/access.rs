//! Who talks to the test API server, and how.
//!
//! In: the server's port and folder. Out: kubeconfigs and clients for the administrator, for
//! impersonated users and for bearers of a token. The administrator's token is known and worth
//! nothing: the server listens on the loopback interface and dies with the test.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use futures::FutureExt;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::{Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde_json::{Value, json};

/// Token of the administrator.
const TOKEN: &str = "administrator-of-a-test";

/// Writes the server's token file into `folder`: one user, who may do everything.
pub(crate) fn write_tokens(folder: &Path) -> Result<PathBuf> {
    let path = folder.join("tokens.csv");
    std::fs::write(&path, format!("{TOKEN},administrator,1,system:masters\n"))
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

/// How the API server is reached.
#[derive(Debug)]
pub(crate) struct Access {
    port: u16,
    kubeconfig: PathBuf,
}

impl Access {
    /// Access to the server at `port`; writes the administrator's kubeconfig into `folder`.
    pub(crate) fn new(port: u16, folder: &Path) -> Result<Self> {
        let access = Self {
            port,
            kubeconfig: folder.join("kubeconfig"),
        };
        // JSON is YAML.
        std::fs::write(&access.kubeconfig, access.administrator().to_string())
            .with_context(|| format!("writing {}", access.kubeconfig.display()))?;
        Ok(access)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn kubeconfig_path(&self) -> &Path {
        &self.kubeconfig
    }

    pub(crate) fn address(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// Kubeconfig of the administrator.
    pub(crate) fn administrator(&self) -> Value {
        self.bearer(TOKEN)
    }

    /// Kubeconfig of whoever bears `token`.
    pub(crate) fn bearer(&self, token: &str) -> Value {
        self.kubeconfig(&json!({ "token": token }))
    }

    /// Kubeconfig of the administrator as `user` in `groups`.
    pub(crate) fn impersonating(&self, user: &str, groups: &[&str]) -> Value {
        self.kubeconfig(&json!({ "token": TOKEN, "as": user, "as-groups": groups }))
    }

    fn kubeconfig(&self, user: &Value) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "test", "cluster": {
                "server": self.address(),
                // The server's certificate is made at its start and signed by itself.
                "insecure-skip-tls-verify": true,
            } }],
            "users": [{ "name": "test", "user": user }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
            "current-context": "test",
        })
    }

    /// A client for a kubeconfig.
    pub(crate) fn client(&self, kubeconfig: &Value) -> Result<Client> {
        Ok(Client::try_from(self.config(kubeconfig)?)?)
    }

    /// What a client is made from, for those that put something beneath it.
    pub(crate) fn config(&self, kubeconfig: &Value) -> Result<Config> {
        let kubeconfig: Kubeconfig = serde_json::from_value(kubeconfig.clone())
            .context("the kubeconfig of the test is none")?;
        let options = KubeConfigOptions::default();
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &options)
            .now_or_never()
            .context("reading a kubeconfig that names no file had to wait")??;
        // A proxy of the machine's environment has no way to the loopback interface.
        config.proxy_url = None;
        Ok(config)
    }
}

/// A token of the ServiceAccount `name` in `namespace`, which is created if it is absent.
pub(crate) async fn service_account_token(
    client: Client,
    namespace: &str,
    name: &str,
) -> Result<String> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client, namespace);
    let account =
        json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": name } });
    accounts
        .patch(
            name,
            &PatchParams::apply(super::FIELD_MANAGER),
            &Patch::Apply(&account),
        )
        .await
        .with_context(|| format!("creating ServiceAccount {namespace}/{name}"))?;
    let request = TokenRequest {
        spec: Some(TokenRequestSpec::default()),
        ..TokenRequest::default()
    };
    let answer = accounts
        .create_token_request(name, &PostParams::default(), &request)
        .await
        .with_context(|| format!("asking for a token of ServiceAccount {namespace}/{name}"))?;
    answer
        .status
        .and_then(|status| status.token)
        .context("the API server answered a TokenRequest without a token")
}
