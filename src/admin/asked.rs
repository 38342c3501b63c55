//! What a request asks for: its query and its body.

use super::answer::Problem;
use super::{KeyAsked, Told};
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};
use serde_json::Value;
use std::net::{IpAddr, Ipv4Addr};

/// The longest body that is read.
pub(super) const MAX_BODY_BYTES: usize = 64 << 10;

/// A query's parameters, decoded as forms are, in order.
#[derive(Debug)]
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    /// # Errors
    /// If there is a parameter that is not in `known`: a misspelt filter must not look like one that finds all.
    pub(super) fn parse(query: Option<&str>, known: &[&str]) -> Result<Self, Problem> {
        let pairs = form_urlencoded::parse(query.unwrap_or_default().as_bytes());
        let pairs: Vec<(String, String)> = pairs.into_owned().collect();
        match pairs
            .iter()
            .find(|(name, _)| !known.contains(&name.as_str()))
        {
            Some((name, _)) => {
                let known = if known.is_empty() {
                    "no parameter".to_owned()
                } else {
                    known.join(", ")
                };
                Err(Problem::wrong(format!(
                    "unknown parameter {name:?}; expected {known}"
                )))
            }
            None => Ok(Self(pairs)),
        }
    }

    pub(super) fn all(self, name: &str) -> Vec<String> {
        self.0
            .into_iter()
            .filter(|(known, _)| known == name)
            .map(|(_, value)| value)
            .collect()
    }

    /// # Errors
    /// If it is there twice: which of them counts?
    pub(super) fn one(&self, name: &str) -> Result<Option<&str>, Problem> {
        let mut values = self.0.iter().filter(|(known, _)| known == name);
        match (values.next(), values.next()) {
            (first, None) => Ok(first.map(|(_, value)| value.as_str())),
            _ => Err(Problem::wrong(format!(
                "parameter {name} is given more than once"
            ))),
        }
    }

    /// A whole number up to `most`, or `default`.
    pub(super) fn number(&self, name: &str, default: usize, most: usize) -> Result<usize, Problem> {
        let Some(text) = self.one(name)? else {
            return Ok(default);
        };
        let number = text.parse().ok().filter(|number| *number <= most);
        number.ok_or_else(|| {
            Problem::wrong(format!(
                "{name}={text:?}: expected a whole number from 0 to {most}"
            ))
        })
    }

    /// `true`, `false`, or `default`.
    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool, Problem> {
        match self.one(name)? {
            None => Ok(default),
            Some("true") => Ok(true),
            Some("false") => Ok(false),
            Some(text) => Err(Problem::wrong(format!(
                "{name}={text:?}: expected true or false"
            ))),
        }
    }
}

/// `policy=NAME&key=VALUE`, a `key` per position.
pub(super) fn key(query: Option<&str>) -> Result<KeyAsked, Problem> {
    let query = Query::parse(query, &["policy", "key"])?;
    let Some(policy) = query.one("policy")?.map(str::to_owned) else {
        return Err(Problem::wrong(
            "policy=NAME is missing; after it comes a key=VALUE for each value of the policy's key, in order",
        ));
    };
    Ok(KeyAsked {
        policy,
        values: query.all("key"),
    })
}

/// A JSON object in a body that says that it is JSON.
pub(super) fn object(
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<serde_json::Map<String, Value>, Problem> {
    let kind = headers
        .get(CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok())
        .unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    // A page elsewhere can send other types without asking anybody.
    if !kind.eq_ignore_ascii_case("application/json") {
        return Err(Problem::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            format!("expected Content-Type: application/json, found {kind:?}"),
        ));
    }
    let body = body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("a body has {MAX_BODY_BYTES} bytes at most here"),
        ),
        _ => Problem::wrong("the body ended early"),
    })?;
    match serde_json::from_slice(&body) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(Problem::wrong("expected a JSON object")),
        Err(error) => Err(Problem::wrong(format!("the body is no JSON: {error}"))),
    }
}

const TOLD: [&str; 5] = ["method", "url", "headers", "ip", "client_cert"];

/// A request as it is told in JSON.
pub(super) fn told(object: &serde_json::Map<String, Value>) -> Result<Told, Problem> {
    only(object, "", &TOLD)?;
    let Some(url) = text(object, "url")? else {
        return Err(Problem::wrong(
            "url is missing, e.g. \"http://shop.example/api/orders\" or \"/api/orders\"",
        ));
    };
    let ip = match text(object, "ip")? {
        None => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Some(text) => text
            .parse()
            .map_err(|error| Problem::wrong(format!("ip {text:?}: {error}")))?,
    };
    let certificate = match object.get("client_cert") {
        None | Some(Value::Null) => None,
        Some(Value::Object(certificate)) => {
            only(certificate, "client_cert.", &["san", "cn"])?;
            Some(certificate)
        }
        Some(_) => {
            return Err(Problem::wrong(
                "client_cert: expected an object with san and cn",
            ));
        }
    };
    let named = |name| certificate.map_or(Ok(None), |certificate| text(certificate, name));
    Ok(Told {
        method: text(object, "method")?.unwrap_or_else(|| "GET".to_owned()),
        url,
        headers: headers(object.get("headers"))?,
        ip,
        client_cert_san: named("san")?,
        client_cert_cn: named("cn")?,
    })
}

pub(super) fn only(
    object: &serde_json::Map<String, Value>,
    within: &str,
    known: &[&str],
) -> Result<(), Problem> {
    match object.keys().find(|name| !known.contains(&name.as_str())) {
        Some(name) => Err(Problem::wrong(format!(
            "unknown key {within}{name:?}; expected {}",
            known.join(", ")
        ))),
        None => Ok(()),
    }
}

pub(super) fn text(
    object: &serde_json::Map<String, Value>,
    name: &str,
) -> Result<Option<String>, Problem> {
    match object.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(Problem::wrong(format!("{name}: expected a text"))),
    }
}

/// `{"name": "value"}`, a list of values for what occurs more than once.
fn headers(value: Option<&Value>) -> Result<Vec<(String, String)>, Problem> {
    let expected = || Problem::wrong("headers: expected an object of texts, or of lists of texts");
    let object = match value {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(value) => value.as_object().ok_or_else(expected)?,
    };
    let mut headers = Vec::new();
    for (name, value) in object {
        let values = value
            .as_array()
            .map_or(std::slice::from_ref(value), Vec::as_slice);
        for value in values {
            headers.push((
                name.clone(),
                value.as_str().ok_or_else(expected)?.to_owned(),
            ));
        }
    }
    Ok(headers)
}
