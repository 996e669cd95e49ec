#!/usr/bin/env python3
"""Starts three simulated engines, Pilotfish and Envoy, sends a few requests through Envoy, and shows who served them and why.

Everything listens on free loopback ports and is stopped at the end. ONCE=1 in the environment stops after the table.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
SYSTEM = {
    "support": "You are the support assistant of a bicycle shop. Be brief, be kind, name prices in euros. " * 12,
    "lawyer": "You summarise contracts for people who have no time. Quote clause numbers, never guess. " * 12,
}
REQUESTS = [
    ("support", "My chain keeps slipping."),
    ("lawyer", "Who pays if delivery is late?"),
    ("support", "Do you repair brakes?"),
    ("lawyer", "Can the tenant sublet?"),
    ("support", "When do you open?"),
    ("support", "How much is a new tyre?"),
]


class Processes:
    """Children that are ended with us, each by its own pid."""

    def __init__(self, logs):
        self.logs = logs
        self.running = []

    def start(self, name, command, wait_for_line=False):
        log = open(self.logs / f"{name}.log", "wb")
        out = subprocess.PIPE if wait_for_line else log
        child = subprocess.Popen(command, stdout=out, stderr=log)
        self.running.append((name, child))
        if not wait_for_line:
            return None
        line = child.stdout.readline()
        if not line:
            fail(f"{name} did not start", self.logs / f"{name}.log")
        return json.loads(line)["listening"]

    def stop(self):
        for _, child in reversed(self.running):
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        for _, child in reversed(self.running):
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def fail(message, log=None):
    print(f"quickstart: {message}", file=sys.stderr)
    if log and log.exists():
        print(log.read_text(errors="replace")[-2000:], file=sys.stderr)
    sys.exit(1)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def build():
    target = os.environ.get("CARGO_TARGET_DIR", str(ROOT / "target"))
    subprocess.run(["cargo", "build", "--locked", "--quiet", "--bin", "pilotfish"], cwd=ROOT, check=True)
    return str(pathlib.Path(target) / "debug" / "pilotfish")


def with_ports(text, ports):
    """The shipped file with its example ports replaced, those of one text in one pass."""
    return re.sub(r"(port_value: |127\.0\.0\.1:)(\d+)", lambda m: m[1] + str(ports.get(int(m[2]), int(m[2]))), text)


def get(url, body=None, request_id=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} if data else {}
    if request_id:
        headers["x-request-id"] = request_id
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as answer:
        return json.loads(answer.read() or b"{}")


def until(what, check, seconds=20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if check():
                return
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.05)
    fail(f"{what} did not come up within {seconds} s")


def why(decision):
    """The source of what was known, and the scorers that spoke for the choice, in the record's own words."""
    chosen = decision["legs"][0]["candidates"][0]
    scores = ", ".join(f"{name} {score['used']:.2f}" for name, score in chosen["scores"].items())
    known = "nobody held it" if not decision["predicted_cached_tokens"] else f"known by {decision['rung']} knowledge"
    return f"{known} ({scores})"


def main():
    binary = build()
    envoy = subprocess.run([ROOT / "scripts/envoy.sh"], check=True, capture_output=True, text=True).stdout.strip()
    work = pathlib.Path(tempfile.mkdtemp(prefix="pilotfish-quickstart-"))
    processes = Processes(work)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run(binary, envoy, work, processes)
    except KeyboardInterrupt:
        pass
    finally:
        processes.stop()
        shutil.rmtree(work, ignore_errors=True)


def run(binary, envoy, work, processes):
    names = {}
    for at in (1, 2, 3):
        command = [binary, "engine", "--port", "0", "--model", "tiny", "--name", f"engine-{at}", "--kv-events", "0", "--replay", "0"]
        address = processes.start(f"engine-{at}", command, wait_for_line=True)["engine"]
        names[address] = f"engine-{at}"
    engines = list(names)

    ports = {8000 + at: int(address.rsplit(":", 1)[1]) for at, address in enumerate(engines, start=1)}
    resources = work / "resources"
    resources.mkdir()
    text = (ROOT / "examples/quickstart/resources.yaml").read_text()
    (resources / "resources.yaml").write_text(with_ports(text, ports))
    scheduler = ROOT / "examples/quickstart/scheduler.yaml"
    # What is built here is not optimised: token ids may take it longer than a release build would wait.
    command = [binary, "serve", "--resources", resources, "--config", scheduler, "--tokenize-least-wait", "50ms", "--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0"]
    picker = processes.start("pilotfish", command, wait_for_line=True)

    ports |= {10000: free_port(), 9901: free_port(), 9002: int(picker["grpc"].rsplit(":", 1)[1])}
    config = work / "envoy.yaml"
    config.write_text(with_ports((ROOT / "envoy/static-fail-open.yaml").read_text(), ports))
    processes.start("envoy", [envoy, "-c", config, "--component-log-level", "upstream:error", "--log-level", "warning", "--concurrency", "1", "--use-dynamic-base-id"])
    gateway, admin = f"http://127.0.0.1:{ports[10000]}", f"http://{picker['admin']}"
    until("Envoy", lambda: get(f"{gateway}/v1/models"))
    until("the engines' metrics", lambda: all(e["state"] == "up" for e in get(f"{admin}/debug/endpoints")["endpoints"]))

    print(f"\n{'request':<44} {'served by':<10} {'predicted':>9} {'cached':>6}  why")
    for number, (kind, question) in enumerate(REQUESTS):
        request_id = f"quickstart-{number}"
        body = {
            "model": "tiny",
            "max_tokens": 8,
            "messages": [{"role": "system", "content": SYSTEM[kind]}, {"role": "user", "content": question}],
        }
        answer = get(f"{gateway}/v1/chat/completions", body, request_id)
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        decision = None

        def settled():
            nonlocal decision
            found = get(f"{admin}/debug/decisions?request_id={request_id}")["decisions"]
            decision = found[0] if found else None
            return decision

        until("the decision's record", settled)
        served = names.get(decision["legs"][0]["served"], decision["legs"][0]["served"])
        predicted = decision["predicted_cached_tokens"]
        print(f"{kind + ': ' + question:<44} {served:<10} {predicted:>9} {cached:>6}  {why(decision)}")

    if os.environ.get("ONCE"):
        return
    print(
        f"""
Everything stays up until Ctrl-C. To try:
  curl -s {gateway}/v1/chat/completions -d '{{"model":"tiny","messages":[{{"role":"user","content":"hello"}}]}}'
  curl -sN {gateway}/v1/completions -d '{{"model":"tiny","prompt":"tell me","stream":true,"max_tokens":20}}'
  curl -si {gateway}/v1/chat/completions -d '{{"model":'
  curl -s {admin}/debug/decisions?limit=1
  curl -s {admin}/debug/endpoints
  curl -s {admin}/metrics
Logs are in {work}."""
    )
    signal.pause()


if __name__ == "__main__":
    main()
