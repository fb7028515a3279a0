//! Where endpoints are published, who may call them, and where their certificates come from.
//!
//! In: the class's `exposurePolicy`. Nothing here is looked up: that an issuer or a Secret exists is
//! a condition.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rules;

/// Where endpoints are published.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExposureType {
    /// Outside the cluster too.
    External,
    /// Inside the cluster only.
    #[default]
    ClusterLocal,
}

/// How a caller is known.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Authentication {
    /// By a bearer token.
    #[default]
    Token,
    /// Not at all.
    None,
}

/// Where the endpoints of orders are published and who may call them.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = rules::forbidden(
        "self.type != 'ClusterLocal' || !has(self.https)",
        ".https",
        "spec.exposurePolicy.https must be absent with type ClusterLocal, which publishes nothing outside the cluster: remove the block, or set type to External"
    ),
    validation = rules::forbidden(
        "self.type == 'ClusterLocal' || self.authentication != 'None'",
        ".authentication",
        "spec.exposurePolicy.authentication None is allowed with type ClusterLocal alone: set it to Token, or set type to ClusterLocal"
    ),
)]
pub struct ExposurePolicy {
    /// `External` (published outside the cluster too) or `ClusterLocal` (inside the cluster only). Default: ClusterLocal. This version does not publish yet: an External endpoint is reached inside the cluster, and the class's condition Ready says so.
    #[serde(rename = "type", default)]
    pub type_: ExposureType,

    /// `Token` (a request carries the order's token) or `None` (allowed with type ClusterLocal alone). Default: Token.
    #[serde(default)]
    pub authentication: Authentication,

    /// Certificate of an External endpoint. Absent: as the installation is configured. Forbidden with type ClusterLocal. Without effect in this version, which does not publish yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub https: Option<HttpsPolicy>,
}

/// Where an external endpoint's certificate comes from.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpsMode {
    /// Plain HTTP.
    Disabled,
    /// A certificate issued by cert-manager.
    CertManager,
    /// A certificate that the administrator brings.
    CustomCertificate,
    /// Plain HTTP behind an outer terminator; addresses say https.
    OnlyInURI,
}

/// Certificate of an external endpoint.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = rules::forbidden(
        "!(has(self.certManager) && has(self.customCertificate))",
        ".customCertificate",
        "spec.exposurePolicy.https.certManager and customCertificate exclude each other: keep the one that belongs to the mode"
    ),
    validation = rules::forbidden(
        "self.mode == 'CertManager' || !has(self.certManager)",
        ".certManager",
        "spec.exposurePolicy.https.certManager belongs to mode CertManager alone: remove the block, or set mode to CertManager"
    ),
    validation = rules::forbidden(
        "self.mode == 'CustomCertificate' || !has(self.customCertificate)",
        ".customCertificate",
        "spec.exposurePolicy.https.customCertificate belongs to mode CustomCertificate alone: remove the block, or set mode to CustomCertificate"
    ),
    validation = rules::required(
        "self.mode != 'CustomCertificate' || has(self.customCertificate)",
        ".customCertificate",
        "spec.exposurePolicy.https.customCertificate is required with mode CustomCertificate: name a Secret of type kubernetes.io/tls in customCertificate.secretName"
    ),
)]
pub struct HttpsPolicy {
    /// `Disabled` (plain http), `CertManager` (block `certManager`), `CustomCertificate` (block `customCertificate`) or `OnlyInURI` (plain http behind an outer terminator; addresses are given as https).
    pub mode: HttpsMode,

    /// Issuer of the certificate, with mode CertManager alone. Absent: the ClusterIssuer `letsencrypt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_manager: Option<CertManagerPolicy>,

    /// Your own certificate, with mode CustomCertificate alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_certificate: Option<CustomCertificatePolicy>,
}

/// Issuer of a certificate.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct CertManagerPolicy {
    /// Name of cert-manager's ClusterIssuer. Default: letsencrypt.
    #[serde(default = "letsencrypt")]
    #[schemars(length(max = 253))]
    #[x_kube(validation = rules::object_name("spec.exposurePolicy.https.certManager.clusterIssuerName", "a ClusterIssuer, such as letsencrypt"))]
    pub cluster_issuer_name: String,
}

fn letsencrypt() -> String {
    "letsencrypt".to_owned()
}

/// The administrator's own certificate.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct CustomCertificatePolicy {
    /// Name of a Secret of type `kubernetes.io/tls` in the namespace of the orders that the class serves.
    #[schemars(length(max = 253))]
    #[x_kube(validation = rules::object_name("spec.exposurePolicy.https.customCertificate.secretName", "a Secret of type kubernetes.io/tls in the namespace that the class serves"))]
    pub secret_name: String,
}
