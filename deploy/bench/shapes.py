"""Folders of models that have a real model's shape and no weights: a config.json and a small tokenizer.

An engine fills such a model with the same pseudo-random weights at every start (vLLM: ``--load-format dummy``), so that its
size, its speed and the exactness of its answers can be measured where no weights can be had. Its answers are gibberish.
"""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 152064
_COMMON = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "use_cache": True,
}
SHAPES = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8),
}
"""Name -> hidden size, intermediate size, layers, attention heads, key-value heads."""


def write(name: str, folder: Path) -> Path:
    """Make the folder of one shape; it is left as it is when it is there."""
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
        special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
        hidden, intermediate, layers, heads, groups = SHAPES[name]
        shape = {
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "max_window_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
        }
        (folder / "config.json").write_text(json.dumps({**_COMMON, **shape}, indent=1))
    return folder


def _tokenizer() -> dict[str, object]:
    """One token for each byte, and a word of its own for every other id, so that different ids have different texts."""
    words = {symbol: byte for byte, symbol in enumerate(_bytes())}
    words |= {"<bos>": 256, "<eos>": 257}
    words |= {f"\u0120w{number}": number for number in range(258, VOCABULARY)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256, "content": "<bos>", **flags}, {"id": 257, "content": "<eos>", **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": words,
            "merges": [],
        },
    }


def _bytes() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
