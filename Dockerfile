# A static binary in an empty image: no shell, no package manager, no root.
#
#   docker build -t tidegate .
#   docker run --network host -v "$PWD:/etc/tidegate:ro" tidegate
#
# The host's network, because config.toml names an app on loopback. The directory, because a file that is mounted by
# itself stays the old one when an editor renames a new one over it.

FROM rust:1.95-bookworm AS build

# aws-lc-rs holds C code: it needs a C compiler that links musl.
RUN apt-get update \
 && apt-get install -y --no-install-recommends musl-tools \
 && rm -rf /var/lib/apt/lists/* \
 && rustup target add x86_64-unknown-linux-musl

WORKDIR /src

# Dependencies first, behind empty sources: this layer is built again only when they change.
# Cargo wants to see every target that Cargo.toml names.
COPY Cargo.toml Cargo.lock ./
RUN mkdir -p src benches/soak tests/it \
 && touch src/lib.rs benches/costs.rs benches/matching.rs benches/redis.rs benches/soak/main.rs tests/architecture.rs tests/it/main.rs \
 && echo 'fn main() {}' > src/main.rs \
 && cargo build --release --locked --target x86_64-unknown-linux-musl \
 && rm -r src

# Newer than what was built above, or Cargo would take the empty sources for these.
COPY config.toml ./
COPY src ./src
RUN find src -type f -exec touch {} + \
 && cargo build --release --locked --target x86_64-unknown-linux-musl


FROM scratch

LABEL org.opencontainers.image.title="tidegate" \
      org.opencontainers.image.description="A rate-limiting sidecar proxy with a stated and tested guarantee" \
      org.opencontainers.image.licenses="Apache-2.0"

# Where the system's roots are looked for when `upstream.tls.ca` is absent.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /src/target/x86_64-unknown-linux-musl/release/tidegate /tidegate

# A number, so that Kubernetes can see that it isn't root.
USER 65532:65532
EXPOSE 8080
# Where Kubernetes runs the image, its own probes are used instead.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s \
  CMD ["/tidegate", "health", "--config", "/etc/tidegate/config.toml"]
ENTRYPOINT ["/tidegate"]
CMD ["run", "--config", "/etc/tidegate/config.toml"]
