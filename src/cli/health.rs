//! `tidegate health`: does the proxy on this machine live?

use super::ask::{ask, reachable};
use super::print;
use crate::admin::harmless;
use crate::config::{self, Sources};
use crate::listen::ListenAddress;
use serde_json::json;
use std::process::ExitCode;

/// Asks `/livez` of the address that is configured for probes, or else of the admin port. `in_json`: what is wrong is
/// told on stdout too.
pub(super) fn run(sources: &Sources, in_json: bool) -> ExitCode {
    let address = match address(sources) {
        Ok(address) => address,
        Err(report) => return print(Err(report)),
    };
    let (status, error) = match ask(&address, "GET", "/livez", None) {
        Ok(answer) => (
            Some(answer.status),
            (answer.status != 200).then(|| format!("answered {}", answer.status)),
        ),
        Err(error) => (None, Some(error.to_string())),
    };
    if !in_json {
        return print(match error {
            None => Ok("ok\n".to_owned()),
            Some(error) => Err(format!("error: {address}: {error}\n")),
        });
    }
    let told = json!({ "healthy": error.is_none(), "address": address.to_string(), "status": status, "error": error });
    let printed = print(Ok(harmless(&format!("{told}\n"))));
    if error.is_none() {
        printed
    } else {
        ExitCode::FAILURE
    }
}

fn address(sources: &Sources) -> Result<ListenAddress, String> {
    let admin = config::load_admin(sources).map_err(|report| report.to_string())?;
    match admin.probes {
        Some(probes) => reachable(&ListenAddress::Ip(probes), "admin.probes"),
        None => reachable(&admin.address, "admin.address"),
    }
}
