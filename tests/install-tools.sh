#!/usr/bin/env bash
# Installs the Debian packages that tests need and that are missing, with one apt-get line, as root or with sudo.
# If that is not possible, it prints the line and fails. BROWSER=skip leaves out the tools of the dashboard's tests.
set -euo pipefail

export PATH="$PATH:/usr/sbin:/sbin"

# command=Debian package
tools=(
  make=make
  cc=build-essential
  c++=build-essential
  git=git
  curl=curl
  redis-server=redis-server
  redis-benchmark=redis-tools
  nginx=nginx
  prometheus=prometheus
  promtool=prometheus
  ip=iproute2
  openssl=openssl
  wrk=wrk
  nc=netcat-openbsd
  python3=python3-venv
)
browser_tools=(
  chromium=chromium
  node=nodejs
  npm=npm
)
[ "${BROWSER:-}" = skip ] || tools+=("${browser_tools[@]}")

packages=()
for tool in "${tools[@]}"; do
  package="${tool#*=}"
  command -v "${tool%%=*}" >/dev/null || [[ " ${packages[*]} " == *" $package "* ]] || packages+=("$package")
done
[ ${#packages[@]} -gt 0 ] || exit 0

line="apt-get install -y --no-install-recommends ${packages[*]}"
sudo=
if [ "$(id -u)" -ne 0 ]; then sudo=sudo; fi
# Without a terminal nobody can type a password.
if [ -n "$sudo" ] && [ ! -t 0 ]; then sudo="sudo -n"; fi

fail() {
  echo "$1; these Debian packages are missing. As root:" >&2
  echo "  $line" >&2
  exit 1
}

command -v apt-get >/dev/null || fail "apt-get is not available"
[ -z "$sudo" ] || command -v sudo >/dev/null || fail "sudo is not available"

# The tests start their own servers, so the packages must not start Debian's services during installation.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' | $sudo tee "$policy" >/dev/null || fail "sudo failed"
  $sudo chmod +x "$policy"
  trap '$sudo rm -f "$policy"' EXIT
fi
echo "+ $line"
$sudo apt-get update -q && $sudo env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 $line || fail "apt-get failed"
