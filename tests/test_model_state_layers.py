"""Recurrent states in slots: answers of generate(), captured and taken back, equal stock's (C4, C7)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from captures import counts, policy, reasons
from cases import every_other
from poison import poison_free_slots
from releases import FLAT_STATES, NEEDS_SLOTS
from tape import record
from tiny import build, config_class

from hf_paged import Engine, PagedCache
from hf_paged.model.cache_name import name_in
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS

FAMILIES = [
    "falcon_h1",
    "jamba",
    "kimi_linear",
    "lfm2",
    "nemotron_h",
    "qwen3_5_text",
    "zamba2",
    "zaya",
]
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "beams": {"num_beams": 3}}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_free_slots(monkeypatch)


@pytest.fixture(scope="module")
def qwen() -> Any:
    return build("causal", config_class("causal", "qwen3_5_text"))


def padded_prompts() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("family", "mode"), every_other(FAMILIES, [*MODES]))
def test_captured_steps_answer_as_stock(family: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    model = build("causal", config_class("causal", family))
    given = {
        **padded_prompts(),
        "max_new_tokens": 14,
        "min_new_tokens": 14,
        "do_sample": False,
        **MODES[mode],
    }
    stock = model.generate(**given)
    assert torch.equal(model.generate(cache_implementation="paged", **given), stock)
    assert counts(model)["replayed"] >= 8, reasons(model)
    memory_of(model).check()


@FLAT_STATES
@pytest.mark.parametrize("family", ["jamba", "zamba"])
def test_a_scan_goes_on_where_a_piece_of_a_prompt_ended(family: str) -> None:
    """Transformers' begins anew: what is right is the whole prompt's answer."""
    model = build("causal", config_class("causal", family))
    given = {**padded_prompts(), "max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    whole = model.generate(**given, do_sample=False).logits[0]
    pieces = model.generate(**given, do_sample=False, cache_implementation="paged", prefill_chunk_size=3)
    torch.testing.assert_close(pieces.logits[0], whole, rtol=1e-5, atol=1e-5)
    memory_of(model).check()


def test_a_fixed_number_of_slots_is_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one slot for each row, steps run once and are not captured; the answer is the same."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    model = build("causal", config_class("causal", "qwen3_5_text"))
    given = {**padded_prompts(), "max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False}
    options = {"cache_implementation": "paged", "cache_config": {"state_slots": 3}}
    assert torch.equal(model.generate(**given, **options), model.generate(**given))
    assert not counts(model)["replayed"]
    memory_of(model).check()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5_text"])
def test_states_in_bfloat16_answer_nearly_as_stock(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed in float32 and rounded where they are stored, in captured steps and others."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    model = build("causal", config_class("causal", family))
    given = {**padded_prompts(), "max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False}
    given |= {"return_dict_in_generate": True, "output_logits": True}
    stock = model.generate(**given)
    options = {"cache_implementation": "paged", "cache_config": {"state_dtype": "bfloat16"}}
    paged = model.generate(**given, **options)
    assert counts(model)["replayed"] >= 8, reasons(model)
    assert (paged.sequences == stock.sequences).float().mean() > 0.9
    difference = (torch.stack(paged.logits[:4]) - torch.stack(stock.logits[:4])).abs().max()
    assert 0 < difference < 0.05
    halves = [
        {each.dtype for each in group.layouts}
        for group in memory_of(model).groups.values()
        if not group.kind.fills
    ]
    assert halves == [{torch.float32, torch.bfloat16}]  # convolutions keep their type
    memory_of(model).check()


def test_no_other_types_of_states(qwen: Any) -> None:
    for wrong in ("float16", torch.bfloat16):
        with pytest.raises(ValueError, match=r"state_dtype=.* is not one of \(None, 'bfloat16'\)"):
            PagedCache(qwen, state_dtype=wrong)
        with pytest.raises(ValueError, match=r"state_dtype=.* is not one of \(None, 'bfloat16'\)"):
            Engine(qwen, state_dtype=wrong)


def test_drafts_that_are_taken_back() -> None:
    """Convolutions keep the inputs of a step in tensors of their own until drafts are settled."""
    model = build("causal", config_class("causal", "lfm2"))
    ids = padded_prompts()["input_ids"][1:2, :4].repeat(1, 4)
    given = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(ids, **given)
    assert torch.equal(model.generate(ids, cache_implementation="paged", **given), wanted)
    memory_of(model).check()


def test_states_are_read_outside_a_forward_and_set_within_one() -> None:
    model = build("causal", config_class("causal", "qwen3_5_text"))
    cache = PagedCache(model, state_dtype="bfloat16")
    with torch.no_grad():
        model(padded_prompts()["input_ids"], past_key_values=cache)
    layer = next(layer for layer in cache.layers if hasattr(layer, "conv_states"))
    assert layer.conv_states[0].shape[0] == 3
    assert layer.has_previous_state[0]
    assert layer.recurrent_states[0].dtype == torch.float32
    with pytest.raises(RuntimeError, match="are set by forwards of the model"):
        layer.conv_states[0] = torch.zeros(3)
    with pytest.raises(KeyError):
        layer.conv_states[1]
    cache.reset()
    assert layer.conv_states[0] is None


@FLAT_STATES
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2"])
def test_models_without_keys_and_values_keep_their_cache(family: str) -> None:
    """Stock takes no cache from one call to the next for these: what is right is the whole prompt's answer."""
    model = build("causal", config_class("causal", family))
    model.generation_config.eos_token_id = None
    given = {"max_new_tokens": 6, "do_sample": False}
    ids = padded_prompts()["input_ids"][1:]
    cache = PagedCache(model)
    said = model.generate(ids, past_key_values=cache, **given)
    assert torch.equal(said, model.generate(ids, **given))
    assert cache.get_seq_length() == said.shape[1] - 1
    assert cache.lengths == [said.shape[1] - 1] * 2
    assert len({tuple(slots) for slots in cache.tables()}) == 2
    twin = copy.deepcopy(cache)
    more = torch.cat([said, ids[:, :5]], 1)
    wanted = model.generate(more, **given)
    assert torch.equal(model.generate(more, past_key_values=cache, **given), wanted)
    mask = torch.ones_like(more)
    assert torch.equal(model.generate(more, attention_mask=mask, past_key_values=twin, **given), wanted)
    cache.batch_select_indices([1])
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, **given), said)
    memory_of(model).check()


@NEEDS_SLOTS
@pytest.mark.parametrize("family", ["lfm2", "mamba2", "qwen3_5_text"])
def test_plain_forwards_of_a_cache(family: str) -> None:
    """A prompt in two forwards of the user's own, by the name that the model has for its cache."""
    model = build("causal", config_class("causal", family))
    ids = torch.randint(5, 80, (2, 13), generator=torch.Generator().manual_seed(1))
    cache = {name_in(model): PagedCache(model)}
    with torch.no_grad():
        logits = [model(part, use_cache=True, **cache).logits for part in (ids[:, :8], ids[:, 8:])]
        torch.testing.assert_close(
            torch.cat(logits, 1), model(ids, use_cache=False).logits, atol=1e-4, rtol=0
        )
