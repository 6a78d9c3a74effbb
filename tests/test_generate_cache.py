"""The public surface of a paged cache and its layers, in every state, beside stock's."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import every_other
from families import BY_NAME
from families import build as build_family
from releases import NEWER_CACHES, layers_say_dtype
from tiny import build, config_class
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

import hf_paged
from hf_paged import PagedCache
from hf_paged.kv.config import CacheConfig
from hf_paged.model.registry import memory_of

pytestmark = NEWER_CACHES
CLOSE = {"atol": 2e-4, "rtol": 2e-4}
Answer = Any
Ask = Callable[[Any], Answer]

FAMILIES = [
    "llama",
    "mistral-window",
    "qwen2-window",
    "falcon_h1",
    "inkling_text",
    "deepseek_v32",
    "gemma4_text",
    "lfm2",
]
WITH_STATE = {"falcon_h1", "inkling_text", "lfm2"}
"""Families of which a layer keeps a recurrent or convolutional state: stock cannot select or repeat their
rows.
"""


@functools.cache
def model_of(family: str) -> Any:
    return (
        build_family(BY_NAME[family])
        if family in BY_NAME
        else build("causal", config_class("causal", family))
    )


def prompt(rows: int = 3, tokens: int = 4) -> torch.Tensor:
    return torch.randint(5, 80, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def feed(model: Any, cache: Any, tokens: int, rows: int = 3) -> None:
    with torch.no_grad():
        model(prompt(rows, tokens), past_key_values=cache)


# ---- states


def _prompted(model: Any, cache: Any) -> None:
    feed(model, cache, 4)


def _decoding(model: Any, cache: Any) -> None:
    feed(model, cache, 4)
    feed(model, cache, 1)


def _past_windows(model: Any, cache: Any) -> None:
    feed(model, cache, 9)
    feed(model, cache, 1)


def _recorded(model: Any, cache: Any) -> None:
    cache.activate_past_recording()
    feed(model, cache, 9)
    cache.crop(0)
    feed(model, cache, 2)


def _recorded_late(model: Any, cache: Any) -> None:
    _past_windows(model, cache)
    cache.activate_past_recording()
    feed(model, cache, 2)


def _cropped(model: Any, cache: Any) -> None:
    _recorded(model, cache)
    cache.crop(-2)
    feed(model, cache, 3)


def _cropped_short(model: Any, cache: Any) -> None:
    cache.activate_past_recording()
    feed(model, cache, 4)
    cache.crop(-1)


def _cropped_to_nothing(model: Any, cache: Any) -> None:
    cache.activate_past_recording()
    feed(model, cache, 4)
    cache.crop(-4)


def _cropped_beyond(model: Any, cache: Any) -> None:
    cache.activate_past_recording()
    feed(model, cache, 4)
    cache.crop(-7)


def _reordered(model: Any, cache: Any) -> None:
    _decoding(model, cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))


def _selected(model: Any, cache: Any) -> None:
    _decoding(model, cache)
    cache.batch_select_indices(torch.tensor([2, -2]))


def _repeated(model: Any, cache: Any) -> None:
    _decoding(model, cache)
    cache.batch_repeat_interleave(2)


def _reset(model: Any, cache: Any) -> None:
    _decoding(model, cache)
    cache.reset()
    if isinstance(cache, DynamicCache) and not isinstance(cache, PagedCache) and not reset_drops():
        as_new(cache)


def _begun_anew(model: Any, cache: Any) -> None:
    _reset(model, cache)
    feed(model, cache, 3)


def _early(model: Any, cache: Any) -> None:
    cache.early_initialization(3, 2, 8, torch.float32, torch.device("cpu"))


STATES: dict[str, Callable[[Any, Any], None]] = {
    "empty": lambda model, cache: None,
    "initialized early": _early,
    "prompt": _prompted,
    "decoding": _decoding,
    "windows passed": _past_windows,
    "recorded": _recorded,
    "recorded late": _recorded_late,
    "cropped": _cropped,
    "cropped before a window": _cropped_short,
    "cropped to nothing": _cropped_to_nothing,
    "cropped beyond its length": _cropped_beyond,
    "reordered": _reordered,
    "rows selected": _selected,
    "rows repeated": _repeated,
    "reset": _reset,
    "begun anew": _begun_anew,
}
NEEDS_ROWS = {"rows selected", "rows repeated"}
AFTER_A_ROLLBACK = {"cropped", "cropped before a window", "cropped to nothing", "cropped beyond its length"}


# ---- questions


def reading(name: str) -> Ask:
    return lambda owner: getattr(owner, name)


def calling(name: str, *arguments: Any) -> Ask:
    return lambda owner: getattr(owner, name)(*arguments)


def states(name: str) -> Ask:
    """The states of a layer that say anything: behind a reset stock has zeros, and a slot is given back."""

    def ask(owner: Any) -> dict[int, torch.Tensor]:
        kept = getattr(owner, name).items()
        return {number: each for number, each in kept if each is not None and each.any()}

    return ask


CACHE_QUESTIONS: dict[str, list[Ask]] = {
    "__iter__": [list],
    "__len__": [len],
    "batch_size": [reading("batch_size")],
    "get_conv_state": [calling("get_conv_state", 0), calling("get_conv_state", 1)],
    "get_mask_sizes": [calling("get_mask_sizes", new, layer) for new in (1, 3, 8) for layer in (0, 1, 9)],
    "get_max_cache_shape": [calling("get_max_cache_shape"), calling("get_max_cache_shape", 1)],
    "get_max_length": [calling("get_max_length"), *(calling("get_max_length", layer) for layer in (0, 1, 9))],
    "get_query_offset": [calling("get_query_offset"), calling("get_query_offset", 1)],
    "get_recurrent_state": [calling("get_recurrent_state", 0), calling("get_recurrent_state", 1)],
    "get_seq_length": [calling("get_seq_length"), calling("get_seq_length", 1), calling("get_seq_length", 9)],
    "has_previous_state": [
        calling("has_previous_state"),
        calling("has_previous_state", 0),
        calling("has_previous_state", 9),
    ],
    "is_compileable": [reading("is_compileable")],
    "is_croppable": [reading("is_croppable")],
    "is_dummy": [reading("is_dummy")],
    "is_initialized": [reading("is_initialized")],
    "is_linear": [reading("is_linear")],
    "is_recording_past": [calling("is_recording_past", 0), calling("is_recording_past", 1)],
    "is_sliding": [reading("is_sliding")],
    "layer_class_to_replicate": [reading("layer_class_to_replicate")],
    "max_batch_size": [reading("max_batch_size")],
    "max_cache_len": [reading("max_cache_len")],
    "offloading": [reading("offloading")],
}
"""Questions to a cache, by member."""

LAYER_QUESTIONS: dict[str, list[Ask]] = {
    "conv_kernel_size": [reading("conv_kernel_size")],
    "conv_states": [states("conv_states")],
    "cumulative_length": [reading("cumulative_length")],
    "device": [reading("device")],
    "dtype": [reading("dtype")] if layers_say_dtype() else [],
    "get_mask_sizes": [calling("get_mask_sizes", 1), calling("get_mask_sizes", 5)],
    "get_max_cache_shape": [calling("get_max_cache_shape")],
    "get_max_length": [calling("get_max_length")],
    "get_seq_length": [calling("get_seq_length")],
    "has_previous_state": [reading("has_previous_state")],
    "indexer_device": [reading("indexer_device")],
    "indexer_dtype": [reading("indexer_dtype")],
    "indexer_keys": [reading("indexer_keys")],
    "indexer_position_ids": [reading("indexer_position_ids")],
    "is_compileable": [reading("is_compileable")],
    "is_conv_states_initialized": [reading("is_conv_states_initialized")],
    "is_croppable": [reading("is_croppable")],
    "is_indexer_initialized": [reading("is_indexer_initialized")],
    "is_initialized": [reading("is_initialized")],
    "is_recurrent_states_initialized": [reading("is_recurrent_states_initialized")],
    "is_sliding": [reading("is_sliding")],
    "keys": [reading("keys")],
    "number_of_states": [reading("number_of_states")],
    "record_past": [lambda layer: getattr(layer, "record_past", False)],
    "recurrent_states": [states("recurrent_states")],
    "sliding_window": [reading("sliding_window")],
    "supports_early_init": [reading("supports_early_init")],
    "values": [reading("values")],
}
"""Questions to each of its layers."""

CHANGES: dict[str, list[Ask]] = {
    "activate_past_recording": [calling("activate_past_recording")],
    "batch_repeat_interleave": [calling("batch_repeat_interleave", repeats) for repeats in (1, 3, -1)],
    "batch_select_indices": [
        calling("batch_select_indices", rows)
        for rows in (
            torch.tensor([1]),
            torch.tensor([False, True, True]),
            [0, 2],
            (2, 1),
            [-1, 0],
            slice(1, None),
            [3],
            [-4, 0],
            [0.5],
        )
    ],
    "crop": [calling("crop", -count) for count in (0, 1, 4, 30)],
    "early_initialization": [calling("early_initialization", 3, 2, 8, torch.float32, torch.device("cpu"))],
    "reorder_cache": [
        calling("reorder_cache", torch.tensor(rows)) for rows in ([1, 1, 0], [2, 1, 0], [0, 1, 3], [0, -1, 1])
    ],
    "reset": [calling("reset")],
}
"""Calls that change a cache; afterwards all questions are asked again."""

FED_BY_MODELS = {
    "lazy_initialization", "lazy_initialization_indexer", "update", "update_conv_state", "update_indexer", "update_recurrent_state",
}  # fmt: skip
"""Calls of models' forwards, which the states come from."""

