//! Generates the Rust messages of `rls.proto` with prost and writes them to the path in the first argument.

use std::{env, error::Error, fs};

fn main() -> Result<(), Box<dyn Error>> {
    let to = env::args_os().nth(1).ok_or("usage: proto OUTPUT_FILE")?;
    let here = env!("CARGO_MANIFEST_DIR");
    let files = protox::compile(["rls.proto"], [here])?;
    let made = tempdir()?;
    prost_build::Config::new()
        .bytes(["."])
        .out_dir(&made)
        .compile_fds(files)?;
    let text = fs::read_to_string(made.join("envoy.service.ratelimit.v3.rs"))?;
    fs::remove_dir_all(&made)?;
    Ok(fs::write(to, text)?)
}

fn tempdir() -> Result<std::path::PathBuf, Box<dyn Error>> {
    let dir = env::temp_dir().join(format!("tidegate-proto-{}", std::process::id()));
    fs::create_dir(&dir)?;
    Ok(dir)
}
