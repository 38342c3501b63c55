#!/usr/bin/env bash
# Holds a running instance against its own OpenAPI document, by schemathesis: every answer to any question has a status,
# a type and a shape that the document tells of, wrong questions are refused, and nothing fails.
#
#   tests/openapi.sh [PATH OF tidegate]
#
# SCHEMATHESIS names the program; without it, it is looked for, then installed from PyPI beside the build. Where that
# can't be done it ends with OPENAPI_MISSING (1).
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
    echo "the API was not held against its document: schemathesis can't be installed from PyPI" >&2
    exit "${OPENAPI_MISSING:-1}"
  fi
fi

dir=$(mktemp -d)
pid=
end() {
  if [ -n "$pid" ]; then kill "$pid" 2>/dev/null || true; fi
  rm -rf "$dir"
}
trap end EXIT

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

# Something to tell of.
for n in 1 2 3 4 5; do
  curl -s -o "$dir/answer" -H 'x-user: ann' "http://$proxy/login/$n"
done

# The questions are drawn anew each time; a failure prints a curl line. Draining has a test of its own. What the document
# allows may be refused all the same: it can't say which values the key of a policy has.
# It keeps notes where it runs.
cd "$dir"
"$tool" run "http://$admin/openapi.json" --header 'Authorization: Bearer s3cret' --exclude-path /drain \
  --exclude-checks positive_data_acceptance \
  -n "${OPENAPI_EXAMPLES:-20}" --phases examples,coverage,fuzzing --request-timeout 15 --no-color