BY_DESIGN = {
    "layers": "every layer is asked by itself",
    "offload": "pages stay on the model's device; the engine swaps them",
    "prefetch": "pages stay on the model's device; the engine swaps them",
    "activate_past_recording": "also of layers without a window, where it does nothing",
    "batch_repeat_interleave": "layers share their rows: only the cache changes them",
    "batch_select_indices": "layers share their rows: only the cache changes them",
    "crop": "layers share their rows: only the cache changes them",
    "reorder_cache": "layers share their rows: only the cache changes them",
    "reset": "layers share their rows: only the cache changes them",
}
"""Of caches (the first three) and of layers, what is no question, or is not stock's."""


def public(owner: Any) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def answer(ask: Ask, owner: Any) -> Answer:
    """Its answer, or the kind of error that it raises."""
    try:
        return ask(owner)
    except Exception as error:
        return type(error)


def assert_alike(stock: Answer, paged: Answer, where: str) -> None:
    if isinstance(stock, torch.Tensor):
        assert isinstance(paged, torch.Tensor), f"{where}: {paged!r}, expected a tensor"
        assert paged.shape == stock.shape, (
            f"{where}: shape {tuple(paged.shape)}, expected {tuple(stock.shape)}"
        )
        torch.testing.assert_close(paged + 0, stock, **CLOSE, msg=lambda text: f"{where}: {text}")
    elif isinstance(stock, (list, tuple)):
        assert type(stock) is type(paged), where
        assert len(stock) == len(paged), where
        for i, (one, other) in enumerate(zip(stock, paged, strict=True)):
            assert_alike(one, other, f"{where}[{i}]")
    elif isinstance(stock, dict):
        assert_alike(sorted(stock), sorted(paged), where)
        for name in stock:
            assert_alike(stock[name], paged[name], f"{where}[{name!r}]")
    else:
        assert paged == stock, f"{where}: {paged!r}, expected {stock!r}"


