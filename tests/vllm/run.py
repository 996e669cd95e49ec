#!/usr/bin/env python3
"""Real vLLM engines behind a real Envoy, in passes that each have engines of their own.

`precise` and `approximate` hold predictions against what engines report, `pd` splits requests between a prefill and a decode
engine. Exit 1 if a bound is missed. Usage: run.py [precise|approximate|pd ...]
"""

import signal
import subprocess
import sys

import caches
import pairs
from stand import HERE

PASSES = {
    "precise": lambda: caches.run("precise"),
    "approximate": lambda: caches.run("approximate"),
    "pd": pairs.run,
}


def run(name):
    passed = PASSES[name]()
    print(f"{name}: {'passed' if passed else 'FAILED'}", flush=True)
    return passed


def main():
    # What was started is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    subprocess.run([HERE / "engine.sh", "install"], check=True)
    names = sys.argv[1:] or list(PASSES)
    sys.exit(0 if all([run(name) for name in names]) else 1)


if __name__ == "__main__":
    main()
