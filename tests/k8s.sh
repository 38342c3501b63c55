#!/usr/bin/env bash
# Tests the output of kustomize for k8s/: the objects against Kubernetes schemas and rules, the alerts against series,
# and the demo pod as local processes from start to shutdown.
#
#   tests/k8s.sh [PATH OF tidegate]
#
# Installs the schemas from PyPI into the target directory. If they, kustomize or namespaces are missing, prints a
# message and exits with K8S_MISSING (default 1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=$(realpath "${CARGO_TARGET_DIR:-target}")
TIDEGATE=$(realpath "${1:-$target/debug/tidegate}")
export TIDEGATE PYTHONDONTWRITEBYTECODE=1
version=1.37.0
tools=$target/tools/kubernetes-validate-$version

missing() {
  echo "manifests not tested: $1" >&2
  exit "${K8S_MISSING:-1}"
}

# kubectl supports components since 1.21.
render() { if command -v kustomize >/dev/null; then kustomize build "$1"; else kubectl kustomize "$1"; fi; }
render k8s/overlays/demo >/dev/null 2>&1 || render k8s/base || missing "kustomize, or kubectl 1.21 or newer, is needed"

if [ ! -e "$tools/complete" ]; then
  { python3 -m venv --clear "$tools" &&
    "$tools/bin/pip" install --quiet --disable-pip-version-check "kubernetes-validate==$version"; } ||
    missing "cannot install kubernetes-validate from PyPI"
  touch "$tools/complete"
fi

# Both run in parallel: the manifest tests use the CPU, the pod test mostly waits.
"$tools/bin/python" -m unittest discover -s tests/k8s -p test_manifests.py &
manifests=$!
pod=0
if unshare --net --mount --pid --fork true 2>/dev/null || sudo -n true 2>/dev/null; then
  "$tools/bin/python" tests/k8s/test_pod.py || pod=$?
else
  echo "pod not tested: root and namespaces are required" >&2
  pod=${K8S_MISSING:-1}
fi
wait "$manifests"
exit "$pod"