def assert_all_alike(stock: Any, paged: Any, where: str) -> None:
    """Every question to the cache and to its layers, with the same answer."""
    for name, asks in CACHE_QUESTIONS.items():
        for i, ask in enumerate(asks):
            assert_alike(answer(ask, stock), answer(ask, paged), f"{where}: {name} ({i})")
    for number, (one, other) in enumerate(zip(stock.layers, paged.layers, strict=True)):
        for name, asks in LAYER_QUESTIONS.items():
            for i, ask in enumerate(asks):
                assert_alike(answer(ask, one), answer(ask, other), f"{where}: layers[{number}].{name} ({i})")


def reset_drops() -> bool:
    """True if stock's reset() makes a cache as new, and not one of zeros as long as before."""
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)
    cache.reset()
    return cache.get_seq_length() == 0


def caches_in(state: str, model: Any) -> Iterator[Any]:
    for cache in (DynamicCache(config=model.config), PagedCache(model, block_size=4)):
        STATES[state](model, cache)
        yield cache


def reachable(state: str, family: str) -> bool:
    """True if stock can bring a cache of the family into the state."""
    recurrent = family in ("falcon_h1",)
    return not (family in WITH_STATE and state in NEEDS_ROWS) and not (
        recurrent and state in AFTER_A_ROLLBACK
    )


