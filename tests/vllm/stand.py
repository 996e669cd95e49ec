"""Real engines, a picker and Envoys before them, on ports of their own."""

import contextlib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from quickstart import Processes, build, free_port, get, until, with_ports  # noqa: E402

# An engine takes half a minute, and many times that where others build.
START_SECONDS = 1200
WORDS = (HERE / "words.txt").read_text().split()


def descendants(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [below for child in map(int, listed) for below in (child, *descendants(child))]


def words(rng, n):
    return " ".join(rng.choice(WORDS) for _ in range(n))


def patient(text):
    """Engines take every core: what is slow here is not dead."""
    return re.sub(r"\b((?:connect_|message_)?timeout: )(?:0\.\d+|5)s", r"\g<1>60s", text)


class Stand:
    """Processes of one pass, ended with it. Their logs stay if it fails."""

    def __init__(self, name):
        self.name = name
        self.passed = False
        self.work = pathlib.Path(tempfile.mkdtemp(prefix=f"pilotfish-vllm-{name}-"))
        self.processes = Processes(self.work)
        self.engines = {}
        self.sent = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.processes.stop()
        if self.passed:
            shutil.rmtree(self.work, ignore_errors=True)
        else:
            print(f"logs are in {self.work}", file=sys.stderr)

    def engine(self, name, blocks, *more):
        """Starts an engine on a core of its own; its port."""
        port, cpu = free_port(), len(self.engines) % (os.cpu_count() or 1)
        self.processes.start(name, [HERE / "engine.sh", "serve", str(port), str(cpu), str(blocks), *map(str, more)])
        self.engines[name] = port
        return port

    def address(self, name):
        return f"127.0.0.1:{self.engines[name]}"

    def kill(self, name):
        """Ends an engine and the processes that it started, without a farewell."""
        [child] = [child for running, child in self.processes.running if running == name]
        below = descendants(child.pid)
        for pid in [child.pid, *below]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()

    def picker(self, resources, config=None):
        folder = self.work / "resources"
        folder.mkdir()
        (folder / "all.yaml").write_text(resources)
        more = []
        if config:
            (self.work / "config.yaml").write_text(config)
            more = ["--config", self.work / "config.yaml"]
        home = subprocess.run([HERE / "engine.sh", "home"], check=True, capture_output=True, text=True).stdout.strip()
        binary = os.environ.get("PILOTFISH_BIN") or build()
        listening = self.processes.start(
            "pilotfish",
            [binary, "serve", "--resources", folder, "--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0",
             "--tokenizer-dir", home, *more],
            wait_for_line=True,
        )
        self.admin = f"http://{listening['admin']}"
        self.grpc = int(listening["grpc"].rsplit(":", 1)[1])

    def envoy(self, setup):
        """Starts an Envoy before the picker and the engines; its address once it answers."""
        binary = subprocess.run([ROOT / "scripts/envoy.sh"], check=True, capture_output=True, text=True).stdout.strip()
        mapped = {10000: free_port(), 9901: free_port(), 9002: self.grpc}
        ports = list(self.engines.values())
        mapped |= {8001 + at: ports[min(at, len(ports) - 1)] for at in range(3)}
        config = self.work / f"{setup}.yaml"
        config.write_text(patient(with_ports((ROOT / f"envoy/{setup}.yaml").read_text(), mapped)))
        self.processes.start(
            f"envoy-{setup}", [binary, "-c", config, "--log-level", "error", "--use-dynamic-base-id", "--concurrency", "1"]
        )
        gateway = f"http://127.0.0.1:{mapped[10000]}"
        until("the engines", lambda: all(e["state"] == "up" for e in self.endpoints()), START_SECONDS)
        until("Envoy", lambda: get(f"{gateway}/v1/models"))
        return gateway

    def endpoints(self):
        return get(f"{self.admin}/debug/endpoints")["endpoints"]

    def request_id(self):
        self.sent += 1
        return f"vllm-{self.name}-{self.sent}-{random.getrandbits(32):08x}"

    def record(self, request_id):
        """The record of a request that has ended."""
        found = []

        def settled():
            found[:] = get(f"{self.admin}/debug/decisions?request_id={request_id}")["decisions"]
            return found

        until("the record", settled)
        return found[0]
