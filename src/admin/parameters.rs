//! Parameters of admin requests: query and JSON body.

use super::responses::ProblemDetails;
use super::{AdminBackend, ExplainRequest, KeyQuery};
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Request};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr};

/// Maximum size of a request body.
pub(super) const MAX_BODY_BYTES: usize = 64 << 10;

/// What most handlers take from a request.
pub(super) struct BackendAndQuery(pub(super) AdminBackend, pub(super) Option<String>);

impl FromRequestParts<AdminBackend> for BackendAndQuery {
    type Rejection = Infallible;

    async fn from_request_parts(
        parts: &mut Parts,
        view: &AdminBackend,
    ) -> Result<Self, Infallible> {
        Ok(Self(view.clone(), parts.uri.query().map(str::to_owned)))
    }
}

/// Query parameters in order, decoded as `application/x-www-form-urlencoded`.
#[derive(Debug)]
pub(super) struct QueryParameters(Vec<(String, String)>);

impl QueryParameters {
    /// # Errors
    /// Fails if a parameter is not in `known`, so that a misspelt filter is not ignored.
    pub(super) fn parse(query: Option<&str>, known: &[&str]) -> Result<Self, String> {
        let pairs = form_urlencoded::parse(query.unwrap_or_default().as_bytes());
        let pairs: Vec<(String, String)> = pairs.into_owned().collect();
        let unknown = pairs.iter().find(|(name, _)| !known.contains(&&**name));
        let Some((name, _)) = unknown else {
            return Ok(Self(pairs));
        };
        let known = match known {
            [] => "no parameter".to_owned(),
            known => known.join(", "),
        };
        Err(format!("unknown parameter {name:?}; expected {known}"))
    }

    pub(super) fn get_all(self, name: &str) -> Vec<String> {
        let values = self.0.into_iter().filter(|(known, _)| known == name);
        values.map(|(_, value)| value).collect()
    }

    /// # Errors
    /// Fails if the parameter occurs more than once.
    pub(super) fn get_one(&self, name: &str) -> Result<Option<&str>, String> {
        let mut values = self.0.iter().filter(|(known, _)| known == name);
        match (values.next(), values.next()) {
            (first, None) => Ok(first.map(|(_, value)| value.as_str())),
            _ => Err(format!("parameter {name} is given more than once")),
        }
    }

    /// Parses a parameter; returns `default` if it is absent.
    ///
    /// # Errors
    /// Says what is `expected` if `parse` returns `None`.
    pub(super) fn get_parsed<T>(
        &self,
        name: &str,
        default: T,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, String> {
        let Some(text) = self.get_one(name)? else {
            return Ok(default);
        };
        parse(text).ok_or_else(|| format!("{name}={text:?}: expected {expected}"))
    }

    /// Returns a whole number up to `max`, or `default` if the parameter is absent.
    pub(super) fn get_number(
        &self,
        name: &str,
        default: usize,
        max: usize,
    ) -> Result<usize, String> {
        let expected = format!("a whole number from 0 to {max}");
        self.get_parsed(name, default, &expected, |text| {
            text.parse().ok().filter(|number| *number <= max)
        })
    }
}

/// Reads `policy=NAME&key=VALUE`, with one `key` per position of the policy's key, and the
/// parameters of `further`.
pub(super) fn parse_key_query(query: Option<&str>, further: &[&str]) -> Result<KeyQuery, String> {
    let query = QueryParameters::parse(query, &[&["policy", "key"], further].concat())?;
    let Some(policy) = query.get_one("policy")?.map(str::to_owned) else {
        return Err("policy=NAME is missing; after it comes a key=VALUE for each value of the policy's key, in order".to_owned());
    };
    Ok(KeyQuery {
        policy,
        limit: query.get_one("limit")?.map(str::to_owned),
        values: query.get_all("key"),
    })
}

/// The JSON object in a body of type `application/json`.
pub(super) struct JsonObject(pub(super) Map<String, Value>);

impl FromRequest<AdminBackend> for JsonObject {
    type Rejection = ProblemDetails;

