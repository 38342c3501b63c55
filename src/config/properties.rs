//! Properties of loading any text. The test suite draws random texts; `fuzz/` searches for others.

use super::{Config, ConfigErrors, ConfigSources, FileSource, FlagOverrides, load};

/// Asserts that loading a text twice gives the same result: a configuration, or errors.
///
/// Skips texts that may name files.
pub fn assert_two_loads_are_equal(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    // The backslash is in the list because escapes could spell the other words.
    if ["include", "file", "ca", "cert", "key =", "\\"]
        .iter()
        .any(|word| text.contains(word))
    {
        return;
    }
    let (first, second) = (load_text(text), load_text(text));
    match (&first, &second) {
        (Ok(first), Ok(second)) => {
            assert_eq!(first.policy_descriptions, second.policy_descriptions);
            assert_eq!(
                first.policy_table.policies().len(),
                second.policy_table.policies().len()
            );
            assert!(
                first
                    .warnings
                    .iter()
                    .all(|warning| !warning.to_log_line().is_empty())
            );
        }
        (Err(first), Err(second)) => {
            assert_eq!(first.to_string(), second.to_string());
            assert!(
                !first.to_string().trim().is_empty(),
                "rejected without an error message"
            );
        }
        _ => assert_eq!(
            first.is_ok(),
            second.is_ok(),
            "two loads of one text differ"
        ),
    }
}

/// Loads a text as if it were the main file.
///
/// # Errors
/// [`ConfigErrors`] if the text is not a valid configuration.
pub fn load_text(text: &str) -> Result<Config, ConfigErrors> {
    load_with_environment(text, &[])
}

/// Loads a text as if it were the main file, with environment variables.
///
/// # Errors
/// Same as [`load_text`].
pub fn load_with_environment(text: &str, env: &[(&str, &str)]) -> Result<Config, ConfigErrors> {
    let file = FileSource::Text {
        name: "config.toml".to_owned(),
        text: text.to_owned(),
    };
    let flags = FlagOverrides {
        upstream: Some("http://127.0.0.1:9".to_owned()),
        ..FlagOverrides::default()
    };
    load(&ConfigSources {
        file,
        env: env
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect(),
        flags,
        skips_key_files: false,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    const LINE: &str = "(\\[\\[policy\\]\\]|\\[listen\\]|\\[listen\\.http\\]|\\[client\\]|\\[path\\]|\\[[a-z.]{0,9}\\]|name = '[a-z ]{0,4}'|\
        limit = \\{ requests = -?[0-9]{0,20}, per = '[0-9]{0,12}[a-z]{0,2}'(, (algorithm|burst|name) = ['a-z0-9_]{1,12})? \\}|\
        match = \\{ (path|methods|hosts) = (\\['[!-&(-~]{0,9}'\\]|'/[!-&(-~]{0,9}') \\}|cost = [0-9.]{1,9}|mode = '[a-z]{0,6}'|\
        [a-z_]{1,9} = ([0-9]{1,9}|'[!-&(-~]{0,9}'|true|\\[\\])|[ -~]{0,12})";

    proptest! {
        #[test]
        fn any_text_loads_or_reports_errors(lines in prop::collection::vec(LINE, 0..8)) {
            super::assert_two_loads_are_equal(lines.join("\n").as_bytes());
        }
    }
}