PLACES = [(family, state) for family in FAMILIES for state in STATES if reachable(state, family)]


def test_every_member_is_known() -> None:
    """A member that a new transformers adds waits here until somebody decides what ours does."""
    for family in FAMILIES:
        model = model_of(family)
        for state in ("empty", "decoding"):
            stock, _ = caches_in(state, model)
            unknown = (
                public(stock) - CACHE_QUESTIONS.keys() - CHANGES.keys() - FED_BY_MODELS - BY_DESIGN.keys()
            )
            assert not unknown, f"decide what a PagedCache does for {sorted(unknown)}"
            for layer in stock.layers:
                unknown = public(layer) - LAYER_QUESTIONS.keys() - FED_BY_MODELS - BY_DESIGN.keys()
                assert not unknown, (
                    f"decide what the paged layer for a {type(layer).__name__} does for {sorted(unknown)}"
                )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_state_answers_as_stock(family: str) -> None:
    """All that a cache and its layers can be asked, and the forward that comes next; forks answer as what
    they were made from.
    """
    for state in (state for other, state in PLACES if other == family):
        model = model_of(family)
        stock, paged = caches_in(state, model)
        twin = copy.deepcopy(paged)
        assert_all_alike(stock, paged, state)
        assert_all_alike(stock, twin, f"{state}, forked")
        assert_next_alike(model, stock, paged, state)
        assert_all_alike(stock, paged, f"{state}, gone on")


def assert_next_alike(model: Any, stock: Any, paged: Any, where: str) -> None:
    """The next forward answers alike."""
    stored = [layer.keys for layer in stock.layers if getattr(layer, "keys", None) is not None]
    rows = next((keys.shape[0] for keys in stored if keys.ndim == 4), 3)
    for cache in (stock, paged):
        if cache.get_seq_length() and any(getattr(layer, "record_past", False) for layer in cache.layers):
            cache.crop(0)  # who records says after every forward how much stays
    with torch.no_grad():
        logits = [model(prompt(rows, 2), past_key_values=cache).logits for cache in (stock, paged)]
    torch.testing.assert_close(logits[1], logits[0], **CLOSE, msg=lambda text: f"{where}: {text}")


# ---- changes


def outcome(change: Ask, cache: Any) -> type[Exception] | None:
    try:
        change(cache)
    except Exception as error:
        return type(error)
    return None


def as_new(stock: Any) -> None:
    """The reset() of a stock cache since it drops the cache's content."""
    for layer in (layer for layer in stock.layers if isinstance(layer, DynamicLayer)):
        layer.keys = layer.values = None
        layer.is_initialized = False
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = 0
        if hasattr(layer, "indexer_keys"):
            layer.indexer_keys = None
            layer.is_indexer_initialized = False


@pytest.mark.parametrize(
    ("name", "state"), every_other([*CHANGES], [state for state in STATES if state != "initialized early"])
)
def test_every_change_does_what_stock_does(name: str, state: str) -> None:
    """Full attention beside a window: what stock does, or a refusal that changes nothing (C7)."""
    model = model_of("qwen2-window")
    for i, change in enumerate(CHANGES[name]):
        where = f"{state}, {name} ({i})"
        stock, paged = caches_in(state, model)
        untouched = copy.deepcopy(stock)
        one, other = outcome(change, stock), outcome(change, paged)
        if name == "reset" and not reset_drops():
            as_new(stock)
        if other is not None:
            behind_a_window = name == "crop" and other is RuntimeError
            assert one is other or behind_a_window, f"{where}: {other}, expected {one}"
            assert_all_alike(untouched, paged, where)
            assert_next_alike(model, untouched, paged, where)
        elif one is not None or stock.get_seq_length(0) < 0:
            assert name == "crop", f"{where}: nothing, expected {one}"
            assert_goes_on(model, paged)
        else:
            assert_all_alike(stock, paged, where)
            assert_next_alike(model, stock, paged, where)
    memory_of(model).check()


