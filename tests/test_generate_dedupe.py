"""Prompts are computed once and stored once: beams, samples, cross attention."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import pytest
import torch
from cases import every_other
from compare import assert_clean, both
from counted_rows import counted
from families import BY_NAME, VOCABULARY, build
from releases import CUTS_AXES, NEEDS_SLOTS
from tiny import build as build_tiny
from tiny import config_class, mappings
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicCache

from hf_paged import FallbackWarning, PagedCache
from hf_paged.generate import dedupe, forward
from hf_paged.generate.ended import ComputedRows
from hf_paged.generate.forward import wrap
from hf_paged.model.adapters import Inapplicable
from hf_paged.model.cache_name import cache_in

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


REPEATED = {
    "adjacent": [0, 0, 0, 0, 1, 1, 1, 1],
    "mixed": [0, 1, 0, 2, 1, 0],
    "all": [0, 0, 0],
    "none": [0, 1, 2],
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=["greedy", "samples"])
def test_rows_that_a_caller_repeated_are_computed_once(
    llama: Any, name: str, padded: bool, options: dict[str, Any]
) -> None:
    """A trainer gives each prompt several times as rows of its batch: they are found by content."""
    order = REPEATED[name]
    ids = torch.randint(5, VOCABULARY, (3, PROMPT), generator=torch.Generator().manual_seed(1))[order]
    mask = torch.ones_like(ids)
    if padded:
        mask[:, :5] = 0
        mask[torch.tensor(order) == 1, :11] = 0
    answer, seen = _call(llama, 1, input_ids=ids * mask, attention_mask=mask, **options)
    assert seen[0] == (len(set(order)), PROMPT)
    assert seen[1:] == [(len(order), 1)] * (NEW - 1)
    tables = answer.past_key_values.tables()
    stored = [5 if padded and row != 1 else 11 if padded else 0 for row in order]
    firsts = [tuple(row[: (PROMPT - skipped) // 4]) for row, skipped in zip(tables, stored, strict=True)]
    assert len(set(firsts)) == len(set(order))


def test_rows_of_other_padding_differ(llama: Any) -> None:
    """The same tokens under another mask are another prompt."""
    ids = torch.randint(5, VOCABULARY, (1, PROMPT)).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    _, seen = _call(llama, 1, input_ids=ids, attention_mask=mask)
    assert seen[0] == (2, PROMPT)


def test_repeated_rows_in_chunks_and_beams(llama: Any) -> None:
    """Every chunk; beams of repeated prompts are one row, too."""
    ids = torch.randint(5, VOCABULARY, (2, PROMPT))[[0, 1, 0]]
    mask = torch.ones_like(ids)
    _, seen = _call(llama, 1, input_ids=ids, attention_mask=mask, num_beams=2, prefill_chunk_size=10)
    assert seen == [(2, 10), (2, 10), (2, 4)] + [(6, 1)] * (NEW - 1)


def test_digests_that_collide_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedupe, "MIX", 0)  # the digest of a row is the sum of its tokens by their places then
    rows = torch.tensor([[2, 1], [0, 2], [2, 1], [4, 0]])
    assert dedupe.equal_by_content([rows]).tolist() == [0, 1, 0, 3]


def test_content_is_compared_bit_by_bit() -> None:
    """All tensors count, in every dtype; what is not a number is equal to itself."""
    nan = float("nan")
    floats = torch.tensor([[0.0, nan], [-0.0, nan], [0.0, nan]])
    assert dedupe.equal_by_content([floats]).tolist() == [0, 1, 0]
    assert dedupe.equal_by_content([floats.bfloat16(), torch.tensor([1, 1, 2])]).tolist() == [0, 1, 2]


class Waits(TorchDispatchMode):
    """Counts what waits for a device: numbers that Python reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = 0
        read = torch.Tensor.tolist
        monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (self.note(), read(x))[1])

    def note(self) -> None:
        self.count += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rows and the attention mask are read in one transfer."""
    ids = torch.randint(5, VOCABULARY, (2, PROMPT))[[0, 1, 0]]
    cache = PagedCache(llama)
    cache.sequences.copies = 1
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with Waits(monkeypatch) as waits:
        prompt = dedupe.read_prompt(llama, arguments, cache)
    assert waits.count == 1
    assert prompt is not None
    assert prompt.distinct is not None
    assert prompt.distinct[:2] == ([0, 1], [0, 1, 0])
    assert prompt.padding == ([0, 0, 0], True)


def test_a_keyword_without_rows_keeps_rows_apart(llama: Any) -> None:
    """Of pictures there may be as many as rows, and two of them belong to one."""
    ids = torch.ones((2, PROMPT), dtype=torch.long)
    for keywords, together in (({}, True), ({"pixel_values": torch.ones(2, 3, 4, 4)}, False)):
        cache = PagedCache(llama)
        cache.sequences.copies = 1
        prompt = dedupe.read_prompt(llama, {"input_ids": ids, **keywords}, cache)
        assert prompt is not None
        assert (prompt.distinct is not None) is together


def test_training_mode_without_dropout_is_shared(llama: Any) -> None:
    """Trap 19: trainers generate in training mode. The mode alone changes nothing."""
    llama.train()
    _, seen = _call(llama, 1, num_beams=3)
    assert seen[0] == (1, PROMPT)
    assert llama.training


def test_rows_under_dropout_are_not_shared(llama: Any) -> None:
    """Trap 10: equal rows differ then. Stock's cache is used, and a cache that was passed computes all rows."""
    llama.train()
    for layer in llama.model.layers:
        layer.self_attn.attention_dropout = 0.2
    ids = torch.randint(5, VOCABULARY, (1, PROMPT)).repeat(3, 1)
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "min_new_tokens": 3}
    found = []
    for cache in ({}, {"cache_implementation": "paged"}, {"past_key_values": PagedCache(llama)}):
        torch.manual_seed(0)
        with counted(llama) as seen, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", FallbackWarning)
            found.append(llama.generate(ids, **call, **cache))
        assert seen[0] == (3, PROMPT)
        texts = [str(each.message) for each in said if each.category is FallbackWarning]
        assert ["attention_dropout=0.2" in text for text in texts] == [True] * (
            "cache_implementation" in cache
        )
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_rows_that_a_user_made_different_are_all_computed(llama: Any) -> None:
    """Embeddings with noise on every row are not one prompt."""
    embeds = torch.randn(6, PROMPT, 32)
    with counted(llama) as seen, torch.no_grad():
        cache = PagedCache(llama)
        cache.sequences.copies = 3
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


