"""Pictures and recordings behind equal token ids are not equal prompts (contract C24)."""

from __future__ import annotations

from typing import Any

import pytest
from changed_models import blind
from compare import assert_clean, assert_equal
from pictures import with_pictures, with_recordings
from tiny import build, mappings

import hf_paged
from hf_paged.generate import keys
from hf_paged.generate import prefix_reuse as reuse

LOOKS = ["gemma3", "idefics3", "llava", "qwen2_vl"]
LISTENS = ["qwen3_asr", "whisper"]


def tiny(family: str) -> Any:
    """The family's tiny model, of whatever kind it counts as."""
    found = {
        config.model_type: (kind, config)
        for kind, known in mappings().items()
        for config in known
        if kind != "causal"
    }
    if family not in found:
        pytest.skip(f"this transformers has no {family}")
    return build(*found[family])


def other(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same prompts with other pictures."""
    return {
        name: value.flip(0) * 1.5 + 0.1 if value.is_floating_point() else value
        for name, value in inputs.items()
    }


def without(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same token ids, and nothing that stands behind them."""
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def ask(model: Any, inputs: dict[str, Any]) -> None:
    """Generate with prefix caching: the answer must be stock's."""
    call = {
        **inputs,
        "max_new_tokens": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    stock = model.generate(**call)
    paged = model.generate(
        **call, cache_implementation="paged", cache_config={"block_size": 4, "prefix_caching": True}
    )
    assert_equal(*({name: answer[name] for name in ("sequences", "scores")} for answer in (stock, paged)))


def blind_to_media(patch: pytest.MonkeyPatch) -> None:
    """Key blocks by tokens alone, whatever else a forward is given."""
    blind(patch)
    patch.setattr(keys, "_settings", lambda arguments: iter(()))
    patch.setattr(keys, "_count_tokens", lambda *args: True)
    patch.setattr(reuse, "why_never", lambda complete, model, in_slots: None)


@pytest.mark.parametrize("family", LOOKS)
def test_other_pictures_behind_the_same_ids(family: str) -> None:
    model = tiny(family)
    shown = with_pictures(model)
    assert shown is not None
    for inputs in (shown, other(shown), without(shown), shown, other(shown), without(shown)):
        ask(model, inputs)
    assert hf_paged.stats(model).reasons
    assert_clean(model, "sdpa")


@pytest.mark.parametrize(
    "family", ["idefics3", "llava"]
)  # others' masks or positions say already that they are no plain prompts
def test_keyed_by_tokens_alone_they_would_be_shared(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family)
    shown = with_pictures(model)
    assert shown is not None
    blind_to_media(monkeypatch)
    ask(model, shown)
    with pytest.raises(AssertionError, match="answer"):
        ask(model, without(shown))


@pytest.mark.parametrize("family", LISTENS)
def test_other_recordings_behind_the_same_ids(family: str) -> None:
    """An encoder's input decides a decoder's keys and values; so does whatever is put in the place of ids."""
    model = tiny(family)
    heard = with_recordings(model)
    assert heard is not None
    for inputs in (heard, other(heard), heard):
        ask(model, inputs)
    assert hf_paged.stats(model).reused == 0
    assert set(hf_paged.stats(model).reasons.values()) == {3}
