#!/bin/bash
# Replaces four proxies of 767e699 one by one by today's, and back, under load on one Redis.
# TIDEGATE_UPGRADE_FROM is a binary of 767e699. If it is not set, it is built from git.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${TIDEGATE_UPGRADE_FROM:-}" ]; then
  target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/upgrade-767e699
  source=$(mktemp -d)
  trap 'git worktree remove --force "$source"' EXIT
  git worktree add --detach "$source" 767e699
  CARGO_TARGET_DIR=$target cargo build --locked --manifest-path "$source/Cargo.toml"
  TIDEGATE_UPGRADE_FROM=$target/debug/tidegate
fi

export TIDEGATE_UPGRADE_FROM
cargo bench --locked --profile dev --bench upgrade
