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

.PHONY: prove
prove: ## For a minute each: a limit shared by two proxies is exact and used up; three keep it without Redis
	$(call need,redis-server,on Debian: apt-get install redis-server)
	TIDEGATE_TEST_SECONDS=60 cargo test --locked --test it -- --nocapture shared_redis three_proxies_keep

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
bench: ## What a decision and a key cost, then decisions per second beside redis-benchmark; a Redis of its own
	$(call need,redis-server,on Debian: apt-get install redis-server)
	$(call need,redis-benchmark,on Debian: apt-get install redis-tools)
	cargo bench --locked --bench costs
	cargo bench --locked --bench redis
