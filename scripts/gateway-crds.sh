#!/usr/bin/env bash
# Takes the definitions of the Gateway API, Istio and Envoy Gateway (pinned) into the cache and prints their folders, a line each.
set -euo pipefail
take() { "$(dirname "$0")/go-module.sh" "$@"; }
take gateway-api sigs.k8s.io/gateway-api v1.5.1 h1:RqVRIlkhLhUO8wOHKTLnTJA6o/1un4po4/6M1nRzdd0= 'config/crd/standard/gateway.networking.k8s.io_*.yaml'
take istio-api istio.io/api v1.32.0 h1:37mJvg9I0biYZAEQF+MATs4FNeCpXEIVO3LFpVb6iNM= 'kubernetes/customresourcedefinitions.gen.yaml'
take envoy-gateway github.com/envoyproxy/gateway v1.8.3 h1:RY8DKli7Z1w3WuMwbA8J5j2sriIxXTWjVv1Bk77nbHo= 'charts/gateway-crds-helm/templates/generated/*.yaml'
