"""Requests to engines and gateways, what their answers say whatever the API, and metrics."""

import dataclasses
import json
import re
import urllib.error
import urllib.request

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@dataclasses.dataclass
class Answer:
    """A whole answer, read to its end."""

    status: int
    content_type: str
    text: str

    def said(self):
        """What a client reads of it: a text and an end for each choice, and the tokens counted. None if it is no answer."""
        if self.status != 200:
            return None
        if self.content_type.startswith("text/event-stream"):
            return merged([json.loads(data) for data in re.findall(r"^data: ({.*})\s*$", self.text, re.M)])
        return merged([json.loads(self.text)])


@dataclasses.dataclass
class Said:
    """What an answer says."""

    texts: dict
    ends: dict
    tokens: tuple | None


def merged(pieces):
    """One object, or those of a stream, put together."""
    texts, ends, tokens = {}, {}, None
    for piece in pieces:
        whole = piece.get("response") or piece.get("message") or piece
        kind = piece.get("type")
        for choice in piece.get("choices", []):
            at = choice["index"]
            inner = choice.get("delta") or choice.get("message") or choice
            texts[at] = texts.get(at, "") + (inner.get("content") or inner.get("text") or "")
            ends[at] = choice.get("finish_reason") or ends.get(at)
        if kind in ("response.output_text.delta", "content_block_delta"):
            delta = piece["delta"]
            texts[0] = texts.get(0, "") + (delta if isinstance(delta, str) else delta.get("text") or "")
        # The last event of a stream of responses repeats what the stream said.
        if kind == "message" or piece.get("object") == "response":
            parts = piece.get("content") or [part for item in piece.get("output", []) for part in item.get("content") or []]
            texts[0] = "".join(part.get("text") or "" for part in parts)
        for source in (whole, piece.get("delta")):
            if isinstance(source, dict):
                reason = source.get("stop_reason") or (source.get("incomplete_details") or {}).get("reason")
                if reason and "choices" not in piece:
                    ends[0] = reason
        tokens = counted(whole.get("usage") or piece.get("usage")) or tokens
    return Said(texts, ends, tokens)


def counted(usage):
    """Tokens of prompt and output; what was found in a cache is part of the prompt, wherever it was found."""
    if not usage:
        return None
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage.get("completion_tokens")
    prompt = (usage.get("input_tokens") or 0) + (usage.get("cache_read_input_tokens") or 0)
    return prompt + (usage.get("cache_creation_input_tokens") or 0), usage.get("output_tokens")


def send(base, path, body, request_id=None):
    """The answer, whatever its status."""
    headers = {"content-type": "application/json"} | ({"x-request-id": request_id} if request_id else {})
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return Answer(answer.status, answer.headers.get("content-type", ""), answer.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers.get("content-type", ""), error.read().decode())


def get_text(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


class Metrics:
    """A page of metrics as it was."""

    def __init__(self, base):
        self.samples = re.findall(r"^([\w:]+)(?:\{(.*)\})? ([^ \n]+)(?: [^ \n]+)?$", get_text(f"{base}/metrics"), re.M)

    def total(self, name, *labels):
        """The sum of a name's samples that carry these labels, each written `name="value"`."""
        return sum(float(value) for found, set_, value in self.samples if found == name and all(l in set_ for l in labels))
