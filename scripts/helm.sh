#!/usr/bin/env bash
# Builds Helm (pinned in tests/kube/helm/go.mod) into the cache and prints its path.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
exec "$root/scripts/go-build.sh" helm "$root/tests/kube/helm" helm.sh/helm/v4/cmd/helm
