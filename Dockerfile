# A static binary in an empty image: no shell, no package manager, no root.
#
#   docker build -t tidegate .
#   docker run --network host --read-only -v "$PWD:/etc/tidegate:ro" tidegate
#
# The host's network, because config.toml names an app on loopback. The directory, because a file that is mounted by
# itself stays the old one when an editor renames a new one over it.
#
# For amd64 and arm64, on either: docker buildx build --platform linux/amd64,linux/arm64 …
# What is in the last stage is tested by tests/image.sh.

FROM --platform=$BUILDPLATFORM rust:1.95-bookworm AS toolchain

ARG TARGETARCH
# aws-lc-rs and mimalloc hold C code. clang compiles it for either architecture with the headers of its musl; Rust brings
# musl itself, and a linker. mimalloc tells when it was compiled, unless it can't know: the same sources make the same bytes.
RUN dpkg --add-architecture "$TARGETARCH" \
 && apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates clang llvm "musl-dev:$TARGETARCH" \
 && rm -rf /var/lib/apt/lists/* \
 && case "$TARGETARCH" in amd64) cpu=x86_64 ;; arm64) cpu=aarch64 ;; *) exit 1 ;; esac \
 && rustup target add "$cpu-unknown-linux-musl" \
 && no_time='-Wno-builtin-macro-redefined -D__DATE__=\"\" -D__TIME__=\"\"' \
 && printf '%s\n' >"$CARGO_HOME/config.toml" \
    '[build]' \
    "target = \"$cpu-unknown-linux-musl\"" \
    '[target.'"$cpu"'-unknown-linux-musl]' \
    'linker = "rust-lld"' \
    'rustflags = ["-Clinker-flavor=ld.lld", "-Clink-self-contained=yes", "-Clink-arg=-zpack-relative-relocs"]' \
    '[env]' \
    'TARGET_CC = "clang"' \
    'TARGET_AR = "llvm-ar"' \
    "TARGET_CFLAGS = \"--target=$cpu-linux-musl -nostdlibinc -isystem /usr/include/$cpu-linux-musl $no_time\""


FROM toolchain AS build

WORKDIR /src

# Dependencies first, behind empty sources: this layer is built again only when they change.
# Cargo wants to see every target that Cargo.toml names.
COPY Cargo.toml Cargo.lock ./
RUN mkdir -p src benches \
 && sed -n '/^\[\[bench\]\]$/,/^name/s/^name = "\(.*\)"$/\1/p' Cargo.toml | while read -r name; do touch "benches/$name.rs"; done \
 && touch src/lib.rs \
 && echo 'fn main() {}' > src/main.rs \
 && cargo build --release --locked \
 && rm -r src

# Newer than what was built above, or Cargo would take the empty sources for these.
COPY build.rs config.toml ./
COPY src ./src
RUN find src -type f -exec touch {} + \
 && cargo build --release --locked \
 && mkdir /image \
 && cp target/*-unknown-linux-musl/release/tidegate /image/tidegate \
 && cp /etc/ssl/certs/ca-certificates.crt /image/


FROM scratch

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tidegate" \
      org.opencontainers.image.description="A rate-limiting sidecar proxy with a stated and tested guarantee" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"

# Where the system's roots are looked for when `upstream.tls.ca` is absent.
COPY --from=build /image/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /image/tidegate /tidegate

# A number, so that Kubernetes can see that it isn't root.
USER 65532:65532
EXPOSE 8080
# Where Kubernetes runs the image, its own probes are used instead.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s \
  CMD ["/tidegate", "health", "--config", "/etc/tidegate/config.toml"]
ENTRYPOINT ["/tidegate"]
CMD ["run", "--config", "/etc/tidegate/config.toml"]
