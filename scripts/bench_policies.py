#!/usr/bin/env python3
"""How scheduling policies compare in time and cache hits: six simulated engines, two of them half as fast, behind a real Envoy.

The load is open: Poisson arrivals at a share of what the stand can carry, streamed answers, prompts whose long beginnings are
shared with Zipf's skew. Every policy takes its turn on the same arrivals with cold caches and a fresh picker that must learn
who is slow; the first part of each turn is not counted. Rounds differ in their arrivals, and every other one goes through the
policies backwards, so that the spread between rounds is the noise. Loopback only, some minutes. PILOTFISH_BIN
names a binary to use in place of one that is built.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import quickstart as kit

ROOT = kit.ROOT
SPEEDS = {"engine-1": 1.0, "engine-2": 1.0, "engine-3": 1.0, "engine-4": 1.0, "engine-5": 0.5, "engine-6": 0.5}
BLOCK, BLOCKS, MOST_RUNNING = 16, 2500, 16
GROUPS, SKEW = 40, 1.0
PREFIX_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = (2_000, 6_000), (10, 60), (20, 80)
# The simulated engine's step at speed 1: 10 ms, 50 us a sequence, 100 us a prompt token (src/engine/scheduler.rs).
STEP, SEQUENCE, PREFILL_TOKEN = 10e-3, 50e-6, 100e-6
BYTES_OF_A_TOKEN = 4  # Without a tokenizer four bytes are a token to the engine.

POLICIES = {
    "default": None,
    "default without queues": "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\nfeatureGates: [flowControl=false]\n",
    "random": [("random", 1)],
    "least-request": [("least-request", 1)],
    "prefix-cache + least-request": [("prefix-cache", 1), ("least-request", 1)],
    "bounded-load-hash": [("bounded-load-hash", 1)],
    "queue + kv + prefix 2:2:3": [("queue-scorer", 2), ("kv-cache-utilization-scorer", 2), ("prefix-cache-scorer", 3)],
}


def config_of(parts):
    if isinstance(parts, str):
        return parts
    lines = ["apiVersion: pilotfish.dev/v1alpha1", "kind: EndpointPickerConfig", "plugins:"]
    lines += [f"- type: {name}" for name, _ in parts]
    lines += ["schedulingProfiles:", "- name: default", "  plugins:"]
    lines += [f"  - {{pluginRef: {name}, weight: {weight}}}" for name, weight in parts]
    return "\n".join(lines) + "\n"


class Prompts:
    """Groups of requests that begin alike; the first is the most popular."""

    def __init__(self, seed):
        dice = random.Random(seed)
        self.lengths = [dice.randint(*PREFIX_TOKENS) for _ in range(GROUPS)]
        self.texts = [self.text(dice, length) for length in self.lengths]
        weights = [1 / (rank + 1) ** SKEW for rank in range(GROUPS)]
        self.shares = [weight / sum(weights) for weight in weights]

    @staticmethod
    def text(dice, tokens):
        return "".join(dice.choices("abcdefghijklmnopqrstuvwxyz ", k=tokens * BYTES_OF_A_TOKEN))

    def capacity(self):
        """Requests a second that the engines carry when all batches are full and each cache holds the most popular
        prefixes that fit it: what a blind policy reaches at best. Following the caches carries more."""
        room = BLOCKS * BLOCK
        uncached = sum(QUESTION_TOKENS) / 2
        for length, share in zip(self.lengths, self.shares):
            room -= length
            uncached += share * length if room < 0 else 0
        request = uncached * PREFILL_TOKEN + sum(OUTPUT_TOKENS) / 2 * (STEP / MOST_RUNNING + SEQUENCE)
        return sum(SPEEDS.values()) / request

    def arrivals(self, seed, rate, seconds):
        """(second, group, question, output tokens) of each request."""
        dice, at, found = random.Random(seed), 0.0, []
        while (at := at + dice.expovariate(rate)) < seconds:
            [group] = dice.choices(range(GROUPS), self.shares)
            found.append((at, group, self.text(dice, dice.randint(*QUESTION_TOKENS)), dice.randint(*OUTPUT_TOKENS)))
        return found


class Failed(Exception):
    pass


async def ask(port, body):
    """Sends one streamed request on its own connection: seconds to the first token and to the end, usage, engine."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
                     b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if " 200 " not in head.split("\r\n")[0]:
            reason = [line for line in head.split("\r\n") if line.startswith("x-pilotfish-reason")]
            raise Failed(head.split("\r\n")[0], *reason, (await reader.read(300)).decode(errors="replace"))
        engine = next(line.split(": ")[1] for line in head.split("\r\n") if line.startswith("x-engine-name: "))
        first, text = None, b""
        while size := int(await reader.readline() or b"0", 16):
            text += (await reader.readexactly(size + 2))[:-2]
            if first is None and b'"content":"' in text.replace(b'"content":""', b""):
                first = time.perf_counter() - began
        if first is None or b"data: [DONE]" not in text:
            raise Failed("the stream broke off")
        last = time.perf_counter() - began
        events = [line[6:] for line in text.split(b"\n") if line.startswith(b"data: {")]
        usage = json.loads(events[-1])["usage"]
        return first, last, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], engine
    finally:
        writer.close()


