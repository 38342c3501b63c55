#!/usr/bin/env bash
# Builds the static binary to ship with profile-guided optimisation: an instrumented build, a training run
# (packaging/train.py), and a build with its profile. Called by `make dist` and the Dockerfile.
#
#   packaging/build.sh TARGET
#
# PROFILE=FILE uses this profile instead of training; PROFILE=none builds without. If something for the training is
# missing, or it fails, the build says so and goes on without a profile. Uses CARGO, RUSTFLAGS and CARGO_TARGET_DIR.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The training ends in order at Ctrl-C, after which bash would go on.
trap 'exit 130' INT

target=$1
built=$(realpath -m "${CARGO_TARGET_DIR:-target}")
profiles=$built/profiles

build() {
  CARGO_TARGET_DIR=$1 RUSTFLAGS="${RUSTFLAGS:-} $2" \
    ${CARGO:-cargo} build --profile dist --locked --bin tidegate --target "$target" >&2
}

# Only the LLVM version that wrote a raw profile can read it.
find_profdata() {
  local llvm tool
  llvm=$(rustc -vV | sed -n 's/^LLVM version: \([0-9]*\).*/\1/p')
  for tool in "$(rustc --print target-libdir)/../bin/llvm-profdata" "llvm-profdata-$llvm" llvm-profdata; do
    if [[ $("$tool" --version 2>/dev/null) == *"LLVM version $llvm."* ]]; then echo "$tool"; return; fi
  done
  echo "llvm-profdata $llvm is missing (rustup component add llvm-tools, or llvm-$llvm of apt.llvm.org)" >&2
  return 1
}

# Writes a profile and prints its path. A second run without changes finds the profile of the first.
train() {
  local profdata key raw tool
  profdata=$(find_profdata) || return
  for tool in python3 redis-server; do
    command -v "$tool" >/dev/null || { echo "$tool is missing (on Debian: apt-get install $tool)" >&2; return 1; }
  done
  [ "${target%%-*}" = "$(uname -m)" ] || { echo "this machine cannot run programs for $target" >&2; return 1; }
  build "$built/instrumented" -Cprofile-generate || return
  key=$(cat "$built/instrumented/$target/dist/tidegate" packaging/train.py | sha256sum | cut -c1-16) || return
  if [ ! -f "$profiles/trained-$key" ]; then
    mkdir -p "$profiles" && raw=$(mktemp -d -p "$profiles") || return
    LLVM_PROFILE_FILE="$raw/%p.profraw" packaging/train.py "$built/instrumented/$target/dist/tidegate" >&2 &&
      "$profdata" merge -o "$raw/merged" "$raw"/*.profraw &&
      mv "$raw/merged" "$profiles/trained-$key"
    rm -rf "$raw"
  fi
  [ -f "$profiles/trained-$key" ] && echo "$profiles/trained-$key"
}

profile=${PROFILE:-}
if [ "$profile" = none ]; then
  profile=
elif [ -z "$profile" ] && ! profile=$(train); then
  echo "build: NO PROFILE, for the reason above; the binary takes some 10 % more CPU per request" >&2
  profile=
fi
if [ -z "$profile" ]; then
  build "$built" ""
  rm -f "$built/dist/tidegate.profdata"
else
  # Cargo does not notice another content, but another name.
  named=$profiles/$(sha256sum <"$profile" | cut -c1-16).profdata
  [ -f "$named" ] || install -D -m 644 "$profile" "$named"
  build "$built" "-Cprofile-use=$named"
  install -D -m 644 "$named" "$built/dist/tidegate.profdata"
fi
