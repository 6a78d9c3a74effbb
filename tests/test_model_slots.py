"""Layers that keep something beside keys and values: theirs are in pages all the same, and the rest follows
the rows.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import every_other
from compare import assert_clean, assert_same, both
from releases import NEEDS_SLOTS
from tiny import build, config_class
from transformers import DynamicCache

import hf_paged
from hf_paged.blocks import Cross, Full, Window
from hf_paged.model.layer import PagedLayer
from hf_paged.model.slots import NO_CONTENT, StatefulLayer, slots_of

INDEXED = ["deepseek_v32", "minimax_m3_vl_text"]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sample": {"do_sample": True, "num_return_sequences": 3},
    "chunks": {"prefill_chunk_size": 5, "num_beams": 2},
}


def prompts(rows: int = 2) -> torch.Tensor:
    return torch.randint(5, 80, (rows, 9), generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize(("family", "mode"), every_other([*INDEXED], [*MODES]))
def test_same_as_stock(family: str, mode: str) -> None:
    """C14, C16: what lies outside the pages is reordered and expanded with the tables. tests/test_generate_dedupe.py
    has the layers with states.
    """
    model = build("causal", config_class("causal", family))
    setting = model.config._attn_implementation
    stock, paged = both(model, input_ids=prompts(), max_new_tokens=9, **{"do_sample": False, **MODES[mode]})
    assert torch.equal(stock, paged)
    assert_clean(model, setting)


@NEEDS_SLOTS
@pytest.mark.parametrize("family", ["falcon_h1", "deepseek_v32"])
def test_a_fork_has_a_rest_of_its_own(family: str) -> None:
    """A copied cache goes on as the first one does, and neither notices the other."""
    model = build("causal", config_class("causal", family))
    cache, ids = hf_paged.PagedCache(model, block_size=4), prompts(1)
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache)
        twin = copy.deepcopy(cache)
        first = model(ids[:, 6:7], past_key_values=cache).logits
        model(ids[:, 8:9], past_key_values=cache)
        second = model(ids[:, 6:7], past_key_values=twin).logits
    torch.testing.assert_close(first, second)
    assert type(twin.layers[0]) is type(cache.layers[0])
    assert twin.tables()[0][0] == cache.tables()[0][0]


def test_what_an_indexer_keeps_is_cropped() -> None:
    """Prompt lookup takes steps back: an indexer's keys go back with the pages."""
    model = build("causal", config_class("causal", "deepseek_v32"))
    ids = prompts(1)[:, :4].repeat(1, 4)
    assert_same(model, input_ids=ids, prompt_lookup_num_tokens=3, max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize(
    ("family", "complete"),
    [
        pytest.param("falcon_h1", True, marks=NEEDS_SLOTS),
        ("deepseek_v32", False),
        pytest.param("qwen3_next", True, marks=NEEDS_SLOTS),
        ("gemma4_text", True),
    ],
)
def test_what_pages_hold(family: str, complete: bool) -> None:
    """Only a cache whose layers keep nothing beside pages and slots may be replayed."""
    model = build("causal", config_class("causal", family))
    cache = hf_paged.PagedCache(model)
    assert cache.complete is complete
    assert cache.paged_layers


@NEEDS_SLOTS
def test_classes_are_stocks_own_too() -> None:
    """Transformers asks for its classes by name: a state's owner is one of them, and counts as attention."""
    model = build("causal", config_class("causal", "falcon_h1"))
    layer = hf_paged.PagedCache(model).layers[0]
    assert isinstance(layer, StatefulLayer)
    assert not any(hf_paged.PagedCache(model).is_linear)
    model = build("causal", config_class("causal", "deepseek_v32"))
    layer = hf_paged.PagedCache(model).layers[0]
    assert isinstance(layer, PagedLayer)
    assert type(layer)._layer_type is None, "transformers would make ours for everybody"
    assert hasattr(layer, "update_indexer")


@NEEDS_SLOTS
def test_places_are_looked_up_once_a_call(monkeypatch: pytest.MonkeyPatch, ids: torch.Tensor) -> None:
    """By every call anew: no cache has another's layers, and a config that changes is followed."""
    looked: list[object] = []
    original = DynamicCache.__init__
    monkeypatch.setattr(
        DynamicCache,
        "__init__",
        lambda self, *rest, **options: looked.append(type(self)) or original(self, *rest, **options),
    )
    model = build("causal", config_class("causal", "jamba"))
    options = {"max_new_tokens": 3, "cache_implementation": "paged", "return_dict_in_generate": True}
    caches = []
    for _ in range(2):
        looked.clear()
        caches.append(model.generate(ids, **options).past_key_values)
        assert looked == [DynamicCache]
    assert not {*map(id, caches[0].layers)} & {*map(id, caches[1].layers)}
    model = build("causal", config_class("causal", "mistral"))
    kinds = []
    for window in (None, 5):
        model.config.sliding_window = window
        found = model.generate(ids, **options).past_key_values
        kinds.append({layer.kind for layer in found.layers})
    assert kinds == [{Full()}, {Window(5)}]


def test_kinds_of_places() -> None:
    """Full, window, cross, states, and a layer that reads another's pages."""
    kinds = {
        name: [slot.kind for slot in slots_of(build("causal", config_class("causal", name)), False)]
        for name in ("jamba", "gemma4_text")
    }
    assert [kind and kind.name for kind in kinds["jamba"]] == ["state", "full", "state", "full"]
    assert kinds["gemma4_text"][:2] == [Window(6), Full()]
    bart = build("seq2seq", config_class("seq2seq", "bart"))
    assert {slot.kind for slot in slots_of(bart, True)} == {Cross()}
    assert None in NO_CONTENT or NO_CONTENT
