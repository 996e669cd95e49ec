#!/usr/bin/env bash
# Takes the definitions of the Gateway API Inference Extension (pinned) from its Go module into the cache and prints their folder.
set -euo pipefail
module=sigs.k8s.io/gateway-api-inference-extension
version=v1.5.0
sum=h1:w9Awt60cmI1vM7Y6N81h8wDCBP0WkmxpdI7GKY0v070=
scripts="$(cd "$(dirname "$0")" && pwd)"
cache="${PILOTFISH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pilotfish}"
folder="$cache/gie-crds-$version"

if [ ! -d "$folder" ]; then
  mkdir -p "$cache"
  # A lock, so that two runs at once do not install into each other; what a killed run left behind is removed by the next.
  exec 9>"$cache/gie.lock"
  flock 9
  if [ ! -d "$folder" ]; then
    echo "taking the definitions of $module $version into $folder" >&2
    work="$cache/gie-download"
    rm -rf "$work"
    mkdir "$work"
    trap 'rm -rf "$work"' EXIT
    go="$("$scripts/go.sh" "$work")"
    # The sum stands above, so no database of sums is asked.
    cd "$work"
    env GOMODCACHE="$work/modules" GOPATH="$work/go" GOTOOLCHAIN=local GOSUMDB=off GOFLAGS=-modcacherw GOWORK=off \
      "$go" mod download -json "$module@$version" >download.json
    read -r found dir < <(python3 -c 'import json; got = json.load(open("download.json")); print(got["Sum"], got["Dir"])')
    [ "$found" = "$sum" ] || { echo "$module $version has the sum $found, not $sum" >&2; exit 1; }
    mkdir fresh
    cp "$dir"/config/crd/bases/*.yaml fresh/
    mv fresh "$folder"
  fi
fi
echo "$folder"
