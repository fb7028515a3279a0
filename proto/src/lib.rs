//! The kubelet's gRPC contracts for DRA drivers.
//!
//! In: the `.proto` files beside this crate, written from the wire facts of
//! `k8s.io/kubelet` v0.37.2 (packages, services and field numbers; a test compares
//! the full method names). Out: one module per contract and version with messages,
//! clients and servers. Never: behaviour.

#![allow(missing_docs, unreachable_pub, clippy::all)] // generated code

/// The DRA node service: prepare and unprepare.
pub mod dra {
    /// `k8s.io.kubelet.pkg.apis.dra.v1`: kubelets 1.34 and later.
    pub mod v1 {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");

        /// This service in `PluginInfo.supported_versions`.
        pub const SERVICE: &str = "v1.DRAPlugin";
    }

    /// `k8s.io.kubelet.pkg.apis.dra.v1beta1`: the same without share ids.
    pub mod v1beta1 {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");

        /// This service in `PluginInfo.supported_versions`.
        pub const SERVICE: &str = "v1beta1.DRAPlugin";
    }
}

/// Plugin registration.
pub mod registration {
    /// `pluginregistration`, which is version 1 although its package does not say so.
    pub mod v1 {
        tonic::include_proto!("pluginregistration");

        /// `PluginInfo.type` of a DRA driver.
        pub const DRA_PLUGIN: &str = "DRAPlugin";
    }
}

/// Device health.
pub mod health {
    /// Package `v1`: kubelets 1.37 and later.
    pub mod v1 {
        tonic::include_proto!("v1");

        /// This service in `PluginInfo.supported_versions`.
        pub const SERVICE: &str = "v1.DRAResourceHealth";
    }

    /// Package `v1alpha1`: kubelets up to 1.36.
    pub mod v1alpha1 {
        tonic::include_proto!("v1alpha1");

        /// This service in `PluginInfo.supported_versions`.
        pub const SERVICE: &str = "v1alpha1.DRAResourceHealth";
    }
}

#[cfg(test)]
mod tests {
    use tonic::server::NamedService;

    use super::*;

    struct Nothing;

    #[test]
    fn services_have_the_names_the_kubelet_dials() {
        fn name<S: NamedService>() -> &'static str {
            S::NAME
        }
        assert_eq!(
            name::<dra::v1::dra_plugin_server::DraPluginServer<Nothing>>(),
            "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
        );
        assert_eq!(
            name::<dra::v1beta1::dra_plugin_server::DraPluginServer<Nothing>>(),
            "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"
        );
        assert_eq!(
            name::<registration::v1::registration_server::RegistrationServer<Nothing>>(),
            "pluginregistration.Registration"
        );
        assert_eq!(
            name::<health::v1::dra_resource_health_server::DraResourceHealthServer<Nothing>>(),
            "v1.DRAResourceHealth"
        );
        assert_eq!(
            name::<health::v1alpha1::dra_resource_health_server::DraResourceHealthServer<Nothing>>(
            ),
            "v1alpha1.DRAResourceHealth"
        );
    }
}
