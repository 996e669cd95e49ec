#!/usr/bin/env python3
"""Two real vLLM engines behind a real Envoy: what picks believe of caches is held against what the engines report.

Passes, each with engines of its own: `precise` (the picker follows the engines' events) and `approximate` (the engines
publish none). Exit 1 if a bound is missed. Usage: run.py [precise|approximate ...]
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from quickstart import Processes, free_port, get, until, with_ports  # noqa: E402

BLOCK, BLOCKS = 32, 160
CONVERSATIONS, TURNS, AT_ONCE = 40, 5, 4
BOUNDS = {"precise": 0.99, "approximate": 0.95}
WORDS = (HERE / "words.txt").read_text().split()


def words(rng, n):
    return " ".join(rng.choice(WORDS) for _ in range(n))


def resources(ports):
    engines = "".join(
        f"---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\n"
        f"metadata: {{name: engine-{at}, labels: {{app: tiny}}}}\nspec: {{address: '127.0.0.1:{port}'}}\n"
        for at, port in enumerate(ports)
    )
    return (
        "apiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelServer\n"
        "metadata: {name: tiny, annotations: {pilotfish.dev/tokenizer: model}}\n"
        "spec: {workloadSelector: {matchLabels: {app: tiny}}, workloadPort: {port: 8000}, inferenceEngine: vLLM}\n"
        + engines
    )


class Stand:
    """Engines, picker and Envoy, and what was sent through them."""

    def __init__(self, kind, work, processes):
        self.kind = kind
        self.sent = 0
        home = subprocess.run([HERE / "engine.sh", "home"], check=True, capture_output=True, text=True).stdout.strip()
        ports = [free_port(), free_port()]
        for at, port in enumerate(ports):
            events = [str(free_port()), str(free_port())] if kind == "precise" else []
            command = [HERE / "engine.sh", "serve", str(port), str(at), str(BLOCKS), *events]
            processes.start(f"engine-{at}", command)
        folder = work / "resources"
        folder.mkdir()
        (folder / "all.yaml").write_text(resources(ports))
        binary = os.environ.get("PILOTFISH_BIN") or build()
        picker = processes.start(
            "pilotfish",
            [binary, "serve", "--resources", folder, "--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0",
             "--tokenizer-dir", home],
            wait_for_line=True,
        )
        self.admin = f"http://{picker['admin']}"
        envoy = subprocess.run([ROOT / "scripts/envoy.sh"], check=True, capture_output=True, text=True).stdout.strip()
        mapped = {10000: free_port(), 9901: free_port(), 9002: int(picker["grpc"].rsplit(":", 1)[1])}
        mapped |= {8001: ports[0], 8002: ports[1], 8003: ports[1]}
        config = work / "envoy.yaml"
        config.write_text(with_ports((ROOT / "envoy/gateway-shaped.yaml").read_text(), mapped))
        processes.start("envoy", [envoy, "-c", config, "--log-level", "error", "--use-dynamic-base-id", "--concurrency", "1"])
        self.gateway = f"http://127.0.0.1:{mapped[10000]}"
        until("the engines", lambda: all(e["state"] == "up" for e in self.endpoints()), 300)
        until("Envoy", lambda: get(f"{self.gateway}/v1/models"))
        if kind == "precise":
            # The first request of each engine makes its events flow.
            until("the events", lambda: all(e["rung"] == "precise" for e in self.endpoints()), 60)

    def endpoints(self):
        return get(f"{self.admin}/debug/endpoints")["endpoints"]

    def ask(self, messages, **more):
        """One answer, and what was predicted and reported of its prompt."""
        self.sent += 1
        request_id = f"vllm-{self.kind}-{self.sent}-{random.getrandbits(32):08x}"
        body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "messages": messages} | more
        answer = get(f"{self.gateway}/v1/chat/completions", body, request_id)
        found = []

        def settled():
            found[:] = get(f"{self.admin}/debug/decisions?request_id={request_id}")["decisions"]
            return found

        until("the record", settled)
        record = found[0]
        reported = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return answer["choices"][0]["message"]["content"] or "", {
            "endpoint": record["legs"][0]["served"],
            "rung": record["rung"],
            "counted": record["prompt_tokens"],
            "prompt": answer["usage"]["prompt_tokens"],
            "predicted": record["predicted_cached_tokens"],
            "reported": reported,
        }


def build():
    subprocess.run(["cargo", "build", "--locked", "--quiet", "--bin", "pilotfish"], cwd=ROOT, check=True)
    target = os.environ.get("CARGO_TARGET_DIR", str(ROOT / "target"))
    return str(pathlib.Path(target) / "debug" / "pilotfish")


def conversation(stand, number):
    """A conversation whose turns follow each other; every fourth shares the beginning of its group."""
    rng = random.Random(number)
    group = random.Random(10_000 + number // 4)
    messages = [{"role": "system", "content": words(group if number % 4 < 2 else rng, 150)}]
    rows = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": words(rng, 180)})
        text, row = stand.ask(messages)
        messages.append({"role": "assistant", "content": text})
        rows.append(row)
    return rows


def namespaces(stand):
    """One text under adapters and cache salts: nothing is shared between them, each finds its own."""
    messages = [{"role": "user", "content": words(random.Random(77), 300)}]
    spaces = [{}, {"model": "lora1"}, {"model": "lora2"}, {"cache_salt": "a"}, {"cache_salt": "b"},
              {"model": "lora1", "cache_salt": "a"}]
    wrong = []
    for space in spaces:
        _, first = stand.ask(messages, **space)
        _, second = stand.ask(messages, **space)
        if first["predicted"] or first["reported"] or second["predicted"] != second["reported"] or not second["reported"]:
            wrong.append((space, first, second))
    return wrong


def run(kind):
    work = pathlib.Path(tempfile.mkdtemp(prefix=f"pilotfish-vllm-{kind}-"))
    processes = Processes(work)
    passed = False
    try:
        stand = Stand(kind, work, processes)
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            rows = [row for rows in pool.map(lambda n: conversation(stand, n), range(CONVERSATIONS)) for row in rows]
        took = time.monotonic() - began
        served = collections.Counter(row["endpoint"] for row in rows)
        equal = [row for row in rows if row["predicted"] == row["reported"]]
        wrong = namespaces(stand)
        metrics = get_text(f"{stand.admin}/metrics")
        removed = sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines()
                      if line.startswith("pilotfish_kv_events_total{") and 'kind="removed"' in line)
        prompt = sum(row["prompt"] for row in rows)
        summary = {
            "pass": kind,
            "requests": len(rows),
            "equal": round(len(equal) / len(rows), 4),
            "cached_share": round(sum(row["reported"] for row in rows) / prompt, 3),
            "prompt_tokens_right": sum(row["counted"] == row["prompt"] for row in rows),
            "served": dict(served),
            "rungs": dict(collections.Counter(row["rung"] for row in rows)),
            "blocks_removed": int(removed),
            "namespaces_wrong": wrong,
            "seconds": round(took, 1),
            "truth": {e["endpoint"]: e["truth"] for e in stand.endpoints()},
        }
        print(json.dumps(summary, indent=1))
        for row in rows:
            if row["predicted"] != row["reported"]:
                print("differs:", json.dumps(row))
        passed = (
            summary["equal"] >= BOUNDS[kind]
            and summary["cached_share"] >= 0.5
            and len(served) == 2 and min(served.values()) >= 0.3 * len(rows)
            and (kind != "precise" or removed >= 1000)
            and not wrong
        )
        print(f"{kind}: {'passed' if passed else 'FAILED'}", flush=True)
    finally:
        processes.stop()
        if passed:
            shutil.rmtree(work, ignore_errors=True)
        else:
            print(f"logs are in {work}", file=sys.stderr)
    return passed


def get_text(url):
    import urllib.request

    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def main():
    subprocess.run([HERE / "engine.sh", "install"], check=True)
    kinds = sys.argv[1:] or list(BOUNDS)
    sys.exit(0 if all([run(kind) for kind in kinds]) else 1)


if __name__ == "__main__":
    main()
