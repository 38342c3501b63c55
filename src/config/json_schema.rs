//! JSON Schema of the configuration, generated from the schema tables, for editors.
//!
//! Keys outside policies are never required: the environment and flags can set them.

use super::schema::{self, KeyRequirement, ROOT, SchemaKey, ValueKind};
use super::schema_value::content_from_text;
use serde_json::{Map, Value, json};

/// Durations as `values::parse_duration` reads them.
const DURATION_PATTERN: &str = "^(0|(?=[0-9])([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?)$";
/// Sizes as `values::parse_byte_size` reads them.
const SIZE_PATTERN: &str = "^[0-9]+(B|KiB|MiB|GiB)?$";

type SchemaTable = &'static [SchemaKey];

/// JSON Schema (draft 2020-12) of a main or included file.
pub fn json_schema() -> String {
    let mut tables = SchemaTables::default();
    let mut root = tables.describe_table(&ROOT, "");
    let mut insert = |key: &str, value| root.insert(key.to_owned(), value);
    insert(
        "$schema",
        "https://json-schema.org/draft/2020-12/schema".into(),
    );
    insert("title", "tidegate configuration".into());
    insert("$defs", tables.definitions.into());
    let root = Value::Object(root);
    format!("{root:#}\n")
}

/// Each table under the first path that leads to it. Tables may contain themselves.
#[derive(Default)]
struct SchemaTables {
    names: Vec<(SchemaTable, String)>,
    definitions: Map<String, Value>,
}

impl SchemaTables {
    fn describe_table(&mut self, table: SchemaTable, path: &str) -> Map<String, Value> {
        let properties: Map<String, Value> = table
            .iter()
            .map(|key| (key.name.to_owned(), self.describe_key(key, path)))
            .collect();
        let mut described = Map::from_iter([
            ("type".to_owned(), "object".into()),
            ("properties".to_owned(), properties.into()),
            ("additionalProperties".to_owned(), false.into()),
        ]);
        if !path.starts_with("policy") {
            return described;
        }
        let is_required = |key: &&SchemaKey| matches!(key.requirement, KeyRequirement::Required);
        let required = table.iter().filter(is_required).map(|key| key.name);
        let required: Vec<&str> = required.collect();
        // A cost is either in a header or in the response; an amount in the file or in a request.
        if std::ptr::eq(table, schema::COST.as_slice()) {
            let kinds = [json!(["header"]), json!(["estimate", "actual"])];
            described.insert("oneOf".to_owned(), require_one_of(kinds));
        } else if std::ptr::eq(table, schema::ESTIMATE.as_slice()) {
            let kinds = [
                json!(["request_json", "default", "max"]),
                json!(["request_bytes_per_unit"]),
            ];
            described.insert("oneOf".to_owned(), require_one_of(kinds));
        } else if std::ptr::eq(table, schema::ACTUAL.as_slice()) {
            let kinds = [json!(["response_json"]), json!(["response_header"])];
            described.insert("oneOf".to_owned(), require_one_of(kinds));
        } else if std::ptr::eq(table, schema::LIMIT.as_slice()) {
            let kinds = [
                json!(["requests"]),
                json!(["requests_from", "default", "max"]),
            ];
            described.insert("oneOf".to_owned(), require_one_of(kinds));
        } else if !required.is_empty() {
            described.insert("required".to_owned(), json!(required));
        }
        described
    }

    fn describe_key(&mut self, key: &SchemaKey, path: &str) -> Value {
        let path = format!("{path}.{}", key.name);
        let mut described = self.describe_kind(&key.kind, path.trim_start_matches('.'));
        if let Some(fields) = described.as_object_mut() {
            fields.insert("description".to_owned(), key.doc.into());
            if let KeyRequirement::Default(text) = key.requirement {
                let default = content_from_text(&key.kind, text);
                fields.insert("default".to_owned(), default.to_json());
            }
        }
        described
    }

