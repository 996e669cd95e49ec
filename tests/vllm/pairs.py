"""A prefill and a decode engine that hand blocks over by NIXL: answers are held against those of one engine alone.

Who answers alone is the decode engine, asked past the picker under a cache salt of the request's own, so that it finds
nothing in any cache. Blocks of another prompt change the text, so texts show that blocks arrive where they belong.
"""

import concurrent.futures
import json
import random
import statistics
import time

from answers import CHAT, COMPLETIONS, Metrics, send
from stand import Stand, free_port, get, until, words
import pairs_apart

BLOCKS = 8192
EACH, AT_ONCE = 30, 4
# Words of prompts, most of them a token. What comes first is shared by a third of them.
LENGTHS = [6, 40, 150, 400, 900, 1900]
SHARED = 350
SETUPS = ["gateway-shaped", "full-duplex"]
CONFIG = (
    "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\n"
    "plugins: [{type: marginal-cost}, {type: always-disagg-pd-decider}]\n"
)


def resources(stand):
    engines = "".join(
        f"---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\n"
        f"metadata: {{name: {role}, labels: {{app: pairs, role: {role}, group: a}}}}\n"
        f"spec: {{address: '{stand.address(role)}'}}\n"
        for role in stand.engines
    )
    return (
        "apiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelServer\n"
        "metadata: {name: pairs, annotations: {pilotfish.dev/tokenizer: model}}\nspec:\n"
        "  inferenceEngine: vLLM\n  workloadPort: {port: 8000}\n  kvConnector: {type: nixl}\n"
        "  workloadSelector:\n    matchLabels: {app: pairs}\n"
        "    pdGroup: {groupKey: group, prefillLabels: {role: prefill}, decodeLabels: {role: decode}}\n" + engines
    )


class Pairs:
    """The engines, the picker and its Envoys, and what was seen of them."""

    def __init__(self, stand):
        self.stand = stand
        self.rows = []
        stand.engine("prefill", BLOCKS, "--pair", "producer", free_port())
        stand.engine("decode", BLOCKS, "--pair", "consumer", free_port())
        stand.picker(resources(stand), CONFIG)
        self.gateways = {setup: stand.envoy(setup) for setup in SETUPS}
        self.gateway = self.gateways[SETUPS[0]]
        self.prefill, self.decode = (f"http://{stand.address(role)}" for role in ("prefill", "decode"))

    def saw(self, what, seen, right=None):
        """Notes what was seen, and whether it is within bounds if there are any."""
        self.rows.append((what, seen, right))
        print(f"  {what:<64} {seen!s:<36} {'' if right is None else 'ok' if right else 'WRONG'}", flush=True)

    def alone(self, path, body):
        """What one engine says."""
        return send(self.decode, path, body | {"cache_salt": f"alone-{random.getrandbits(64):x}"})

    def ask(self, path, body, gateway=None):
        """What comes through the picker, and the request's record."""
        request_id = self.stand.request_id()
        answer = send(gateway or self.gateway, path, body, request_id)
        if answer.status >= 500:
            # Envoy's own answers have no record.
            print(request_id, answer, flush=True)
        return answer, self.stand.record(request_id)

    def fallbacks(self, *labels):
        return Metrics(self.stand.admin).total("pilotfish_pd_fallback_total", *labels)

    def until_idle(self):
        def idle():
            page = Metrics(self.stand.admin)
            return not page.total("pilotfish_reserved_requests") and not page.total("pilotfish_reserved_tokens")

        until("the end of every booking", idle)


class Growth:
    """Metrics between two moments."""

    def __init__(self, base):
        self.base = base
        self.before = Metrics(base)

    def of(self, name, *labels):
        return Metrics(self.base).total(name, *labels) - self.before.total(name, *labels)


def prompts(name):
    """Paths and bodies, half of them streams."""
    asked = []
    for at in range(2 * EACH):
        rng = random.Random(f"{name}-{at}")
        text = words(rng, LENGTHS[at % len(LENGTHS)])
        if at % 3 == 0:
            text = words(random.Random(f"{name}-{at % 4}"), SHARED) + " " + text
        body = {"model": "tiny", "temperature": 0, "seed": at, "max_tokens": 8 + at % 9, "stream": at % 4 < 2}
        if at % 8 == 0:
            body["stream_options"] = {"include_usage": True}
        if at % 2:
            asked.append((CHAT, body | {"messages": [{"role": "user", "content": text}]}))
        else:
            asked.append((COMPLETIONS, body | {"prompt": text}))
    return asked


