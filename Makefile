# `make` alone lists what there is. The gate (.ci/run) calls `lint` and `test`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Debian keeps nginx where only root looks.
export PATH := $(PATH):/usr/sbin

ADVISORIES := https://github.com/rustsec/advisory-db

# $(call need,command,how to get it): fails with a sentence when the command is missing.
need = @command -v $(1) >/dev/null || { echo "make: $(1) is missing; $(2)" >&2; exit 1; }

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## A sample upstream and the proxy in one process, with curl lines to try
	cargo run --release --locked -- demo

.PHONY: test
test: test-tools test-docs test-suite ## Every test: doc tests, then unit and integration tests

.PHONY: test-tools
test-tools:
	$(call need,redis-server,on Debian: apt-get install redis-server)
	$(call need,nginx,on Debian: apt-get install nginx)

.PHONY: test-docs
test-docs: test-tools
	cargo test --locked --doc

# Last, so that its summary ends the output. A flaky test is a bug: nothing is retried.
.PHONY: test-suite
test-suite: test-tools test-docs
	@if cargo nextest --version >/dev/null 2>&1; then \
		set -x; cargo nextest run --locked --no-fail-fast --retries 0; \
	else \
		set -x; cargo test --locked --no-fail-fast --lib --bins --tests; \
	fi

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

.PHONY: prove
prove: ## For a minute each: a limit shared by two proxies is exact and used up; three keep it without Redis
	$(call need,redis-server,on Debian: apt-get install redis-server)
	TIDEGATE_TEST_SECONDS=60 cargo test --locked --test it -- --nocapture shared_redis three_proxies_keep

# Of a release build, as it is shipped. The rest of the settings is told in benches/soak/main.rs.
SOAK_MINUTES ?= 30

.PHONY: soak
soak: ## Traffic and faults of many kinds for SOAK_MINUTES (30): flat memory, no error without a reason, counters add up
	$(call need,redis-server,on Debian: apt-get install redis-server)
	SOAK_MINUTES=$(SOAK_MINUTES) SOAK_SEED=$(SOAK_SEED) cargo bench --locked --bench soak

.PHONY: lint
lint: fmt clippy deny architecture ## Formatting, clippy, dependencies, and who may import whom

.PHONY: fmt
fmt:
	cargo fmt --check

.PHONY: clippy
clippy:
	cargo clippy --locked --all-targets -- -D warnings

# Advisories need a database that is fetched: they are checked wherever it can be reached.
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
	UPDATE_FIXTURES=1 cargo test --locked --test it pictures::

.PHONY: bench
bench: ## What finding a policy, a decision and a key cost, then decisions per second beside redis-benchmark; a Redis of its own
	$(call need,redis-server,on Debian: apt-get install redis-server)
	$(call need,redis-benchmark,on Debian: apt-get install redis-tools)
	cargo bench --locked --bench matching
	cargo bench --locked --bench costs
	cargo bench --locked --bench redis
