#!/usr/bin/env python3
"""What the picker costs beside an ext_proc server that does nothing, in the same run behind the same Envoy configuration.

For every set-up and load it prints requests a second and CPU microseconds a request of Envoy and of the server, from the
kernel's scheduler statistics, the ratio to the no-op, and the server's resident memory. The picker runs twice: comparing prompts as text, and
as token ids of a real tokenizer (scripts/tokenizers.py fetches it; without, of the tests'). What a server spends while idle is measured before each row, shown,
and not counted as requests'. Needs wrk (Debian package wrk). Loopback only, a few minutes.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import quickstart as kit

ROOT = kit.ROOT
SETUPS = ["static-fail-open", "full-duplex", "gateway-shaped"]
LOADS = {
    "1KB shared": (1_000, False, False),
    "1KB distinct": (1_000, True, False),
    "128KB shared": (128_000, False, False),
    "128KB distinct": (128_000, True, False),
    "SSE 200 chunks": (1_000, False, True),
}
LUA = """
local size, distinct, stream = %d, %s, %s
local filler = string.rep("All work and no play makes a dull boy. ", math.ceil(size / 39))
local n = 0
function request()
  n = n + 1
  local head = distinct and (tostring(os.time()) .. tostring(math.random(1e9)) .. n .. " ") or ""
  local text = head .. filler:sub(1, size - 120 - #head)
  local body = '{"model":"tiny","max_tokens":' .. (stream and 200 or 1) .. ',"stream":' .. tostring(stream) ..
    ',"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"' .. text .. '"}]}'
  if not stream then body = body:gsub(',"stream":false,"stream_options":{"include_usage":true}', '') end
  return wrk.format("POST", "/v1/chat/completions", {["content-type"] = "application/json"}, body)
end
"""


def cpu_seconds(pid):
    """Time on a CPU of all threads, from /proc: nanosecond resolution, unlike utime and stime."""
    total = 0
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            pass
    return total / 1e9


def resident_mib(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def tokenizer():
    """Folder and name of the tokenizer to count with."""
    cache = pathlib.Path(os.environ.get("PILOTFISH_CACHE", pathlib.Path.home() / ".cache/pilotfish")) / "tokenizers"
    return (cache, "qwen3") if (cache / "qwen3").exists() else (ROOT / "tests/data/tokenizers", "small")


def idle_share(pid):
    """CPU that the server spends on nothing but time (polling engines, its own ticks), so that it is not taken for requests'."""
    if pid is None:
        return 0.0
    before = cpu_seconds(pid)
    time.sleep(1)
    return cpu_seconds(pid) - before


def wrk(url, script, connections, seconds):
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "--timeout", "30s", "-s", script, url]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    requests = int(re.search(r"(\d+) requests in", out)[1])
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", out)[1])
    half = re.search(r"^\s+50%\s+(\S+)", out, re.MULTILINE)[1]
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", out)
    return requests, rate, half, int(bad[1]) if bad else 0


def measure(name, load, server, engine, envoy, work, args):
    """One row: `server` is (label, process or None, grpc port)."""
    processes = kit.Processes(work)
    size, distinct, stream = LOADS[load]
    label, pid, port = server
    try:
        ports = {10000: kit.free_port(), 9901: kit.free_port(), 9002: port}
        ports |= {8001: engine, 8002: engine, 8003: engine}
        text = kit.with_ports((ROOT / f"envoy/{name}.yaml").read_text(), ports)
        if pid is None:
            text = without_picker(text, engine)
        config = work / f"envoy-{name}-{label}.yaml"
        config.write_text(text)
        processes.start("envoy", [envoy, "-c", config, "--log-level", "error", "--concurrency", "1", "--use-dynamic-base-id"])
        envoy_pid = processes.running[-1][1].pid
        url = f"http://127.0.0.1:{ports[10000]}/v1/chat/completions"
        kit.until("Envoy", lambda: kit.get(url, {"model": "tiny", "max_tokens": 1, "messages": []}))
        script = work / "load.lua"
        script.write_text(LUA % (size, str(distinct).lower(), str(stream).lower()))
        connections = 32 if stream else 16
        wrk(url, script, connections, 1)
        idle = idle_share(pid)
        before = cpu_seconds(envoy_pid), cpu_seconds(pid) if pid else 0
        requests, rate, half, bad = wrk(url, script, connections, args.seconds)
        after = cpu_seconds(envoy_pid), cpu_seconds(pid) if pid else 0
        return {
            "setup": name, "load": load, "server": label, "rps": rate, "p50": half, "bad": bad,
            "envoy_us": (after[0] - before[0]) / requests * 1e6,
            "server_us": (after[1] - before[1] - idle * args.seconds) / requests * 1e6,
            "idle": idle, "rss_mib": resident_mib(pid) if pid else 0,
        }
    finally:
        processes.stop()


