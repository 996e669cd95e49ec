#!/usr/bin/env python3
"""CPU share of polling many engines every 200 ms, with filtered and with whole pages of 60 KB, and the oldest signal's age.

Loopback only; about half a minute.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import quickstart as kit
from bench import cpu_seconds


def measure(binaries, count, whole, seconds, work):
    processes = kit.Processes(work)
    try:
        command = [binaries / "examples/engines", str(count)] + (["whole"] if whole else [])
        addresses = processes.start("engines", command, wait_for_line=True)
        resources = work / f"resources-{whole}"
        resources.mkdir()
        text = "apiVersion: inference.networking.k8s.io/v1\nkind: InferencePool\nmetadata: {name: p}\n"
        text += "spec: {selector: {matchLabels: {app: x}}}\n"
        for at, address in enumerate(addresses):
            text += "---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\n"
            text += f"metadata: {{name: e{at}, labels: {{app: x}}}}\nspec: {{address: '{address}'}}\n"
        (resources / "r.yaml").write_text(text)
        serve = [binaries / "pilotfish", "serve", "--resources", resources, "--grpc-port", "0"]
        serve += ["--grpc-health-port", "0", "--metrics-port", "0"]
        picker = processes.start("pilotfish", serve, wait_for_line=True)
        pid = processes.running[-1][1].pid
        admin = f"http://{picker['admin']}"
        kit.until("all engines", lambda: all(e["state"] == "up" for e in kit.get(f"{admin}/debug/endpoints")["endpoints"]), 60)
        time.sleep(2)
        before, began, oldest = cpu_seconds(pid), time.monotonic(), 0.0
        while time.monotonic() - began < seconds:
            time.sleep(1)
            for endpoint in kit.get(f"{admin}/debug/endpoints")["endpoints"]:
                oldest = max(oldest, endpoint["signals"]["running"]["age_s"] or 0.0)
        share = (cpu_seconds(pid) - before) / (time.monotonic() - began)
        return share, oldest
    finally:
        processes.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--seconds", type=int, default=10)
    args = parser.parse_args()
    build = ["cargo", "build", "--locked", "--quiet", "--profile", "quick-release", "--bin", "pilotfish", "--example", "engines"]
    subprocess.run(build, cwd=kit.ROOT, check=True)
    binaries = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", kit.ROOT / "target")) / "quick-release"
    work = pathlib.Path(tempfile.mkdtemp(prefix="pilotfish-bench-"))
    try:
        print(f"{'pages':<9} {'engines':>7} {'share of a core':>16} {'oldest signal':>14}")
        for name, whole in (("filtered", False), ("whole", True)):
            share, oldest = measure(binaries, args.engines, whole, args.seconds, work)
            print(f"{name:<9} {args.engines:>7} {share:>15.1%} {oldest:>12.2f} s", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
