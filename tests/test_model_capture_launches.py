"""Launches a layer of captured steps: what people run stays as fused as it is."""

from __future__ import annotations

import pytest
from launches import KINDS, launches_of
from releases import LATENTS
from tiny import build, config_class, prompts

LAUNCHES = {
    "deepseek_v3": (12, 1, 8.5, 41),
    "gemma2": (7, 2, 3, 0),
    "gemma3_text": (7, 2, 5, 0),
    "gemma4_text": (8, 1.5, 7, 0),
    "glm4": (6, 2, 5, 0),
    "gpt_oss": (7, 2, 8, 1),
    "llama": (7, 2, 3.5, 0),
    "mistral": (7, 2, 3.5, 0),
    "olmo3": (7, 2, 6.5, 0),
    "phi3": (4, 2, 5, 0),
    "qwen2": (7, 2, 3.5, 0),
    "qwen3": (7, 2, 5.5, 0),
    "qwen3_moe": (7, 2, 7.5, 1),
}
"""Of each of KINDS, of the most downloaded families."""


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=LATENTS if each == "deepseek_v3" else ()) for each in LAUNCHES]
)
def test_launches_a_layer(family: str) -> None:
    model = build("causal", config_class("causal", family)).bfloat16()
    found = launches_of(model, dict(prompts("causal"))["whole"])
    assert found.kinds() == dict(zip(KINDS, LAUNCHES[family], strict=True)), found.counts
