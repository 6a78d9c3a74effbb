"""Layers of a decoder's own cache that attend to a picture's tokens instead of the text's (Mllama): tables of
their own (C36).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from captures import counts, policy, reasons
from cases import once_each
from compare import assert_clean, assert_equal, assert_same, both
from modes import MODES
from tape import record
from tiny import PROMPT_IDS, build, config_class
from transformers import MllamaForConditionalGeneration
from transformers.cache_utils import DynamicCache

import hf_paged
from hf_paged.generate.cache import paged_parts
from hf_paged.model.cache_name import cache_in
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS

TILES, PICTURE = 4, 68
"""Tiles of a picture, and the tokens that the tiny model makes of all of them."""
NEEDS_NO_STOCK = ("assisted", "prompt-lookup")
"""Stock takes rejected drafts back from the picture's tokens too, and fails: the answer without drafts is the
right one.
"""
STEPS_ALIKE = "_prepare_static_cache" in vars(MllamaForConditionalGeneration)
"""Before transformers had a static cache for the model, its mask over the picture grew from step to step, and
prompts came in chunks.
"""
Given = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model() -> Any:
    made = build("image", config_class("image", "mllama"))
    object.__setattr__(made, "assistant", build("image", config_class("image", "mllama")))
    return made


@pytest.fixture(autouse=True)
def _clean(model: Any) -> Any:
    setting = model.config._attn_implementation
    yield
    assert_clean(model, setting)


def text(rows: int = 3, tokens: int = 13, seed: int = 2) -> torch.Tensor:
    return torch.randint(
        PROMPT_IDS.start, PROMPT_IDS.stop, (rows, tokens), generator=torch.Generator().manual_seed(seed)
    )


def seen(rows: int, tokens: int, pictures: int) -> torch.Tensor:
    """Which token sees which tiles: none before a picture, not all tiles of the first row's."""
    mask = torch.ones(rows, tokens, pictures, TILES, dtype=torch.long)
    mask[0, :, 0, 2:] = 0
    for picture in range(pictures):
        mask[:, : 2 + 4 * picture, picture] = 0
    return mask


def shown(rows: int, tokens: int, pictures: int, seed: int = 4) -> Given:
    """So many pictures for each of `rows` prompts of `tokens` tokens."""
    ones = torch.ones(rows, pictures, dtype=torch.long)
    return {
        "pixel_values": torch.rand(
            rows, pictures, TILES, 3, 32, 32, generator=torch.Generator().manual_seed(seed)
        )
        * 2
        - 1,
        "aspect_ratio_ids": ones,
        "aspect_ratio_mask": ones[..., None].expand(-1, -1, TILES).contiguous(),
        "cross_attention_mask": seen(rows, tokens, pictures),
    }


