"""Requests to a pair that are each something of their own: other APIs, several answers, refusals, a dead engine."""

import random

from answers import CHAT, COMPLETIONS, MESSAGES, RESPONSES, send
from stand import words

GREEDY = {"model": "tiny", "temperature": 0}


def chat(text, **more):
    return GREEDY | {"max_tokens": 10, "messages": [{"role": "user", "content": text}]} | more


def prompt(text, **more):
    return GREEDY | {"max_tokens": 10, "prompt": text} | more


def text_of(name, n=300):
    return words(random.Random(name), n)


def run(pairs):
    apis(pairs)
    variants(pairs)
    first_token_ends_it(pairs)
    refusals(pairs)


def compare(pairs, what, path, body, split, alone=None):
    """The answer must be that of one engine alone, by this decision and without a fallback."""
    fell = pairs.fallbacks()
    answer, record = pairs.ask(path, body)
    fell = pairs.fallbacks() - fell
    said, expected = answer.said(), pairs.alone(*(alone or (path, body))).said()
    same = bool(said and expected) and said.texts == expected.texts
    # Their names for the end differ between APIs.
    same = same and (alone is not None or said.ends == expected.ends)
    if not same:
        print("differs:", what, expected, said or answer)
    right = same and record["split"] == split and not fell
    pairs.saw(what, f"{answer.status}, {record['split']}, {'as alone' if same else 'DIFFERS'}", right)


def apis(pairs):
    """One prompt in each API, whole and streamed."""
    for stream in (False, True):
        kind = "streamed" if stream else "whole"
        for path in (RESPONSES, MESSAGES):
            text = text_of(f"{path}-{stream}")
            body = GREEDY | {"stream": stream}
            if path == RESPONSES:
                body |= {"input": text, "max_output_tokens": 10}
            else:
                body |= {"messages": [{"role": "user", "content": text}], "max_tokens": 10}
            compare(pairs, f"{path} {kind}", path, body, "pair", alone=(CHAT, chat(text)))


def variants(pairs):
    """What asks for more than one answer to one prompt, and what chooses other weights or another cache."""
    seeded = {"n": 2, "temperature": 0.8, "seed": 7}
    compare(pairs, "chat, n=2", CHAT, chat(text_of("two"), **seeded), "unfit")
    compare(pairs, "completions, n=2, streamed", COMPLETIONS, prompt(text_of("2"), stream=True, **seeded), "unfit")
    compare(pairs, "two prompts", COMPLETIONS, prompt([text_of("a"), text_of("b")]), "unfit")
    compare(pairs, "an adapter", CHAT, chat(text_of("lora"), model="lora1"), "pair")
    compare(pairs, "the adapter's prompt without it", CHAT, chat(text_of("lora")), "pair")
    compare(pairs, "one token", COMPLETIONS, prompt(text_of("one"), max_tokens=1), "pair")
    compare(pairs, "a cache salt", CHAT, chat(text_of("salt"), cache_salt="s"), "pair")
    compare(pairs, "the same again", CHAT, chat(text_of("salt"), cache_salt="s"), "pair")
    compare(pairs, "no room for the whole output", COMPLETIONS, prompt(list(range(1000, 5050)), max_tokens=80), "pair")
    compare(pairs, "token ids", COMPLETIONS, prompt(list(range(1000, 1300))), "pair")
    compare(pairs, "log probabilities", CHAT, chat(text_of("logs"), logprobs=True, top_logprobs=2, stream=True), "pair")


def first_token_ends_it(pairs):
    """The prefill leg ends by itself, and hands blocks over all the same."""
    body = prompt(text_of("stop"))
    first = pairs.alone(COMPLETIONS, body | {"max_tokens": 1}).said().texts[0]
    compare(pairs, "the first token is a stop", COMPLETIONS, body | {"stop": [first]}, "pair")


def refusals(pairs):
    """What an engine refuses reaches the client as the engine says it."""
    limited = {"max_tokens": 1}
    wrong = [
        ("an unknown model", chat(text_of("unknown"), model="nobody"), 404),
        ("a prompt too long", chat(text_of("long", 4500)), 400),
        ("a wrong parameter", chat(text_of("wrong"), temperature=-1), 400),
    ]
    for what, body, status in wrong:
        answer, record = pairs.ask(CHAT, body)
        said = send(pairs.prefill, CHAT, body | limited)
        right = answer.status == status and answer.text == said.text
        pairs.saw(what, f"{answer.status}, {record['outcome']}, {'as the engine says' if right else answer.text[:200]}", right)


def without_prefill(pairs):
    """The prefill engine is killed: the decode engine computes prompts itself."""
    body = chat(text_of("killed"))
    expected = pairs.alone(CHAT, body).said()
    pairs.stand.kill("prefill")
    answer, record = pairs.ask(CHAT, body)
    fell = {reason: pairs.fallbacks(f'reason="{reason}"') for reason in ("refused", "broken")}
    right = answer.said() == expected and record["split"] == "pair" and fell["refused"] == 1
    pairs.saw("prefill killed", f"{answer.status}, {record['split']}, {fell}", right)
    answer, record = pairs.ask(CHAT, chat(text_of("later"), stream=True))
    expected = pairs.alone(CHAT, chat(text_of("later"))).said()
    right = answer.status == 200 and answer.said().texts == expected.texts
    pairs.saw("later", f"{answer.status}, {record['split']}, {'as alone' if right else 'DIFFERS'}", right)
