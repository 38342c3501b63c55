//! The `tidegate` binary. The command line and everything else are in the library.

/// Replaces the allocator of the C library. musl's allocator has one global lock, which costs a
/// quarter more CPU per request. glibc's allocator does not return memory after a burst of
/// connections. `docs/PERFORMANCE.md` has the measurements of the allocators.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Runs the command line and returns its exit code.
fn main() -> std::process::ExitCode {
    tidegate::cli::main()
}
