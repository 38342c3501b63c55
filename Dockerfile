# A static binary in an empty image: no shell, no package manager, no root.
#
#   docker build -t tidegate .
#   docker run --network host --read-only -v "$PWD:/etc/tidegate:ro" tidegate
#
# The host network is needed because config.toml names an app on loopback. The directory is mounted because a mounted
# file keeps its old content when an editor replaces it by a rename.
#
# Builds for amd64 and arm64 on either: docker buildx build --platform linux/amd64,linux/arm64 …
# tests/image.sh tests the last stage.

FROM --platform=$BUILDPLATFORM rust:1.95-bookworm AS toolchain

ARG TARGETARCH
# aws-lc-rs and mimalloc contain C code. clang compiles it for either architecture with the musl headers; Rust includes
# musl and a linker. Without __DATE__ and __TIME__, mimalloc embeds no build time, and the build is reproducible.
RUN dpkg --add-architecture "$TARGETARCH" \
 && apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates clang llvm "musl-dev:$TARGETARCH" python3 redis-server \
 && rm -rf /var/lib/apt/lists/* \
 && case "$TARGETARCH" in amd64) cpu=x86_64 ;; arm64) cpu=aarch64 ;; *) exit 1 ;; esac \
 && rustup target add "$cpu-unknown-linux-musl" \
 && rustup component add llvm-tools \
 && no_time='-Wno-builtin-macro-redefined -D__DATE__=\"\" -D__TIME__=\"\"' \
 && printf '%s\n' >"$CARGO_HOME/config.toml" \
    '[build]' \
    "target = \"$cpu-unknown-linux-musl\"" \
    '[target.'"$cpu"'-unknown-linux-musl]' \
    'linker = "rust-lld"' \
    '[env]' \
    'TARGET_CC = "clang"' \
    'TARGET_AR = "llvm-ar"' \
    "TARGET_CFLAGS = \"--target=$cpu-linux-musl -nostdlibinc -isystem /usr/include/$cpu-linux-musl $no_time\""
ENV RUSTFLAGS="-Clinker-flavor=ld.lld -Clink-self-contained=yes -Clink-arg=-zpack-relative-relocs"


FROM toolchain AS build

WORKDIR /src

# Dependencies are built first, with empty sources and instrumented for the training run, so that this layer is rebuilt
# only when they change.
# Cargo requires a file for every target in Cargo.toml.
COPY Cargo.toml Cargo.lock ./
RUN mkdir -p src benches \
 && sed -n '/^\[\[bench\]\]$/,/^name/s/^name = "\(.*\)"$/\1/p' Cargo.toml | while read -r name; do touch "benches/$name.rs"; done \
 && touch src/lib.rs \
 && echo 'fn main() {}' > src/main.rs \
 && RUSTFLAGS="$RUSTFLAGS -Cprofile-generate" cargo build --profile dist --locked --target-dir target/instrumented \
 && rm -r src

# The sources must be newer than the build above, otherwise Cargo reuses the result of the empty sources.
COPY build.rs config.toml ./
COPY packaging/build.sh packaging/train.py ./packaging/
COPY src ./src
RUN find src -type f -exec touch {} + \
 && packaging/build.sh "$(sed -n 's/^target = "\(.*\)"$/\1/p' "$CARGO_HOME/config.toml")" \
 && mkdir /image \
 && cp target/*-unknown-linux-musl/dist/tidegate /image/tidegate \
 && cp /etc/ssl/certs/ca-certificates.crt /image/


FROM scratch

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tidegate" \
      org.opencontainers.image.description="A rate-limiting sidecar proxy with a stated and tested guarantee" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"

# The system's root certificates, used without `upstream.tls.ca`.
COPY --from=build /image/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /image/tidegate /tidegate

# A numeric user, so that Kubernetes can verify `runAsNonRoot`.
USER 65532:65532
EXPOSE 8080
# Kubernetes ignores this and uses its own probes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s \
  CMD ["/tidegate", "health", "--config", "/etc/tidegate/config.toml"]
ENTRYPOINT ["/tidegate"]
CMD ["run", "--config", "/etc/tidegate/config.toml"]
