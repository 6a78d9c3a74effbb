"""Models with adapters of other methods than LoRA, that do something."""

from __future__ import annotations

import dataclasses
from typing import Any

import peft
import torch
from adapters import LINEAR, NAMES
from families import BY_NAME, build
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

SQUARE = ["q_proj", "o_proj"]
OPTIONS: dict[str, dict[str, Any]] = {
    "ADAPTION_PROMPT": {
        "target_modules": "self_attn",
        "adapter_len": 4,
        "adapter_layers": 1,
        "task_type": "CAUSAL_LM",
    },
    "BEFT": {"target_modules": ["v_proj"]},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "FOURIERFT": {"n_frequency": 100},
    "FROD": {"target_modules": SQUARE, "progressbar": False},
    "IA3": {
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
    "LILY": {"r": 4},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "MISS": {"r": 4},
    "OFT": {"oft_block_size": 8},
    "POLY": {"r": 4, "n_tasks": 3, "n_skills": 2, "task_type": "CAUSAL_LM"},
    "PSOFT": {"r": 4},
    "ROAD": {"group_size": 8},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [5, 6, 7, 8]},
    "VBLORA": {"vector_length": 16, "num_vectors": 8},
    "WAVEFT": {"n_frequency": 100},
}
"""Options that a tiny model needs, by method."""
NOISE = {"FOURIERFT": 30.0, "WAVEFT": 2.0, "IA3": 0.6, "LN_TUNING": 0.6}


def config_of(kind: str) -> Any:
    """A config of a method."""
    found: Any = PEFT_TYPE_TO_CONFIG_MAPPING[kind]  # type: ignore[index]
    fields = {field.name for field in dataclasses.fields(found)}
    wanted: dict[str, Any] = {"target_modules": LINEAR} if "target_modules" in fields else {}
    return found(**{**wanted, **OPTIONS.get(kind, {})})


def tiny_llama() -> Any:
    """The Llama of all tests, the same one every time."""
    torch.manual_seed(0)
    return build(BY_NAME["llama"]).eval()


def other_method(kind: str, count: int = 2, base: Any = None) -> Any:
    """A peft model with adapters of one method, called NAMES; the first one is active."""
    base = tiny_llama() if base is None else base
    before = {id(each) for each in base.parameters()}
    torch.manual_seed(1)
    made = peft.get_peft_model(base, config_of(kind), NAMES[0])
    for name in NAMES[1:count]:
        made.add_adapter(name, config_of(kind))
    with torch.no_grad():
        for each in made.parameters():
            if id(each) not in before and each.is_floating_point():
                each.add_(torch.randn_like(each) * NOISE.get(kind, 0.2))
    return made.eval()
