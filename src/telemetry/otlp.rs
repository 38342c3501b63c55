//! OTLP: the client for collectors, shared by traces and metrics.

mod attributes;
mod collector;
mod resource;

pub(super) use attributes::{
    bool_attribute, int_attribute, standard_method_name, string_attribute,
};
pub(super) use collector::CollectorClient;
pub use collector::{CollectorSettings, CollectorUrl, OtlpSignal};
pub use resource::ResourceAttributes;
pub(super) use resource::instrumentation_scope;