def many(pairs, setup):
    """Completions and chats through one Envoy."""
    print(f"pd, {setup}:")
    asked, n = prompts(setup), 2 * EACH
    prefill, decode, picker = Growth(pairs.prefill), Growth(pairs.decode), Growth(pairs.stand.admin)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        alone = [answer.said() for answer in pool.map(lambda one: pairs.alone(*one), asked)]
    names = ["vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total", "vllm:nixl_xfer_time_seconds_count"]
    shared = [decode.of(name) for name in names] + [prefill.of("vllm:e2e_request_latency_seconds_count")]
    pairs.saw("alone: cached, fetched, transfers, prefill requests", shared, not any(shared))
    texts = {one.texts[0] for one in alone if one}
    pairs.saw("alone: different texts", f"{len(texts)} of {n}", len(texts) >= 0.95 * n)

    decode = Growth(pairs.decode)
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        answered = list(pool.map(lambda one: pairs.ask(*one, pairs.gateways[setup]), asked))
    took = time.monotonic() - began
    said = [answer.said() for answer, _ in answered]
    same = [bool(one and other) and (one.texts, one.ends) == (other.texts, other.ends) for one, other in zip(said, alone)]
    for (path, body), one, other, (answer, record), is_same in zip(asked, said, alone, answered, same):
        if not is_same:
            print("differs:", path, json.dumps(body)[:200], other, one or answer, json.dumps(record)[:3000])
    pairs.saw("texts and ends as alone", f"{sum(same)} of {n} in {took:.1f} s", all(same))
    tokens = [one.tokens == other.tokens for one, other in zip(said, alone) if one and other and one.tokens and other.tokens]
    pairs.saw("tokens as alone, where both count", f"{sum(tokens)} of {len(tokens)}", all(tokens) and len(tokens) >= n / 2)

    records = [record for _, record in answered]
    prompt = sum(record["prefill"]["usage"]["prompt"] for record in records if record["prefill"])
    fetched, cached, transfers = (decode.of(name) for name in (names[1], names[0], names[2]))
    pairs.saw("decode: fetched + cached of prompt tokens", f"{fetched:.0f} + {cached:.0f} of {prompt}",
              fetched + cached == prompt and fetched >= 0.5 * prompt)
    pairs.saw("decode: transfers", f"{transfers:.0f}, {decode.of('vllm:nixl_bytes_transferred_sum') / 1e6:.1f} MB", transfers >= n)
    failed = [decode.of(f"vllm:nixl_num_failed_{what}_total") for what in ("transfers", "notifications")]
    pairs.saw("decode: failed transfers, notifications", failed, not any(failed))
    legs = prefill.of("vllm:e2e_request_latency_seconds_count"), prefill.of("vllm:generation_tokens_total")
    pairs.saw("prefill: requests, tokens generated", legs, legs == (n, n))
    pairs.saw("picker: pairs", picker.of("pilotfish_pd_decisions_total", 'decision="pair"'),
              picker.of("pilotfish_pd_decisions_total", 'decision="pair"') == n)
    pairs.saw("picker: fallbacks", picker.of("pilotfish_pd_fallback_total"), not picker.of("pilotfish_pd_fallback_total"))
    counted = sum(record["prompt_tokens"] == record["prefill"]["usage"]["prompt"] for record in records if record["prefill"])
    pairs.saw("picker: prompt tokens as the engine counts", f"{counted} of {n}")
    pairs.until_idle()
    speed(pairs, records, prefill)


def speed(pairs, records, prefill):
    """What the call of a prefill leg takes beyond the engine's own time. No bound: the machine has other work."""
    took = sorted(record["prefill"]["took_us"] / 1e3 for record in records if record["prefill"])
    own = 1e3 * prefill.of("vllm:e2e_request_latency_seconds_sum") / prefill.of("vllm:e2e_request_latency_seconds_count")
    mean = statistics.mean(took)
    pairs.saw("prefill leg, ms: p50, p90, mean", f"{statistics.median(took):.1f}, {took[int(0.9 * len(took))]:.1f}, {mean:.1f}")
    pairs.saw("prefill engine's own, ms: mean; the call adds", f"{own:.1f}; {mean - own:.1f}")


def leases(pairs):
    """Whether prefill engines were rid of every block in time, by the one that fetched it."""
    page = Metrics(pairs.prefill)
    ends = [page.total(f"vllm:nixl_num_{what}_total") for what in ("kv_expired_reqs", "notifications_after_expiry")]
    pairs.saw("prefill: leases that expired, fetches of blocks given up", ends, not any(ends))


def run():
    with Stand("pd") as stand:
        pairs = Pairs(stand)
        for setup in SETUPS:
            many(pairs, setup)
        print("pd, one by one:")
        pairs_apart.run(pairs)
        leases(pairs)
        pairs.until_idle()
        pairs.saw("every booking given back", True, True)
        pairs_apart.without_prefill(pairs)
        pairs.until_idle()
        truth = {e["name"]: e["truth"] for e in get(f"{stand.admin}/debug/endpoints")["endpoints"]}
        print(json.dumps(truth))
        stand.passed = all(right is not False for _, _, right in pairs.rows)
        return stand.passed
