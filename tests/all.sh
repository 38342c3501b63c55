#!/usr/bin/env bash
# Runs all tests, for `make test`. A part that fails does not stop the others; the summary names it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

failed=()
run() {
  printf '\n== %s\n' "$1"
  make --no-print-directory "$2" || failed+=("$1 (make $2)")
}

run "unit and integration tests" test-suite
run "documentation tests" test-docs
if [ "${BROWSER:-}" = skip ]; then
  left_out=", without the dashboard (BROWSER=skip)"
else
  run "dashboard tests" test-browser
fi

if [ ${#failed[@]} -gt 0 ]; then
  printf '\nFAILED: %s\n' "${failed[@]}"
  exit 1
fi
printf '\nAll tests passed%s.\n' "${left_out:-}"