# ---- recurrent states

HYBRIDS = [
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "inkling2_text", "inkling_text", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "lfm3", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba", "zamba2", "zaya",
]  # fmt: skip
WITH_AXES = ["qwen2_vl", "qwen3_5"]
"""Models with pictures, whose positions have several axes also where none is shown."""
LENGTH = 17


@functools.lru_cache(maxsize=1)
def tiny_model(kind: str, family: str) -> Any:
    """One model at a time, shared by the modes of its family."""
    known = {config.model_type: config for config in mappings()[kind]}
    if family not in known:
        pytest.skip(f"this transformers has no {family}")
    return build_tiny(kind, known[family])


def repeated_prompts(order: list[int], padded: int = 0) -> dict[str, torch.Tensor]:
    """Rows of two prompts, the first of which begins with padding."""
    ids = torch.randint(5, 80, (2, LENGTH), generator=torch.Generator().manual_seed(3))[order]
    mask = torch.ones_like(ids)
    mask[torch.tensor(order) == 0, :padded] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


HYBRID_MODES: dict[str, dict[str, Any]] = {
    "samples": {**repeated_prompts([0, 1]), "do_sample": True, "num_return_sequences": 3},
    "beams": {**repeated_prompts([0, 1], 6), "do_sample": False, "num_beams": 3},
    "rows": {**repeated_prompts([0, 1, 1, 0], 6), "do_sample": True},
    "chunks": {**repeated_prompts([1, 0, 1], 6), "do_sample": True, "num_return_sequences": 2, "prefill_chunk_size": 7},
}  # fmt: skip
CELLS = [("causal", family) for family in HYBRIDS] + [("image", family) for family in WITH_AXES]


