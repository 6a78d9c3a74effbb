"""Models that ask their cache whether a forward is the prompt's: only there some of their tokens see what
comes behind them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from captures import counts, policy, reasons
from cases import every_other
from compare import assert_clean, assert_equal, both
from families import BY_NAME
from families import build as build_family
from pictures import with_pictures
from tape import record
from tiny import build, config_class
from transformers.cache_utils import DynamicCache
from transformers.models.auto import modeling_auto

import hf_paged
from hf_paged.engine import Engine
from hf_paged.model.cache_name import cache_in
from hf_paged.model.rehearsal import RECORDERS

TYPES = {
    "hrm_text": ("causal", "token_type_ids", 1),
    "paligemma": ("image", "token_type_ids", 0),
    "molmo2": ("image", "mm_token_type_ids", 1),
    "gemma3": ("image", "token_type_ids", 1),
}
"""The kind of model, the argument that says which tokens see each other, and by which number."""
NAMES = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
FAMILIES = [name for name, (kind, _, _) in TYPES.items() if name in NAMES[kind]]
"""Those that this transformers has."""
MODES: dict[str, dict[str, Any]] = {
    "lookup": {"prompt_lookup_num_tokens": 20, "max_matching_ngram_size": 1, "max_new_tokens": 40},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}


def model_of(family: str) -> Any:
    kind = TYPES[family][0]
    return build(kind, config_class(kind, family))


def typed(family: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments in which all tokens see each other."""
    _, name, number = TYPES[family]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), name: torch.full_like(ids, number)}


def prompt(tokens: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(5, 80, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize(("family", "mode"), every_other([*FAMILIES], [*MODES]))
def test_generates_as_stock(family: str, mode: str) -> None:
    """A prompt of 4 tokens: what comes behind it, drafts of 20 tokens too, is causal."""
    model = model_of(family)
    arguments = {
        "max_new_tokens": 10,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        **MODES[mode],
    }
    stock, paged = both(model, **typed(family, prompt(4)), **arguments)
    assert_equal(stock, paged)
    del stock, paged
    assert_clean(model, model.config._attn_implementation)


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family != "gemma3"]
)  # where an older stock fails itself
def test_drafts_that_are_longer_than_the_prompt(family: str) -> None:
    """12 drafts behind a prompt of 4, of which few are accepted: the forwards over the next ones are not the
    prompt's.
    """
    model, assistant = model_of(family), model_of(family)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    assistant.generation_config.update(
        num_assistant_tokens=12,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
        eos_token_id=None,
    )
    arguments = {
        "max_new_tokens": 16,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    with widths_of(model) as widths:
        stock, paged = both(model, **typed(family, prompt(4)), **arguments, assistant_model=assistant)
    assert widths[:2] == [16, 13]
    assert_equal(stock, paged)


@contextmanager
def widths_of(model: Any) -> Iterator[list[int]]:
    """How many tokens each forward is given."""
    widths: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield widths
    finally:
        handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_second_turn_on_a_kept_cache(family: str) -> None:
    model = model_of(family)
    stock, paged = DynamicCache(config=model.config), hf_paged.PagedCache(model, block_size=4)
    call = {
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    history = prompt(5, rows=2)
    for more in (14, 1):
        answers = [
            model.generate(**typed(family, history), **call, past_key_values=cache)
            for cache in (stock, paged)
        ]
        assert_equal(*answers)
        history = torch.cat([answers[0].sequences, prompt(more, rows=2)], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_forwards(family: str) -> None:
    """Without generate(), and on a cache that was emptied by a crop, where stock's is begun; a failed prompt
    is a prompt again.
    """
    model = model_of(family)
    stock, paged = DynamicCache(config=model.config), hf_paged.PagedCache(model, block_size=4)

    def alike(tokens: int) -> None:
        arguments = typed(family, prompt(tokens))
        del arguments["attention_mask"]
        with torch.no_grad():
            logits = [model(**arguments, past_key_values=cache).logits for cache in (stock, paged)]
        torch.testing.assert_close(*logits, atol=2e-4, rtol=2e-4)

    assert stock.is_initialized is paged.is_initialized is False
    for tokens in (4, 5, 1):
        alike(tokens)
        assert stock.is_initialized is paged.is_initialized is True
    if not any(stock.is_sliding):
        for cache in (stock, paged):
            cache.crop(-10)
        assert stock.is_initialized is paged.is_initialized is True
        alike(4)


@pytest.mark.parametrize("beams", [1, 2])
def test_steps_are_captured(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the prompt the mask says no more than the pages do, so a step may be replayed."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    model = model_of("hrm_text")
    stock, paged = both(
        model,
        **typed("hrm_text", prompt(5)),
        max_new_tokens=16,
        min_new_tokens=16,
        do_sample=False,
        num_beams=beams,
    )
    assert torch.equal(stock, paged)
    assert counts(model)["replayed"], reasons(model)


def test_a_prompt_that_failed_is_a_prompt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("hrm_text")
    call = {
        **typed("hrm_text", prompt(6)),
        "max_new_tokens": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    cache = hf_paged.PagedCache(model, block_size=4)
    with monkeypatch.context() as patch:
        patch.setattr(
            model.lm_head, "forward", lambda *args: (_ for _ in ()).throw(RuntimeError("no memory"))
        )
        with pytest.raises(RuntimeError, match="no memory"):
            model.generate(**call, past_key_values=cache)
    assert not cache.is_initialized
    assert_equal(model.generate(**call), model.generate(**call, past_key_values=cache))


@pytest.mark.parametrize("mode", ["lookup", "beams"])
def test_around_a_picture(mode: str) -> None:
    model = model_of("paligemma")
    inputs = with_pictures(model, 1)
    assert inputs is not None
    arguments = {
        "max_new_tokens": 10,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        **MODES[mode],
    }
    assert_equal(*both(model, **inputs, **arguments))


def test_the_engine_separates_a_prompt_from_what_follows() -> None:
    """Where one sequence runs by itself its cache is initialized from the second forward on, be that a piece
    of the prompt or a step.
    """
    model = build_family(BY_NAME["bloom"])
    with Engine(model, block_size=4, num_blocks=60, max_batch_tokens=4) as engine:
        seen: list[bool] = []
        model.register_forward_pre_hook(
            lambda module, args, given: seen.append(cache_in(given).is_initialized), with_kwargs=True
        )
        engine.generate([prompt(6)[0].tolist()], max_new_tokens=3, do_sample=False)
        engine.generate([prompt(3)[0].tolist()], max_new_tokens=2, do_sample=False)
    assert seen == [False, True, True, True, False, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_serves_them(family: str) -> None:
    """Ids alone say of no token that it sees others: in the engine these models are causal, as in generate()
    without types.
    """
    model = model_of(family)
    if (
        family == "paligemma"
    ):  # its attention is causal only under a mask, which stock leaves out where it has no cache
        with pytest.raises(ValueError, match="when its prompt is computed in chunks"):
            Engine(model, block_size=4, num_blocks=60)
        return
    rows = [prompt(tokens)[0].tolist() for tokens in (4, 11, 7)]
    right = [
        model.generate(torch.tensor([row]), max_new_tokens=8, do_sample=False)[0, len(row) :].tolist()
        for row in rows
    ]
    with Engine(model, block_size=4, num_blocks=60, max_batch_tokens=9) as engine:
        outputs = engine.generate(rows, max_new_tokens=8, do_sample=False)
    assert [output.sequences[0].token_ids for output in outputs] == right
