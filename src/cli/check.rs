//! `tidegate check`: is this configuration right, and does it say what its owner means?

use crate::config::{self, Config, Diagnostic, Report, Sources};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::process::ExitCode;

/// How to answer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct How {
    pub(super) json: bool,
    /// Warnings fail too.
    pub(super) strict: bool,
}

/// Prints each policy in words to `out`, and what is wrong or doubtful to `talk`; as JSON all of it to `out`. Fails if
/// anything is wrong.
pub(super) fn run(
    sources: &Sources,
    how: How,
    out: &mut impl Write,
    talk: &mut impl Write,
) -> ExitCode {
    let loaded = config::load(sources);
    let is_right = loaded
        .as_ref()
        .is_ok_and(|config| !how.strict || config.warnings.is_empty());
    let (text, findings) = match &loaded {
        _ if how.json => (format!("{:#}\n", in_json(&loaded, is_right)), String::new()),
        Ok(config) => {
            let words: String = config
                .words
                .iter()
                .map(|words| format!("{words}\n"))
                .collect();
            (
                words,
                config.warnings.iter().map(ToString::to_string).collect(),
            )
        }
        Err(report) => (String::new(), report.to_string()),
    };
    // Whoever closed the pipe has read enough; the exit code still tells.
    let printed: io::Result<()> = talk
        .write_all(findings.as_bytes())
        .and_then(|()| out.write_all(text.as_bytes()));
    if printed.is_ok() && is_right {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn in_json(loaded: &Result<Config, Report>, is_right: bool) -> Value {
    let (policies, warnings, errors) = match loaded {
        Ok(config) => (
            config.words.as_slice(),
            config.warnings.as_slice(),
            [].as_slice(),
        ),
        Err(report) => ([].as_slice(), [].as_slice(), report.diagnostics.as_slice()),
    };
    let policies = policies
        .iter()
        .map(|words| json!({ "policy": words.policy, "off": words.off, "means": words.sentence }));
    json!({
        "ok": is_right,
        "policies": policies.collect::<Vec<_>>(),
        "errors": errors.iter().map(finding).collect::<Vec<_>>(),
        "warnings": warnings.iter().map(finding).collect::<Vec<_>>(),
    })
}

fn finding(found: &Diagnostic) -> Value {
    let position = found.place.position.as_ref();
    json!({
        "source": found.place.source,
        "line": position.map(|at| at.line),
        "column": position.map(|at| at.column),
        "key": found.key,
        "problem": found.problem,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::FileSource;

    fn check(text: &str) -> (ExitCode, String, String) {
        check_as(text, How::default())
    }

    fn check_as(text: &str, how: How) -> (ExitCode, String, String) {
        let file = FileSource::Text {
            name: "test.toml".into(),
            text: text.into(),
        };
        let (mut out, mut talk) = (Vec::new(), Vec::new());
        let code = run(
            &Sources {
                file,
                ..Sources::default()
            },
            how,
            &mut out,
            &mut talk,
        );
        (
            code,
            String::from_utf8(out).unwrap(),
            String::from_utf8(talk).unwrap(),
        )
    }

    #[test]
    fn policies_are_said_in_words() {
        let (code, out, talk) = check(
            "upstream.url = \"http://app\"\n[[policy]]\nname = \"login\"\n\
             match = { methods = [\"POST\"], path = \"/api/login\" }\nkey = [\"client_ip\"]\n\
             limit = { requests = 5, per = \"1m\" }\non_store_failure = \"closed\"\n\
             [[policy]]\nname = \"nobody\"\nlimit = { requests = 0, per = \"1s\" }\n",
        );
        assert_eq!(code, ExitCode::SUCCESS);
        assert_eq!(
            out,
            "login: POST /api/login, per client IP: at most 5 requests in any 1m window; store away: rejected\n\
             nobody: all requests, all together: at most 0 requests in any 1s window; store away: let through\n"
        );
        assert!(
            talk.starts_with("warning: test.toml:10:22: policy[1].limit.requests: 0 refuses"),
            "{talk}"
        );
    }

    #[test]
    fn errors_are_not_data() {
        let (code, out, talk) = check("[log]\nlevel = \"loud\"\nformat = \"xml\"\n");
        assert_eq!((code, out.as_str()), (ExitCode::FAILURE, ""));
        assert!(
            talk.contains("upstream.url") && talk.ends_with("3 errors\n"),
            "{talk}"
        );
    }

    #[test]
    fn scripts_get_one_object() {
        let json = How {
            json: true,
            strict: false,
        };
        let doubtful = "upstream.url = \"http://app\"\n[[policy]]\nname = \"a\"\nlimit = { requests = 0, per = \"1s\" }\n";
        let (code, out, talk) = check_as(doubtful, json);
        let told: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            (code, talk.as_str(), &told["ok"]),
            (ExitCode::SUCCESS, "", &json!(true))
        );
        assert_eq!(told["policies"][0]["policy"], "a");
        assert_eq!(
            (&told["warnings"][0]["line"], &told["warnings"][0]["column"]),
            (&json!(4), &json!(22))
        );

        let (code, out, _) = check_as("[log]\nlevel = \"loud\"\n", json);
        let told: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            (code, &told["ok"], told["errors"].as_array().unwrap().len()),
            (ExitCode::FAILURE, &json!(false), 2)
        );

        let (code, ..) = check_as(
            doubtful,
            How {
                json: false,
                strict: true,
            },
        );
        assert_eq!(code, ExitCode::FAILURE);
    }
}
