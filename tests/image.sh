#!/usr/bin/env bash
# Builds the last stage of the Dockerfile with buildah and tests it: size, user, content, read-only root, health check.
#
#   tests/image.sh [PATH OF a static tidegate]
#
# That binary (built by make dist) and the local root certificates replace the stage `build`, so no registry is
# needed. Requires root and buildah.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tidegate=$(realpath "${1:-${CARGO_TARGET_DIR:-target}/dist/tidegate}")
max_bytes=$((15 * 1000 * 1000))

dir=$(mktemp -d)
# Separate storage: no existing image is used, and nothing remains.
buildah=(buildah --root "$dir/storage" --runroot "$dir/run" --storage-driver vfs)
pid=
cleanup() {
  if [ -n "$pid" ]; then kill "$pid" 2>/dev/null || true; fi
  "${buildah[@]}" rm --all >/dev/null 2>&1 || true
  rm -rf "$dir"
}
trap cleanup EXIT

fail() {
  echo "image: $*" >&2
  exit 1
}

# expect NAME VALUE: compares stdin with VALUE.
expect() {
  local actual
  actual=$(cat)
  [ "$actual" = "$2" ] || fail "$1: expected $2, found $actual"
}

echo "dependency layer"
# The empty files of the Dockerfile satisfy Cargo.
mkdir "$dir/stub"
cp Cargo.toml Cargo.lock "$dir/stub/"
sed -n '/^RUN mkdir -p src benches/,/ cargo build/p' Dockerfile | sed '1s/^RUN //; $d; s/\\$//' >"$dir/stub.sh"
(cd "$dir/stub" && sh -eu <(tr '\n' ' ' <"$dir/stub.sh"))
# This binary does not exist, but Cargo reports missing files first.
(cd "$dir/stub" && cargo build --locked --offline --bin none 2>&1 || true) >"$dir/output"
if grep "can't find" "$dir/output"; then fail "the Dockerfile creates no file for a target in Cargo.toml"; fi
grep -q 'no bin target named `none`' "$dir/output" || fail "$(cat "$dir/output")"

# The replacement contains the files that the stage `build` puts into /image.
mkdir -p "$dir/context/image"
cp "$tidegate" "$dir/context/image/tidegate"
cp /etc/ssl/certs/ca-certificates.crt "$dir/context/image/"
printf 'FROM scratch\nCOPY image /image\n' >"$dir/context/Dockerfile"
"${buildah[@]}" build --quiet --tag localhost/stand-in "$dir/context" >/dev/null

# The last stage of the Dockerfile, unchanged.
{ echo 'FROM localhost/stand-in AS build'; sed -n '/^FROM scratch$/,$p' Dockerfile; } >"$dir/Dockerfile"
"${buildah[@]}" build --quiet --format docker --pull-never --build-arg REVISION=0123abc --tag localhost/tidegate \
  --file "$dir/Dockerfile" "$dir/context" >/dev/null

container=$("${buildah[@]}" from --pull-never localhost/tidegate)
root=$("${buildah[@]}" mount "$container")
# inspect_image FORMAT: image metadata, by a Go template.
inspect_image() { "${buildah[@]}" inspect --type image --format "$1" localhost/tidegate; }

echo "content"
(cd "$root" && find . -type f | sort | tr '\n' ' ') | expect files "./etc/ssl/certs/ca-certificates.crt ./tidegate "
bytes=$(du -sb "$root" | cut -f1)
[ "$bytes" -lt "$max_bytes" ] || fail "$bytes bytes exceed $max_bytes"
if readelf -l "$root/tidegate" | grep -q INTERP; then fail "the binary is not static"; fi
find "$root" -perm /6000 -o -type f -perm /022 | expect "group- or world-writable and setuid files" ""

echo "metadata"
inspect_image '{{.Docker.Config.User}}' | expect user 65532:65532
inspect_image '{{.Docker.Config.Entrypoint}} {{.Docker.Config.Cmd}}' |
  expect command "[/tidegate] [run --config /etc/tidegate/config.toml]"
inspect_image '{{.Docker.Config.Healthcheck.Test}}' | expect healthcheck "[CMD /tidegate health --config /etc/tidegate/config.toml]"
inspect_image '{{index .Docker.Config.Labels "org.opencontainers.image.revision"}}' | expect revision 0123abc
inspect_image '{{index .Docker.Config.Labels "org.opencontainers.image.version"}}' |
  expect version "$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)"

# Free local ports.
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
mkdir "$dir/config"
listen=127.0.0.1:$(port)
admin=127.0.0.1:$(port)
cat >"$dir/config/config.toml" <<EOF
[listen]
address = "$listen"
[upstream]
url = "http://127.0.0.1:9"
[admin]
address = "$admin"
EOF
chmod -R a+rX "$dir/config"

# in_image mounted|without COMMAND…: runs as the image's user in its read-only root, with or without the configuration.
# (`buildah run` does not support a read-only root.)
cp -r "$root" "$dir/root"
mkdir "$dir/root/etc/tidegate"
in_image() {
  exec unshare --mount bash -euc '
    mount --bind "$1/root" "$1/root" && mount -o remount,ro,bind "$1/root"
    if [ "$2" = mounted ]; then mount --bind "$1/config" "$1/root/etc/tidegate"; fi
    exec env -i "$(command -v chroot)" --userspec=65532:65532 --groups= "$1/root" "${@:3}"
  ' in_image "$dir" "$@"
}

echo "no shell, no configuration"
if (in_image without /bin/sh -c true) 2>/dev/null; then fail "the image contains a shell"; fi
if (in_image without /tidegate run --config /etc/tidegate/config.toml) >"$dir/output" 2>&1; then fail "started without a configuration"; fi
grep -q '/etc/tidegate/config.toml' "$dir/output" || fail "the missing file is not named: $(cat "$dir/output")"
if "${buildah[@]}" run --isolation chroot "$container" /tidegate health --config /etc/tidegate/config.toml 2>/dev/null; then
  fail "healthy without a proxy"
fi
"${buildah[@]}" run --isolation chroot "$container" /tidegate --version | expect version "tidegate $(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)"

echo "read-only run"
entry=(/tidegate run --config /etc/tidegate/config.toml)
health=(/tidegate health --config /etc/tidegate/config.toml)
if (in_image mounted "${health[@]}") >/dev/null 2>&1; then fail "healthy before the start"; fi
in_image mounted "${entry[@]}" 2>"$dir/log" &
pid=$!
for _ in $(seq 100); do
  if curl -sf -o /dev/null "http://$admin/readyz"; then break; fi
  sleep 0.1
done
curl -s -o /dev/null -w '%{http_code}' "http://$admin/livez" | expect "status of /livez" 200
curl -s -o /dev/null -w '%{http_code}' "http://$listen/" | expect "status without an app" 502
(in_image mounted "${health[@]}") | expect health ok
stat -c %u "/proc/$pid" | expect "process user" 65532
if touch "/proc/$pid/root/x" 2>/dev/null; then fail "the root file system is writable"; fi
(in_image mounted /tidegate drain --config /etc/tidegate/config.toml) >/dev/null
wait "$pid" || fail "exit code $? after a drain"
pid=

echo "image: $bytes bytes, all tests passed"
