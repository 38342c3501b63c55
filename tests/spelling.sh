#!/usr/bin/env bash
# Checks the spelling of every file in the repository with typos (settings: typos.toml).
#
# TYPOS names the program. Without it the script looks for `typos`, then installs it from PyPI beside the build.
# If that fails, the script exits with TYPOS_MISSING (default 1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
version=1.52.0

tool=${TYPOS:-$(command -v typos || true)}
if [ -z "$tool" ]; then
  tool=$target/tools/typos-$version/bin/typos
  if [ ! -x "$tool" ] && ! { python3 -m venv "${tool%/bin/*}" &&
    "${tool%/*}/pip" install --quiet --disable-pip-version-check "typos==$version"; }; then
    rm -rf "${tool%/bin/*}"
    echo "spelling was not checked: typos cannot be installed from PyPI" >&2
    exit "${TYPOS_MISSING:-1}"
  fi
fi
"$tool" --format brief
