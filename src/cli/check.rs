//! `tidegate check`: is this configuration right, and does it say what its owner means?

use crate::config::{self, Sources};
use std::io::{self, Write};
use std::process::ExitCode;

/// Prints each policy in words to `out`, and what is wrong or doubtful to `talk`. Fails if anything is wrong.
pub(super) fn run(sources: &Sources, out: &mut impl Write, talk: &mut impl Write) -> ExitCode {
    let (text, findings, code) = match config::load(sources) {
        Ok(config) => {
            let words: String = config.words.iter().map(|sentence| format!("{sentence}\n")).collect();
            let warnings: String = config.warnings.iter().map(ToString::to_string).collect();
            (words, warnings, ExitCode::SUCCESS)
        }
        Err(report) => (String::new(), report.to_string(), ExitCode::FAILURE),
    };
    // Whoever closed the pipe has read enough; the exit code still tells.
    let printed: io::Result<()> =
        talk.write_all(findings.as_bytes()).and_then(|()| out.write_all(text.as_bytes()));
    printed.map_or(ExitCode::FAILURE, |()| code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::FileSource;

    fn check(text: &str) -> (ExitCode, String, String) {
        let file = FileSource::Text { name: "test.toml".into(), text: text.into() };
        let (mut out, mut talk) = (Vec::new(), Vec::new());
        let code = run(&Sources { file, ..Sources::default() }, &mut out, &mut talk);
        (code, String::from_utf8(out).unwrap(), String::from_utf8(talk).unwrap())
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
        assert!(talk.starts_with("warning: test.toml:10:22: policy[1].limit.requests: 0 refuses"), "{talk}");
    }

    #[test]
    fn errors_are_not_data() {
        let (code, out, talk) = check("[log]\nlevel = \"loud\"\nformat = \"xml\"\n");
        assert_eq!((code, out.as_str()), (ExitCode::FAILURE, ""));
        assert!(talk.contains("upstream.url") && talk.ends_with("3 errors\n"), "{talk}");
    }
}
