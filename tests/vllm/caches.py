"""What picks believe of caches is held against what two engines report.

`precise`: the picker follows the engines' events. `approximate`: the engines publish none.
"""

import collections
import concurrent.futures
import json
import random
import time

from answers import Metrics
from stand import Stand, free_port, get, until, words

BLOCKS = 160
CONVERSATIONS, TURNS, AT_ONCE = 40, 5, 4
BOUNDS = {"precise": 0.99, "approximate": 0.95}


def resources(stand):
    engines = "".join(
        f"---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\n"
        f"metadata: {{name: {name}, labels: {{app: tiny}}}}\nspec: {{address: '{stand.address(name)}'}}\n"
        for name in stand.engines
    )
    return (
        "apiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelServer\n"
        "metadata: {name: tiny, annotations: {pilotfish.dev/tokenizer: model}}\n"
        "spec: {workloadSelector: {matchLabels: {app: tiny}}, workloadPort: {port: 8000}, inferenceEngine: vLLM}\n"
        + engines
    )


def start(stand):
    """The gateway's address."""
    for at in range(2):
        events = ["--events", free_port(), free_port()] if stand.name == "precise" else []
        stand.engine(f"engine-{at}", BLOCKS, *events)
    stand.picker(resources(stand))
    gateway = stand.envoy("gateway-shaped")
    if stand.name == "precise":
        # The first request of each engine makes its events flow.
        until("the events", lambda: all(e["rung"] == "precise" for e in stand.endpoints()), 60)
    return gateway


def ask(stand, gateway, messages, **more):
    """One answer, and what was predicted and reported of its prompt."""
    request_id = stand.request_id()
    body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "messages": messages} | more
    answer = get(f"{gateway}/v1/chat/completions", body, request_id)
    record = stand.record(request_id)
    return answer["choices"][0]["message"]["content"] or "", {
        "endpoint": record["legs"][0]["served"],
        "rung": record["rung"],
        "counted": record["prompt_tokens"],
        "prompt": answer["usage"]["prompt_tokens"],
        "predicted": record["predicted_cached_tokens"],
        "reported": (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    }


def conversation(stand, gateway, number):
    """A conversation whose turns follow each other; every fourth shares the beginning of its group."""
    rng = random.Random(number)
    group = random.Random(10_000 + number // 4)
    messages = [{"role": "system", "content": words(group if number % 4 < 2 else rng, 150)}]
    rows = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": words(rng, 180)})
        text, row = ask(stand, gateway, messages)
        messages.append({"role": "assistant", "content": text})
        rows.append(row)
    return rows


def namespaces(stand, gateway):
    """One text under adapters and cache salts: nothing is shared between them, each finds its own."""
    messages = [{"role": "user", "content": words(random.Random(77), 300)}]
    spaces = [{}, {"model": "lora1"}, {"model": "lora2"}, {"cache_salt": "a"}, {"cache_salt": "b"},
              {"model": "lora1", "cache_salt": "a"}]
    wrong = []
    for space in spaces:
        _, first = ask(stand, gateway, messages, **space)
        _, second = ask(stand, gateway, messages, **space)
        if first["predicted"] or first["reported"] or second["predicted"] != second["reported"] or not second["reported"]:
            wrong.append((space, first, second))
    return wrong


def run(kind):
    with Stand(kind) as stand:
        gateway = start(stand)
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            conversations = pool.map(lambda n: conversation(stand, gateway, n), range(CONVERSATIONS))
            rows = [row for rows in conversations for row in rows]
        took = time.monotonic() - began
        served = collections.Counter(row["endpoint"] for row in rows)
        equal = [row for row in rows if row["predicted"] == row["reported"]]
        wrong = namespaces(stand, gateway)
        removed = Metrics(stand.admin).total("pilotfish_kv_events_total", 'kind="removed"')
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
        stand.passed = (
            summary["equal"] >= BOUNDS[kind]
            and summary["cached_share"] >= 0.5
            and len(served) == 2 and min(served.values()) >= 0.3 * len(rows)
            and (kind != "precise" or removed >= 1000)
            and not wrong
        )
        return stand.passed