def answer(model: Any, arguments: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(**copy.copy(arguments), **more)


# ---- every mode


@pytest.mark.parametrize(
    ("mode", "pictures"), once_each([name for name in MODES if name not in NEEDS_NO_STOCK], [1, 2])
)
def test_modes(model: Any, mode: str, pictures: int) -> None:
    arguments = {"input_ids": text()} | MODES[mode](model, text())
    arguments |= shown(*arguments["input_ids"].shape, pictures)
    if "chunks" in mode and STEPS_ALIKE:
        with pytest.raises(ValueError, match="Chunked prefill cannot split"):
            answer(model, arguments, cache_implementation="paged")
        return
    assert_same(model, **arguments)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("call", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_without_a_mask(call: dict[str, Any], implementation: str) -> None:
    """Stock's sdpa attends causally to a picture whose mask is left out, and eager attention does not."""
    model = build("image", config_class("image", "mllama"))
    model.set_attn_implementation(implementation)
    given = {name: value for name, value in shown(3, 13, 2).items() if name != "cross_attention_mask"}
    assert_same(model, input_ids=text(), **given, max_new_tokens=8, do_sample=False, **call)


@pytest.mark.parametrize("mode", NEEDS_NO_STOCK)
def test_rejected_drafts_leave_the_picture(model: Any, mode: str) -> None:
    arguments = MODES[mode](model, text())
    arguments |= shown(*arguments["input_ids"].shape, 1)
    plain = {
        name: value
        for name, value in arguments.items()
        if name not in ("assistant_model", "prompt_lookup_num_tokens")
    }
    try:
        paged = answer(model, arguments, cache_implementation="paged", cache_config={"block_size": 4})
    except IndexError:
        pytest.skip("this transformers cannot draft beside pictures at all")
    assert torch.equal(paged, answer(model, plain))


@pytest.mark.parametrize("mode", ["greedy-padded", "beams-padded", "chunks-padded-beams"])
def test_without_a_picture(model: Any, mode: str) -> None:
    arguments = {"input_ids": text()} | MODES[mode](model, text())
    assert_same(model, **arguments)
    assert memory_of(model).paths[1::2] == ["unused", "unused"]


# ---- tables


@pytest.mark.parametrize(
    "call", [{"num_beams": 4}, {"do_sample": True, "num_return_sequences": 4}], ids=["beams", "samples"]
)
def test_rows_of_a_prompt_share_the_picture(call: dict[str, Any]) -> None:
    """One table per prompt, as long as its picture, whatever the number of beams or samples."""
    model = build("image", config_class("image", "mllama"))
    held: set[int] = set()

    def count(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        parts = paged_parts(cache_in(kwargs))
        if parts:
            held.add(next(iter(parts[1].sequences.rows.values())).group.pool.held)

    model.register_forward_hook(count, with_kwargs=True)
    arguments = {"input_ids": text(2), **shown(2, 13, 1), "max_new_tokens": 9, "min_new_tokens": 9, **call}
    stock, paged = both(model, **arguments)
    assert torch.equal(stock, paged)
    assert held == {2 * -(-PICTURE // 4)}
    assert memory_of(model).paths == ["paged"] * 4


def test_as_many_tokens_as_the_text(model: Any) -> None:
    """A layer says whether it holds states; their number does not."""
    assert_same(
        model,
        input_ids=text(2, PICTURE),
        **shown(2, PICTURE, 1),
        num_beams=2,
        max_new_tokens=8,
        do_sample=False,
    )


# ---- turns


def talk(model: Any, cache: Any, turns: list[int]) -> list[Any]:
    """Greedy answers of a conversation that brings so many pictures in each turn."""
    ids, pictures, answers = text(2, 0), 0, []
    for turn, more in enumerate(turns):
        pictures += more
        ids = torch.cat([ids, text(2, 7, seed=turn)], 1)
        given = {"cross_attention_mask": seen(2, ids.shape[1], pictures)} if pictures else {}
        if more:
            given = {**shown(2, ids.shape[1], more, seed=turn), **given}
        made = model.generate(
            input_ids=ids, **given, past_key_values=cache, max_new_tokens=5, min_new_tokens=5, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        ids = made.sequences
        answers.append((ids, made.logits))
    return answers


@pytest.mark.parametrize("turns", [[1, 0], [1, 1, 0], [0, 1, 0, 2]], ids=str)
def test_turns(model: Any, turns: list[int]) -> None:
    """A later picture's tokens come behind those of earlier ones, in the cross layers' tables only."""
    stock, cache = (
        DynamicCache(config=model.config.get_text_config()),
        hf_paged.PagedCache(model, block_size=4),
    )
    assert_equal(talk(model, stock, turns), talk(model, cache, turns))
    assert_equal(stock, cache)
    assert cache.layers[1].get_seq_length() == sum(turns) * PICTURE
    assert_equal(stock.layers[3].keys, cache.to_dynamic().layers[3].keys)


def test_copies_and_rows(model: Any) -> None:
    """A copy, chosen rows, repeated rows, a crop: the picture's tables go with their rows, and none of its
    tokens is taken away.
    """
    stock, cache = (
        DynamicCache(config=model.config.get_text_config()),
        hf_paged.PagedCache(model, block_size=4),
    )
    for each in (stock, cache):
        model.generate(
            input_ids=text(2), **shown(2, 13, 1), past_key_values=each, max_new_tokens=4, do_sample=False
        )
    twin = copy.deepcopy(cache)
    assert_equal(stock, twin)
    for each in (stock, cache):
        each.batch_repeat_interleave(2)
        each.batch_select_indices(torch.tensor([3, 0, 1]))
        each.reorder_cache(torch.tensor([1, 2, 0]))
    assert_equal(stock, cache)
    assert len(cache.tables(1)) == 3
    cache.crop(-2)
    assert cache.layers[0].get_seq_length() == 13 + 3 - 2
    assert cache.layers[1].get_seq_length() == PICTURE
    cache.reset()
    twin.reset()
    assert memory_of(model).held == 0


def test_a_step_that_fails_leaves_no_picture(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states that a broken prompt wrote are taken back with its text, and the cache goes on without a
    picture.
    """
    cache = hf_paged.PagedCache(model, block_size=4)
    with monkeypatch.context() as broken:
        broken.setattr(model.model.language_model.layers[3], "forward", lambda *args, **kwargs: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model.generate(input_ids=text(2), **shown(2, 13, 1), past_key_values=cache, max_new_tokens=4)
    assert memory_of(model).held == 0
    paged = model.generate(input_ids=text(2), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(paged, model.generate(input_ids=text(2), max_new_tokens=4, do_sample=False))


# ---- prefixes and captured steps


def test_no_prefix_is_taken_from_beside_a_picture() -> None:
    """Text behind a picture is nobody else's; text alone is shared with text alone, and both are counted."""
    model = build("image", config_class("image", "mllama"))
    word: dict[str, Any] = {
        "cache_implementation": "paged",
        "cache_config": {"block_size": 4, "prefix_caching": True},
    }
    call: dict[str, Any] = {"input_ids": text(1), "max_new_tokens": 4, "do_sample": False}
    for given in ({}, shown(1, 13, 1, seed=1), shown(1, 13, 1, seed=2), {}, {}):
        assert torch.equal(model.generate(**call, **given, **word), model.generate(**call, **given))
    stats = hf_paged.stats(model)
    assert stats.reused > 0
    assert sum(count for reason, count in stats.reasons.items() if reason.endswith("is given")) == 2, (
        stats.reasons
    )


@pytest.mark.parametrize(
    "call",
    [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["greedy", "beams", "samples"],
)
def test_captured_steps(model: Any, call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed step reads the picture's tables; one with another number of picture's tokens, or none, is
    another step.
    """
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    arguments: dict[str, Any] = {
        "input_ids": text(2),
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "do_sample": False,
        **call,
    }
    for pictures in (1, 0, 2):
        before = counts(model)["replayed"]
        assert_same(model, **arguments, **(shown(2, 13, pictures) if pictures else {}))
        if STEPS_ALIKE or not pictures:
            assert counts(model)["replayed"] > before, (pictures, reasons(model))


def test_a_picture_with_a_captured_turn(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of a few tokens would be captured: not where they bring the first picture, nor another one."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=1, after=1)
    turns = [0, 1, 1, 0]
    stock, cache = (
        DynamicCache(config=model.config.get_text_config()),
        hf_paged.PagedCache(model, block_size=4),
    )
    assert_equal(talk(model, stock, turns), talk(model, cache, turns))
    assert_equal(stock, cache)


def test_a_layer_that_attends_across_unsaid(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that keeps it to itself ends in an error, also where a picture has just as many tokens as the
    text.
    """
    monkeypatch.setattr(model.config.text_config, "cross_attention_layers", [])
    call: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "paged"}
    with pytest.raises(RuntimeError, match="cross_attention_layers"):
        model.generate(input_ids=text(2), **shown(2, 13, 1), **call)
    seen_by_all = {
        name: value for name, value in shown(2, PICTURE, 1).items() if name != "cross_attention_mask"
    }
    with pytest.raises(RuntimeError, match="cross_attention_layers"):
        model.generate(input_ids=text(2, PICTURE), **seen_by_all, **call)
