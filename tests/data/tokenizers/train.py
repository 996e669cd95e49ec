#!/usr/bin/env python3
"""Trains the small tokenizer of the tests on this repository's own prose.

    python3 -m pip install tokenizers==0.23.3 && python3 train.py
"""

import json
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|tool|>"]

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=1500,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
    show_progress=False,
)
texts = sorted(ROOT.glob("docs/**/*.md")) + [ROOT / "ARCHITECTURE.md", ROOT / "README.md"]
tokenizer.train_from_iterator((path.read_text() for path in texts), trainer)
tokenizer.add_tokens([AddedToken("<think>", normalized=True), AddedToken("</think>", normalized=True)])
tokenizer.post_processor = processors.Sequence(
    [
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]),
    ]
)
tokenizer.save(str(HERE / "small/tokenizer.json"), pretty=False)

TEMPLATE = """{%- if tools %}{{ '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '<|tool|>' + call.function | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
config = {
    "bos_token": {"__type": "AddedToken", "content": "<s>"},
    "eos_token": "</s>",
    "chat_template": TEMPLATE,
}
(HERE / "small/tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")

EXPECTED = [
    "", "Hello world, this is a test", "  two\n\n lines\t", "<|im_start|>user\nhi<|im_end|>\n", "x<think>y</think>z",
    "Zażółć gęślą jaźń 🐟 中文", "it's 12345 o'clock", "<|tool|>><|tool|>", "a<s>b</s>", "fn main() { println!(\"{}\", 1); }\n",
]
golden = [
    {"text": text, "with": tokenizer.encode(text).ids, "without": tokenizer.encode(text, add_special_tokens=False).ids}
    for text in EXPECTED
]
(HERE / "small/expected.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")