def rows_of_a_prompt(model: Any, **arguments: Any) -> list[int]:
    """The rows that each forward of a prompt computed, in a call that answers like stock."""
    setting = model.config._attn_implementation
    given = {"max_new_tokens": 4, "min_new_tokens": 4, **arguments}
    with counted(model) as seen:
        stock, paged = both(model, **given)
    assert torch.equal(stock, paged)
    assert_clean(model, setting)
    forwards = seen[len(seen) // 2 :]  # those of the second call
    return [rows for rows, _ in forwards[: len(forwards) - 3]]


@NEEDS_SLOTS
@pytest.mark.parametrize(
    ("kind", "family", "mode"), [(*cell, mode) for cell, mode in every_other(CELLS, [*HYBRID_MODES], every=4)]
)
def test_states_follow_the_rows_of_a_prompt(kind: str, family: str, mode: str) -> None:
    """Stock's layers fork their states with the rows: two rows are computed, whatever there are of each."""
    if kind == "image" and mode == "chunks" and not CUTS_AXES:
        pytest.skip("this stock cannot cut positions of several axes into chunks")
    assert set(rows_of_a_prompt(tiny_model(kind, family), **HYBRID_MODES[mode])) == {2}


def test_a_state_in_the_modules_keeps_rows_apart(caplog: pytest.LogCaptureFixture) -> None:
    """RecurrentGemma's cache has places for states, and its modules keep them: every row is computed, and the
    log says so by name, once.
    """
    model = tiny_model("causal", "recurrent_gemma")
    computed = []
    for _ in range(2):
        with counted(model) as seen:
            stock, paged = both(model, **HYBRID_MODES["samples"], max_new_tokens=4, min_new_tokens=4)
        assert torch.equal(stock, paged)
        computed.append([rows for rows, _ in seen[4:-3]])
    assert [rows[-1] for rows in computed] == [6, 6]
    assert computed[1] == [6], "it is known after the first prompt"
    own = [each.message for each in caplog.records if each.name == "hf_paged"]  # transformers has words, once
    assert [
        "RecurrentGemmaForCausalLM computes equal rows of a prompt one by one" in each for each in own
    ] == [True]


def test_a_layer_that_leaves_what_it_keeps_keeps_rows_apart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The abilities of stock's layers are tried, not read from their classes."""
    model = build_tiny("causal", config_class("causal", "deepseek_v32"))
    stock = type(DynamicCache(config=model.config).layers[0])
    monkeypatch.setattr(stock, "reorder_cache", lambda self, index: super(stock, self).reorder_cache(index))
    assert rows_of_a_prompt(model, **HYBRID_MODES["samples"]) == [2, 6]
    assert rows_of_a_prompt(model, **HYBRID_MODES["rows"]) == [4]
    own = [each.message for each in caplog.records if each.name == "hf_paged"]  # transformers has words, once
    assert ["indexer_keys" in message for message in own] == [True]


class Binds(torch.nn.Module):
    """A layer that binds its inputs to the cache, and needs as many rows of them in the next step."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, **keywords: Any) -> Any:
        cache = cache_in(keywords)
        cache.bound = torch.cat([getattr(cache, "bound", x[:, :0]), x], 1)
        return self.layer(x, **keywords)


@pytest.mark.parametrize("family", [pytest.param("jamba", marks=NEEDS_SLOTS), "llama"])
def test_what_a_model_binds_to_its_cache_keeps_rows_apart(family: str) -> None:
    """Qwen4-Exp of transformers 5.17 binds its positions: nothing forks them."""
    model = build_tiny("causal", config_class("causal", family))
    model.model.layers[0] = Binds(model.model.layers[0])
    assert rows_of_a_prompt(model, **HYBRID_MODES["samples"]) == [2, 6]
    assert rows_of_a_prompt(model, **HYBRID_MODES["samples"]) == [6]


@NEEDS_SLOTS
def test_states_of_rows_that_draw_are_taken_back() -> None:
    """A forward that draws runs again over all rows, from the states before it."""
    model = build_tiny("causal", config_class("causal", "jamba"))
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda module, args: (args[0] + torch.randn_like(args[0]), *args[1:]))
    assert rows_of_a_prompt(model, **HYBRID_MODES["samples"]) == [2, 6]


@pytest.mark.parametrize(
    "family", [*(pytest.param(each, marks=NEEDS_SLOTS) for each in ("falcon_h1", "jamba")), "llama"]
)
def test_a_forward_that_is_repeated_without_adapters_updates_states_once(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels cannot tell the adapters of a step, peft's layers compute it again."""
    pytest.importorskip("peft")
    model = tiny_model("causal", family)
    refusing = [True]

    def refuse(*rest: Any) -> None:
        if refusing.pop() if refusing else False:
            raise Inapplicable("a layer was given other rows")

    class Captures:
        def with_adapters(self, *rest: Any) -> Any:
            return contextlib.nullcontext(True)

    monkeypatch.setattr(forward, "can_record", lambda devices: True)
    monkeypatch.setattr(forward, "captures_of", lambda model: Captures())
    handle = model.model.layers[-1].register_forward_hook(refuse)
    given = {**HYBRID_MODES["beams"], "max_new_tokens": 4, "cache_config": {"graphs": False}}
    paged = model.generate(**given, cache_implementation="paged")
    handle.remove()
    assert not refusing
    del given["cache_config"]
    assert torch.equal(paged, model.generate(**given))


@NEEDS_SLOTS
@pytest.mark.parametrize("family", ["lfm2", "jamba"])
def test_a_cache_that_was_reset_takes_another_prompt(family: str) -> None:
    """Stock's reset() keeps the rows of a state, so these are computed."""
    model = tiny_model("causal", family)
    given = {**HYBRID_MODES["samples"], "max_new_tokens": 4}
    cache = PagedCache(model)
    answers = []
    for held in ({"past_key_values": cache}, {"past_key_values": cache}, {}):
        cache.reset()
        torch.manual_seed(0)
        answers.append(model.generate(**given, **held))
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[2])


def test_positions_of_another_form_keep_rows_apart() -> None:
    """Positions along axes are [axes, rows, tokens]; three axes are not three rows."""
    ids = torch.ones((3, 5), dtype=torch.long)
    positions = torch.arange(15).view(3, 5)
    for axes in (3, 4):
        along = positions[None].repeat(axes, 1, 1)
        found = dedupe.rows_to_compare({"input_ids": ids, "position_ids": along}, 3)
        assert found is not None
        assert [tuple(each.shape) for each in found] == [(3, 5), (3, axes, 5)]
    assert dedupe.rows_to_compare({"input_ids": ids, "position_ids": positions[:, :, None]}, 3) is None
    few = dedupe.select_rows(
        {"input_ids": ids, "position_ids": positions[None].repeat(3, 1, 1)},
        ComputedRows([0, 2], [0, 0, 1], {}, {}),
    )
    assert few["position_ids"].tolist() == [positions[[0, 2]].tolist()] * 3
