#!/usr/bin/env bash
# What kustomize makes of k8s/: its objects against Kubernetes' schemas and rules, alerts against series, and the pod of
# the demo as processes, from start to end.
#
#   tests/k8s.sh [PATH OF tidegate]
#
# Schemas come from PyPI, into a folder beside the build. Where that, kustomize or namespaces are missing, it says so and
# ends with K8S_MISSING (1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=$(realpath "${CARGO_TARGET_DIR:-target}")
TIDEGATE=$(realpath "${1:-$target/debug/tidegate}")
export TIDEGATE PYTHONDONTWRITEBYTECODE=1
version=1.37.0
tools=$target/tools/kubernetes-validate-$version

missing() {
  echo "the manifests were not checked: $1" >&2
  exit "${K8S_MISSING:-1}"
}

# Components came with kubectl 1.21.
render() { if command -v kustomize >/dev/null; then kustomize build "$1"; else kubectl kustomize "$1"; fi; }
render k8s/overlays/demo >/dev/null 2>&1 || render k8s/base || missing "kustomize, or kubectl 1.21 or newer, is needed"

if [ ! -e "$tools/complete" ]; then
  { python3 -m venv --clear "$tools" &&
    "$tools/bin/pip" install --quiet --disable-pip-version-check "kubernetes-validate==$version"; } ||
    missing "kubernetes-validate can't be installed from PyPI"
  touch "$tools/complete"
fi

# Side by side: the one computes, the other mostly waits.
"$tools/bin/python" -m unittest discover -s tests/k8s -p test_manifests.py &
manifests=$!
pod=0
if unshare --net --mount --pid --fork true 2>/dev/null || sudo -n true 2>/dev/null; then
  "$tools/bin/python" tests/k8s/test_pod.py || pod=$?
else
  echo "the pod was not run: that needs root, and namespaces" >&2
  pod=${K8S_MISSING:-1}
fi
wait "$manifests"
exit "$pod"
