//! An app that checks passwords, for policies that count its responses.

use super::prelude::*;
use std::future::{Ready, ready};

/// The app: 200 for the password `right`, else 401.
pub fn check_password(request: Request<Incoming>) -> Ready<UpstreamResponse> {
    let password = request.headers().get("x-password");
    let is_right = password.is_some_and(|password| password == "right");
    let response = Response::builder().status(if is_right { 200 } else { 401 });
    ready(response.body(full_body("")).unwrap())
}

/// Sends a password to the app.
pub async fn log_in(proxy: &Proxy, path: &str, user: &str, password: &str) -> RawResponse {
    let request = proxy.request("POST", path).header("X-User", user);
    request.header("X-Password", password).send().await
}
