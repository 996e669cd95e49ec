#!/usr/bin/env bash
# Builds etcd and kube-apiserver (one binary, pinned in tests/kube/server/go.mod) into the cache and prints its path.
set -euo pipefail
scripts="$(cd "$(dirname "$0")" && pwd)"
source="$(cd "$scripts/../tests/kube/server" && pwd)"
cache="${PILOTFISH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pilotfish}"
hash="$(cat "$source/go.mod" "$source/go.sum" "$source/main.go" | sha256sum | cut -c1-16)"
binary="$cache/kube-server-$hash"

if [ ! -x "$binary" ]; then
  mkdir -p "$cache"
  # A lock, so that two runs at once do not build twice; what a killed build left behind is removed by the next.
  exec 9>"$cache/kube.lock"
  flock 9
  if [ ! -x "$binary" ]; then
    echo "building etcd and kube-apiserver into $binary: some minutes" >&2
    work="$cache/kube-build"
    rm -rf "$work"
    mkdir "$work"
    trap 'rm -rf "$work"' EXIT
    go="$("$scripts/go.sh" "$work")"
    version="$(sed -n 's|^\tk8s.io/kubernetes v||p' "$source/go.mod")"
    package=k8s.io/component-base/version
    flags="-s -w -X $package.gitVersion=v$version"
    flags+=" -X $package.gitMajor=$(cut -d. -f1 <<<"$version") -X $package.gitMinor=$(cut -d. -f2 <<<"$version")"
    # Caches of its own, 3.4 GB, which go when the binary is there.
    cd "$source"
    env GOCACHE="$work/go-build" GOMODCACHE="$work/modules" GOTMPDIR="$work" GOPATH="$work/go" \
      GOTOOLCHAIN=local CGO_ENABLED=0 GOWORK=off GOFLAGS="-mod=readonly -modcacherw -buildvcs=false" \
      "$go" build -trimpath -ldflags "$flags" -o "$work/kube-server" . >&2
    mv "$work/kube-server" "$binary"
  fi
fi
echo "$binary"
