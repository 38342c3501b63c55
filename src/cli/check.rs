//! `tidegate check`: validates a configuration and describes its policies.

use super::output::{CheckOptions, diagnostic_to_json};
use crate::app::descriptor_limit::describe_lowered_connections;
use crate::config::{self, Config, ConfigErrors, ConfigSources};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::process::ExitCode;

/// Writes a description of each policy to `out`, and errors, warnings and notes to
/// `diagnostics_out`. With `options.json`, writes everything to `out` as JSON. Checks each of
/// `files` on its own. Fails on errors, and on warnings if `options.strict` is set.
pub(super) fn run(
    files: &[ConfigSources],
    options: CheckOptions,
    out: &mut impl Write,
    diagnostics_out: &mut impl Write,
) -> ExitCode {
    let results: Vec<CheckResult> = files
        .iter()
        .map(|sources| CheckResult::new(sources, options))
        .collect();
    let is_valid = results.iter().all(|result| result.is_valid);
    let printed = match results.as_slice() {
        [result] if options.json => writeln!(out, "{:#}", result.to_json()),
        all if options.json => {
            let files: Vec<Value> = all.iter().map(CheckResult::to_json).collect();
            writeln!(out, "{:#}", json!({ "ok": is_valid, "files": files }))
        }
        all => all.iter().enumerate().try_for_each(|(index, result)| {
            if files.len() > 1 {
                let gap = if index == 0 { "" } else { "\n" };
                writeln!(out, "{gap}{}:", result.file)?;
            }
            // If the output is a closed pipe, the command fails without a message.
            diagnostics_out.write_all(result.format_diagnostics().as_bytes())?;
            out.write_all(result.format_descriptions().as_bytes())
        }),
    };
    ExitCode::from(u8::from(printed.is_err() || !is_valid))
}

/// The result of loading one file.
struct CheckResult {
    file: String,
    loaded: Result<Config, ConfigErrors>,
    is_valid: bool,
    skips_key_files: bool,
}

impl CheckResult {
    fn new(sources: &ConfigSources, options: CheckOptions) -> Self {
        let loaded = config::load(sources);
        let is_valid = loaded
            .as_ref()
            .is_ok_and(|config| !options.strict || config.warnings.is_empty());
        Self {
            file: sources.file.to_string(),
            loaded,
            is_valid,
            skips_key_files: sources.skips_key_files,
        }
    }

    fn format_descriptions(&self) -> String {
        let Ok(config) = &self.loaded else {
            return String::new();
        };
        let addresses = config.summarize_addresses().into_iter();
        let addresses = addresses.map(|(name, text)| format!("{name}: {text}\n"));
        let policies = config.policy_descriptions.iter();
        let policies = policies.map(|words| format!("{words}\n"));
        let gap = std::iter::once("\n".to_owned());
        addresses.chain(gap).chain(policies).collect()
    }

    fn format_diagnostics(&self) -> String {
        match &self.loaded {
            Ok(config) => {
                let notes = notes_of(config);
                let notes = notes.iter().map(|note| format!("note: {note}\n"));
                let groups = config::group_diagnostics(&config.warnings);
                let warnings = groups.iter().map(ToString::to_string);
                let unread = self.skips_key_files.then_some(
                    "note: secrets, certificates and key sets were not read (--no-files)\n",
                );
                let unread = unread.into_iter().map(str::to_owned);
                warnings.chain(notes).chain(unread).collect()
            }
            Err(report) => report.to_string(),
        }
    }

    fn to_json(&self) -> Value {
        let (config, errors) = match &self.loaded {
            Ok(config) => (Some(config), [].as_slice()),
            Err(report) => (None, report.diagnostics.as_slice()),
        };
        let policies = config.iter().flat_map(|config| &config.policy_descriptions);
        let warnings = config.iter().flat_map(|config| &config.warnings);
        let policies = policies.map(
            |words| json!({ "policy": words.policy, "off": words.is_off, "means": words.sentence }),
        );
        let addresses = config.into_iter().flat_map(Config::summarize_addresses);
        let addresses: Map<String, Value> = addresses
            .map(|(name, text)| (name.to_owned(), text.into()))
            .collect();
        json!({
            "file": self.file,
            "ok": self.is_valid,
            "files_read": !self.skips_key_files,
            "addresses": addresses,
            "policies": policies.collect::<Vec<_>>(),
            "errors": errors.iter().map(diagnostic_to_json).collect::<Vec<_>>(),
            "warnings": warnings.map(diagnostic_to_json).collect::<Vec<_>>(),
            "notes": config.map_or(Vec::new(), notes_of),
        })
    }
}

fn notes_of(config: &Config) -> Vec<String> {
    let mut notes = config.notes();
    notes.extend(describe_lowered_connections(config));
    notes
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
            &[ConfigSources {
                file,
                ..ConfigSources::default()
            }],
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
            "listen: [::]:8080, cleartext\nupstream: http://app\nstore: memory, of this process only\n\
             admin: 127.0.0.1:9090\n\n\
             login: POST /api/login, per client IP: at most 5 requests in any 1m window; if the store fails: reject\n\
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
    fn a_note_names_the_timeout_that_envoy_needs() {
        let policy = "[[policy]]\nname = \"user\"\nmatch = { domain = \"edge\" }\nlimit = { requests = 5, per = \"1m\" }\n";
        let store = "[store]\nkind = \"redis\"\nredis = { url = \"redis://r\", key_prefix = \"x\", timeout = \"70ms\" }\n";
        let (code, _, diagnostics) = run_check(&format!("[rls]\n{store}{policy}"));
        assert_eq!(code, ExitCode::SUCCESS, "{diagnostics}");
        for noted in ["20 ms", "(70 ms)", "failure_mode_allowed", "given_up"] {
            assert!(diagnostics.contains(noted), "{noted}: {diagnostics}");
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
