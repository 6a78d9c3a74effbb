"""Prompts are computed once and stored once: beams, samples, cross attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted_rows import counted
from families import BY_NAME, VOCABULARY, build

from hf_paged import PagedCache
from hf_paged.generate.forward import wrap

PROMPT, NEW = 24, 10


def _call(model: Any, prompts: int, **arguments: Any) -> tuple[Any, list[tuple[int, int]]]:
    ids = torch.randint(5, VOCABULARY, (prompts, PROMPT), generator=torch.Generator().manual_seed(1))
    call = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        **arguments,
    }
    with counted(model) as seen:
        torch.manual_seed(0)
        answer = model.generate(
            **call, cache_implementation="paged", cache_config={"block_size": 4}, return_dict_in_generate=True
        )
    torch.manual_seed(0)
    assert torch.equal(answer.sequences, model.generate(**call))
    return answer, seen


@pytest.mark.parametrize(
    "mode",
    [{"num_beams": 4, "do_sample": False}, {"do_sample": True, "num_return_sequences": 4}],
    ids=["beams", "samples"],
)
def test_prompt_is_computed_once(llama: Any, mode: dict[str, Any]) -> None:
    """Two prompts with four rows each: the prefill runs two rows, every step after it eight."""
    answer, seen = _call(llama, 2, **mode)
    assert seen[0] == (2, PROMPT)
    assert seen[1:] == [(8, 1)] * (NEW - 1)
    assert answer.past_key_values.sequences.count == 8


@pytest.mark.parametrize(
    "mode",
    [{"num_beams": 4, "do_sample": False}, {"do_sample": True, "num_return_sequences": 4}],
    ids=["beams", "samples"],
)
def test_prompt_is_stored_once(llama: Any, mode: dict[str, Any]) -> None:
    """C6, C13: all full blocks of a prompt are the same in the rows of its group."""
    answer, _ = _call(llama, 2, **mode)
    cache = answer.past_key_values
    tables = cache.tables()
    for group in (tables[:4], tables[4:]):
        assert len({tuple(row[: PROMPT // 4]) for row in group}) == 1
    pool = next(iter(cache.sequences.rows.values())).group.pool
    assert all(pool.references(block) == 4 for block in tables[0][: PROMPT // 4])
    assert pool.peak_held < 8 * len(tables[0])


def test_chunks_of_a_prompt_are_computed_once(llama: Any) -> None:
    """Every chunk, not the first alone."""
    _, seen = _call(llama, 2, num_beams=3, prefill_chunk_size=10)
    assert seen[:3] == [(2, 10), (2, 10), (2, 4)]
    assert seen[3:] == [(6, 1)] * (NEW - 1)


def test_greedy_rows_are_all_computed(llama: Any) -> None:
    """Equal prompts of different requests are rows like any other: nothing is folded that was not
    expanded.
    """
    _, seen = _call(llama, 2)
    assert seen == [(2, PROMPT)] + [(2, 1)] * (NEW - 1)


def test_training_mode_is_not_shared(llama: Any) -> None:
    """Trap 10: under dropout equal rows differ."""
    llama.train()
    ids = torch.randint(5, VOCABULARY, (1, PROMPT))
    with counted(llama) as seen:
        llama.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=3,
            max_new_tokens=3,
            min_new_tokens=3,
            cache_implementation="paged",
        )
    assert seen[0] == (3, PROMPT)


def test_rows_that_a_user_made_different_are_all_computed(llama: Any) -> None:
    """Embeddings with noise on every row are not one prompt."""
    embeds = torch.randn(6, PROMPT, 32)
    with counted(llama) as seen, torch.no_grad():
        cache = PagedCache(llama)
        cache.sequences.unforked = 3
        wrap(llama, llama.forward)(inputs_embeds=embeds, past_key_values=cache)
    assert seen == [(6, PROMPT)]
    assert cache.sequences.count == 6


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_cross_attention_is_stored_once(name: str) -> None:
    """C36: one cross table per prompt, of the encoder's length, shared by its beams."""
    model = build(BY_NAME[name])
    answer, seen = _call(model, 2, num_beams=4)
    assert seen[0] == (2, 1)
    cross = answer.past_key_values.cross_attention_cache
    tables = cross.tables()
    assert len(tables) == 8
    assert len({tuple(row) for row in tables}) == 2
    pool = next(iter(cross.sequences.rows.values())).group.pool
    assert pool.peak_held == 2 * PROMPT // 4


def test_reorder_moves_no_tensor(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies on write are the only traffic of a beam step: at most one block a row."""
    from hf_paged.kv.store import Store

    copied: list[int] = []
    original = Store.copy
    monkeypatch.setattr(
        Store, "copy", lambda self, copies: (copied.append(len(copies)), original(self, copies))[1]
    )
    _call(llama, 1, num_beams=4)
    assert sum(copied) > 0
    assert max(copied) <= 4
    assert len(copied) < NEW


def test_mixed_adapters_are_sliced_with_the_rows(ids: torch.Tensor) -> None:
    """Trap 10: peft checks that it has one adapter name per row."""
    from peft import LoraConfig, get_peft_model

    base = build(BY_NAME["llama"])
    model = get_peft_model(
        base,
        LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"]),
        adapter_name="one",
    )
    model.add_adapter("two", LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"]))
    model.eval()
    call = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "adapter_names": ["one", "__base__", "two"],
        "num_beams": 3,
        "max_new_tokens": 6,
    }
    with counted(base) as seen:
        paged = model.generate(**call, cache_implementation="paged")
    assert seen[0] == (3, 13)
    assert torch.equal(paged, model.generate(**call))