def assert_goes_on(model: Any, paged: Any) -> None:
    """Where stock cannot crop, ours has the tokens that it says it has."""
    length = paged.get_seq_length()
    assert length >= 0
    assert {layer.get_seq_length() for layer in paged.layers} == {length}
    feed(model, paged, 1, paged.sequences.count or 3)
    assert paged.get_seq_length() == length + 1


@pytest.mark.parametrize("rows", [0, torch.tensor(1), [[0, 1], [1, 0]]], ids=str)
def test_what_picks_no_list_of_rows_is_refused(rows: Any) -> None:
    """Stock makes keys of other dimensions of it, and fails in the next forward."""
    model = model_of("llama")
    stock, paged = caches_in("decoding", model)
    with pytest.raises(IndexError, match=r"expected a list of rows; a single row i is \[i\]"):
        paged.batch_select_indices(rows)
    assert_all_alike(stock, paged, "refused")
    assert_next_alike(model, stock, paged, "refused")


@pytest.mark.parametrize(
    "leave",
    [calling("batch_select_indices", []), calling("batch_repeat_interleave", 0)],
    ids=["select", "repeat"],
)
def test_a_cache_without_rows_is_empty(leave: Ask) -> None:
    """No row is left: every block is back, and another batch may begin."""
    model = model_of("qwen2-window")
    _, paged = caches_in("windows passed", model)
    leave(paged)
    assert memory_of(model).held == 0
    assert {layer.get_seq_length() for layer in paged.layers} == {0}
    assert_next_alike(model, DynamicCache(config=model.config), paged, "anew")


def test_rows_may_be_repeated_as_often_as_each_wants() -> None:
    model = model_of("qwen2-window")
    stock, paged = caches_in("decoding", model)
    for cache in (stock, paged):
        cache.batch_repeat_interleave(torch.tensor([1, 0, 2]))
    assert_all_alike(stock, paged, "repeated")
    assert_next_alike(model, stock, paged, "repeated")


@pytest.mark.parametrize("family", sorted(WITH_STATE))
def test_a_state_follows_the_rows(family: str) -> None:
    """Stock selects the keys and forgets the states; ours goes on as a cache that held these rows from the
    beginning.
    """
    model = model_of(family)
    _, paged = caches_in("decoding", model)
    paged.batch_select_indices([-1, 0])
    paged.batch_repeat_interleave(2)
    rows, fresh = [2, 2, 0, 0], DynamicCache(config=model.config)
    with torch.no_grad():
        for tokens in (4, 1):
            model(prompt(3, tokens)[rows], past_key_values=fresh)
        logits = [model(prompt(4, 1), past_key_values=cache).logits for cache in (fresh, paged)]
    torch.testing.assert_close(*logits, **CLOSE)


@pytest.mark.parametrize("family", ["falcon_h1", "qwen2-window"])
def test_a_crop_that_is_refused_changes_nothing(family: str) -> None:
    """Neither the pages nor the states go back where the other cannot."""
    model = model_of(family)
    stock, paged = caches_in("windows passed", model)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        paged.crop(-3)
    assert_all_alike(stock, paged, "refused")
    assert_next_alike(model, stock, paged, "refused")


@pytest.mark.parametrize(
    "change",
    [
        calling("crop", -1),
        calling("reset"),
        calling("reorder_cache", torch.tensor([0, 0, 0])),
        calling("batch_repeat_interleave", 2),
    ],
)
@pytest.mark.parametrize("family", ["llama", "falcon_h1", "deepseek_v32"])
def test_a_layer_by_itself_is_not_changed(family: str, change: Ask) -> None:
    """Layers share their rows: what would change one of them names the cache's method instead."""
    model = model_of(family)
    stock, paged = caches_in("prompt", model)
    with pytest.raises(RuntimeError, match="of the cache"):
        change(paged.layers[0])
    assert_all_alike(stock, paged, "refused")
    assert_next_alike(model, stock, paged, "refused")


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "an item": lambda kept: kept.__setitem__((slice(None), slice(None), slice(-1, None)), 7.0),
    "all": lambda kept: kept.zero_(),
    "a sum": lambda kept: kept.__iadd__(1),
    "out": lambda kept: torch.mul(torch.ones(kept.shape), 2, out=kept),
}


