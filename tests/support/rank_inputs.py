"""Cases: requests with more than token ids, which rank 0 sends to the others."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from typing import Any

import pytest
import torch
from engine_answers import (
    KINDS,
    PROMPTS,
    SCORED,
    alone,
    alone_with_media,
    answers,
    checked_answers,
    new_tokens_of,
)
from rank_models import SHOWN
from rank_support import CUDA, GREEDY, NEW, SMALL, led, loaded, shown_to, whole
from tape import record

from hf_paged.engine import Engine
from hf_paged.engine.parallel import Ranks
from hf_paged.engine.worker.runner import Runner
from hf_paged.model.rehearsal import RECORDERS


def compare_shown(name: str, rank: int, **options: Any) -> dict[str, Any]:
    """Pictures beside texts, in chunks, put down in between, and again from cached blocks; of one family in several
    ways.
    """
    model = loaded(name)
    with Engine(model, **{**SMALL, **options}) as engine:
        if rank:
            assert engine.follow()
            assert not engine.follow()
            return {}
        given = shown_to(name)
        one = whole(name)
        expected = [alone_with_media(one, each, **GREEDY) for each in given]
        texts = [alone(one, prompt, **GREEDY) for prompt in PROMPTS[:2]]
        handles = [engine.submit(**each, **GREEDY) for each in given]
        others = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:2]]
        for _ in range(4):
            engine.step()
        engine.pause()
        engine.resume()
        found = checked_answers(engine, [*handles, *others])
        assert found == expected + texts, (name, found, expected, texts)
        assert answers(engine.submit(**given[0], **GREEDY).result()) == expected[0]
        if name == "llava":
            ways = ({**GREEDY, "num_beams": 2}, {**KINDS[3], "max_new_tokens": NEW, "seed": 3})
            with Engine(one, **SMALL) as single:
                both = []
                for each in (engine, single):
                    handles = [each.submit(**given[0], **way) for way in ways]
                    both.append(checked_answers(each, handles))
            assert both[0] == both[1]
            # more pictures than places for them: an error of all ranks
            pixels = given[0]["pixel_values"].repeat(2, 1, 1, 1)
            bad = engine.submit(**{**given[0], "pixel_values": pixels}, **GREEDY)
            good = engine.submit(**given[1], **GREEDY)
            assert isinstance(bad.result().error, ValueError)
            assert answers(good.result()) == expected[1]
        stats = engine.stats()
        assert stats["hits"] > 0
        return stats


def pictures_and_recordings(rank: int) -> None:
    for name, kind in SHOWN.items():
        if kind != "seq2seq" and name != "qwen2_vl":  # the next case has it
            compare_shown(name, rank)


def pictures_in_captured_steps(rank: int) -> None:
    """Tokens behind a picture whose positions are moved by one number are replayed."""
    if not CUDA:
        RECORDERS["cpu"] = record
    try:
        stats = compare_shown("qwen2_vl", rank, run_ahead=True)
    finally:
        RECORDERS.pop("cpu", None)
    if rank == 0:
        assert stats["graphs"]["replayed"] > 5, stats["graphs"]


def embeddings(rank: int) -> None:
    def act(engine: Engine) -> None:
        one = whole("llama")
        draw = torch.Generator().manual_seed(0)
        rows = [torch.randn(n, one.config.hidden_size, generator=draw) / 4 for n in (17, 5)]
        rows = [each.to(one.device) for each in rows]
        ways = [GREEDY, {**GREEDY, "num_beams": 3}]
        with Engine(one, **SMALL) as single:
            both = []
            for each in (engine, single):
                handles = [each.submit(inputs_embeds=row, **way) for row in rows for way in ways]
                handles.append(each.submit(PROMPTS[1], **GREEDY))
                both.append(checked_answers(each, handles))
        assert both[0] == both[1]
        ids = one.generate(inputs_embeds=rows[0][None], **GREEDY).tolist()
        assert both[0][0] == ids

    led(rank, loaded("llama"), act)


def encoders(rank: int) -> None:
    """Encoder-decoders: each rank has its part of the encoder, and of the keys and values across."""

    greedy = {**GREEDY, "max_new_tokens": 9}
    asked = [(prompt, way) for prompt in PROMPTS[1:4] for way in (greedy, {**greedy, "num_beams": 3})]

    @functools.cache
    def expected() -> list[list[list[int]]]:
        one = whole("t5gemma")
        outputs = [
            one.generate(torch.tensor([prompt], device=one.device), **SCORED, **way) for prompt, way in asked
        ]
        return [new_tokens_of(output, 1) for output in outputs]

    def act(engine: Engine) -> None:
        found = checked_answers(engine, [engine.submit(prompt, **way) for prompt, way in asked])
        assert found == expected()
        assert engine.stats()["preemptions"] > 0

    for way in ("recompute", "swap"):
        led(rank, loaded("t5gemma"), act, preemption=way, num_blocks=10)


def long_messages(rank: int) -> None:
    """A step that needs more numbers than the first part of a message has."""

    def act(engine: Engine) -> None:
        prompts = [[5 + (7 * i + row) % 90 for i in range(220)] for row in range(12)]
        outputs = engine.generate(prompts, max_new_tokens=3, do_sample=False)
        assert [answers(each) for each in outputs] == [
            alone(whole("llama"), prompt, max_new_tokens=3, do_sample=False) for prompt in prompts
        ]

    led(rank, loaded("llama"), act, num_blocks=900, max_batch_tokens=2048, max_batch_sequences=12)


class _Forced:
    """A processor of a request: rank 0's alone."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([7 + ids.shape[1] % 3], device=ids.device), 100.0)


