//! Compiles `src/musl.c` where it is meant for: the static binary on x86-64.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=src/musl.c");
    let target = |what: &str| env::var(format!("CARGO_CFG_TARGET_{what}")).unwrap_or_default();
    if target("ENV") == "musl" && target("ARCH") == "x86_64" {
        // A compiler must not see a `memcpy` in the loops of memcpy.
        cc::Build::new()
            .file("src/musl.c")
            .flag("-ffreestanding")
            .flag_if_supported("-fno-tree-loop-distribute-patterns")
            .opt_level(2)
            .warnings_into_errors(true)
            .compile("tidegate_musl");
    }
}
