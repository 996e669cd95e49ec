#!/usr/bin/env bash
# Builds a package of a pinned Go module into the cache and prints the binary's path: go-build.sh NAME MODULE_DIR PACKAGE [LDFLAGS].
set -euo pipefail
scripts="$(cd "$(dirname "$0")" && pwd)"
name="$1" source="$2" package="$3" flags="-s -w ${4:-}"
cache="${PILOTFISH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pilotfish}"
hash="$(find "$source" -name 'go.*' -o -name '*.go' | LC_ALL=C sort | xargs cat | sha256sum | cut -c1-16)"
binary="$cache/$name-$hash"

if [ ! -x "$binary" ]; then
  mkdir -p "$cache"
  # A lock, so that two runs at once do not build twice; what a killed build left behind is removed by the next.
  exec 9>"$cache/$name.lock"
  flock 9
  if [ ! -x "$binary" ]; then
    echo "building $package into $binary: some minutes" >&2
    work="$cache/$name-build"
    rm -rf "$work"
    mkdir "$work"
    trap 'rm -rf "$work"' EXIT
    go="$("$scripts/go.sh" "$work")"
    # Caches of its own, some GB, which go when the binary is there.
    cd "$source"
    env GOCACHE="$work/go-build" GOMODCACHE="$work/modules" GOTMPDIR="$work" GOPATH="$work/go" \
      GOTOOLCHAIN=local CGO_ENABLED=0 GOWORK=off GOFLAGS="-mod=readonly -modcacherw -buildvcs=false" \
      "$go" build -trimpath -ldflags "$flags" -o "$work/$name" "$package" >&2
    mv "$work/$name" "$binary"
  fi
fi
echo "$binary"