def processors_and_criteria(rank: int) -> None:
    def act(engine: Engine) -> None:
        def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(ids),), ids.shape[1] >= 8, device=ids.device)

        keywords = {
            "do_sample": False,
            "max_new_tokens": NEW,
            "logits_processor": [_Forced()],
            "stopping_criteria": [criterion],
        }
        found = answers(engine.submit(PROMPTS[0], **keywords).result())
        assert found == alone(whole("llama"), PROMPTS[0], **keywords)

        def broken(*_: Any) -> torch.Tensor:
            raise KeyError("mine")

        bad = engine.submit(PROMPTS[0], logits_processor=[broken], max_new_tokens=3)
        good = engine.submit(PROMPTS[1], max_new_tokens=3, do_sample=False)
        assert answers(good.result()) == alone(whole("llama"), PROMPTS[1], max_new_tokens=3, do_sample=False)
        assert isinstance(bad.result().error, KeyError)

    led(rank, loaded("llama"), act)


def broadcasts_from_within_a_step(rank: int) -> None:
    """A processor may broadcast; a signal handler in the middle of a forward gets an error."""
    model = loaded("llama")
    forward = model.model.layers[1].mlp.forward
    refused: list[str] = []
    armed = [False]

    def handle(*_: Any) -> None:
        try:
            engine.broadcast("from a handler")
        except RuntimeError as error:
            refused.append(str(error))

    def interrupted(states: torch.Tensor) -> torch.Tensor:
        if armed[0]:
            os.kill(os.getpid(), signal.SIGUSR1)
        return forward(states)

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        engine.broadcast(ids.shape[1])
        return scores

    model.model.layers[1].mlp.forward = interrupted  # on all ranks alike
    with pytest.MonkeyPatch.context() as patch, Engine(model, **SMALL) as engine:
        patch.setitem(RECORDERS, "cpu", record)
        if rank:
            received: list[int] = []
            assert not engine.follow(received.append)
            length = len(PROMPTS[1])
            assert received == list(range(length, length + NEW)), received
            return
        found = answers(engine.submit(PROMPTS[1], logits_processor=[processor], **GREEDY).result())
        assert found == alone(whole("llama"), PROMPTS[1], **GREEDY)
        before = signal.signal(signal.SIGUSR1, handle)
        armed[0] = True
        assert answers(engine.submit(PROMPTS[2], **GREEDY).result())
        signal.signal(signal.SIGUSR1, before)
        assert refused
        assert set(refused) == {refused[0]}
        assert "middle of a forward" in refused[0]


def inputs_that_take_long_to_read(rank: int) -> None:
    """Rank 0 computes with a request's inputs when all ranks have read them: errors of all come together."""

    def act(engine: Engine) -> None:
        given = shown_to("llava")[0]
        assert isinstance(engine.submit(**given, **GREEDY).result().error, ZeroDivisionError)
        found = answers(engine.submit(**given, **GREEDY).result())
        assert found == alone_with_media(whole("llava"), given, **GREEDY)

    read, show = Ranks.broadcast_object, Runner.encode_media
    pauses = itertools.chain([1.2 * rank], itertools.repeat(0))
    errors = itertools.chain([1], itertools.repeat(0))

    def slowly(ranks: Ranks, *value: Any) -> Any:
        found = read(ranks, *value)
        time.sleep(next(pauses))
        return found

    def broken(*given: Any) -> None:
        if next(errors):
            raise ZeroDivisionError("on all ranks")
        show(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "broadcast_object", slowly)
        patch.setattr(Runner, "encode_media", broken)
        patch.setattr("hf_paged.engine.parallel.ranks.GRACE", 0.8)
        led(rank, loaded("llava"), act)
