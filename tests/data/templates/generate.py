#!/usr/bin/env python3
"""Renders the templates of `src/` with Python's jinja2, in transformers' settings, into `golden.json`.

    python3 -m pip install jinja2==3.1.6 && python3 generate.py
"""

import json
import pathlib

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

HERE = pathlib.Path(__file__).parent
assert jinja2.__version__ == "3.1.6", "the golden file is pinned to jinja2 3.1.6"


class Generation(jinja2.ext.Extension):
    """`{% generation %}`: renders what it holds."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_held"), [], [], body).set_lineno(line)

    def _held(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather at a place: \"now\" <or> later & so on,\nżółw 🐢.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "A town's name"},
                    "unit": {"enum": ["°C", "°F"], "default": "°C"},
                    "days": {"type": ["integer", "null"], "default": None},
                    "box": {"type": "object", "properties": {"n": {"type": "number"}, "w": {}}, "required": ["n"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "noop", "description": None, "parameters": {"type": "object", "properties": {}}}},
]


def call(name, arguments, id="call_1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": "Hi there"}
SYSTEM = {"role": "system", "content": "  You are helpful.\n"}
CONTEXTS = {
    "plain": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {"messages": [SYSTEM, USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"}, {"role": "user", "content": "And\n\nnow?  "}]},
    "closed": {"messages": [USER, {"role": "assistant", "content": "Hello."}], "add_generation_prompt": False},
    "unicode": {"messages": [{"role": "user", "content": "Zażółć gęślą jaźń 🐟 中文 \u200d \u00a0 <b>&amp;'\"\\ \t end"}]},
    "empty": {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, {"role": "user", "content": " "}]},
    "null": {"messages": [USER, {"role": "assistant", "content": None}, USER]},
    "tools": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "tools-alone": {"messages": [USER], "tools": TOOLS[:1]},
    "no-tools": {"messages": [USER], "tools": []},
    "call": {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call("get_weather", {"place": "Łódź", "n": 1.0, "deep": {"a": [1, 2.5, None, True, "x\ny"]}})]}, {"role": "tool", "tool_call_id": "call_1", "content": "{\"t\": 3}"}], "tools": TOOLS},
    "call-text": {"messages": [USER, {"role": "assistant", "content": "Let me see.", "tool_calls": [call("get_weather", "{\"place\": \"x\"}")]}, {"role": "tool", "tool_call_id": "call_1", "content": "warm"}], "tools": TOOLS},
    "calls": {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call("noop", {}), call("get_weather", {"place": "y"}, "call_2")]}, {"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}, {"role": "assistant", "content": "done", "reasoning": "r", "reasoning_content": "\nr\n"}, USER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]}]},
    "bad-order": {"messages": [USER, USER]},
    "unknown-role": {"messages": [USER, {"role": "robot", "content": "beep"}]},
    "kwargs": {"messages": [SYSTEM, USER], "enable_thinking": False, "thinking": True, "flag": True, "reasoning_effort": "high", "date_string": "3 Feb 2027", "extra": {"b": [1, {"ü": "\u0001\u007f"}], "a": 1e100, "c": 0.00001, "d": [], "e": {}, "f": False}},
    "flag-off": {"messages": [SYSTEM], "flag": False, "extra": "só"},
    "documents": {"messages": [USER], "documents": [{"title": "T", "text": "body"}, {"text": "b2"}]},
    "six": {"messages": [{"role": r, "content": c} for r, c in [("skip", "-"), ("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"), ("user", "5"), ("assistant", "6")]]},
    "continued": {"messages": [USER, {"role": "assistant", "content": "I am CONTINUE_FINAL_MESSAGE_TAG "}], "add_generation_prompt": False, "continue_final": True},
}


def main():
    for context in CONTEXTS.values():
        context.setdefault("add_generation_prompt", True)
        context.setdefault("tools", None)
        context.setdefault("documents", None)
        context.update(bos_token="<s>", eos_token="</s>")
    templates = {path.stem: path.read_text() for path in sorted((HERE / "src").glob("*.jinja"))}
    rendered = []
    for name, source in templates.items():
        template = environment().from_string(source)
        for context, variables in CONTEXTS.items():
            try:
                text = template.render(**variables)
            except Exception:  # noqa: BLE001: whatever a template raises is a refusal
                text = None
            rendered.append({"template": name, "context": context, "text": text})
    golden = {"templates": templates, "contexts": CONTEXTS, "rendered": rendered}
    (HERE / "golden.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")
    refused = sum(case["text"] is None for case in rendered)
    print(f"{len(rendered)} renderings, {refused} of them refusals")


if __name__ == "__main__":
    main()
