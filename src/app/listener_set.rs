//! The listeners of the data path and their TLS settings.

use super::AppError;
use crate::config::Config;
use crate::listen::ListenAddress;
use crate::proxy::{ListenerKind, ProxyServer};
use crate::telemetry::metrics::CertificateExpiry;
use crate::tls::ReloadableServerTls;
use std::sync::Arc;

/// Every open listener: its kind, its address and its current TLS settings.
#[derive(Clone, Debug)]
pub(super) struct ListenerSet(Vec<(ListenerKind, ListenAddress, ReloadableServerTls)>);

impl ListenerSet {
    /// Opens all listeners of the configuration on `server`.
    pub(super) fn open(server: &mut ProxyServer, config: &Config) -> Result<Self, AppError> {
        let proxy = (ListenerKind::Proxy, &config.listen, &config.tls);
        let proxy = config.has_upstream.then_some(proxy).into_iter();
        let services = config.service_listeners.iter();
        let services = services.map(|service| (service.kind, &service.listen, &service.tls));
        let mut listeners = Vec::new();
        for (kind, listen, tls) in proxy.chain(services) {
            let tls = ReloadableServerTls::new(tls.clone().into());
            let address = server.add_listener(kind, listen, Arc::clone(&tls));
            let address = address.map_err(|cause| AppError::Listen {
                address: listen.address.clone(),
                cause,
            })?;
            listeners.push((kind, address, tls));
        }
        Ok(Self(listeners))
    }

    /// Whether a listener of this kind is open.
    pub(super) fn has_kind(&self, kind: ListenerKind) -> bool {
        self.0.iter().any(|(known, ..)| *known == kind)
    }

    /// Whether the first listener serves TLS.
    pub(super) fn first_listener_has_tls(&self) -> bool {
        self.0
            .first()
            .is_some_and(|(_, _, tls)| tls.load().is_some())
    }

    /// Applies the TLS settings of a reloaded configuration. Only changed settings are replaced,
    /// because clients cannot resume TLS sessions of replaced settings.
    pub(super) fn update_tls(&self, config: &Config) {
        for (kind, address, current) in &self.0 {
            let (table, new) = match kind {
                ListenerKind::Proxy => ("listen", Some(config.tls.as_ref())),
                ListenerKind::RateLimitService => ("rls", config.service_listener_tls(*kind)),
                ListenerKind::ExtAuthz => ("check", config.service_listener_tls(*kind)),
            };
            // A listener that is no longer configured stays open until a restart.
            let Some(new) = new.filter(|new| current.load().as_ref() != *new) else {
                continue;
            };
            current.store(new.cloned());
            match new {
                Some(_) => {
                    tracing::info!(%address, "TLS settings changed; new connections use them")
                }
                None => {
                    tracing::warn!(%address, table, "TLS was removed from the configuration; new connections are in cleartext");
                }
            }
        }
    }

    /// Logs the addresses of all listeners except that of the proxy.
    pub(super) fn log_service_addresses(&self) {
        for (kind, address, _) in &self.0 {
            match kind {
                ListenerKind::Proxy => {}
                ListenerKind::RateLimitService => {
                    tracing::info!(%address, "rate-limit service listening");
                }
                ListenerKind::ExtAuthz => tracing::info!(%address, "check listening"),
            }
        }
    }

    /// Returns the expiry of each certificate in use.
    pub(super) fn certificate_expiries(&self) -> Vec<CertificateExpiry> {
        let all_expiries = self.0.iter().flat_map(|(_, _, tls)| {
            tls.load()
                .as_ref()
                .map(|tls| tls.certificate_expiries.clone())
                .unwrap_or_default()
        });
        let mut expiries: Vec<_> = all_expiries.collect();
        expiries.sort_unstable();
        expiries.dedup();
        let expiries = expiries.into_iter();
        expiries
            .map(|(file, ends_s)| CertificateExpiry { file, ends_s })
            .collect()
    }
}
