#!/usr/bin/env bash
# Tests a running instance against its OpenAPI document with schemathesis: every response has a documented status,
# content type and schema, invalid requests are rejected, and no request causes a server error.
#
#   tests/openapi.sh [PATH OF tidegate]
#
# SCHEMATHESIS is the program's path. By default it is searched in PATH, then installed from PyPI into the target
# directory. If that fails, exits with OPENAPI_MISSING (default 1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=$(realpath "${CARGO_TARGET_DIR:-target}")
tidegate=${1:-$target/debug/tidegate}
version=4.32.5

tool=${SCHEMATHESIS:-$(command -v schemathesis || true)}
if [ -z "$tool" ]; then
  tool=$target/tools/schemathesis-$version/bin/schemathesis
  if [ ! -x "$tool" ] && ! { python3 -m venv "${tool%/bin/*}" &&
    "${tool%/*}/pip" install --quiet --disable-pip-version-check "schemathesis==$version"; }; then
    rm -rf "${tool%/bin/*}"
    echo "API not tested: cannot install schemathesis from PyPI" >&2
    exit "${OPENAPI_MISSING:-1}"
  fi
fi

dir=$(mktemp -d)
pid=
cleanup() {
  if [ -n "$pid" ]; then kill "$pid" 2>/dev/null || true; fi
  rm -rf "$dir"
}
trap cleanup EXIT

echo s3cret >"$dir/token"
cat >"$dir/config.toml" <<EOF
[admin]
address = "127.0.0.1:0"
token_file = "$dir/token"
[[policy]]
name = "free"
match = { path = "/free" }
action = "allow"
[[policy]]
name = "login"
match = { path = "/login/**" }
key = ["client_ip", "header:x-user"]
limits = [{ requests = 1, per = "1h" }, { requests = 5, per = "1d", algorithm = "token_bucket", burst = 9 }]
block_for = "1m"
[[policy]]
name = "all"
limit = { requests = 3, per = "1h" }
[[policy]]
name = "candidate"
mode = "shadow"
limit = { requests = 1, per = "1h" }
[[policy]]
name = "asleep"
mode = "off"
limit = { requests = 1, per = "1s" }
EOF

"$tidegate" run --config "$dir/config.toml" --listen 127.0.0.1:0 --upstream http://127.0.0.1:9 2>"$dir/log" &
pid=$!
address_in() {
  sed -n "s/.*\"message\":\"$1\",\"address\":\"\([^\"]*\)\".*/\1/p" "$dir/log"
}
for _ in $(seq 100); do
  if [ -n "$(address_in listening)" ]; then break; fi
  sleep 0.1
done
admin=$(address_in "admin listening")
proxy=$(address_in listening)

# Traffic, so that the responses contain data.
for n in 1 2 3 4 5; do
  curl -s -o "$dir/answer" -H 'x-user: ann' "http://$proxy/login/$n"
done

# Requests are random; a failure prints a curl command. /drain has its own test. A request that the document allows may
# still be rejected, because the document cannot name the valid key values of a policy.
# schemathesis writes files into the working directory.
cd "$dir"
"$tool" run "http://$admin/openapi.json" --header 'Authorization: Bearer s3cret' --exclude-path /drain \
  --exclude-checks positive_data_acceptance \
  -n "${OPENAPI_EXAMPLES:-20}" --phases examples,coverage,fuzzing --request-timeout 15 --no-color
