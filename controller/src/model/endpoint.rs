//! A hub's address, and the names that may become a part of it.
//!
//! In: texts of settings, orders and hubs. Out: addresses, or what is wrong with
//! a text. Never: an address outside the hub's own, a path that leaves a folder.

use reqwest::Url;
use std::time::Duration;

/// Where a hub answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubEndpoint(Url);

impl std::str::FromStr for HubEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let url = Url::parse(text.trim_end_matches('/')).map_err(|e| {
            format!("{text:?} is no URL: {e}; give one like https://huggingface.co")
        })?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
            return Err(format!("{text:?} is neither http:// nor https://"));
        }
        if !url.username().is_empty() || url.password().is_some() || url.query().is_some() {
            return Err("a hub's address holds neither credentials nor a query".into());
        }
        Ok(HubEndpoint(url))
    }
}

impl std::fmt::Display for HubEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.as_str().trim_end_matches('/'))
    }
}

impl HubEndpoint {
    /// The address of `segments` below the hub's own, each percent-encoded.
    pub fn url<'a>(&self, segments: impl IntoIterator<Item = &'a str>) -> Url {
        let mut url = self.0.clone();
        // Only a URL that cannot be a base has no segments; the constructor refused those.
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    /// The address of one file at one commit.
    pub fn file_url(&self, repository: &str, commit: &str, path: &str) -> Url {
        self.url(
            repository
                .split('/')
                .chain(["resolve", commit])
                .chain(path.split('/')),
        )
    }

    /// An HTTP client for this hub.
    ///
    /// # Errors
    /// Where the system's certificates cannot be loaded; a plain `http` hub needs none.
    pub fn client(&self, read_timeout: Duration) -> Result<reqwest::Client, reqwest::Error> {
        let builder = reqwest::Client::builder()
            .user_agent(concat!("ai-inference/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(Duration::from_secs(10))
            .read_timeout(read_timeout);
        match self.0.scheme() {
            // An image without certificates can still reach a hub inside the cluster.
            "http" => builder.tls_certs_only([]).build(),
            _ => builder.build(),
        }
    }
}

/// Checks a repository's name: one or two segments of letters, digits, `-`, `_` and `.`.
///
/// # Errors
/// What is wrong with it.
pub fn check_repository(name: &str) -> Result<(), String> {
    let segment = |s: &str| {
        !s.is_empty()
            && s.len() <= 96
            && !s.starts_with(['.', '-'])
            && !s.contains("..")
            && s.chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let segments: Vec<&str> = name.split('/').collect();
    if matches!(segments.len(), 1 | 2) && segments.iter().all(|s| segment(s)) {
        Ok(())
    } else {
        Err(format!("{name:?} is no repository name; write OWNER/NAME"))
    }
}

/// Checks a branch, tag or commit.
///
/// # Errors
/// What is wrong with it.
pub fn check_revision(revision: &str) -> Result<(), String> {
    let fine = !revision.is_empty()
        && revision.len() <= 255
        && !revision.starts_with(['/', '.', '-'])
        && !revision.contains("..")
        && revision
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_./+".contains(c));
    if fine {
        Ok(())
    } else {
        Err(format!("{revision:?} is no branch, tag or commit"))
    }
}

/// Checks a path inside a repository: relative, no `..`, nothing that a file
/// system or a URL would read differently.
///
/// # Errors
/// What is wrong with it.
pub fn check_path(path: &str) -> Result<(), String> {
    let segment = |s: &str| {
        !s.is_empty()
            && s != "."
            && s != ".."
            // A file system's 255 bytes, less what the download appends while it runs.
            && s.len() <= 240
            && !s.chars().any(|c| c.is_control() || c == '\\')
    };
    if path.len() <= 1024 && path.split('/').all(segment) {
        Ok(())
    } else {
        Err(format!("{path:?} is no path inside a repository"))
    }
}
