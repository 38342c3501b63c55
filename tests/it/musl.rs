//! Compares the memory functions of the static binary with naive loops.

use std::path::Path;
use std::process::{Command, Output};

fn run_successfully(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

/// Compiles `src/musl.c` with renamed symbols, using the C compiler that the dependencies also
/// need. The program covers many sizes, addresses and overlaps.
#[cfg(target_arch = "x86_64")]
#[test]
fn memory_functions_behave_as_the_c_standard_requires() {
    let (folder, sources) = (
        tempfile::tempdir().unwrap(),
        Path::new(env!("CARGO_MANIFEST_DIR")),
    );
    let (object, program) = (folder.path().join("musl.o"), folder.path().join("musl"));
    let renamed =
        ["memcpy", "memmove", "memcmp", "bcmp"].map(|name| format!("-D{name}=our_{name}"));
    run_successfully(
        Command::new("cc")
            .args([
                "-O2",
                "-ffreestanding",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-c",
                "-o",
            ])
            .args([&object, &sources.join("src/musl.c")])
            .args(renamed),
    );
    run_successfully(Command::new("cc").args(["-O1", "-o"]).args([
        &program,
        &sources.join("tests/it/musl.c"),
        &object,
    ]));
    run_successfully(&mut Command::new(program));
}
