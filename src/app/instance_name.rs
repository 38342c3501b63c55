//! What identifies this process in a fleet: its name and the address of its admin endpoint.

use crate::admin::{AdminSettings, AdvertisedAddress};
use crate::listen::ListenAddress;
use crate::store::redis::MemberDescription;
use std::env;

/// The name of the pod, or of the host.
pub(super) fn instance_name() -> String {
    let pod = env::var("POD_NAME").ok().filter(|name| !name.is_empty());
    pod.unwrap_or_else(|| {
        let host = rustix::system::uname();
        host.nodename().to_string_lossy().into_owned()
    })
}

/// The description of this process in its heartbeats. `bound` is the address of the admin endpoint.
pub(super) fn describe_member(
    settings: &AdminSettings,
    bound: &ListenAddress,
) -> MemberDescription {
    let pod_ip = || env::var("POD_IP").ok()?.parse().ok();
    let advertised = settings
        .advertise
        .clone()
        .or_else(|| AdvertisedAddress::from_bound_address(bound, pod_ip()));
    MemberDescription {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        name: instance_name(),
        admin_address: advertised
            .and_then(|address| address.with_port_of(bound))
            .map(|address| address.to_string()),
    }
}
