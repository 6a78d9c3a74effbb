"""Models with LoRA adapters that do something."""

from __future__ import annotations

from typing import Any

import peft
import torch
from families import BY_NAME, build

NAMES = ("one", "two", "three", "four", "five", "six")
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
