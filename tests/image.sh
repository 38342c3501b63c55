#!/usr/bin/env bash
# The image's last stage, built by buildah from the Dockerfile and run: size, user, nothing else inside, read-only, health.
#
#   tests/image.sh [PATH OF a static tidegate]
#
# The stage `build` is stood in for by that binary (make release makes it) and this machine's certificates: no registry
# is needed. Needs root and buildah.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tidegate=$(realpath "${1:-${CARGO_TARGET_DIR:-target}/$(uname -m)-unknown-linux-musl/release/tidegate}")
most_bytes=$((15 * 1000 * 1000))

dir=$(mktemp -d)
# Storage of its own: nothing stays, and nobody's images are seen.
buildah=(buildah --root "$dir/storage" --runroot "$dir/run" --storage-driver vfs)
pid=
end() {
  if [ -n "$pid" ]; then kill "$pid" 2>/dev/null || true; fi
  "${buildah[@]}" rm --all >/dev/null 2>&1 || true
  rm -rf "$dir"
}
trap end EXIT

fail() {
  echo "image: $*" >&2
  exit 1
}

# expect WHAT IS WANTED: compares with what comes in.
expect() {
  local seen
  seen=$(cat)
  [ "$seen" = "$2" ] || fail "$1 is $seen, not $2"
}

echo "the layer of dependencies"
# What the Dockerfile writes in place of the sources is all that Cargo wants to see.
mkdir "$dir/stub"
cp Cargo.toml Cargo.lock "$dir/stub/"
sed -n '/^RUN mkdir -p src benches/,/ && cargo build/p' Dockerfile | sed '1s/^RUN //; $d; s/\\$//' >"$dir/stub.sh"
(cd "$dir/stub" && sh -eu <(tr '\n' ' ' <"$dir/stub.sh"))
# There is no such binary; before that is noticed, files that are missing are.
(cd "$dir/stub" && cargo build --locked --offline --bin none 2>&1 || true) >"$dir/said"
if grep "can't find" "$dir/said"; then fail "the Dockerfile makes no file for a target of Cargo.toml"; fi
grep -q 'no bin target named `none`' "$dir/said" || fail "$(cat "$dir/said")"

# The stand-in holds what the stage `build` leaves in /image.
mkdir -p "$dir/context/image"
cp "$tidegate" "$dir/context/image/tidegate"
cp /etc/ssl/certs/ca-certificates.crt "$dir/context/image/"
printf 'FROM scratch\nCOPY image /image\n' >"$dir/context/Dockerfile"
"${buildah[@]}" build --quiet --tag localhost/stand-in "$dir/context" >/dev/null

# The Dockerfile's own last stage; only what comes before it is left out.
{ echo 'FROM localhost/stand-in AS build'; sed -n '/^FROM scratch$/,$p' Dockerfile; } >"$dir/Dockerfile"
"${buildah[@]}" build --quiet --format docker --pull-never --build-arg REVISION=0123abc --tag localhost/tidegate \
  --file "$dir/Dockerfile" "$dir/context" >/dev/null

container=$("${buildah[@]}" from --pull-never localhost/tidegate)
root=$("${buildah[@]}" mount "$container")
# Format, as in a template of Go: what the image says of itself.
says() { "${buildah[@]}" inspect --type image --format "$1" localhost/tidegate; }

echo "what is inside"
(cd "$root" && find . -type f | sort | tr '\n' ' ') | expect files "./etc/ssl/certs/ca-certificates.crt ./tidegate "
bytes=$(du -sb "$root" | cut -f1)
[ "$bytes" -lt "$most_bytes" ] || fail "$bytes bytes are more than $most_bytes"
if readelf -l "$root/tidegate" | grep -q INTERP; then fail "the binary is not static"; fi
find "$root" -perm /6000 -o -type f -perm /022 | expect "what others may write, or runs as its owner" ""

echo "what it says"
says '{{.Docker.Config.User}}' | expect user 65532:65532
says '{{.Docker.Config.Entrypoint}} {{.Docker.Config.Cmd}}' |
  expect command "[/tidegate] [run --config /etc/tidegate/config.toml]"
says '{{.Docker.Config.Healthcheck.Test}}' | expect healthcheck "[CMD /tidegate health --config /etc/tidegate/config.toml]"
says '{{index .Docker.Config.Labels "org.opencontainers.image.revision"}}' | expect revision 0123abc
says '{{index .Docker.Config.Labels "org.opencontainers.image.version"}}' |
  expect version "$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)"

# Ports of this machine: free ones, as the configuration would have them.
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

# in_image COMMAND…: as the image's user, in its root, which can't be written. With the configuration mounted, if there
# is one. (`buildah run` has no read-only root.)
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
if (in_image without /bin/sh -c true) 2>/dev/null; then fail "there is a shell"; fi
if (in_image without /tidegate run --config /etc/tidegate/config.toml) >"$dir/said" 2>&1; then fail "ran without configuration"; fi
grep -q '/etc/tidegate/config.toml' "$dir/said" || fail "does not say which file is missing: $(cat "$dir/said")"
if "${buildah[@]}" run --isolation chroot "$container" /tidegate health --config /etc/tidegate/config.toml 2>/dev/null; then
  fail "health without a proxy"
fi
"${buildah[@]}" run --isolation chroot "$container" /tidegate --version | expect "its version" "tidegate $(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)"

echo "it runs, read-only"
entry=(/tidegate run --config /etc/tidegate/config.toml)
health=(/tidegate health --config /etc/tidegate/config.toml)
if (in_image mounted "${health[@]}") >/dev/null 2>&1; then fail "healthy before it runs"; fi
in_image mounted "${entry[@]}" 2>"$dir/log" &
pid=$!
for _ in $(seq 100); do
  if curl -sf -o /dev/null "http://$admin/readyz"; then break; fi
  sleep 0.1
done
curl -s -o /dev/null -w '%{http_code}' "http://$admin/livez" | expect "the answer of /livez" 200
curl -s -o /dev/null -w '%{http_code}' "http://$listen/" | expect "the answer without an app" 502
(in_image mounted "${health[@]}") | expect health ok
stat -c %u "/proc/$pid" | expect "its user" 65532
if touch "/proc/$pid/root/x" 2>/dev/null; then fail "its root can be written"; fi
(in_image mounted /tidegate drain --config /etc/tidegate/config.toml) >/dev/null
wait "$pid" || fail "drained with $?"
pid=

echo "image: $bytes bytes; all as it should be"
