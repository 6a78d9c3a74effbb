"""Cases: generate() and forwards of models that ranks divide."""

from __future__ import annotations

import functools
import importlib
import itertools
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dropout import stop_dropout, train_with_dropout
from engine_answers import PROMPTS, alone, answers
from families import BY_NAME, build
from modes import MODES as MODES_BY_NAME
from processes import LIMIT
from rank_support import (
    BACKEND,
    CUDA,
    GREEDY,
    MODES,
    NEW,
    SMALL,
    begin_again,
    first_capture_without_memory,
    generated,
    loaded,
    meshes,
    raises,
    whole,
)

import hf_paged
from hf_paged.engine import Engine
from hf_paged.generate.ranks import check_ranks
from hf_paged.model.capture import pool
from hf_paged.model.capture.replay import captures_of
from hf_paged.model.ranks import tensor_parallel
from hf_paged.model.ranks import votes as rank_votes
from hf_paged.model.ranks.tensor_parallel import mesh_of


def generate(rank: int) -> None:
    """All ranks call it, and all have the tokens of one process."""
    for name in ("llama", "mixtral", "gpt-oss"):
        model = loaded(name)
        for mode in MODES:
            found = generated(model, mode, cache_implementation="paged")
            assert found == generated(whole(name), mode), (name, mode)


def captured_steps_of_generate(rank: int) -> None:
    """All ranks have the same ones: also after one had no memory for its own, or lost them."""
    model, one = loaded("llama"), whole("llama")
    pool = captures_of(model).pool

    def compared() -> int:
        """The replays of all modes, alike on all ranks."""
        before = pool.counts["replayed"]
        for mode in MODES:
            found = generated(model, mode, cache_implementation="paged")
            assert found == generated(one, mode), mode
        replayed = pool.counts["replayed"] - before
        all_of_them: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_of_them, (replayed, [size[1:] for size in pool.sizes()]))
        assert all(each == all_of_them[0] for each in all_of_them), all_of_them
        return replayed

    with first_capture_without_memory(rank == 1), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged.model.capture.replay.LEAST_STEPS", 1)
        for _ in range(3):
            many = compared()
        assert many > 10
        assert not pool.counts["refused"], pool.reasons
        if rank == 1:
            pool.drop()
        assert compared() < many
        for _ in range(2):
            again = compared()
        assert again == many


class _Notes:
    """A streamer of the user's own, which changes the model once."""

    def __init__(self, model: Any, at: int) -> None:
        self._model = model
        self._at = at
        self.tokens: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        if len(self.tokens) == self._at:
            self._model.config.note = self._at
            time.sleep(0.2)

    def end(self) -> None:
        pass