    fn describe_kind(&mut self, kind: &ValueKind, path: &str) -> Value {
        match kind {
            ValueKind::Bool => json!({ "type": "boolean" }),
            ValueKind::Integer {
                min: i64::MIN,
                max: i64::MAX,
            } => json!({ "type": "integer" }),
            ValueKind::Integer { min, max } => {
                json!({ "type": "integer", "minimum": min, "maximum": max })
            }
            ValueKind::Either(first, _, second) => {
                json!({ "anyOf": [self.describe_kind(first, path), self.describe_kind(second, path)] })
            }
            ValueKind::Fraction => json!({ "type": "number", "minimum": 0, "maximum": 1 }),
            ValueKind::Factor => describe_factor(),
            ValueKind::Duration { .. } => json!({ "type": "string", "pattern": DURATION_PATTERN }),
            ValueKind::ByteSize { .. } => json!({ "type": "string", "pattern": SIZE_PATTERN }),
            ValueKind::Keyword([only]) => json!({ "const": only }),
            ValueKind::Keyword(words) => json!({ "enum": words }),
            ValueKind::Text(_) => json!({ "type": "string" }),
            ValueKind::TextList(_) => json!({
                "anyOf": [{ "type": "array", "items": { "type": "string" } }, { "type": "string" }]
            }),
            ValueKind::StatusList => json!({
                "type": "array",
                "minItems": 1,
                "items": { "anyOf": [
                    { "type": "integer", "minimum": 100, "maximum": 599 },
                    { "type": "string", "pattern": "^[1-5](xx|[0-9][0-9])$" },
                ] },
            }),
            ValueKind::ThresholdList => json!({
                "type": "array",
                "minItems": 1,
                "maxItems": 4,
                "uniqueItems": true,
                "items": { "type": "number", "exclusiveMinimum": 0, "maximum": 1 },
            }),
            ValueKind::Table(table) => self.refer_to_table(table, path),
            ValueKind::TableList(table) => {
                json!({ "type": "array", "items": self.refer_to_table(table, path) })
            }
            ValueKind::Map(_) | ValueKind::Conditions { .. } => {
                let condition = self.refer_to_table(&schema::VALUE_CONDITION, "condition");
                if path.ends_with(".weights") {
                    return json!({
                        "type": "object",
                        "required": ["by", "default"],
                        "properties": { "by": { "type": "string" } },
                        "additionalProperties": describe_factor(),
                    });
                }
                // Claims and values of a body may also be booleans and numbers.
                let plain = if path.ends_with(".jwt") || path.ends_with(".body") {
                    json!({ "type": ["string", "boolean", "integer"] })
                } else {
                    json!({ "type": "string" })
                };
                let list = json!({ "type": "array", "items": plain, "minItems": 1 });
                json!({ "type": "object", "additionalProperties": { "anyOf": [plain, list, condition] } })
            }
        }
    }

    /// Returns a reference to the definition of a table. Adds the definition at the first use.
    fn refer_to_table(&mut self, table: SchemaTable, path: &str) -> Value {
        let is_known = |(known, _): &&(SchemaTable, String)| std::ptr::eq(*known, table);
        let known = self
            .names
            .iter()
            .find(is_known)
            .map(|(_, name)| name.clone());
        let name = known.unwrap_or_else(|| {
            self.names.push((table, path.to_owned()));
            let described = self.describe_table(table, path);
            self.definitions.insert(path.to_owned(), described.into());
            path.to_owned()
        });
        json!({ "$ref": format!("#/$defs/{name}") })
    }
}

fn describe_factor() -> Value {
    json!({ "type": "number", "minimum": -1_000_000, "maximum": 1_000_000 })
}

