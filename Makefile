# Build outputs and installed parts live outside the tree, so that a checkout stays clean and CI starts warm.
export PILOTFISH_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/pilotfish
export CARGO_TARGET_DIR ?= $(PILOTFISH_CACHE)/target

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

.PHONY: quickstart
quickstart: ## Three simulated engines, Pilotfish and Envoy on free ports; ONCE=1 stops after the table
	@python3 scripts/quickstart.py

.PHONY: test
test: ## All tests, those with a real Envoy, Redis, API server and Helm included; the first run builds that for some minutes
	PILOTFISH_ENVOY="$$(scripts/envoy.sh)" PILOTFISH_REDIS_SERVER="$$(scripts/redis.sh)" \
		PILOTFISH_KUBE="$$(scripts/kube.sh)" PILOTFISH_HELM="$$(scripts/helm.sh)" \
		PILOTFISH_GIE_CRDS="$$(scripts/gie-crds.sh)" PILOTFISH_GATEWAY_CRDS="$$(scripts/gateway-crds.sh)" \
		cargo test --locked

.PHONY: test-vllm
test-vllm: ## Real vLLM engines on the CPU: predictions, and prefill and decode apart; 7 GB on disk, some minutes the first time
	cargo build --locked --quiet --profile quick-release --bin pilotfish
	PILOTFISH_BIN="$(CARGO_TARGET_DIR)/quick-release/pilotfish" python3 tests/vllm/run.py

.PHONY: lint
lint: ## Formatting and clippy, warnings are errors
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings

.PHONY: bench
bench: ## The picker beside an ext_proc server that does nothing, the cost of scraping, of turns and of limits; some minutes
	@python3 scripts/bench.py
	@python3 scripts/bench_scrape.py
	cargo bench --locked --quiet --bench admission --bench limits

.PHONY: bench-policies
bench-policies: ## Scheduling policies side by side: times and cache hits behind a real Envoy; 8 minutes
	@python3 scripts/bench_policies.py

.PHONY: bench-kube
bench-kube: ## A picker of 1,000 pods, 10 pools and 200 routes on a real API server: start, memory, CPU; a minute without it; 4 minutes
	cargo build --locked --quiet --profile quick-release --bin pilotfish
	PILOTFISH_BIN="$(CARGO_TARGET_DIR)/quick-release/pilotfish" PILOTFISH_KUBE="$$(scripts/kube.sh)" \
		cargo test --locked --quiet --test main kube:: -- --ignored --nocapture --test-threads=1

.PHONY: bench-queue
bench-queue: ## 10,000 requests that wait: CPU and memory, engines that freeze, a pool that loses its endpoints; 1 minute
	cargo build --locked --quiet --profile quick-release --bin pilotfish
	PILOTFISH_BIN="$(CARGO_TARGET_DIR)/quick-release/pilotfish" \
		cargo test --locked --quiet --test main serving::queues -- --ignored --nocapture

.PHONY: bench-pairs
bench-pairs: ## What a prefill leg adds to the engine's own time, through Envoy
	PILOTFISH_ENVOY="$$(scripts/envoy.sh)" cargo test --locked --quiet --test main serving::pairs -- --ignored --nocapture

.PHONY: microbench
microbench: ## Micro-benchmarks of single parts
	cargo bench --locked

.PHONY: generate
generate: ## Rewrite the generated documentation and definitions
	cargo run --locked --quiet --example generate
