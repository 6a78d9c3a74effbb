"""Several pictures, videos or recordings a prompt, on a sample of the classes that scripts/sweep_media.py
goes through.
"""

from __future__ import annotations

from typing import Any

import pytest
from compare import assert_clean, assert_same
from pictures import pad_left, with_pictures, with_recordings, with_videos
from releases import NEEDS_SLOTS
from tiny import build, config_class, mappings

SAMPLE = [
    ("image", "llava_next", with_pictures),
    ("image", "llava_onevision", with_videos),
    ("image", "idefics2", with_pictures),
    ("image", "kosmos-2", with_pictures),
    ("image", "minicpmv4_6", with_pictures),
    ("image", "mllama", with_pictures),
    ("image", "glm4v", with_videos),
    ("image", "step3p7", with_pictures),
    ("image", "gemma4_unified", with_recordings),
    ("image", "qwen2_vl", with_videos),
    ("image", "qwen2_5_omni_thinker", with_recordings),
    ("audio", "qwen2_audio", with_recordings),
    ("audio", "voxtral", with_recordings),
    ("audio", "granite_speech", with_recordings),
    ("audio", "pop2piano", with_recordings),
]
ONE_EACH = {"kosmos-2", "pop2piano"}
"""Models that take one picture a prompt."""
CALLS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize(
    ("kind", "family", "show"),
    [
        pytest.param(
            *each, id=f"{each[1]}-{each[2].__name__}", marks=NEEDS_SLOTS if each[1] == "minicpmv4_6" else ()
        )
        for each in SAMPLE
    ],
)
def test_several_each(kind: str, family: str, show: Any) -> None:
    """Two of them in each of two prompts, with padding: beams and samples each see their own prompt's, as
    with stock.
    """
    if family not in {config.model_type for config in mappings()[kind]}:
        pytest.skip(f"this transformers has no {family}")
    model = build(kind, config_class(kind, family))
    setting = model.config._attn_implementation
    given = show(model, 2, 1 if family in ONE_EACH else 2)
    assert given is not None, "no inputs are known any more that change the logits"
    for call in CALLS.values():
        try:
            model.generate(**pad_left(given), max_new_tokens=2, **call)
        except Exception:  # stock itself cannot repeat several pictures for the rows of a prompt
            call = {}
        assert_same(model, **pad_left(given), **{"max_new_tokens": 6, "do_sample": False, **call})
    assert_clean(model, setting)
