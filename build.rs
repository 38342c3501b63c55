//! Compiles `src/musl.c` for its only target, the static binary on x86-64.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=src/musl.c");
    let target =
        |property: &str| env::var(format!("CARGO_CFG_TARGET_{property}")).unwrap_or_default();
    if target("ENV") == "musl" && target("ARCH") == "x86_64" {
        // The compiler must not replace the loops of memcpy with calls to memcpy.
        cc::Build::new()
            .file("src/musl.c")
            .flag("-ffreestanding")
            .flag_if_supported("-fno-tree-loop-distribute-patterns")
            .opt_level(2)
            .warnings_into_errors(true)
            .compile("tidegate_musl");
    }
}
