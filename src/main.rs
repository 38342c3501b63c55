//! The binary: arguments in, exit code out. Everything else is in the library.

/// musl's own takes a quarter more CPU per request, as one lock is around all of it; glibc's keeps what a burst of
/// connections has taken. docs/PERFORMANCE.md has the figures.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    tidegate::cli::main()
}
