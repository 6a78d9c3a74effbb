"""Shared by the tests: engines, prompts and kinds of requests, and the answers of stock generate() to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tiny
import torch
from computed_once import computed_once
from families import BY_NAME, VOCABULARY, build

from hf_paged.engine import Engine

PROMPTS = [
    torch.randint(5, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (3, 17, 9, 30, 1, 12)
]


SCORED = {"return_dict_in_generate": True, "output_scores": True}
"""The fields of generate()'s answer that `new_tokens_of` needs."""


def new_tokens_of(answer: Any, begin: int) -> list[list[int]]:
    """The tokens of a `SCORED` answer of generate() after the first `begin`, padding taken off."""
    rows = [row[begin:].tolist() for row in answer.sequences]
    if "beam_indices" in answer:
        lengths = (answer.beam_indices >= 0).sum(1).tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return rows


def alone(model: Any, prompt: list[int], **options: Any) -> list[list[int]]:
    """The new tokens of generate() on that prompt alone."""
    return alone_with_media(model, {"input_ids": torch.tensor([prompt], device=model.device)}, **options)


def alone_with_media(model: Any, inputs: Mapping[str, Any], **options: Any) -> list[list[int]]:
    """The same of a prompt as a processor answers."""

    def compute() -> list[list[int]]:
        return new_tokens_of(model.generate(**inputs, **SCORED, **options), inputs["input_ids"].shape[1])

    if options.get("do_sample", model.generation_config.do_sample):
        return compute()
    return computed_once(compute, model, dict(inputs), options)


def small_engine(model: Any, **options: Any) -> Engine:
    """An engine of few blocks, rows and tokens a step, in which requests are cut, wait and share blocks."""
    few = {"block_size": 4, "num_blocks": 60, "max_batch_tokens": 11, "max_batch_sequences": 6}
    return Engine(model, **{**few, **options})


def checked_answers(engine: Engine, handles: list[Any]) -> list[list[list[int]]]:
    """The answers; the books are recounted after every step."""
    while not all(handle.done for handle in handles):
        engine.step()
        engine.check()
    assert all(kind["held"] == 0 for kind in engine.stats()["blocks"].values())
    return [answers(handle.result()) for handle in handles]


def answers(output: Any) -> list[list[int]]:
    if output.error is not None:
        raise output.error
    return [sequence.token_ids for sequence in output.sequences]


@functools.cache
def _model(name: str) -> Any:
    return (
        build(BY_NAME[name]) if name in BY_NAME else tiny.build("causal", tiny.config_class("causal", name))
    )


@functools.cache
def _roomy(name: str) -> Engine:
    """An engine in which a request is alone, with nothing cached."""
    return Engine(_model(name), prefix_caching=False, num_blocks=200, max_batch_sequences=8)


def each_alone(
    asked: Sequence[tuple[list[int], dict[str, Any]]],
    stock: Callable[[Any, list[int], dict[str, Any]], list[list[int]]],
) -> list[list[list[int]]]:
    """The answers of an engine to prompts with options, each alone: those without draws are stock's."""
    model = build(BY_NAME["llama"])
    with Engine(model, num_blocks=200, run_ahead=False, prefix_caching=False) as engine:
        expected = [answers(engine.generate([prompt], **kind)[0]) for prompt, kind in asked]
    for (prompt, kind), found in zip(asked, expected, strict=True):
        if not kind["do_sample"]:
            options = {name: value for name, value in kind.items() if name != "logprobs"}
            assert found == stock(model, prompt, options), kind
    return expected


KINDS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    {"do_sample": True, "temperature": 1.3, "presence_penalty": 0.9, "frequency_penalty": -0.6},
    {"do_sample": True, "num_return_sequences": 3, "top_k": 20, "top_p": 0.9},
    {
        "do_sample": True,
        "num_return_sequences": 2,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "eos_token_id": [2, 9, 30, 41, 60, 77],
    },
    {"do_sample": False, "repetition_penalty": 1.4},
    {"num_beams": 3, "do_sample": False, "num_return_sequences": 2},
    {"num_beams": 2, "do_sample": False, "early_stopping": True, "eos_token_id": [2, 9, 30, 41, 60, 77]},
]


@functools.cache
def right(name: str, prompt: int, kind: int, new: int) -> list[list[int]]:
    """The answer of a request alone."""
    if KINDS[kind]["do_sample"]:
        return answers(
            _roomy(name).generate([PROMPTS[prompt]], max_new_tokens=new, seed=prompt, **KINDS[kind])[0]
        )
    return alone(_model(name), PROMPTS[prompt], max_new_tokens=new, **KINDS[kind])
