//! What holds for any text at all. The suite draws some at random, `fuzz/` looks for the others.

use super::{Config, ConfigErrors, ConfigSources, FileSource, FlagOverrides, load};

/// A text is a configuration, or everything that is wrong with it is said; the same each time.
///
/// Texts that would make it read files are left out.
pub fn check_any_text(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    // Escapes could spell them.
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
                    .all(|warning| !warning.to_line().is_empty())
            );
        }
        (Err(first), Err(second)) => {
            assert_eq!(first.to_string(), second.to_string());
            assert!(
                !first.to_string().trim().is_empty(),
                "refused without a word"
            );
        }
        _ => assert_eq!(first.is_ok(), second.is_ok(), "once so, once so"),
    }
}

/// As it is read from a file.
///
/// # Errors
/// What is wrong with it.
pub fn load_text(text: &str) -> Result<Config, ConfigErrors> {
    let file = FileSource::Text {
        name: "config.toml".to_owned(),
        text: text.to_owned(),
    };
    let flags = FlagOverrides {
        upstream: Some("http://127.0.0.1:9".to_owned()),
        listen: None,
    };
    load(&ConfigSources {
        file,
        env: Vec::new(),
        flags,
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
        fn any_text(lines in prop::collection::vec(LINE, 0..8)) {
            super::check_any_text(lines.join("\n").as_bytes());
        }
    }
}
