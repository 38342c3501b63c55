#!/usr/bin/env bash
# Runs the client libraries of OpenAI, Anthropic, Google and MCP through tidegate, in front of servers with their APIs.
#
#   tests/models.sh [PATH OF tidegate]
#
# The libraries are installed from PyPI into the target directory. Without redis-server, counters are in memory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
tidegate=${1:-$target/debug/tidegate}
tools=$target/tools/models
requirements=tests/models/requirements.txt
if ! cmp --quiet "$requirements" "$tools/$(basename "$requirements")"; then
  rm -rf "$tools"
  python3 -m venv "$tools"
  "$tools/bin/pip" install --quiet --disable-pip-version-check --requirement "$requirements"
  cp "$requirements" "$tools"
fi

exec "$tools/bin/python" tests/models/drive.py "$tidegate" $(command -v redis-server)
