"""Models, engines, requests and process groups that the cases of several ranks share."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import engine_answers
import peft
import pytest
import torch
import torch.distributed as dist
import transformers as tf
from computed_once import computed_once
from engine_answers import KINDS, PROMPTS, checked_answers, right
from families import BY_NAME, build
from pictures import with_pictures, with_recordings
from rank_models import SHOWN
from tape import record

from hf_paged.engine import Engine
from hf_paged.model.rehearsal import RECORDERS

FOLDER = Path(sys.argv[1])
CUDA = torch.cuda.is_available()
BACKEND = "cpu:gloo,cuda:nccl" if CUDA else "gloo"
NEW = 6
ASKED = [((1, 3, 0)[k % 3], k) for k in range(len(KINDS))] + [(3, 3), (1, 6), (1, 1)]
FEW = [(3, 0), (1, 3), (3, 6)]
SMALL = {
    "block_size": 4,
    "num_blocks": 60,
    "max_batch_tokens": 11,
    "max_batch_sequences": 6,
    "rank_timeout": 20.0,
}
GREEDY = {"do_sample": False, "max_new_tokens": NEW}
MODES: list[dict[str, Any]] = [
    {"do_sample": False},
    {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    {
        "do_sample": True,
        "top_k": 30,
        "num_return_sequences": 4,
        "eos_token_id": [*range(5, 20)],
        "pad_token_id": 0,
    },
]
meshes = functools.cache(dist.init_device_mesh)
"""One mesh for all models that are divided alike: transformers makes one for each, with groups whose threads
poll for as long as the process lives.
"""
dist.init_device_mesh = meshes


@functools.cache
def whole(name: str) -> Any:
    """A family's model in this process alone."""
    return build(BY_NAME[name]).to("cuda" if CUDA else "cpu")


engine_answers._model = whole


def loaded(name: str, **options: Any) -> Any:
    """A family's model, divided over the ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases have another name for the argument
        options = options or {"tp_plan": "auto"}
        kind = type(whole(name)) if name in SHOWN else tf.AutoModelForCausalLM
        return kind.from_pretrained(FOLDER / name, **options).eval()


def led(rank: int, model: Any, act: Callable[[Engine], Any], **options: Any) -> Any:
    """The answer of `act` with rank 0's engine, while the others follow."""
    with Engine(model, **{**SMALL, **options}) as engine:
        if rank == 0:
            return act(engine)
        assert not engine.follow()
    return None


def asked(engine: Engine, requests: list[tuple[int, int]]) -> list[list[list[int]]]:
    """The answers of requests that are submitted together."""
    handles = [engine.submit(PROMPTS[p], max_new_tokens=NEW, seed=p, **KINDS[k]) for p, k in requests]
    return checked_answers(engine, handles)


def compare(
    name: str, rank: int, requests: list[tuple[int, int]] = ASKED, twice: bool = True, **options: Any
) -> dict[str, Any]:
    """Requests of an engine on all ranks, held to the same requests alone in one process: its counts. twice:
    ask some again, of an idle engine that has cached them.
    """

    def act(engine: Engine) -> dict[str, Any]:
        found = asked(engine, requests)
        again = asked(engine, requests[:3]) if twice else []
        stats = engine.stats()
        expected = [right(name, p, k, NEW) for p, k in requests]
        assert found == expected, (found, expected)
        assert again == expected[: len(again)]
        return stats

    stats: dict[str, Any] = led(rank, loaded(name), act, **options) or {}
    return stats


def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], words: str, act: Callable[[], Any]
) -> None:
    with pytest.raises(kind, match=f"(?s){words}"):
        act()


def generated(model: Any, mode: dict[str, Any], **options: Any) -> list[list[int]]:
    """The tokens of generate() for two prompts, one of them padded, with draws under one seed."""
    ids = torch.tensor([[0] * 8 + PROMPTS[2], PROMPTS[1]], device=model.device)

    def compute() -> Any:
        torch.manual_seed(11)
        mask = (ids != 0).long()
        return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **mode, **options).tolist()

    tokens: list[list[int]] = compute() if options else computed_once(compute, model, mode)
    return tokens


def shown_to(name: str) -> list[dict[str, torch.Tensor]]:
    """Two prompts of equal ids around other pictures, or recordings."""
    model = whole(name)
    first = (with_pictures if SHOWN[name] == "image" else with_recordings)(model, rows=1)
    assert first is not None
    first = {key: value.to(model.device) for key, value in first.items()}
    return [
        first,
        {key: value * 0.5 + 0.1 if value.is_floating_point() else value for key, value in first.items()},
    ]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(lora_alpha=8, **options)


def adapter_of(name: str, seed: int, rank: int, **more: list[int]) -> dict[str, torch.Tensor]:
    """A state dict for all linear layers of a family that an adapter may have, each with large weights."""
    draw = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for path, module in whole(name).named_modules():
        if type(module) is torch.nn.Linear and "router" not in path:
            found[f"{path}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=draw) / 8
            found[f"{path}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=draw) / 8
    return found


@contextmanager
def first_capture_without_memory(on: bool) -> Iterator[None]:
    """The first recording of this process finds no memory; it is tried again a few steps later."""
    device = "cuda" if CUDA else "cpu"
    own = RECORDERS.get(device)
    tries = [0]

    def scarce(*given: Any) -> Any:
        found = (own or record)(*given)
        tries[0] += 1
        if on and tries[0] == 1:
            raise torch.OutOfMemoryError("no memory on purpose")
        return found

    RECORDERS[device] = scarce
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hf_paged.model.capture.pool.LATER", 6)
            yield
    finally:
        RECORDERS.pop(device)
        if own is not None:
            RECORDERS[device] = own


def begin_again(number: int) -> None:
    """New process groups."""
    meshes.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{FOLDER}/groups-{number}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
