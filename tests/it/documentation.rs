//! The documentation: every example that a user can copy must work.

use super::support::jwt_issuer::{TokenIssuer, write_jwks};
use crate::support::prelude::*;
use jsonwebtoken::Algorithm;
use walkdir::WalkDir;

/// A fenced code block of a page.
#[derive(Clone, Debug)]
pub struct CodeBlock {
    /// File and line, as in `docs/operations/redis.md:18`.
    pub location: String,
    /// The nearest heading above the block.
    pub heading: String,
    pub language: String,
    pub text: String,
}

/// Returns the code blocks of one page.
pub fn read_code_blocks(page: &str) -> Vec<CodeBlock> {
    let text = fs::read_to_string(repository_root().join(page)).unwrap();
    let (mut blocks, mut open, mut heading) =
        (Vec::new(), None::<(CodeBlock, usize)>, String::new());
    for (number, line) in text.lines().enumerate() {
        match &mut open {
            Some((block, _)) if line.trim() == "```" => {
                blocks.push(block.clone());
                open = None;
            }
            Some((block, indent)) => {
                block.text.push_str(line.get(*indent..).unwrap_or(""));
                block.text.push('\n');
            }
            None if line.trim_start().starts_with("```") => {
                let place = format!("{page}:{}", number + 1);
                let language = line.trim().trim_matches('`').to_owned();
                let block = CodeBlock {
                    location: place,
                    heading: heading.clone(),
                    language,
                    text: String::new(),
                };
                open = Some((block, line.len() - line.trim_start().len()));
            }
            None if line.starts_with('#') => {
                heading = line.trim_start_matches(['#', ' ']).to_owned()
            }
            None => {}
        }
    }
    assert!(open.is_none(), "{page}: a code block is not closed");
    blocks
}

/// README and all pages in `docs/`.
fn list_pages() -> Vec<String> {
    let docs = WalkDir::new(repository_root().join("docs"))
        .sort_by_file_name()
        .into_iter()
        .map(|entry| entry.unwrap());
    let docs = docs.filter(|entry| entry.path().extension().is_some_and(|ext| ext == "md"));
    let docs = docs.map(|entry| {
        entry
            .path()
            .strip_prefix(repository_root())
            .unwrap()
            .display()
            .to_string()
    });
    std::iter::once("README.md".to_owned())
        .chain(docs)
        .collect()
}

/// The text of a page without code, and the anchors of its headings as GitHub writes them.
fn read_text_and_anchors(page: &Path) -> (String, Vec<String>) {
    let (mut text, mut anchors, mut is_code) = (String::new(), Vec::<String>::new(), false);
    for line in fs::read_to_string(page).unwrap().lines() {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        if is_code || is_fence {
            continue;
        }
        // Every other part is inline code.
        text.extend(line.split('`').step_by(2));
        text.push('\n');
        let Some(heading) = line.starts_with('#').then(|| line.trim_start_matches('#')) else {
            continue;
        };
        // The words of a link stay, its target does not.
        let (first, rest) = heading.split_once("](").unwrap_or((heading, ""));
        let words = rest
            .split("](")
            .map(|part| part.split_once(')').map_or("", |(_, text)| text));
        let words = std::iter::once(first).chain(words);
        let kept = words.collect::<String>().trim().to_lowercase();
        let kept = kept
            .chars()
            .filter(|one| one.is_alphanumeric() || "-_ ".contains(*one));
        let anchor: String = kept.collect::<String>().replace(' ', "-");
        let same = anchors.iter().filter(|known| **known == anchor).count();
        anchors.push(if same == 0 {
            anchor
        } else {
            format!("{anchor}-{same}")
        });
    }
    (text, anchors)
}

/// The links of a page that lead nowhere in the repository.
fn find_broken_links(page: &Path) -> Vec<String> {
    let (text, own_anchors) = read_text_and_anchors(page);
    let links = text
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next());
    let links = links.map(|link| link.split_whitespace().collect::<String>());
    let is_broken = |link: &String| {
        if ["http://", "https://", "mailto:"]
            .iter()
            .any(|scheme| link.starts_with(scheme))
        {
            return false;
        }
        let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
        let target = page.parent().unwrap().join(file);
        let anchors = match file.is_empty() {
            true => own_anchors.clone(),
            false if !target.exists() => return true,
            false if anchor.is_empty() => return false,
            false => read_text_and_anchors(&target).1,
        };
        !anchors.iter().any(|known| known == anchor)
    };
    links.filter(is_broken).collect()
}

