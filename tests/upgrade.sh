#!/bin/bash
# Replaces four proxies of an earlier commit one by one by today's, and back, under load on one Redis.
# FROM is the earlier commit, which is built from git: by default the newest from which an upgrade is tested.
# If TIDEGATE_UPGRADE_FROM is set, it is the binary of that commit, and nothing else is built.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${TIDEGATE_UPGRADE_FROM:-}" ]; then
  commit=$(git rev-parse --short=8 --verify "${FROM:-ecbe442}^{commit}")
  target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/upgrade-$commit
  source=$(mktemp -d)
  trap 'git worktree remove --force "$source"' EXIT
  git worktree add --detach "$source" "$commit"
  CARGO_TARGET_DIR=$target cargo build --locked --manifest-path "$source/Cargo.toml"
  TIDEGATE_UPGRADE_FROM=$target/debug/tidegate
fi

export TIDEGATE_UPGRADE_FROM
cargo bench --locked --profile dev --bench upgrade
