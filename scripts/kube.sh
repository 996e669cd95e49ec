#!/usr/bin/env bash
# Builds etcd and kube-apiserver (one binary, pinned in tests/kube/server/go.mod) into the cache and prints its path.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
source="$root/tests/kube/server"
version="$(sed -n 's|^\tk8s.io/kubernetes v||p' "$source/go.mod")"
package=k8s.io/component-base/version
flags="-X $package.gitVersion=v$version"
flags+=" -X $package.gitMajor=$(cut -d. -f1 <<<"$version") -X $package.gitMinor=$(cut -d. -f2 <<<"$version")"
exec "$root/scripts/go-build.sh" kube-server "$source" . "$flags"