def a_benchmark_of_votes(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        found = importlib.import_module("tensor_parallel").vote(loaded("llama"))
    assert found["ms"] > 0


def a_streamer_on_one_rank(rank: int) -> None:
    """Rank 0 alone runs code of the user between steps, which takes long and changes its model: all ranks
    still take the same steps.
    """
    model, one = loaded("llama"), whole("llama")
    ids = torch.tensor([PROMPTS[1]], device=model.device)
    options: dict[str, Any] = {"max_new_tokens": 3 * NEW, "do_sample": False}
    expected = one.generate(ids, **options).tolist()
    with first_capture_without_memory(False), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged.model.capture.replay.LEAST_STEPS", 1)
        patch.setattr("hf_paged.model.ranks.votes._votes", {})
        patch.setattr("hf_paged.model.ranks.votes.MEETING", 0.1)
        for call in range(4):
            streamer = _Notes(model, 22 + call) if rank == 0 else None
            found = model.generate(ids, streamer=streamer, cache_implementation="paged", **options)
            assert found.tolist() == expected, (found.tolist(), expected)
    counts = captures_of(model).pool.counts
    assert counts["replayed"] > 10, counts


def sums_of_different_things(rank: int) -> None:
    """A rank has begun a sum more than the others, as one does whose device had no memory in a capture: no
    token comes of it.
    """
    model = loaded("llama")
    begun = "hf_paged.model.ranks.votes.collectives_begun"
    counts = rank_votes.collectives_begun
    calls = itertools.count()
    with first_capture_without_memory(False), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged.model.capture.replay.LEAST_STEPS", 1)
        patch.setattr("hf_paged.model.ranks.votes._votes", {})
        patch.setattr(begun, lambda group: counts(group) + (rank == 1 and next(calls) > 1))
        for _ in range(2):
            raises(
                RuntimeError,
                "computed different things",
                lambda: generated(model, MODES[0], cache_implementation="paged"),
            )


def messages_of_the_user(rank: int) -> None:
    """A message that rank 1 waits for meanwhile, in the process group of the model, is no sum of a call that
    begins later. In the middle of one it may be: the error says what to do.
    """
    if CUDA:
        return  # there a message is counted apart from sums
    model, one = loaded("llama"), whole("llama")
    assert mesh_of(model).get_group() is dist.group.WORLD
    expected = generated(one, MODES[0])
    works = []

    class Waits(_Notes):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if rank == 1 and len(self.tokens) == len(PROMPTS[1]) + 1:
                works.append(dist.irecv(torch.zeros(1), 0, tag=7))

    with first_capture_without_memory(False), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged.model.capture.replay.LEAST_STEPS", 1)
        patch.setattr("hf_paged.model.ranks.votes._votes", {})
        assert generated(model, MODES[0], cache_implementation="paged") == expected
        works += [dist.irecv(torch.zeros(1), 0, tag=7)] if rank == 1 else []
        assert generated(model, MODES[0], cache_implementation="paged") == expected
        captures_of(model).pool.drop()
        ids = torch.tensor([PROMPTS[1]])
        options = {"cache_implementation": "paged", "streamer": Waits(model, -1), **GREEDY}
        raises(RuntimeError, "collectives.*group of its own", lambda: model.generate(ids, **options))
    if rank == 0:
        for _ in "12":
            dist.send(torch.ones(1), 1, tag=7)
    for work in works:
        work.wait()


def dropout_on_one_rank(rank: int) -> None:
    """Stock computes the call on all ranks: it does other sums, and draws other numbers."""
    model = loaded("llama")
    ids = torch.tensor([PROMPTS[1]], device=model.device)
    reason = ("another rank of LlamaForCausalLM cannot", "attention_dropout=0.2")[rank]
    with first_capture_without_memory(False):
        for draws in (False, True):
            if rank == 1:
                train_with_dropout(model)
            with pytest.warns(hf_paged.FallbackWarning, match=reason):
                model.generate(ids, cache_implementation="paged", do_sample=draws, max_new_tokens=NEW)
            stop_dropout(model)
            found = model.generate(ids, cache_implementation="paged", **GREEDY)
            assert found.tolist() == whole("llama").generate(ids, **GREEDY).tolist()


def two_models_in_two_threads(rank: int) -> None:
    """Each has process groups of its own. One rank runs the one first, the other one the other: no lock of
    the process is held while ranks meet.
    """
    if torch.cuda.is_available():
        return  # threads share a stream, and sums of two groups on it wait for each other, as stock's do
    one, models = whole("llama"), []
    with pytest.MonkeyPatch.context() as patch:
        for _ in "12":
            patch.setattr(dist, "init_device_mesh", _mesh_of_its_own)
            models.append(loaded("llama"))
    expected = generated(one, MODES[0])
    fused, memory, symmetric = pool.fused, tensor_parallel.symmetric_memory_of, set()
    both, begun, found = threading.Barrier(2), set(), {}

    @contextmanager
    def fused_in_turn(fusion: Any) -> Iterator[None]:
        name = threading.current_thread().name
        if name not in begun:
            begun.add(name)
            with suppress(threading.BrokenBarrierError):
                both.wait(0.5)
            time.sleep(0.3 * (name != str(rank)))
        with fused(fusion):
            yield

    def meeting(group: Any) -> Any:
        if group not in symmetric:
            time.sleep(0.3)
            dist.barrier(group)
            symmetric.add(group)
        return memory(group)

    def checked_in_turn(*given: Any) -> None:
        time.sleep(0.1 * (threading.current_thread().name != str(rank)))
        check_ranks(*given)

    def run(number: int) -> None:
        time.sleep(0.1 * (number != rank))
        for _ in range(6):
            found.setdefault(number, []).append(
                generated(models[number], MODES[0], cache_implementation="paged")
            )

    with first_capture_without_memory(False), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged.model.capture.replay.LEAST_STEPS", 1)
        patch.setattr(pool, "fused", fused_in_turn)
        patch.setattr("hf_paged.generate.install.check_ranks", checked_in_turn)
        for place in ("hf_paged.model.ranks.tensor_parallel", "hf_paged.generate.ranks"):
            patch.setattr(f"{place}.symmetric_memory_of", meeting)
        threads = [threading.Thread(target=run, args=(n,), name=str(n), daemon=True) for n in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(LIMIT)
        for each in models:  # the one that had no turn captures later
            assert generated(each, MODES[0], cache_implementation="paged") == expected
    assert found == {0: [expected] * 6, 1: [expected] * 6}, found
    assert [captures_of(each).pool.counts["captured"] for each in models] == [1, 1]


def _mesh_of_its_own(*given: Any, mesh_dim_names: tuple[str, ...] | None = None) -> Any:
    """As transformers makes it, with a process group that no other model has."""
    names = mesh_dim_names or ()
    own = {name: BACKEND for name in names if name == "tp"} if names else {0: BACKEND}
    return meshes.__wrapped__(*given, mesh_dim_names=mesh_dim_names, backend_override=own)


def a_call_that_begins_again(rank: int) -> None:
    """A rank whose call has failed begins another one, while the others are in the middle of the first: none
    of them has a token of that.
    """
    begin_again(9)
    model = loaded("llama-3")
    ids = torch.tensor([PROMPTS[1][:1]], device=model.device)
    options = {"do_sample": False, "max_new_tokens": 3 * NEW, "cache_implementation": "paged"}
    expected = whole("llama-3").generate(ids, **{**options, "cache_implementation": None}).tolist()

    class Raises(_Notes):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if rank == 1 and len(self.tokens) == self._at:
                raise LookupError("mine")

    with first_capture_without_memory(False), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged.model.capture.replay.LEAST_STEPS", 1)
        for _ in range(3):
            assert model.generate(ids, **options).tolist() == expected
        first = {**options, "streamer": Raises(model, 6)}
        if rank == 1:
            raises(LookupError, "mine", lambda: model.generate(ids, **first))
            raises(RuntimeError, "at the beginning of a call; look", lambda: model.generate(ids, **options))
        else:
            raises(RuntimeError, "at the beginning of a step; look", lambda: model.generate(ids, **first))


def forwards_of_the_user(rank: int) -> None:
    """A layer's forward that the user sets is computed by generate(), and by an engine made before."""
    model, one = loaded("llama"), whole("llama")

    def change(layer: Any) -> Any:
        own = layer.forward

        @functools.wraps(own)
        def forward(x: torch.Tensor) -> torch.Tensor:
            return own(x) * -3  # type: ignore[no-any-return]

        layer.forward = forward
        return forward

    before = generated(one, MODES[0])
    with Engine(model, **SMALL) as engine:
        layer, alone_in_one = (each.model.layers[0].mlp.down_proj for each in (model, one))
        forward = change(layer)
        change(alone_in_one)
        try:
            expected = generated(one, MODES[0])
            found = generated(model, MODES[0], cache_implementation="paged")
            assert found == expected != before
            if rank == 0:
                token_ids = alone(one, PROMPTS[1], **GREEDY)
                assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == token_ids
        finally:
            del alone_in_one.forward
        if rank > 0:
            assert not engine.follow()
    assert layer.forward is forward


CALLS = ("assisted", "prompt-lookup", "chunks", "beam-sample", "everything", "everything-beams")


def modes_of_generate(rank: int) -> None:
    """Drafts, chunked prompts, sampled beams, and outputs with scores and states."""
    model, one = loaded("llama"), whole("llama")
    for each in (model, one):
        each.assistant = build(BY_NAME["llama"]).to(each.device)
        with torch.no_grad():
            each.assistant.lm_head.weight[::3].mul_(0.8)  # it is often right, and sometimes not
    ids = torch.tensor([PROMPTS[1][:5], PROMPTS[2][:5], PROMPTS[3][:5]], device=model.device)
    for name in CALLS:
        found = []
        for each, word in ((one, {}), (model, {"cache_implementation": "paged"})):
            torch.manual_seed(5)
            found.append(each.generate(**{"input_ids": ids, **MODES_BY_NAME[name](each, ids)}, **word))
        expected, answer = found
        if isinstance(expected, torch.Tensor):
            assert answer.tolist() == expected.tolist(), name
            continue
        assert answer.sequences.tolist() == expected.sequences.tolist(), name
        assert answer.keys() == expected.keys(), name
        for own, other in zip(answer.logits, expected.logits, strict=True):
            torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-3)


def draws_of_ranks(rank: int) -> None:
    """Other random states: rank 0's are taken, with one warning."""
    model = loaded("llama")
    ids = torch.tensor([PROMPTS[1]], device=model.device)
    mode = {"do_sample": True, "max_new_tokens": NEW, "cache_implementation": "paged"}
    torch.manual_seed(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokens = model.generate(ids, **mode).tolist()
        model.generate(ids, **mode)  # alike by now
    found = [str(each.message) for each in caught if "random states" in str(each.message)]
    assert len(found) == (rank == 0), found
    torch.manual_seed(0)
    assert tokens == whole("llama").generate(ids, **mode).tolist()
