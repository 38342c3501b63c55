//! Finds the bracket that an invalid TOML document does not close.

/// Byte offset of the last bracket or brace before `error_offset` that is never closed.
pub(super) fn find_unclosed_bracket(text: &str, error_offset: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut open: Vec<(usize, u8)> = Vec::new();
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'#' => at = find_line_end(bytes, at),
            b'"' | b'\'' => at = find_string_end(bytes, at, byte),
            b'[' | b'{' => open.push((at, byte)),
            b']' | b'}' => {
                let (opened_at, opener) = open.pop()?;
                if (opener == b'[') != (byte == b']') {
                    return Some(opened_at).filter(|offset| *offset <= error_offset);
                }
            }
            _ => {}
        }
        at += 1;
    }
    let mut offsets = open.into_iter().map(|(offset, _)| offset);
    offsets.rfind(|offset| *offset <= error_offset)
}

fn find_line_end(bytes: &[u8], start: usize) -> usize {
    let rest = bytes.get(start..).unwrap_or_default();
    let length = rest.iter().position(|byte| *byte == b'\n');
    start + length.unwrap_or(rest.len())
}

/// Offset of the last byte of the string that begins at `start`. A string on one line ends with
/// the line, even without its quote.
fn find_string_end(bytes: &[u8], start: usize, quote: u8) -> usize {
    let is_triple = |at: usize| bytes.get(at..at + 3) == Some(&[quote; 3]);
    let is_multiline = is_triple(start);
    let mut at = start + if is_multiline { 3 } else { 1 };
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'\\' if quote == b'"' => at += 1,
            _ if is_multiline && is_triple(at) => return at + 2,
            _ if !is_multiline && (byte == quote || byte == b'\n') => return at,
            _ => {}
        }
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_bracket_that_is_not_closed() {
        // `^` marks the bracket, `!` the position of the parser's error.
        for marked in [
            "key = ^[\"a\", \"b\"\n!limit = { requests = 1 }\n",
            "limits = [\n  ^{ requests = 5,\n!]\n",
            "limits = ^[\n  { requests = 5 },\n\n![[policy]]\nname = \"b\"\nkey = [\"x\"]\n",
            "a = \"[\" # [ {\nb = '{'\nc = ^[\n!d = 1\n",
            "a = \"\"\"\n[ \\\"\"\" { \"\"\"\nb = ^{ c = 1\n!d = 2\n",
            // Only the bracket of the first error.
            "a = ^[1\n!b = 2\nc = [3\nd = 4\n",
            "a = [[1, 2], ^[3\n!",
            "^[policy\n!name = 1\n",
        ] {
            let error_offset = marked.replace('^', "").find('!').unwrap();
            let opened_at = marked.find('^').unwrap();
            let text = marked.replace(['^', '!'], "");
            assert_eq!(
                find_unclosed_bracket(&text, error_offset),
                Some(opened_at),
                "{marked}"
            );
        }
        for closed in [
            "a = [1, 2]\nb = ]\n",
            "a = [GET]\n",
            "a = { b = [\"[\"] }\nc = = 1\n",
            "",
            "a = \"x",
        ] {
            assert_eq!(
                find_unclosed_bracket(closed, closed.len()),
                None,
                "{closed}"
            );
        }
    }
}