    async fn from_request(request: Request, view: &AdminBackend) -> Result<Self, ProblemDetails> {
        let content_type = request.headers().get(CONTENT_TYPE);
        let content_type = content_type.and_then(|kind| kind.to_str().ok());
        let media_type = content_type.unwrap_or_default().split(';').next();
        let media_type = media_type.unwrap_or_default().trim();
        // Only this type is accepted, because it cannot be sent cross-site without a CORS
        // preflight.
        if !media_type.eq_ignore_ascii_case("application/json") {
            return Err(ProblemDetails::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                format!("expected Content-Type: application/json, found {media_type:?}"),
            ));
        }
        let body = Bytes::from_request(request, view).await;
        let body = body.map_err(|rejection| match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => ProblemDetails::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("the body is too large: at most {MAX_BODY_BYTES} bytes"),
            ),
            _ => "the body ended early".to_owned().into(),
        })?;
        match serde_json::from_slice(&body) {
            Ok(Value::Object(object)) => Ok(Self(object)),
            Ok(_) => Err("expected a JSON object".to_owned().into()),
            Err(error) => Err(format!("the body is not JSON: {error}").into()),
        }
    }
}

const EXPLAIN_FIELDS: [&str; 6] = ["method", "url", "headers", "body", "ip", "client_cert"];

/// Parses the described request in the body of `POST /explain`.
pub(super) fn parse_explain_request(object: &Map<String, Value>) -> Result<ExplainRequest, String> {
    reject_unknown_fields(object, "", &EXPLAIN_FIELDS)?;
    let Some(url) = get_string_field(object, "url")? else {
        return Err(
            "url is missing, e.g. \"http://shop.example/api/orders\" or \"/api/orders\"".to_owned(),
        );
    };
    let ip = match get_string_field(object, "ip")? {
        None => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Some(text) => text
            .parse()
            .map_err(|error| format!("ip {text:?}: {error}"))?,
    };
    let certificate = get_field(object, "client_cert", "an object with san and cn")?;
    let certificate: Map<String, Value> = certificate.unwrap_or_default();
    reject_unknown_fields(&certificate, "client_cert: ", &["san", "cn"])?;
    let expected = "an object of texts, or of lists of texts";
    let headers: Option<BTreeMap<String, OneOrMany>> = get_field(object, "headers", expected)?;
    let headers = headers.into_iter().flatten().flat_map(|(name, values)| {
        let values = values.into_vec().into_iter();
        values.map(move |value| (name.clone(), value))
    });
    Ok(ExplainRequest {
        method: get_string_field(object, "method")?.unwrap_or_else(|| "GET".to_owned()),
        url,
        headers: headers.collect(),
        body: get_string_field(object, "body")?.unwrap_or_default(),
        peer_ip: ip,
        client_cert_san: get_string_field(&certificate, "san")?,
        client_cert_cn: get_string_field(&certificate, "cn")?,
    })
}

/// A text or a list of texts.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub(crate) fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

/// `place` precedes the message.
pub(crate) fn reject_unknown_fields(
    object: &Map<String, Value>,
    place: &str,
    known: &[&str],
) -> Result<(), String> {
    match object.keys().find(|name| !known.contains(&name.as_str())) {
        Some(name) => Err(format!(
            "{place}unknown field {name:?}; expected {}",
            known.join(", ")
        )),
        None => Ok(()),
    }
}

pub(crate) fn get_string_field(
    object: &Map<String, Value>,
    name: &str,
) -> Result<Option<String>, String> {
    get_field(object, name, "a string")
}

/// Returns a field, or `None` if it is absent or null.
///
/// # Errors
/// That the field has another type, and which one is `expected`.
pub(crate) fn get_field<T: DeserializeOwned>(
    object: &Map<String, Value>,
    name: &str,
    expected: &str,
) -> Result<Option<T>, String> {
    let value = object.get(name).map_or(Ok(None), Option::deserialize);
    value.map_err(|_other| format!("{name}: expected {expected}"))
}