def without_picker(text, engine):
    """The same Envoy without its ext_proc filter, straight to the engine."""
    start = text.index("          - name: envoy.filters.http.ext_proc")
    end = text.index("          - name: envoy.filters.http.", start + 10)
    text = text[:start] + text[end:]
    start = text.index("  clusters:")
    return text[:start] + (
        "  clusters:\n  - name: engines\n    type: STATIC\n    load_assignment:\n      cluster_name: engines\n      endpoints:\n"
        "      - lb_endpoints:\n        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: %d}}}\n"
        "  - name: pilotfish\n    type: STATIC\n    load_assignment: {cluster_name: pilotfish}\n" % engine
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=5, help="length of one measurement")
    parser.add_argument("--setup", action="append", choices=SETUPS, help="only these set-ups")
    parser.add_argument("--load", action="append", choices=list(LOADS), help="only these loads")
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    if not shutil.which("wrk"):
        sys.exit("bench: install wrk (Debian package wrk)")
    build = ["cargo", "build", "--locked", "--quiet", "--profile", "quick-release", "--bin", "pilotfish", "--example", "noop_ext_proc"]
    subprocess.run(build, cwd=ROOT, check=True)
    binaries = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "quick-release"
    envoy = subprocess.run([ROOT / "scripts/envoy.sh"], check=True, capture_output=True, text=True).stdout.strip()
    work = pathlib.Path(tempfile.mkdtemp(prefix="pilotfish-bench-"))
    processes = kit.Processes(work)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        # So fast that nothing waits for it: at low rates a server mostly pays for waking up, and what it touches has gone cold.
        engine = [binaries / "pilotfish", "engine", "--port", "0", "--speed", "1000000", "--blocks", "1000000"]
        address = processes.start("engine", engine, wait_for_line=True)["engine"]
        port = int(address.rsplit(":", 1)[1])
        resources = work / "resources"
        resources.mkdir()
        (resources / "r.yaml").write_text(
            "apiVersion: inference.networking.k8s.io/v1\nkind: InferencePool\nmetadata: {name: tiny}\n"
            "spec: {selector: {matchLabels: {app: tiny}}}\n---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\n"
            f"metadata: {{name: e, labels: {{app: tiny}}}}\nspec: {{address: '{address}'}}\n"
        )
        serve = [binaries / "pilotfish", "serve", "--resources", resources, "--grpc-port", "0", "--grpc-health-port", "0"]
        serve += ["--metrics-port", "0", "--log-level", "info,pilotfish::access=off"]
        picker = processes.start("pilotfish", serve, wait_for_line=True)
        picker_pid = processes.running[-1][1].pid
        folder, name = tokenizer()
        config = work / "tokens.yaml"
        config.write_text(
            "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\n"
            f"tokenizers:\n- {{model: tiny, source: {name}}}\n"
        )
        serve += ["--config", config, "--tokenizer-dir", folder]
        counting = processes.start("pilotfish-tokens", serve, wait_for_line=True)
        counting_pid = processes.running[-1][1].pid
        noop = processes.start("noop", [binaries / "examples/noop_ext_proc", address], wait_for_line=True)
        noop_pid = processes.running[-1][1].pid
        servers = [
            ("none", None, 9),
            ("no-op", noop_pid, int(noop["grpc"].rsplit(":", 1)[1])),
            ("pilotfish", picker_pid, int(picker["grpc"].rsplit(":", 1)[1])),
            ("tokens", counting_pid, int(counting["grpc"].rsplit(":", 1)[1])),
        ]
        rows = []
        print(f"{'set-up':<17} {'load':<15} {'server':<10} {'rps':>8} {'p50':>9} {'Envoy us':>9} {'server us':>10} {'idle':>6} {'MiB':>5} {'x no-op':>8}")
        for setup in args.setup or SETUPS:
            for load in args.load or LOADS:
                base = None
                for server in servers:
                    row = measure(setup, load, server, port, envoy, work, args)
                    base = row["server_us"] if server[0] == "no-op" else base
                    row["ratio"] = row["server_us"] / base if server[0] in ("pilotfish", "tokens") else None
                    rows.append(row)
                    ratio = f"{row['ratio']:.2f}" if row["ratio"] else ""
                    bad = f"  {row['bad']} BAD" if row["bad"] else ""
                    print(f"{setup:<17} {load:<15} {row['server']:<10} {row['rps']:>8.0f} {row['p50']:>9} {row['envoy_us']:>9.1f} {row['server_us']:>10.1f} {row['idle']:>6.1%} {row['rss_mib']:>5.0f} {ratio:>8}{bad}", flush=True)
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(rows, indent=1))
    finally:
        processes.stop()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
