use super::*;
use serde::de::DeserializeOwned;
use serde_json::json;

/// An instance of a schema with all its fields.
fn sample(openapi: &Value, schema: &Value) -> Value {
    if let Some(reference) = schema["$ref"].as_str() {
        let pointer = reference.trim_start_matches('#');
        return sample(openapi, openapi.pointer(pointer).unwrap());
    }
    if let Some(variants) = schema["anyOf"].as_array().or(schema["enum"].as_array()) {
        return if schema["enum"].is_array() {
            variants[variants.len() - 1].clone()
        } else {
            sample(openapi, &variants[0])
        };
    }
    if !schema["const"].is_null() {
        return schema["const"].clone();
    }
    let kinds = schema["type"].as_array();
    match kinds.map_or(&schema["type"], |kinds| &kinds[0]).as_str() {
        Some("integer") => json!(1),
        Some("number") => json!(0.5),
        Some("boolean") => json!(true),
        // Any text, also where an IP address is expected.
        Some("string") => json!("127.0.0.1"),
        Some("array") => json!([sample(openapi, &schema["items"])]),
        Some("object") => match schema["properties"].as_object() {
            Some(fields) => fields
                .iter()
                .map(|(name, field)| (name.clone(), sample(openapi, field)))
                .collect(),
            None => json!({ "any": sample(openapi, &schema["additionalProperties"]) }),
        },
        other => panic!("{other:?} in {schema}"),
    }
}

#[track_caller]
fn reads_and_writes_all_fields<T: Serialize + DeserializeOwned>(schema: &str) {
    let openapi: Value = serde_json::from_str(crate::admin::routes::OPENAPI_JSON).unwrap();
    let sample = sample(&openapi, &openapi["components"]["schemas"][schema]);
    let read: T = serde_json::from_value(sample.clone()).unwrap();
    assert_eq!(json!(read), sample, "{schema}");
}

#[test]
fn documents_have_the_fields_of_the_openapi_document() {
    reads_and_writes_all_fields::<OverviewDocument>("Overview");
    reads_and_writes_all_fields::<PoliciesDocument>("Policies");
    reads_and_writes_all_fields::<TopDocument>("Top");
    reads_and_writes_all_fields::<ReadinessDocument>("Readiness");
    reads_and_writes_all_fields::<DrainDocument>("Draining");
    reads_and_writes_all_fields::<LogLevelDocument>("LogLevel");
    reads_and_writes_all_fields::<KeyDocument>("Key");
    reads_and_writes_all_fields::<KeyResetDocument>("Forgotten");
    reads_and_writes_all_fields::<ExplanationDocument>("Explanation");
    reads_and_writes_all_fields::<OverrideDocument>("Override");
    reads_and_writes_all_fields::<OverrideListDocument>("Overrides");
    reads_and_writes_all_fields::<OverrideRemovalDocument>("RemovedOverride");
    reads_and_writes_all_fields::<DoctorReport>("Doctor");
    reads_and_writes_all_fields::<FleetDocument>("Fleet");
    reads_and_writes_all_fields::<InstanceSummary>("InstanceSummary");
}
