#!/usr/bin/env bash
# Takes files of a pinned Go module into the cache and prints their folder: go-module.sh NAME MODULE VERSION SUM PATTERN.
set -euo pipefail
name="$1" module="$2" version="$3" sum="$4" pattern="$5"
scripts="$(cd "$(dirname "$0")" && pwd)"
cache="${PILOTFISH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pilotfish}"
folder="$cache/$name-$version"

if [ ! -d "$folder" ]; then
  mkdir -p "$cache"
  # A lock, so that two runs at once do not install into each other; what a killed run left behind is removed by the next.
  exec 9>"$cache/$name.lock"
  flock 9
  if [ ! -d "$folder" ]; then
    echo "taking files of $module $version into $folder" >&2
    work="$cache/$name-download"
    rm -rf "$work"
    mkdir "$work"
    trap 'rm -rf "$work"' EXIT
    go="$("$scripts/go.sh" "$work")"
    # The sum is the caller's, so no database of sums is asked.
    cd "$work"
    env GOMODCACHE="$work/modules" GOPATH="$work/go" GOTOOLCHAIN=local GOSUMDB=off GOFLAGS=-modcacherw GOWORK=off \
      "$go" mod download -json "$module@$version" >download.json
    read -r found dir < <(python3 -c 'import json; got = json.load(open("download.json")); print(got["Sum"], got["Dir"])')
    [ "$found" = "$sum" ] || { echo "$module $version has the sum $found, not $sum" >&2; exit 1; }
    mkdir fresh
    # shellcheck disable=SC2086 # a pattern
    (cd "$dir" && cp $pattern "$work/fresh/")
    mv fresh "$folder"
  fi
fi
echo "$folder"