#[test]
fn every_link_and_anchor_exists() {
    let folder = TempDir::new().unwrap();
    let page = folder.path().join("page.md");
    let text = "# A `b_c`, [d](e.md) ↻\n# Twice\n# Twice\n[1](#a-b_c-d-) [2](#twice-1) [3](page.md#twice)\n\
        `[code](x)` [4](#twice-2) [5](\npage.md#none) [6](gone.md) [7](https://x.example/#y)\n";
    fs::write(&page, text).unwrap();
    let found = find_broken_links(&page);
    assert_eq!(found, ["e.md", "#twice-2", "page.md#none", "gone.md"]);
    let further = [
        "SECURITY.md",
        "benches/SCALE.md",
        "benches/fleet/README.md",
        "tests/sim/README.md",
        "tests/spellings/README.md",
    ];
    let pages = list_pages().into_iter().chain(further.map(str::to_owned));
    let mut broken = Vec::new();
    for page in pages {
        let links = find_broken_links(&repository_root().join(&page));
        broken.extend(links.into_iter().map(|link| format!("{page}: {link}")));
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

fn repository_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The two commands that set up a bare machine, and the length that a new user reads.
#[test]
fn the_readme_is_short_and_names_the_set_up_commands() {
    let readme = fs::read_to_string(repository_root().join("README.md")).unwrap();
    let lines = readme.lines().count();
    assert!(lines <= 250, "{lines} lines");
    for command in ["cargo run --release -- demo", "make test"] {
        assert!(readme.lines().any(|line| line == command), "{command}");
    }
}

/// A temporary directory with the files that pages mention.
struct MountedFiles {
    folder: TempDir,
}

impl MountedFiles {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let authority = CertificateAuthority::new();
        authority.sign("tls", "shop.example");
        let tls = folder.path().join("tidegate/tls");
        fs::create_dir_all(&tls).unwrap();
        for (from, to) in [
            ("tls.pem", "tls.crt"),
            ("tls.key", "tls.key"),
            ("ca.pem", "ca.crt"),
        ] {
            fs::copy(authority.path(from), tls.join(to)).unwrap();
        }
        Self { folder }
    }

    /// Writes a configuration from a page to its own file, and completes it if it is a fragment.
    fn write_config(&self, name: &str, text: &str) -> PathBuf {
        let mut whole = text.replace("\"/etc/", &format!("\"{}/", self.folder.path().display()));
        // Files of secrets contain a secret.
        for file in whole
            .lines()
            .filter_map(|line| line.split_once("_file = \"")?.1.split('"').next())
        {
            fs::create_dir_all(Path::new(file).parent().unwrap()).unwrap();
            // In a file of header fields, the secret is a field's value.
            fs::write(file, "name: a secret of many bytes").unwrap();
        }
        let keys_file = whole.split_once("keys_file = \"");
        if let Some(file) = keys_file.and_then(|(_, rest)| rest.split('"').next()) {
            write_jwks(Path::new(file), &[&TokenIssuer::new("k", Algorithm::ES256)]);
        }
        if text.trim_start().starts_with("[[policy.override]]") {
            whole = format!(
                "[[policy]]\nname = \"the-policy\"\nkey = [\"client_ip\", \"const:x\"]\nlimit = {{ requests = 1, per = \"1h\" }}\n{}",
                whole.replace("key = [\"acme\", \"*\"]", "key = [\"10.0.0.1\", \"*\"]")
            );
        }
        if !text.contains("[upstream]") {
            whole = format!(
                "upstream.url = \"http://127.0.0.1:3000\"\nupstream.max_tunnels_per_client = 64\n{whole}"
            );
        }
        let file = self.folder.path().join(name);
        fs::write(&file, whole).unwrap();
        file
    }
}

#[tokio::test]
async fn every_configuration_in_the_docs_is_valid_without_warnings() {
    let mounted = MountedFiles::new();
    let mut checked = 0;
    let examples = list_pages()
        .into_iter()
        .flat_map(|page| read_code_blocks(&page));
    for block in examples.filter(|block| block.language == "toml") {
        // A block about settings alone would get a warning that there is no policy.
        let policy = if block.text.contains("[[policy]]") {
            ""
        } else {
            ANY_POLICY
        };
        let file = mounted.write_config("page.toml", &format!("{}\n{policy}", block.text));
        let output = run_command(tidegate_command().arg("check").arg(&file)).await;
        assert!(
            output.status.success() && has_only_notes(&output.stderr),
            "{}: {}",
            block.location,
            output.stderr
        );
        checked += 1;
    }
    assert!(checked >= 18, "only {checked} blocks were found");
}

/// As in CI, where no secret is mounted.
#[tokio::test]
async fn shipped_configurations_pass_a_strict_check_without_their_files() {
    let folder = TempDir::new().unwrap();
    let mut files: Vec<PathBuf> = ["config.toml", "k8s/base/config.toml"]
        .map(|file| repository_root().join(file))
        .into();
    let examples = read_code_blocks("README.md");
    let is_complete =
        |block: &&CodeBlock| block.language == "toml" && block.text.contains("[upstream]");
    for (index, example) in examples.iter().filter(is_complete).enumerate() {
        let file = folder.path().join(format!("readme-{index}.toml"));
        fs::write(&file, &example.text).unwrap();
        files.push(file);
    }
    assert!(files.len() >= 3, "README has no example");
    for file in files {
        let mut check = tidegate_command();
        check.args(["check", "--no-files", "--strict"]).arg(&file);
        let output = run_command(&mut check).await;
        assert!(output.status.success(), "{file:?}: {}", output.stderr);
        for line in ["listen: ", "upstream: ", "store: "] {
            output.expect_stdout(line);
        }
    }
}

const ANY_POLICY: &str =
    "[[policy]]\nname = 'any'\nkey = ['client_ip']\nlimit = { requests = 1, per = '1s' }\n";

fn has_only_notes(diagnostics: &str) -> bool {
    diagnostics.lines().all(|line| line.starts_with("note: "))
}

/// Returns the shell commands of a block, without the `$`, with their output.
fn parse_commands(block: &CodeBlock) -> Vec<(String, String)> {
    let mut commands: Vec<(String, String)> = Vec::new();
    for line in block.text.lines() {
        match (line.strip_prefix("$ "), commands.last_mut()) {
            (Some(command), _) => commands.push((command.to_owned(), String::new())),
            (None, Some((_, output))) => {
                output.push_str(line);
                output.push('\n');
            }
            (None, None) => {}
        }
    }
    commands
}

/// Every `tidegate` command in the pages has valid arguments.
#[tokio::test]
async fn every_tidegate_command_in_the_docs_is_accepted() {
    let mut tried = 0;
    for block in list_pages()
        .into_iter()
        .flat_map(|page| read_code_blocks(&page))
    {
        let lines: Vec<String> = match block.language.as_str() {
            "console" => parse_commands(&block)
                .into_iter()
                .map(|(command, _)| command)
                .collect(),
            "sh" | "bash" => block
                .text
                .replace("\\\n", " ")
                .lines()
                .map(str::to_owned)
                .collect(),
            _ => continue,
        };
        for line in lines
            .into_iter()
            .filter(|line| line.contains("tidegate ") || line.contains("run --release"))
        {
            let line = line
                .replace("cargo run --release -- ", "tidegate ")
                .replace("target/release/", "");
            let Some(words) = shlex::split(&line) else {
                panic!("{}: {line}", block.location)
            };
            let begins = |word: &String| word == "tidegate";
            let ours: Vec<String> = words
                .iter()
                .skip_while(|word| !begins(word))
                .skip(1)
                .take_while(|word| !["|", ";", ">"].contains(&&***word))
                .cloned()
                .collect();
            if !words.iter().any(begins) {
                continue;
            }
            // clap parses all arguments before it rejects this one.
            let output = run_command(tidegate_command().args(&ours).arg("--no-such-flag")).await;
            // With `--json` the error is on stdout.
            let printed = output.stdout + &output.stderr;
            assert!(
                printed.contains("unexpected argument '--no-such-flag'"),
                "{}: {line}: {printed}",
                block.location
            );
            tried += 1;
        }
    }
    assert!(tried >= 8, "only {tried} commands were found");
}

/// Runs the README's curl commands in order against a demo. The statuses must be those shown.
#[tokio::test]
async fn the_readme_shows_the_responses_of_the_demo() {
    let tour: Vec<_> = read_code_blocks("README.md")
        .iter()
        .flat_map(parse_commands)
        .collect();
    let shown = |part: &str| {
        tour.iter()
            .find(|(command, _)| command.contains(part))
            .unwrap()
            .1
            .clone()
    };
    let demo = super::support::process::ChildProcess::start(tidegate_command().args([
        "demo",
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "127.0.0.1:0",
    ]))
    .unwrap();
    let address = demo
        .wait_for(
            "the demo's address",
            0,
            super::support::TEST_TIMEOUT,
            |line| {
                line.text
                    .trim()
                    .strip_prefix("proxy ")?
                    .trim()
                    .strip_prefix("http://")?
                    .parse()
                    .ok()
            },
        )
        .await;
    let mut statuses = Vec::new();
    for _ in 0..25 {
        statuses.push(
            ClientRequest::new(address, "GET", "/hello")
                .send()
                .await
                .status
                .to_string(),
        );
    }
    assert_eq!(statuses.join(" "), shown("seq 25").trim());

    for (part, ask) in [
        (
            "curl -i http://127.0.0.1:8080/hello",
            ClientRequest::new(address, "GET", "/hello"),
        ),
        (
            "x-user-id: ann",
            ClientRequest::new(address, "GET", "/api/orders").header("x-user-id", "ann"),
        ),
    ] {
        let (reply, shown) = (ask.header("Accept", "*/*").send().await, shown(part));
        let mut lines = shown.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap();
        assert_eq!(reply.status.to_string(), status);
        for line in lines.take_while(|line| !line.is_empty()) {
            let (name, value) = line.split_once(": ").unwrap();
            let found = reply
                .header(name)
                .unwrap_or_else(|| panic!("{part}: no {name}"));
            // Values that depend on the time differ between runs.
            let changes = [
                "date",
                "content-length",
                "retry-after",
                "x-ratelimit-reset",
                "ratelimit",
            ];
            assert!(
                changes.contains(&name) || found == value,
                "{part}: {name}: {found} instead of {value}"
            );
        }
    }
}
