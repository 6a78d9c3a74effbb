"""A sample of every kind of architecture, from shrunken default configs: stock's tokens, and the path that
each had before.

`scripts/sweep_models.py` does this for all of them, in more modes, and writes docs/models.md and
expected_paths.json.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import every_other
from compare import assert_clean, assert_equal, assert_same, both
from expected import expected_paths, path_of
from pictures import pad_left, with_pictures, with_recordings
from tiny import build, mappings, prompts

from hf_paged.generate.cache import paged_parts
from hf_paged.model.cache_name import NAMES, cache_in
from hf_paged.model.state_layers import NUMBERED

SAMPLE = {
    # Plain attention in all its variants; windows, chunks, biases, experts.
    "causal": [
        "biogpt", "cohere2", "glm4", "granite_swa", "llama4_text", "nemotron", "olmo2", "phimoe", "smollm3", "stablelm", "starcoder2",
        # Shared keys and values; latents; an indexer beside them.
        "gemma3n_text", "gemma4_text", "deepseek_v2", "deepseek_v3", "longcat_flash", "deepseek_v32",
        # Recurrent layers beside attention, and both in one layer.
        "bamba", "jamba", "kimi_linear", "lfm2", "qwen3_next", "falcon_h1", "zamba2",
        # Attention of their own, and no keys and values at all.
        "gptj", "mpt", "mamba2",
    ],
    "seq2seq": ["m2m_100", "marian", "mbart", "pegasus", "umt5", "led"],
}  # fmt: skip
CELLS = [(kind, family) for kind, families in SAMPLE.items() for family in families]
LOOKS = ["gemma3", "idefics3", "llava", "qwen2_vl"]
SHARES = ["bart", "m2m_100", "marian", "pegasus", "t5"]


def tiny(kind: str, family: str) -> Any:
    """The family's tiny model, if this transformers knows it."""
    known = {config.model_type: config for config in mappings()[kind]}
    if family not in known:
        pytest.skip(f"this transformers has no {family}")
    return build(kind, known[family])


@pytest.mark.filterwarnings("default::hf_paged.FallbackWarning")
@pytest.mark.parametrize(("kind", "family"), CELLS, ids=[f"{kind}-{family}" for kind, family in CELLS])
def test_path_and_tokens(kind: str, family: str) -> None:
    """Padded beams (C16, C36) give stock's tokens; every layer is read the way that expected_paths.json
    says.
    """
    model = tiny(kind, family)
    setting = model.config._attn_implementation
    arguments = {
        **dict(prompts(kind))["padded"],
        "max_new_tokens": 8,
        "do_sample": False,
        "return_dict_in_generate": True,
    }
    stock, paged = both(model, **arguments, num_beams=2, output_scores=True)
    path = path_of(paged_parts(cache_in(paged)))
    assert_equal(_told(stock), _told(paged))
    expected = expected_paths().get(f"{kind} {family}", "")
    # Before transformers 5.14 some attention is not in the registry, and states are on stock's cache.
    known = [expected] if NUMBERED else [expected, expected.replace("paged", "dense"), ""]
    assert path in known, "a path changed; if it is meant to: scripts/sweep_models.py --expect"
    del stock, paged
    assert_clean(model, setting)


def _told(answer: Any) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in (*NAMES, "cache_params")}


@pytest.mark.parametrize(
    ("family", "mode"),
    every_other(
        [*LOOKS],
        [{}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 2}],
    ),
)
def test_pictures(family: str, mode: dict[str, Any]) -> None:
    """Two prompts of different lengths, each around a picture of its own."""
    model = tiny("image", family)
    shown = with_pictures(model)
    assert shown is not None, "nobody knows any more how to show it a picture"
    paged = assert_same(
        model,
        **pad_left(shown),
        max_new_tokens=8,
        return_dict_in_generate=True,
        **{"do_sample": False, **mode},
    )
    assert path_of(paged_parts(paged.past_key_values)) == expected_paths()[f"image {family}"]


@pytest.mark.parametrize("family", [*SHARES, "whisper"])
def test_beams_share_the_cross_tables(family: str) -> None:
    """C36: one cross table per prompt, of the encoder's length, whatever the number of beams."""
    kind = "audio" if family == "whisper" else "seq2seq"
    model = tiny(kind, family)
    if kind == "audio":
        given = with_recordings(model)
        assert given is not None
        length = given["input_features"].shape[2] // 2
        model.generation_config.return_dict_in_generate = False
    else:
        given = dict(prompts("seq2seq"))["whole"]
        length = given["input_ids"].shape[1]
    held: list[tuple[int, int]] = []

    def count(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        parts = paged_parts(cache_in(kwargs))
        if len(parts) == 2:
            held.append(tuple(next(iter(part.sequences.rows.values())).group.pool.held for part in parts))

    model.register_forward_hook(count, with_kwargs=True)
    stock, paged = both(model, **given, num_beams=4, max_new_tokens=9, min_new_tokens=9, do_sample=False)
    assert torch.equal(stock, paged)
    blocks = -(-length // 4)
    assert {cross for _, cross in held} == {2 * blocks}
    assert max(own for own, _ in held) > 2 * 3, "beams that never part prove nothing"


@pytest.mark.parametrize("beams", [1, 3])
def test_a_second_half_of_the_models_own(beams: int) -> None:
    """BLIP puts the cache beside a stock one for its picture: that one has rows for every beam too."""
    model = tiny("image", "blip")
    shown = with_pictures(model)
    assert shown is not None
    assert_same(
        model, **shown, num_beams=beams, num_return_sequences=beams, max_new_tokens=8, do_sample=False
    )


@pytest.mark.parametrize("padded", [False, True])
def test_latents_without_positions(padded: bool) -> None:
    """GLM-5's default has no width for positions: half of what its latents' layer stores is empty."""
    model = tiny("image", "glm5_next")
    given = dict(prompts("causal"))["padded" if padded else "whole"]
    assert_same(model, **given, num_beams=2, max_new_tokens=8, do_sample=False)


def test_a_second_cache() -> None:
    """Voxtral Realtime hands a cache of its encoder from step to step: prompts of its beams are computed for
    every beam.
    """
    model = tiny("audio", "voxtral_realtime")
    heard = with_recordings(model)
    assert heard is not None
    assert_same(model, **heard, num_beams=2, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize(
    "mode", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=["beams", "samples"]
)
def test_a_forward_that_draws(mode: dict[str, Any]) -> None:
    """VibeVoice ASR adds noise to its recordings: each row of a prompt gets noise of its own, the same as
    with stock.
    """
    model = tiny("audio", "vibevoice_asr")
    heard = with_recordings(model)
    assert heard is not None
    assert_same(model, **heard, max_new_tokens=8, **{"do_sample": False, **mode})
