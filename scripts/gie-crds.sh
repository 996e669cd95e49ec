#!/usr/bin/env bash
# Takes the definitions of the Gateway API Inference Extension (pinned) from its Go module into the cache and prints their folder.
set -euo pipefail
exec "$(dirname "$0")/go-module.sh" gie-crds sigs.k8s.io/gateway-api-inference-extension v1.5.0 \
  h1:w9Awt60cmI1vM7Y6N81h8wDCBP0WkmxpdI7GKY0v070= 'config/crd/bases/*.yaml'