@pytest.mark.parametrize("write", WRITES)
def test_stored_keys_are_not_written_in_place(write: str) -> None:
    """Content that stock's cache would keep is refused, not lost: the blocks may be those of other rows too."""
    model = model_of("llama")
    _, paged = caches_in("decoding", model)
    before = paged.layers[0].keys.clone()
    with pytest.raises(RuntimeError, match="cannot be changed in place"):
        WRITES[write](paged.layers[0].keys)
    assert torch.equal(paged.layers[0].keys.clone(), before)


def test_stocks_cache_is_rebuilt_from_the_items() -> None:
    """DynamicCache takes what iterating a cache yields: sliding layers keep their window."""
    model = model_of("qwen2-window")
    stock, paged = caches_in("windows passed", model)
    made = [DynamicCache(list(cache)) for cache in (stock, paged)]
    assert [type(layer) for layer in made[0].layers] == [type(layer) for layer in made[1].layers]
    assert_all_alike(*made, "rebuilt")


@pytest.mark.parametrize("family", ["llama", "qwen2-window", "falcon_h1", "inkling_text", "deepseek_v32"])
def test_classes_are_found_by_name(family: str) -> None:
    """Classes that are made for a model's layers, too, are found by pickle and inspect, and show where they
    come from.
    """
    for layer in PagedCache(model_of(family)).layers:
        kind = type(layer)
        assert kind.__module__.startswith("hf_paged.")
        assert kind.__qualname__ == kind.__name__ == type(layer).__name__
        assert getattr(inspect.getmodule(kind), kind.__name__) is kind
        assert pickle.loads(pickle.dumps(kind)) is kind
        assert repr(layer).startswith(f"{kind.__name__}(")


# ---- encoder-decoders

OF_BOTH: dict[str, list[Ask]] = {
    "check_dynamic_cache": [calling("check_dynamic_cache", "crop")],
    "is_updated": [reading("is_updated")],
}
"""Questions to EncoderDecoderCache, stock's own class around two caches of ours, beside a cache's questions.
"""
HALVES = {"cross_attention_cache", "self_attention_cache"}


def pair_of(model: Any, kind: str) -> EncoderDecoderCache:
    if kind == "stock":
        return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    config = CacheConfig(block_size=4)
    return EncoderDecoderCache(PagedCache.make(model, config), PagedCache.make(model, config, cross=True))


def feed_pair(model: Any, pair: Any, tokens: int, rows: list[int]) -> torch.Tensor:
    """The logits of a forward behind the encoder."""
    with torch.no_grad():
        answer = model(prompt(2, 7)[rows], decoder_input_ids=prompt(2, tokens)[rows], past_key_values=pair)
    logits: torch.Tensor = answer.logits
    return logits


PAIR_STATES: dict[str, tuple[list[Ask], list[int]]] = {
    "decoding": ([], [0, 1]),
    "cropped": ([calling("crop", -2)], [0, 1]),
    "cropped to nothing": ([calling("crop", -9)], [0, 1]),
    "reordered": ([calling("reorder_cache", torch.tensor([1, 1]))], [1, 1]),
    "rows repeated": ([calling("batch_repeat_interleave", 2)], [0, 0, 1, 1]),
    "rows selected": ([calling("batch_select_indices", [-1])], [1]),
    "recording": ([calling("activate_past_recording")], [0, 1]),
    "forked": ([], [0, 1]),
    "reset": ([calling("reset")], [0, 1]),
}
"""Calls that change a pair after a prompt of 3 tokens and a step, and the rows that it holds then."""


def assert_pairs_alike(stock: Any, paged: Any, where: str) -> None:
    for name, asks in {**CACHE_QUESTIONS, **OF_BOTH}.items():
        for i, ask in enumerate(asks):
            assert_alike(answer(ask, stock), answer(ask, paged), f"{where}: {name} ({i})")
    assert_all_alike(stock.self_attention_cache, paged.self_attention_cache, f"{where}, self")
    assert_all_alike(stock.cross_attention_cache, paged.cross_attention_cache, f"{where}, cross")


