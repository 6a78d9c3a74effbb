"""Models with LoRA adapters that do something."""

from __future__ import annotations

from typing import Any

import peft
import torch
from families import BY_NAME, build

NAMES = ("one", "two", "three", "four", "five", "six")
TRAINED = (
    "trainable_tokens_delta",
    "modules_to_save",
    "lora_magnitude_vector",
    "lora_B.one.bias",
    "lora_B.two.bias",
)
"""Weights that begin as the model's own, or as zeros."""
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(**options: Any) -> Any:
    """A LoraConfig whose adapter changes answers from the start."""
    return peft.LoraConfig(
        **{"r": 8, "lora_alpha": 32, "target_modules": LINEAR, "init_lora_weights": False, **options}
    )


def adapted(*configs: Any, family: str = "llama", seed: int = 0, model: Any = None) -> Any:
    """A peft model with an adapter for each config, called NAMES; the first one is active."""
    torch.manual_seed(seed)
    made = peft.get_peft_model(
        model or build(BY_NAME[family]), configs[0] if configs else lora(), adapter_name=NAMES[0]
    )
    for name, config in zip(NAMES[1:], configs[1:], strict=False):
        made.add_adapter(name, config)
    return made.eval()


def trained(*configs: Any, third: dict[str, Any] | None = None, **options: Any) -> Any:
    """A peft model whose adapters have trained weights of every kind."""
    model = adapted(*configs, lora(r=4, **(third or {})), **options)
    noise = torch.Generator().manual_seed(7)
    for name, each in model.named_parameters():
        if any(part in name for part in TRAINED):
            spread = each.data.std() if each.numel() > 1 else 0
            each.data += torch.randn(each.shape, generator=noise) * (0.3 * spread if spread > 0 else 0.3)
    return model


def with_a_tied_head() -> Any:
    """A model whose head has the weight of its embeddings."""
    torch.manual_seed(0)
    made = build(BY_NAME["llama"])
    made.config.tie_word_embeddings = True
    made.lm_head.weight = made.model.embed_tokens.weight
    return made.eval()