async def play(port, prompts, arrivals):
    """All requests at their times; each one's result or failure, and by how much the latest was sent late."""
    start, latest = time.perf_counter() + 0.1, 0.0

    async def one(at, group, question, output):
        nonlocal latest
        messages = [{"role": "system", "content": prompts.texts[group]}, {"role": "user", "content": question}]
        body = {"model": "tiny", "max_tokens": output, "stream": True, "stream_options": {"include_usage": True}, "messages": messages}
        body = json.dumps(body).encode()
        await asyncio.sleep(start + at - time.perf_counter())
        latest = max(latest, time.perf_counter() - start - at)
        try:
            async with asyncio.timeout(120):
                return await ask(port, body)
        except (OSError, EOFError, ValueError, TimeoutError, Failed) as error:
            return error

    return await asyncio.gather(*(one(*arrival) for arrival in arrivals)), latest


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


class Stand:
    """Engines and resources that outlive the turns."""

    def __init__(self, binary, envoy, work):
        self.binary, self.envoy, self.work = binary, envoy, work
        self.processes = kit.Processes(work)
        self.engines = {}

    def start(self):
        resources = "apiVersion: inference.networking.k8s.io/v1\nkind: InferencePool\nmetadata: {name: tiny}\n"
        resources += "spec: {selector: {matchLabels: {app: tiny}}}\n"
        for name, speed in SPEEDS.items():
            command = [self.binary, "engine", "--port", "0", "--name", name, "--speed", str(speed), "--blocks", str(BLOCKS)]
            command += ["--block-size", str(BLOCK), "--max-running", str(MOST_RUNNING)]
            address = self.processes.start(name, command, wait_for_line=True)["engine"]
            self.engines[name] = address
            resources += "---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\n"
            resources += f"metadata: {{name: {name}, labels: {{app: tiny}}}}\nspec: {{address: '{address}'}}\n"
        folder = self.work / "resources"
        folder.mkdir()
        (folder / "resources.yaml").write_text(resources)

    def turn(self, policy, prompts, arrivals, warm_up):
        """One policy over the arrivals, from cold caches, with a picker and an Envoy of its own."""
        for address in self.engines.values():
            kit.get(f"http://{address}/reset_prefix_cache", {})
        processes = kit.Processes(self.work)
        try:
            serve = [self.binary, "serve", "--resources", self.work / "resources", "--grpc-port", "0", "--grpc-health-port", "0"]
            serve += ["--metrics-port", "0", "--log-level", "info,pilotfish::access=off"]
            if POLICIES[policy]:
                config = self.work / "config.yaml"
                config.write_text(config_of(POLICIES[policy]))
                serve += ["--config", config]
            picker = processes.start("pilotfish", serve, wait_for_line=True)
            addresses = list(self.engines.values())[:3]
            ports = {8001 + at: int(address.rsplit(":", 1)[1]) for at, address in enumerate(addresses)}
            ports |= {10000: kit.free_port(), 9901: kit.free_port(), 9002: int(picker["grpc"].rsplit(":", 1)[1])}
            config = self.work / "envoy.yaml"
            config.write_text(kit.with_ports((ROOT / "envoy/static-fail-open.yaml").read_text(), ports))
            processes.start("envoy", [self.envoy, "-c", config, "--log-level", "error", "--concurrency", "1", "--use-dynamic-base-id"])
            gateway, admin = f"http://127.0.0.1:{ports[10000]}", f"http://{picker['admin']}"
            kit.until("Envoy", lambda: kit.get(f"{gateway}/v1/models"))
            endpoints = lambda: kit.get(f"{admin}/debug/endpoints")["endpoints"]
            kit.until("the engines' metrics", lambda: all(endpoint["state"] == "up" for endpoint in endpoints()))
            used = resource.getrusage(resource.RUSAGE_SELF)
            began, cpu = time.perf_counter(), used.ru_utime + used.ru_stime
            results, late = asyncio.run(play(ports[10000], prompts, arrivals))
            used = resource.getrusage(resource.RUSAGE_SELF)
            row = self.row(policy, [result for (at, *_), result in zip(arrivals, results) if at >= warm_up])
            row["generator_cpu"] = (used.ru_utime + used.ru_stime - cpu) / (time.perf_counter() - began)
            row["latest_send_ms"] = late * 1e3
            row["failed_warming"] = sum(isinstance(result, Exception) for result in results) - row["failed"]
            names = {address: name for name, address in self.engines.items()}
            row["rates"] = {names[endpoint["endpoint"]]: endpoint["rates"] for endpoint in endpoints()}
            row["decisions"] = kit.get(f"{admin}/debug/decisions?limit=200")["decisions"]
            return row
        finally:
            processes.stop()

    @staticmethod
    def row(policy, results):
        served = [result for result in results if not isinstance(result, Exception)]
        first, last = [result[0] for result in served], [result[1] for result in served]
        by_engine = {name: sum(result[4] == name for result in served) for name in SPEEDS}
        return {
            "policy": policy,
            "requests": len(results),
            "failed": len(results) - len(served),
            "failures": sorted({repr(result) for result in results if isinstance(result, Exception)}),
            "mean_s": sum(last) / len(last),
            "p99_s": percentile(last, 0.99),
            "first_mean_s": sum(first) / len(first),
            "first_p99_s": percentile(first, 0.99),
            "cached": sum(result[3] for result in served) / sum(result[2] for result in served),
            "slow_share": sum(by_engine[name] for name, speed in SPEEDS.items() if speed < 1) / len(served),
            "by_engine": by_engine,
        }


