//! The resource of all exports: the attributes that identify this process.

use super::attributes::string_attribute;
use opentelemetry_proto::tonic::common::v1::InstrumentationScope;
use opentelemetry_proto::tonic::resource::v1::Resource;
use percent_encoding::percent_decode_str;
use std::collections::BTreeMap;

/// Environment variables that Kubernetes' downward API sets, and their attributes.
const DOWNWARD_API_VARIABLES: [(&str, &str); 4] = [
    ("POD_NAME", "k8s.pod.name"),
    ("POD_UID", "k8s.pod.uid"),
    ("NAMESPACE", "k8s.namespace.name"),
    ("NODE_NAME", "k8s.node.name"),
];

/// Resource attributes by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceAttributes(BTreeMap<String, String>);

impl ResourceAttributes {
    /// Reads the environment. `instance_id` identifies this process.
    pub fn from_environment(instance_id: &str) -> Self {
        Self::from_variables(instance_id, |name| std::env::var(name).ok())
    }

    /// Later sources take precedence: the defaults, the downward API, `OTEL_RESOURCE_ATTRIBUTES`,
    /// and `OTEL_SERVICE_NAME`.
    fn from_variables(instance_id: &str, read_variable: impl Fn(&str) -> Option<String>) -> Self {
        let read_variable = |name| read_variable(name).filter(|value| !value.is_empty());
        let mut attributes = BTreeMap::new();
        let mut set_attribute = |name: &str, value: String| {
            attributes.insert(name.to_owned(), value);
        };
        set_attribute("service.name", "tidegate".to_owned());
        set_attribute("service.version", env!("CARGO_PKG_VERSION").to_owned());
        set_attribute("service.instance.id", instance_id.to_owned());
        for (variable, name) in DOWNWARD_API_VARIABLES {
            if let Some(value) = read_variable(variable) {
                set_attribute(name, value);
            }
        }
        let configured = read_variable("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
        for pair in configured.split(',') {
            let (name, value) = pair.split_once('=').unwrap_or_default();
            if !name.trim().is_empty() {
                let value = percent_decode_str(value.trim()).decode_utf8_lossy();
                set_attribute(name.trim(), value.into_owned());
            }
        }
        if let Some(name) = read_variable("OTEL_SERVICE_NAME") {
            set_attribute("service.name", name);
        }
        Self(attributes)
    }

    pub(crate) fn to_resource(&self) -> Resource {
        let attributes = self.0.iter();
        Resource {
            attributes: attributes
                .map(|(name, value)| string_attribute(name, value))
                .collect(),
            ..Resource::default()
        }
    }
}

/// The library that all exports name as their origin.
pub(crate) fn instrumentation_scope() -> InstrumentationScope {
    InstrumentationScope {
        name: "tidegate".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
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
        ResourceAttributes::from_variables("id-1", read_variable).0
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
