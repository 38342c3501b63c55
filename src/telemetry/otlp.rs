//! OTLP: the client for collectors, and what the exports of traces and metrics share.

mod collector;

pub(super) use collector::CollectorClient;
pub use collector::{CollectorSettings, OtlpSignal};

use http::Method;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value};
use opentelemetry_proto::tonic::resource::v1::Resource;
use percent_encoding::percent_decode_str;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Maximum time that the process waits for the last export at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum length of a text attribute. A request head may contain more than a trace should store.
const MAX_ATTRIBUTE_BYTES: usize = 256;

/// Returns the name of a method that the semantic conventions list. Clients can invent any number
/// of other methods.
pub(super) fn standard_method_name(method: &Method) -> Option<&'static str> {
    const KNOWN: [&str; 9] = [
        "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE",
    ];
    KNOWN.into_iter().find(|known| method.as_str() == *known)
}

pub(super) fn string_attribute(key: &str, value: &str) -> KeyValue {
    let end = value.floor_char_boundary(MAX_ATTRIBUTE_BYTES);
    let value = value.get(..end).unwrap_or_default().to_owned();
    new_attribute(key, any_value::Value::StringValue(value))
}

pub(super) fn bool_attribute(key: &str, value: bool) -> KeyValue {
    new_attribute(key, any_value::Value::BoolValue(value))
}

pub(super) fn int_attribute(key: &str, value: i64) -> KeyValue {
    new_attribute(key, any_value::Value::IntValue(value))
}

fn new_attribute(key: &str, value: any_value::Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}

/// Environment variables that Kubernetes' downward API sets, and their attributes.
const DOWNWARD_API_VARIABLES: [(&str, &str); 4] = [
    ("POD_NAME", "k8s.pod.name"),
    ("POD_UID", "k8s.pod.uid"),
    ("NAMESPACE", "k8s.namespace.name"),
    ("NODE_NAME", "k8s.node.name"),
];

/// The resource of all exports: the attributes that identify this process, from the environment.
pub fn read_resource(instance_id: &str) -> Resource {
    let attributes = resource_attributes(instance_id, |name| std::env::var(name).ok());
    let attributes = attributes.iter();
    Resource {
        attributes: attributes
            .map(|(name, value)| string_attribute(name, value))
            .collect(),
        ..Resource::default()
    }
}

/// Later sources take precedence: the defaults, the downward API, `OTEL_RESOURCE_ATTRIBUTES`, and
/// `OTEL_SERVICE_NAME`.
fn resource_attributes(
    instance_id: &str,
    read_variable: impl Fn(&str) -> Option<String>,
) -> BTreeMap<String, String> {
    let read_variable = |name| read_variable(name).filter(|value| !value.is_empty());
    let defaults = [
        ("service.name", "tidegate"),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("service.instance.id", instance_id),
    ];
    let defaults = defaults.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let mut attributes = BTreeMap::from(defaults);
    for (variable, name) in DOWNWARD_API_VARIABLES {
        attributes.extend(read_variable(variable).map(|value| (name.to_owned(), value)));
    }
    let configured = read_variable("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
    for pair in configured.split(',') {
        let (name, value) = pair.split_once('=').unwrap_or_default();
        if !name.trim().is_empty() {
            let value = percent_decode_str(value.trim()).decode_utf8_lossy();
            attributes.insert(name.trim().to_owned(), value.into_owned());
        }
    }
    let name = read_variable("OTEL_SERVICE_NAME");
    attributes.extend(name.map(|name| ("service.name".to_owned(), name)));
    attributes
}

/// The library that all exports name as their origin.
pub(super) fn instrumentation_scope() -> InstrumentationScope {
    InstrumentationScope {
        name: "tidegate".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    }
}

/// Handle that stops an export at shutdown.
#[derive(Debug)]
pub struct ExportHandle {
    signal: OtlpSignal,
    stop: oneshot::Sender<()>,
    done: oneshot::Receiver<()>,
}

impl ExportHandle {
    /// Creates a handle, with the signal to stop, and a sender that the export drops at its end.
    pub(super) fn new(signal: OtlpSignal) -> (Self, oneshot::Receiver<()>, oneshot::Sender<()>) {
        let (stop, stopped) = oneshot::channel();
        let (done_sender, done) = oneshot::channel();
        (Self { signal, stop, done }, stopped, done_sender)
    }

    /// Stops the export after what is queued is exported, and waits up to two seconds for that.
    pub async fn finish(self) {
        // Dropping `stop` is the signal.
        drop(self.stop);
        if timeout(SHUTDOWN_TIMEOUT, self.done).await.is_err() {
            match self.signal {
                OtlpSignal::Traces => tracing::warn!("span export incomplete at shutdown"),
                OtlpSignal::Metrics => {
                    tracing::warn!("last metric export incomplete at shutdown");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes_from(variables: &[(&str, &str)]) -> BTreeMap<String, String> {
        let read_variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        resource_attributes("id-1", read_variable)
    }

    #[test]
    fn environment_takes_precedence_over_defaults() {
        let plain = attributes_from(&[]);
        assert_eq!(plain["service.name"], "tidegate");
        assert_eq!(plain["service.instance.id"], "id-1");
        assert_eq!(plain.len(), 3);

        let attributes = attributes_from(&[
            ("POD_NAME", "orders-7c-x"),
            ("NAMESPACE", "shop"),
            ("NODE_NAME", ""),
            (
                "OTEL_RESOURCE_ATTRIBUTES",
                "k8s.namespace.name=other, deployment.environment.name=a%2Cb ,,broken,service.name=x",
            ),
            ("OTEL_SERVICE_NAME", "orders-limits"),
        ]);
        let expected = [
            ("deployment.environment.name", "a,b"),
            ("k8s.namespace.name", "other"),
            ("k8s.pod.name", "orders-7c-x"),
            ("service.instance.id", "id-1"),
            ("service.name", "orders-limits"),
            ("service.version", env!("CARGO_PKG_VERSION")),
        ];
        let attributes: Vec<_> = attributes
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        assert_eq!(attributes, expected);
    }
}