fn require_one_of(kinds: [Value; 2]) -> Value {
    json!(kinds.map(|keys| json!({ "required": keys })))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::{Path, PathBuf};

    const ROOT_PATH: &str = env!("CARGO_MANIFEST_DIR");

    fn toml_files(folder: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(Path::new(ROOT_PATH).join(folder)).unwrap();
        let files = entries.map(|entry| entry.unwrap().path());
        files
            .filter(|file| file.extension().is_some_and(|ext| ext == "toml"))
            .collect()
    }

    fn read_as_json(file: &Path) -> Value {
        let text = fs::read_to_string(file).unwrap();
        let table: toml::Table = text.parse().unwrap();
        serde_json::to_value(table).unwrap()
    }

    fn schema_validator() -> jsonschema::Validator {
        let schema: Value = serde_json::from_str(&json_schema()).unwrap();
        jsonschema::meta::validate(&schema).unwrap();
        jsonschema::draft202012::new(&schema).unwrap()
    }

    /// With `UPDATE_FIXTURES=1` the test rewrites the file.
    #[test]
    fn the_shipped_schema_is_current() {
        let file = Path::new(ROOT_PATH).join("config.schema.json");
        if std::env::var_os("UPDATE_FIXTURES").is_some() {
            fs::write(&file, json_schema()).unwrap();
        }
        assert!(
            fs::read_to_string(&file).unwrap_or_default() == json_schema(),
            "config.schema.json is stale: make schema"
        );
        let config = fs::read_to_string(Path::new(ROOT_PATH).join("config.toml")).unwrap();
        assert!(config.starts_with("#:schema ./config.schema.json\n"));
    }

    #[test]
    fn valid_configurations_match_the_schema() {
        let validator = schema_validator();
        let mut files: Vec<PathBuf> = ["valid", "doubtful"]
            .iter()
            .flat_map(|folder| toml_files(&format!("tests/fixtures/config/{folder}")))
            .collect();
        files.extend(toml_files("k8s/base"));
        files.push(Path::new(ROOT_PATH).join("config.toml"));
        assert!(files.len() > 10, "{files:?}");
        for file in &files {
            let config = read_as_json(file);
            let errors: Vec<String> = validator
                .iter_errors(&config)
                .map(|error| format!("{}: {error}", error.instance_path()))
                .collect();
            assert!(errors.is_empty(), "{}: {errors:#?}", file.display());
        }
    }

    #[test]
    fn unknown_keys_and_wrong_values_fail_the_schema() {
        let validator = schema_validator();
        let policy = "[[policy]]\nname = 'a'\n";
        let limit = "limit = { requests = 1, per = '1s' }\n";
        let matching = "[[policy]]\nname = 'a'\naction = 'deny'\n";
        for (text, is_valid) in [
            (format!("{policy}{limit}"), true),
            (format!("{policy}{limit}frob = 1\n"), false),
            (format!("{limit}[[policy]]\n"), false),
            (format!("[[policy]]\n{limit}"), false),
            (format!("{policy}limit = {{ per = '1s' }}\n"), false),
            (
                format!(
                    "{policy}limit = {{ requests_from = 'jwt:a', default = 1, max = 2, per = '1s' }}\n"
                ),
                true,
            ),
            (
                format!("{policy}limit = {{ requests_from = 'jwt:a', default = 1, per = '1s' }}\n"),
                false,
            ),
            (
                format!("{policy}limit = {{ requests = 1, per = '1h30m' }}\n"),
                true,
            ),
            (
                format!("{policy}limit = {{ requests = 1, per = '1min' }}\n"),
                false,
            ),
            (
                format!("{policy}limit = {{ requests = 1, per = '' }}\n"),
                false,
            ),
            (
                format!("{policy}limit = {{ requests = 1, per = 60 }}\n"),
                false,
            ),
            (
                format!("{policy}{limit}cost = {{ header = 'x-cost' }}\n"),
                true,
            ),
            (format!("{policy}{limit}cost = {{ estimate = 5 }}\n"), false),
            (format!("{policy}{limit}lease = 'auto'\n"), true),
            (format!("{policy}{limit}lease = 'some'\n"), false),
            (
                format!("{matching}match = {{ not = {{ path = '/a' }} }}\n"),
                true,
            ),
            (
                format!("{matching}match = {{ not = {{ paht = '/a' }} }}\n"),
                false,
            ),
            (
                format!("{matching}match = {{ headers = {{ a = {{ regex = 'x' }} }} }}\n"),
                true,
            ),
            (
                format!("{matching}match = {{ headers = {{ a = {{ regx = 'x' }} }} }}\n"),
                false,
            ),
            (
                format!("{matching}match = {{ jwt = {{ admin = true }} }}\n"),
                true,
            ),
            ("[store.redis]\nurl = 'redis://a'\n".to_owned(), true),
            ("[store.redis]\nurll = 'redis://a'\n".to_owned(), false),
            ("[listen]\nthreads = -1\n".to_owned(), false),
            ("[log]\naccess_sample = 1.5\n".to_owned(), false),
            ("[upstrem]\nurl = 'http://a'\n".to_owned(), false),
            (
                "[listen.http]\nmax_header_bytes = '64KB'\n".to_owned(),
                false,
            ),
        ] {
            let table: toml::Table = text.parse().unwrap();
            let config = serde_json::to_value(table).unwrap();
            assert_eq!(validator.is_valid(&config), is_valid, "{text}");
        }
    }

    /// The loader and the schema agree about unknown keys.
    #[test]
    fn fixtures_with_unknown_keys_fail_the_schema() {
        let validator = schema_validator();
        let mut count = 0;
        for file in toml_files("tests/fixtures/config/invalid") {
            let expected = fs::read_to_string(file.with_extension("expected")).unwrap();
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            let is_unknown = |line: &str| {
                line.starts_with(&format!("error: {name}:")) && line.contains(": unknown key")
            };
            if expected.contains("not TOML") || !expected.lines().any(is_unknown) {
                continue;
            }
            count += 1;
            assert!(
                !validator.is_valid(&read_as_json(&file)),
                "{}",
                file.display()
            );
        }
        assert!(count > 0, "no fixture with an unknown key");
    }
}