HEAD = f"{'policy':<30} {'mean s':>8} {'p99 s':>8} {'TTFT s':>8} {'p99 s':>8} {'cached':>7} {'slow':>6} {'failed':>6}"


def line(row):
    return (f"{row['policy']:<30} {row['mean_s']:>8.3f} {row['p99_s']:>8.3f} {row['first_mean_s']:>8.3f} {row['first_p99_s']:>8.3f}"
            f" {row['cached']:>7.1%} {row['slow_share']:>6.1%} {row['failed'] + row['failed_warming']:>6}")


def summary(rounds):
    """Means over the rounds and each round's ratios to its best mean."""
    print(f"\nmeans of {len(rounds)} rounds; the ratios are mean s over the round's best\n{HEAD}  ratios")
    means = []
    for policy in rounds[0]:
        rows = [turns[policy] for turns in rounds]
        mean = {key: sum(row[key] for row in rows) / len(rows) for key, value in rows[0].items() if isinstance(value, float)}
        mean |= {"policy": policy, "failed": sum(row["failed"] for row in rows), "failed_warming": sum(row["failed_warming"] for row in rows)}
        mean["ratios"] = [turns[policy]["mean_s"] / min(row["mean_s"] for row in turns.values()) for turns in rounds]
        print(line(mean) + "  " + " ".join(f"{ratio:.2f}" for ratio in mean["ratios"]))
        means.append(mean)
    return means


def build():
    command = ["cargo", "build", "--locked", "--quiet", "--profile", "quick-release", "--bin", "pilotfish"]
    subprocess.run(command, cwd=ROOT, check=True)
    return pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "quick-release/pilotfish"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=22, help="counted part of one turn")
    parser.add_argument("--warm-up", type=float, default=8, help="part of one turn before that")
    parser.add_argument("--load", type=float, default=0.7, help="share of the stand's capacity")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", action="append", choices=list(POLICIES), help="only these")
    parser.add_argument("--json", help="also write everything to this file")
    args = parser.parse_args()
    binary = os.environ.get("PILOTFISH_BIN") or build()
    envoy = subprocess.run([ROOT / "scripts/envoy.sh"], check=True, capture_output=True, text=True).stdout.strip()
    prompts = Prompts(args.seed)
    rate = args.load * prompts.capacity()
    print(f"capacity {prompts.capacity():.1f} requests/s, load {rate:.1f}, prefixes {sum(prompts.lengths)} tokens, "
          f"caches {len(SPEEDS)} x {BLOCKS * BLOCK}")
    work = pathlib.Path(tempfile.mkdtemp(prefix="pilotfish-bench-"))
    stand = Stand(binary, envoy, work)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rounds = []
    try:
        stand.start()
        for number in range(args.rounds):
            arrivals = prompts.arrivals(args.seed + number, rate, args.warm_up + args.seconds)
            print(f"\nround {number + 1}: {len(arrivals)} requests\n{HEAD}  generator")
            policies = args.policy or list(POLICIES)
            turns = {}
            for policy in policies[::-1] if number % 2 else policies:
                row = turns[policy] = stand.turn(policy, prompts, arrivals, args.warm_up)
                print(f"{line(row)}  {row['generator_cpu']:.0%} of a CPU, {row['latest_send_ms']:.0f} ms late", flush=True)
                if row["failures"]:
                    print("  " + "; ".join(row["failures"]))
            rounds.append({policy: turns[policy] for policy in policies})
        means = summary(rounds)
        if args.json:
            found = {"capacity": prompts.capacity(), "rate": rate, "means": means, "rounds": rounds}
            pathlib.Path(args.json).write_text(json.dumps(found, indent=1))
    finally:
        stand.processes.stop()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
