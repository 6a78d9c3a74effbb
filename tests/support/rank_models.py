"""Models that ranks compute together: `save(folder)` leaves each where `from_pretrained` finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
import transformers as tf
from families import BY_NAME, FAMILIES, LONG, SMALL, TOKENS, Family, build


def _llama(queries: int, keys: int) -> tf.PreTrainedModel:
    options: dict[str, Any] = {**SMALL, **TOKENS, **LONG, "hidden_size": 8 * queries}
    options |= {"num_attention_heads": queries, "num_key_value_heads": keys}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**options))


OWN = [
    Family("llama-3", lambda: _llama(6, 3)),
    Family("llama-5", lambda: _llama(10, 5)),
    Family("olmo2", lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**SMALL, **TOKENS, **LONG))),
]
DIVIDED = [
    *("llama", "qwen2-window", "qwen3", "mixtral", "qwen3-moe", "gpt-oss", "gemma3_text", "deepseek_v3"),
    *(each.name for each in OWN),
    "qwen3_5_text",
]
SHOWN = {"llava": "image", "qwen2_vl": "image", "llama4": "image", "qwen3_asr": "audio", "t5gemma": "seq2seq"}
"""Families whose prompts are more than token ids, and of which kind each is."""


def _tiny(kind: str, name: str) -> Family:
    return Family(name, lambda: tiny.build(kind, tiny.config_class(kind, name)))


def _llama4_answers() -> bool:
    """True if its own forward comes to an end: that of transformers 5.24.0 asks its language model's output
    for pictures, which only its own output has.
    """
    try:
        _tiny("image", "llama4").build()(torch.tensor([[5, 6]]))
    except AttributeError as error:
        if "image_outputs" in str(error):
            return False
        raise
    return True


SHOWN = {name: kind for name, kind in SHOWN.items() if name in tf.CONFIG_MAPPING}  # older releases lack some
if not _llama4_answers():
    del SHOWN["llama4"]

OTHERS = [_tiny(kind, name) for name, kind in SHOWN.items()]
OTHERS += [_tiny("causal", name) for name in ("gemma3_text", "deepseek_v3", "qwen3_5_text")]
BY_NAME |= {family.name: family for family in (*FAMILIES, *OWN, *OTHERS)}


def save(folder: Path) -> None:
    """Write every model that ranks load."""
    for name in (*DIVIDED, *SHOWN):
        build(BY_NAME[name]).save_pretrained(folder / name)
