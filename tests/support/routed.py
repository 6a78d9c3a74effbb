"""Models with experts, and their routing as stock's forward of whole sequences has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from families import BY_NAME, build
from tiny import config_class, model_class_of, tiny

from hf_paged.model.mixtures import mixtures_of

WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    "lfm2_moe": {"num_dense_layers": 0},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
}
"""Settings by which small models have layers with experts, and groups of these."""


def mixture(name: str) -> Any:
    """A family's small model, the same random weights every time."""
    if name in BY_NAME and name not in WITH_EXPERTS:  # tests of ranks add small families to it
        return build(BY_NAME[name])
    cls = config_class("causal", name)
    config = cls(**{**tiny(cls), **WITH_EXPERTS.get(name, {})})
    torch.manual_seed(0)
    model = model_class_of("causal", cls)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 or not parameter.any():
                parameter.normal_(0, 0.2)
    return model


@contextmanager
def seen_routing(model: Any) -> Iterator[list[torch.Tensor]]:
    """The experts [tokens, k] that each layer of the forwards inside computes, one layer after the other."""
    seen: list[torch.Tensor] = []

    def note(module: Any, arguments: Any, keywords: Any) -> None:
        seen.append((arguments[1] if len(arguments) > 1 else keywords["top_k_index"]).clone())

    hooks = [each.register_forward_pre_hook(note, with_kwargs=True) for each in mixtures_of(model).values()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def routing_of(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The routing int16 [rows, columns, layers, k] of stock's forward without a cache."""
    with seen_routing(model) as seen, torch.no_grad():
        model(ids, attention_mask=mask, use_cache=False)
    stacked = torch.stack([each.flatten(0, -2) for each in seen], 1)
    return stacked.unflatten(0, tuple(ids.shape)).to(torch.int16)
