//! `tidegate check`: validates a configuration and describes its policies.

use crate::config::{self, Config, ConfigDiagnostic, ConfigErrors, ConfigSources};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::process::ExitCode;

/// Options of `tidegate check`: output format and strictness.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CheckOptions {
    pub(super) json: bool,
    /// Warnings fail the check.
    pub(super) strict: bool,
}

/// Writes a description of each policy to `out`, and errors, warnings and notes to
/// `diagnostics_out`. With
/// `options.json`, writes everything to `out` as JSON. Fails on errors, and on warnings if
/// `options.strict` is set.
pub(super) fn run(
    sources: &ConfigSources,
    options: CheckOptions,
    out: &mut impl Write,
    diagnostics_out: &mut impl Write,
) -> ExitCode {
    let loaded = config::load(sources);
    let is_valid = loaded
        .as_ref()
        .is_ok_and(|config| !options.strict || config.warnings.is_empty());
    let (text, findings) = match &loaded {
        _ if options.json => (
            format!("{:#}\n", check_result_to_json(&loaded, is_valid)),
            String::new(),
        ),
        Ok(config) => {
            let policies: String = config
                .policy_descriptions
                .iter()
                .map(|words| format!("{words}\n"))
                .collect();
            let notes = config.policy_table.spelling_notes();
            let notes = notes.iter().map(|note| format!("note: {note}\n"));
            let warnings = config.warnings.iter().map(ToString::to_string);
            (policies, warnings.chain(notes).collect())
        }
        Err(report) => (String::new(), report.to_string()),
    };
    // If the output is a closed pipe, the command fails without a message.
    let printed: io::Result<()> = diagnostics_out
        .write_all(findings.as_bytes())
        .and_then(|()| out.write_all(text.as_bytes()));
    if printed.is_ok() && is_valid {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn check_result_to_json(loaded: &Result<Config, ConfigErrors>, is_valid: bool) -> Value {
    let (policies, warnings, errors) = match loaded {
        Ok(config) => (
            config.policy_descriptions.as_slice(),
            config.warnings.as_slice(),
            [].as_slice(),
        ),
        Err(report) => ([].as_slice(), [].as_slice(), report.diagnostics.as_slice()),
    };
    let notes = loaded.as_ref().map_or_else(
        |_| Vec::new(),
        |config| config.policy_table.spelling_notes(),
    );
    let policies = policies.iter().map(
        |words| json!({ "policy": words.policy, "off": words.is_off, "means": words.sentence }),
    );
    json!({
        "ok": is_valid,
        "policies": policies.collect::<Vec<_>>(),
        "errors": errors.iter().map(diagnostic_to_json).collect::<Vec<_>>(),
        "warnings": warnings.iter().map(diagnostic_to_json).collect::<Vec<_>>(),
        "notes": notes,
    })
}

fn diagnostic_to_json(diagnostic: &ConfigDiagnostic) -> Value {
    let position = diagnostic.span.position.as_ref();
    json!({
        "source": diagnostic.span.source,
        "line": position.map(|at| at.line),
        "column": position.map(|at| at.column),
        "key": diagnostic.key,
        "problem": diagnostic.problem,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::FileSource;

    fn run_check(text: &str) -> (ExitCode, String, String) {
        run_check_with_options(text, CheckOptions::default())
    }

    fn run_check_with_options(text: &str, options: CheckOptions) -> (ExitCode, String, String) {
        let file = FileSource::Text {
            name: "test.toml".into(),
            text: text.into(),
        };
        let (mut out, mut diagnostics) = (Vec::new(), Vec::new());
        let code = run(
            &ConfigSources {
                file,
                ..ConfigSources::default()
            },
            options,
            &mut out,
            &mut diagnostics,
        );
        (
            code,
            String::from_utf8(out).unwrap(),
            String::from_utf8(diagnostics).unwrap(),
        )
    }

    #[test]
    fn prints_policies_in_words() {
        let (code, out, diagnostics) = run_check(
            "upstream.url = \"http://app\"\n[[policy]]\nname = \"login\"\n\
             match = { methods = [\"POST\"], path = \"/api/login\" }\nkey = [\"client_ip\"]\n\
             limit = { requests = 5, per = \"1m\" }\non_store_failure = \"closed\"\n\
             [[policy]]\nname = \"blocked\"\nlimit = { requests = 0, per = \"1s\" }\n",
        );
        assert_eq!(code, ExitCode::SUCCESS);
        assert_eq!(
            out,
            "login: POST /api/login, per client IP: at most 5 requests in any 1m window; if the store fails: reject\n\
             blocked: all requests, in total: at most 0 requests in any 1s window; if the store fails: allow\n"
        );
        assert!(
            diagnostics
                .starts_with("warning: test.toml:10:22: policy[1].limit.requests: 0 rejects"),
            "{diagnostics}"
        );
    }

    #[test]
    fn notes_name_the_spellings_that_remain() {
        let policy = "upstream.url = \"http://app\"\n[[policy]]\nname = \"login\"\nlimit = { requests = 5, per = \"1m\" }\n";
        for (text, noted) in [
            ("match = { path = \"/login\" }\n", Some("letter case")),
            ("match = { path = [\"/login\", \"/**\"] }\n", None),
            (
                "match = { path = \"/login\" }\n[path]\ncase_sensitive = false\n",
                None,
            ),
            ("key = [\"header:authorization\"]\n", Some("authorization")),
            (
                "key = [\"header:authorization\"]\n[[policy]]\nname = \"ip\"\nkey = [\"client_ip\"]\nlimit = { requests = 9, per = \"1m\" }\n",
                None,
            ),
        ] {
            let (code, _, diagnostics) = run_check(&format!("{policy}{text}"));
            assert_eq!(code, ExitCode::SUCCESS);
            match noted {
                Some(noted) => assert!(
                    diagnostics.contains("note: ") && diagnostics.contains(noted),
                    "{diagnostics}"
                ),
                None => assert!(!diagnostics.contains("note: "), "{diagnostics}"),
            }
        }
    }

    #[test]
    fn prints_errors_to_stderr_only() {
        let (code, out, diagnostics) = run_check("[log]\nlevel = \"loud\"\nformat = \"xml\"\n");
        assert_eq!((code, out.as_str()), (ExitCode::FAILURE, ""));
        assert!(
            diagnostics.contains("upstream.url") && diagnostics.ends_with("3 errors\n"),
            "{diagnostics}"
        );
    }

    #[test]
    fn prints_one_json_object() {
        let json = CheckOptions {
            json: true,
            strict: false,
        };
        let with_warning = "upstream.url = \"http://app\"\n[[policy]]\nname = \"a\"\nlimit = { requests = 0, per = \"1s\" }\n";
        let (code, out, diagnostics) = run_check_with_options(with_warning, json);
        let result: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            (code, diagnostics.as_str(), &result["ok"]),
            (ExitCode::SUCCESS, "", &json!(true))
        );
        assert_eq!(result["policies"][0]["policy"], "a");
        assert_eq!(
            (
                &result["warnings"][0]["line"],
                &result["warnings"][0]["column"]
            ),
            (&json!(4), &json!(22))
        );

        let (code, out, _) = run_check_with_options("[log]\nlevel = \"loud\"\n", json);
        let result: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            (
                code,
                &result["ok"],
                result["errors"].as_array().unwrap().len()
            ),
            (ExitCode::FAILURE, &json!(false), 2)
        );

        let (code, ..) = run_check_with_options(
            with_warning,
            CheckOptions {
                json: false,
                strict: true,
            },
        );
        assert_eq!(code, ExitCode::FAILURE);
    }
}