@pytest.mark.parametrize("state", PAIR_STATES)
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_pair_of_ours_answers_as_stocks(family: str, state: str) -> None:
    model, (changes, rows) = model_of(family), PAIR_STATES[state]
    stock, paged = (pair_of(model, kind) for kind in ("stock", "paged"))
    unknown = (
        public(stock)
        - CACHE_QUESTIONS.keys()
        - CHANGES.keys()
        - FED_BY_MODELS
        - BY_DESIGN.keys()
        - OF_BOTH.keys()
        - HALVES
    )
    assert not unknown, f"decide what a pair of PagedCaches does for {sorted(unknown)}"
    assert_pairs_alike(stock, paged, "empty")
    for pair in (stock, paged):
        for tokens in (3, 1):
            feed_pair(model, pair, tokens, [0, 1])
        for change in changes:
            change(pair)
    if state == "forked":
        stock, paged = copy.deepcopy(stock), copy.deepcopy(paged)
    if state == "reset" and not reset_drops():
        as_new(stock.self_attention_cache)
        as_new(stock.cross_attention_cache)
    assert_pairs_alike(stock, paged, state)
    logits = [feed_pair(model, pair, 2, rows) for pair in (stock, paged)]
    torch.testing.assert_close(*logits, **CLOSE)
    assert_pairs_alike(stock, paged, f"{state}, gone on")


@pytest.mark.parametrize("reuse", [False, True], ids=["", "prefixes"])
def test_a_model_is_cast_while_an_answers_cache_is_kept(llama: Any, reuse: bool) -> None:
    """The kept cache has its pool, the next call another; back in the first dtype both are there."""
    ids = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    call = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    word = {"cache_implementation": "paged", "cache_config": {"block_size": 4, "prefix_caching": reuse}}
    first = llama.generate(ids, **call, **word)
    kept = first.past_key_values.to_dynamic()
    expected = {}
    for cast in (torch.bfloat16, torch.float64, torch.float32):
        llama.to(cast)
        expected[cast] = llama.generate(ids, **call).sequences
        assert torch.equal(llama.generate(ids, **call, **word).sequences, expected[cast])
    for one, other in zip(kept.layers, first.past_key_values.to_dynamic().layers, strict=True):
        assert torch.equal(one.keys, other.keys)
    longer = llama.generate(first.sequences, past_key_values=first.past_key_values, **call).sequences
    assert torch.equal(longer, llama.generate(first.sequences, **call).sequences)
    del first
    llama.generate(ids, **call, **word)
    assert len(hf_paged.stats(llama).pools) <= 4


@pytest.mark.parametrize("family", ["llama", "mistral-window", "deepseek_v3"])
def test_rows_take_different_numbers_of_tokens(family: str) -> None:
    """A loop of one's own, in which a row takes 0 to 3 tokens of a forward, has every row's own logits."""
    model = model_of(family)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 60, (3, 24), generator=generator)
    cache = PagedCache(model, block_size=4)
    whole = model(tokens).logits
    with torch.no_grad():
        for counts in ([5, 2, 3], [1, 3, 0], [0, 2, 3], [1, 1, 1], [2, 0, 1], [3, 3, 1]):
            new, before = max(counts), cache.lengths or [0] * 3
            ends = [length + count for length, count in zip(before, counts, strict=True)]
            columns = cache.get_seq_length() + new
            mask = torch.stack([torch.arange(columns) >= columns - end for end in ends]).long()
            places = torch.stack([torch.arange(end - new, end) for end in ends]).clamp(min=0)
            with cache.taking(counts):
                logits = model(
                    tokens.gather(1, places),
                    attention_mask=mask,
                    position_ids=places,
                    past_key_values=cache,
                ).logits
            assert cache.lengths == ends
            for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
                assert torch.allclose(logits[row, new - count :], whole[row, end - count : end], **CLOSE)
            memory_of(model).check()
    cache.reset()


def test_rows_with_states_or_shared_blocks_advance_together() -> None:
    with (
        pytest.raises(ValueError, match="more than keys and values, which every column changes"),
        PagedCache(model_of("falcon_h1")).taking([1, 0]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="make the cache without prefix_caching"),
        PagedCache(model_of("llama"), prefix_caching=True).taking([1, 0]),
    ):
        pass
