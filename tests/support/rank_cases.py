"""What several ranks compute together: `rank_cases.py FOLDER [2:swap 3:peft_models ...]`. Each case leaves a line.

Ranks are forks of one process, which imports for all of them; or processes of torchrun, as a device needs it.

The reference is the same engine, or generate(), on the whole model in rank 0's own process, on its CPU. Where
there are CUDA devices each rank has one, and its steps are captured:

    export PYTHONPATH=.:kernels:tests:tests/support
    python -c "import pathlib, rank_models; rank_models.save(pathlib.Path('models'))"
    torchrun --nproc-per-node 2 tests/support/rank_cases.py models
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_answers
import peft
import pytest
import torch
import torch.distributed as dist
import transformers as tf
from dropout import stop_dropout, train_with_dropout
from engine_answers import (
    KINDS,
    PROMPTS,
    SCORED,
    alone,
    alone_with_media,
    answers,
    checked_answers,
    new_tokens_of,
    right,
)
from families import BY_NAME, build
from fused_models import Kernels
from kernel_cases import load as load_kernels
from modes import MODES as MODES_BY_NAME
from pictures import with_pictures, with_recordings
from processes import LIMIT
from rank_models import DIVIDED, SHOWN
from rank_names import CASES
from safetensors.torch import save_file
from tape import record, rerun
from torch.distributed import destroy_process_group
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.generation.continuous_batching import RequestStatus

import hf_paged
from hf_paged.blocks import OutOfBlocks
from hf_paged.continuous.manager import EngineBatchingManager
from hf_paged.engine import Engine, Handle, RankError
from hf_paged.engine.adapters import EngineAdapters
from hf_paged.engine.in_flight import InFlightStep
from hf_paged.engine.parallel import Ranks, follower, joining, ranks
from hf_paged.engine.parallel.message import MessageKind
from hf_paged.engine.runner import Runner
from hf_paged.engine.support import Unservable
from hf_paged.generate.ranks import check_ranks
from hf_paged.kv import HostBlocks, Ops, budget, group
from hf_paged.model.adapters.loading import load_adapter
from hf_paged.model.capture import pool
from hf_paged.model.capture.fusion import Fusion
from hf_paged.model.capture.pool import CapturePool
from hf_paged.model.capture.products import joined_of
from hf_paged.model.capture.replay import captures_of
from hf_paged.model.dispatch import has_foreign_code
from hf_paged.model.ranks import symmetric_memory, tensor_parallel
from hf_paged.model.ranks import votes as rank_votes
from hf_paged.model.ranks.symmetric_memory import FUSED, MOST_BYTES, LazySum, SymmetricMemory
from hf_paged.model.ranks.tensor_parallel import mesh_of
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.model.shards import local_part
from hf_paged.trainer import SampleCallback

FOLDER = Path(sys.argv[1])
CUDA = torch.cuda.is_available()
BACKEND = "cpu:gloo,cuda:nccl" if CUDA else "gloo"
NEW = 9
ASKED = [((1, 3, 0)[k % 3], k) for k in range(len(KINDS))] + [(3, 3), (1, 6), (1, 1)]
FEW = [(3, 0), (1, 3), (3, 6)]
SMALL = {
    "block_size": 4,
    "num_blocks": 60,
    "max_batch_tokens": 11,
    "max_batch_sequences": 6,
    "rank_timeout": 20.0,
}


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
    """What `act` does with rank 0's engine, while the others follow."""
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


# ---- the engine


def chunks_recomputation_and_hits(rank: int) -> None:
    name = "llama-3" if dist.get_world_size() == 3 else "llama"
    requests = ASKED if dist.get_world_size() == 2 else ASKED[2:7]
    stats = compare(name, rank, requests, preemption="recompute", num_blocks=26, max_batch_sequences=10)
    if rank == 0:
        assert stats["preemptions"] > 0
        assert stats["hits"] > 0


def swap(rank: int) -> None:
    stats = compare("llama", rank, preemption="swap", num_blocks=26, max_batch_sequences=10)
    if rank == 0:
        assert stats["swapped_out"] > 0
        assert stats["swapped_in"] > 0


def steps_ahead_of_their_tokens(rank: int) -> None:
    compare("llama", rank, FEW + [(1, 2)], run_ahead=True)


def tokens_that_a_broken_off_broadcast_leaves(rank: int) -> None:
    """Any numbers. No rank looks one up that has no embedding, which would end the process of a CUDA device
    before it hears of the error.
    """
    model = loaded("llama")
    looked_up: list[int] = []
    table = model.get_input_embeddings()
    table.register_forward_pre_hook(lambda _, given: looked_up.extend(given[0].flatten().tolist()))
    broadcast = Ranks.broadcast_on_device
    left = itertools.cycle([2**40, -(2**40)])

    def broken_off(own: Ranks, tokens: torch.Tensor) -> None:
        broadcast(own, tokens)
        tokens.fill_(next(left))

    with (
        pytest.MonkeyPatch.context() as patch,
        Engine(model, run_ahead=True, graphs=False, **SMALL) as engine,
    ):
        if rank == 0:
            engine.submit(PROMPTS[1], **GREEDY).result()
            return
        patch.setattr(Ranks, "broadcast_on_device", broken_off)
        assert not engine.follow()
    assert {0, table.num_embeddings - 1} <= set(looked_up) <= set(range(model.config.vocab_size))


def windows(rank: int) -> None:
    compare("qwen2-window", rank, FEW + [(1, 2)], run_ahead=True)


def captured_steps(rank: int) -> None:
    """Replayed on all ranks, collectives included; a tape stands in for CUDA graphs."""
    if not CUDA:
        RECORDERS["cpu"] = record
    try:
        several = [compare(name, rank, FEW, run_ahead=True) for name in ("llama", "olmo2")]
    finally:
        RECORDERS.pop("cpu", None)
    if rank == 0:
        assert all(stats["graphs"]["replayed"] > 10 for stats in several), several


def kernels_that_are_ready_later_on_one_rank(rank: int) -> None:
    """Until then no rank captures what launches them, and no rank waits for another."""
    asked: list[bool] = []

    def is_ready(runner: Runner, size: Any) -> bool:
        asked.append(rank == 0 or len(asked) >= 4)
        if not asked[-1] or len(asked) < 5:
            assert not runner.decoding or not len(runner.decoding.captures)
        return asked[-1]

    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setitem(RECORDERS, "cpu", record)
        patch.setattr(Runner, "is_ready", is_ready)
        stats = compare("llama", rank, FEW)
    assert len(asked) > 4
    assert rank or stats["graphs"]["replayed"] > 10, stats


def captured_steps_over_pools_that_grow(rank: int) -> None:
    """A pool moves on all ranks or on none: captured steps that read it are dropped with it."""
    if CUDA:
        return  # there pools have all their memory from the first step on
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECORDERS, "cpu", record)
        patch.setattr("hf_paged.engine.pools.SHARE_AT_FIRST", 0.001)
        stats = compare("llama", rank, ASKED, num_blocks=None, rank_timeout=20.0)
    assert rank or stats["graphs"]["replayed"] > 10, stats


def captured_steps_of_code_that_changes_on_one_rank(rank: int) -> None:
    """What a replaced forward has from where it was made is part of a captured step: all begin anew."""
    model = loaded("llama")
    forward = model.model.layers[1].mlp.forward
    noted = [0]

    def noting(states: torch.Tensor) -> torch.Tensor:
        assert noted[0] >= 0
        return forward(states)

    model.model.layers[1].mlp.forward = noting
    with pytest.MonkeyPatch.context() as patch, Engine(model, **SMALL) as engine:
        patch.setitem(RECORDERS, "cpu", record)
        if rank:
            assert not engine.follow(lambda value: noted.__setitem__(0, value))
            return
        right = alone(whole("llama"), PROMPTS[1], **GREEDY)
        for change in (1, None, 2, None):
            before = engine.stats()["graphs"]["replayed"]
            handle = engine.submit(PROMPTS[1], **GREEDY)
            for _ in range(5):
                engine.step()
            if change == 1:
                engine.broadcast(change)
            elif change == 2:
                noted[0] = change
            assert answers(handle.result()) == right
            assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == right
            assert engine.stats()["graphs"]["replayed"] > before + 5, engine.stats()["graphs"]


def a_warm_up(rank: int) -> None:
    """All ranks capture before requests come what these will need."""
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setitem(RECORDERS, "cpu", rerun)
            patch.setitem(sys.modules, "hf_paged_kernels", load_kernels())
            patch.setattr("hf_paged.kv.ops.why_no_kernels", lambda layout: None)

        def act(engine: Engine) -> None:
            end = time.monotonic() + LIMIT
            while not engine.warm_up():
                assert time.monotonic() < end
                time.sleep(0.1)
            warm = engine.stats()["graphs"]
            assert warm["captured"] > 1, warm
            assert asked(engine, FEW[:1]) == [right("llama", *FEW[0], NEW)]
            found = engine.stats()["graphs"]
            assert found["captured"] == warm["captured"], found
            assert found["replayed"] > 5, found

        led(rank, loaded("llama"), act, max_batch_sequences=1)


def user_code_on_one_rank_for_a_while(rank: int) -> None:
    """A hook, or a replaced forward, comes and goes between requests: none captures meanwhile."""
    for which, wraps in ((0, True), (1, False), (1, True)):
        _with_user_code(rank == which, wraps)


def _with_user_code(here: bool, wraps: bool) -> None:
    model = loaded("llama")
    layer: Any = model.model.layers[1].mlp
    forward = layer.forward
    handles: list[Any] = []

    def change(on: bool) -> None:
        if here and wraps and on:
            layer.forward = lambda x: forward(x)
        elif here and wraps:
            del layer.forward
        elif here and on:
            handles.append(layer.register_forward_hook(lambda module, given, answer: None))
        elif here:
            handles.pop().remove()

    with pytest.MonkeyPatch.context() as patch, Engine(model, **SMALL) as engine:
        patch.setitem(RECORDERS, "cpu", record)
        if not engine.leads:
            assert not engine.follow(change)
            return
        for on in (None, True, False):
            if on is not None:
                engine.broadcast(on)
                change(on)
            before = engine.stats()["graphs"]["replayed"]
            for _ in range(3):
                found = answers(engine.submit(PROMPTS[1], **GREEDY).result())
                assert found == right("llama", 1, 0, NEW)
            assert on or engine.stats()["graphs"]["replayed"] > before + 5


def weights_at_an_earlier_address_on_one_rank(rank: int) -> None:
    """All ranks put a weight elsewhere; rank 0 where it was before, of which it knows captured steps."""
    model = loaded("llama")
    weight = local_part(model.model.norm.weight)
    places = [weight.data, weight.data.clone()]
    with pytest.MonkeyPatch.context() as patch, Engine(model, **SMALL) as engine:
        patch.setitem(RECORDERS, "cpu", record)
        for turn in range(3):
            if rank == 0:
                for _ in range(2):
                    found = answers(engine.submit(PROMPTS[1], **GREEDY).result())
                    assert found == right("llama", 1, 0, NEW)
                engine.pause()
            else:
                assert engine.follow()
                places.append(places[0].clone())
            weight.data = places[(turn + 1) % 2] if rank == 0 else places[-1]
            if rank == 0:
                engine.resume()
        if rank == 0:
            assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == right("llama", 1, 0, NEW)
            assert engine.stats()["graphs"]["replayed"] > 10
        else:
            assert not engine.follow()


def what_ranks_do_in_a_pause(rank: int) -> None:
    """Blocks that rank 0 has cached, or that requests keep, are there on all ranks afterwards, or on none."""
    ids = torch.tensor([PROMPTS[1]])
    expected = right("llama", 3, 0, NEW)
    model = loaded("llama")

    def generates() -> None:
        model.generate(ids.to(model.device), cache_implementation="paged", **GREEDY)

    def gives_back(which: int = 1) -> None:
        if rank == which:
            hf_paged.release(model)

    def gives_back_and_moves() -> None:
        if rank == 1:
            hf_paged.release(model)
            weight = local_part(model.model.norm.weight)
            weight.data = weight.data.clone()

    def trains() -> None:
        model.train()
        model(ids.to(model.device)).logits.sum().backward()
        model.zero_grad()
        model.eval()

    for captures in (False, True):
        acts = generates, gives_back, functools.partial(gives_back, 0), gives_back_and_moves, trains
        with pytest.MonkeyPatch.context() as patch, Engine(model, **SMALL) as engine:
            if captures:
                patch.setitem(RECORDERS, "cpu", record)
                patch.setattr("hf_paged.model.capture.replay.LEAST_STEPS", 1)
            for act in acts:
                if rank:
                    assert engine.follow()
                    act()
                    continue
                for _ in range(2):
                    assert answers(engine.submit(PROMPTS[3], **GREEDY).result()) == expected
                running = engine.submit(PROMPTS[3], **GREEDY)
                for _ in range(5):
                    engine.step()
                engine.pause()
                act()
                engine.resume()
                for handle in (running, *[engine.submit(PROMPTS[3], **GREEDY) for _ in range(2)]):
                    assert answers(handle.result()) == expected, act
            if rank:
                assert not engine.follow()
            elif captures:
                assert engine.stats()["graphs"]["replayed"] > 20


def swapped_blocks_after_a_pause(rank: int) -> None:
    """Blocks on the hosts have memory again where it was given back."""
    model = loaded("llama")
    options = {**SMALL, "preemption": "swap", "num_blocks": 26, "max_batch_sequences": 10}
    for who in ((0, 1), (1,)):
        with Engine(model, **options) as engine:
            for turn in range(2):
                if rank == 0:
                    before = engine.stats()["swapped_out"]
                    assert asked(engine, ASKED) == [right("llama", p, k, NEW) for p, k in ASKED]
                    assert engine.stats()["swapped_out"] > before
                    if turn == 0:
                        engine.pause()
                else:
                    assert engine.follow() is (turn == 0)
                if turn == 0 and rank in who:
                    hf_paged.release(model)
                if turn == 0 and rank == 0:
                    engine.resume()


def fused_projections(rank: int) -> None:
    """Each rank lays its parts side by side, and multiplies with them at once."""
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setitem(RECORDERS, "cpu", record)
            patch.setattr(Ops, "kernels", Kernels())
        for name in ("llama", "olmo2"):
            model = loaded(name)
            for parameter in model.parameters():  # on a CPU a rank's part lies in the memory of the whole
                part = local_part(parameter)
                part.data = part.clone()

            def act(engine: Engine, name: str = name) -> int:
                assert asked(engine, FEW) == [right(name, p, k, NEW) for p, k in FEW]
                return int(engine.stats()["graphs"]["replayed"])

            replayed = led(rank, model, act, fuse_projections=True)
            assert rank or replayed > 10
            attention = model.model.layers[0].self_attn
            layers = [attention.q_proj, attention.k_proj, attention.v_proj]
            joined = joined_of([local_part(layer.weight) for layer in layers])
            assert joined is not None
            assert torch.equal(joined, torch.cat([layer.weight.to_local() for layer in layers]))


class _HostMemory(SymmetricMemory):
    """Stands for memory that devices share: parts are summed by the ranks' own connections."""

    def __init__(self, group: Any) -> None:
        ranks = dist.get_world_size(group)
        self.fused_one_shot, self.most_fused = FUSED[2]
        self.bytes = torch.zeros(MOST_BYTES + self.most_fused, dtype=torch.uint8)
        self._group = weakref.ref(group)
        self._inboxes = [torch.zeros(2, ranks, self.most_fused, dtype=torch.uint8)] * ranks
        self._pads = [torch.zeros(512, dtype=torch.int32)] * ranks
        self._rank = dist.get_rank(group)
        self._multiple = 2
        self.sums = 0
        self.unmet = None
        self.sent: int | None = None
        """The inboxes to which parts were sent last, if ranks have not met since."""

    def sum_now(self, room: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        self.unmet = self.sent = None
        return self.summed(room)

    def summed(self, room: torch.Tensor) -> torch.Tensor:
        out = room.clone()
        dist.all_reduce(out, group=self._group())
        return out

    def add_norm(self, kernels: Any, room: torch.Tensor, *given: Any, **options: Any) -> Any:
        def reduce(part: Any, inboxes: Any, rank: int, *given: Any, shots: int, **options: Any) -> Any:
            assert inboxes[rank].data_ptr() != self.sent, (
                "a part is overwritten that a rank may not have read"
            )
            assert inboxes[rank][rank].numel() >= part.numel()
            self.sent = inboxes[rank].data_ptr()
            return kernels.add_rms_norm(self.summed(part), *given, **options)

        return super().add_norm(SimpleNamespace(reduce_add_rms_norm=reduce), room, *given, **options)

    @contextmanager
    def forward(self) -> Iterator[None]:
        assert self.sent is None, "a forward has ended before the ranks have met"
        with super().forward():
            yield


@contextmanager
def sums_on_the_host() -> Iterator[Counter[str]]:
    """Captured steps whose ranks sum as those of devices do, and how many sums were made with a norm."""
    made: Counter[str] = Counter()
    add_norm = LazySum.add_norm

    def counted(lazy: LazySum, *given: Any, **options: Any) -> Any:
        found = add_norm(lazy, *given, **options)
        made["with a norm"] += found is not None
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LazySum, "add_norm", counted)
        if not CUDA:
            patch.setitem(RECORDERS, "cpu", record)
            patch.setattr(Ops, "kernels", Kernels())
            known = weakref.WeakKeyDictionary()
            patch.setattr(symmetric_memory, "_known", known)
            patch.setattr(
                tensor_parallel,
                "symmetric_memory_of",
                lambda group: known.setdefault(group, known.get(group) or _HostMemory(group)),
            )
        yield made


def sums_with_norms(rank: int) -> None:
    """In captured steps a sum waits for the addition and the norm behind it, but for the last of a forward,
    and where a layer's code is not Llama's.
    """
    together = {}
    for family in ("llama", "qwen3", "olmo2"):
        with sums_on_the_host() as made:
            stats = compare(family, rank, FEW)
        assert rank or stats["graphs"]["replayed"] > 10, stats
        together[family] = made["with a norm"]
    forwards, rest = divmod(together["llama"], 2 * whole("llama").config.num_hidden_layers - 1)
    assert forwards
    assert not rest
    assert together["qwen3"]
    assert not together["olmo2"]


def sums_of_half_a_layer(rank: int) -> None:
    """Where a plan divides attention alone, or feed-forward layers alone, no part is overwritten before the
    other rank has read it: all sums in a row wait for norms.
    """
    plan: dict[str, str] = tf.LlamaConfig.base_model_tp_plan
    for part in ("self_attn", "mlp"):
        with sums_on_the_host() as made, pytest.MonkeyPatch.context() as patch:
            half = {name: style for name, style in plan.items() if part in name}
            patch.setattr(tf.LlamaConfig, "base_model_tp_plan", half)
            stats = compare("llama", rank, FEW)
        assert rank or stats["graphs"]["replayed"] > 10, stats
        assert made["with a norm"]


def a_forward_that_breaks_off(rank: int) -> None:
    """On all ranks behind a sum that waited for its norm: they meet before another uses the same inboxes."""
    broken: list[bool] = []
    met: list[bool] = []
    add_norm, capture = Fusion.add_norm, CapturePool.capture_or_compare

    def breaks(*given: Any) -> Any:
        found = add_norm(*given)
        if not broken:
            broken.append(True)
            raise RuntimeError("on purpose")
        return found

    def watched(*given: Any) -> None:
        capture(*given)
        memory = symmetric_memory.memory_of(mesh_of(model).get_group())
        met.append(memory is None or memory.unmet is None)

    with sums_on_the_host() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fusion, "add_norm", breaks)
        patch.setattr(CapturePool, "capture_or_compare", watched)
        model = loaded("llama")
        right = [alone(whole("llama"), prompt, max_new_tokens=NEW, do_sample=False) for prompt in PROMPTS]

        def act(engine: Engine) -> None:
            for prompt, expected in zip(PROMPTS, right, strict=True):
                asked = engine.submit(prompt, max_new_tokens=NEW, do_sample=False)
                assert answers(asked.result()) == expected

        led(rank, model, act, **SMALL)
    assert broken
    assert made["with a norm"]
    assert len(met) > 1
    assert all(met)


def ranks_that_run_different_code(rank: int) -> None:
    """A forward was replaced on one of them: sums would be of different things, so no step is captured."""

    def act(engine: Engine) -> dict[str, Any]:
        assert asked(engine, FEW) == [right("llama", p, k, NEW) for p, k in FEW]
        return engine.stats()["graphs"]

    with sums_on_the_host() as made:
        model = loaded("llama")
        if rank == 0:
            norm = model.model.norm
            own = norm.forward
            norm.forward = lambda x: own(x)
        graphs = led(rank, model, act)
        assert not made["with a norm"]
    assert rank or (graphs["refused"] and not graphs["replayed"]), graphs


def layers_that_compute_with_local_parts(rank: int) -> None:
    """Where the plan divides linear layers and embeddings no step makes a DTensor."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a DTensor in a step")

    for name in ("llama", "olmo2"):
        with Engine(loaded(name), graphs=False, **SMALL) as engine, pytest.MonkeyPatch.context() as patch:
            patch.setattr(DTensor, "from_local", refuse)
            if rank == 0:
                assert asked(engine, FEW) == [right(name, p, k, NEW) for p, k in FEW]
            else:
                assert not engine.follow()


def forwards_of_divided_layers(rank: int) -> None:
    """Those that transformers sets on them are its own code, of which one size is rehearsed for all."""
    model = loaded("llama")
    modules = [*model.modules()]
    assert not has_foreign_code(modules)
    layer = model.model.layers[0].mlp.down_proj
    own = layer.forward
    for theirs in (lambda x: own(x) * 1, tf.utils.can_return_tuple(lambda x: own(x))):
        layer.forward = theirs
        assert has_foreign_code(modules)
    layer.forward = own
    rehearsed = []
    rehearse = pool.Rehearsal.__init__

    def noting(self: Any, *given: Any) -> None:
        rehearsed.append(given)
        rehearse(self, *given)

    if not CUDA:
        RECORDERS["cpu"] = record
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool.Rehearsal, "__init__", noting)
            patch.setattr(pool, "PADDED", -1)
            stats = compare("llama", rank, FEW, run_ahead=True)
    finally:
        RECORDERS.pop("cpu", None)
    assert len(rehearsed) == 1 or not rank  # rank 0 has an engine of its own beside it
    assert rank or stats["graphs"]["captured"] > 1, stats


def scores_of_prompts(rank: int) -> None:
    def act(engine: Engine) -> None:
        with Engine(whole("llama"), **SMALL) as one:
            for each in (engine, one):
                each.submit(PROMPTS[3], max_new_tokens=1, do_sample=False).result()  # a part is cached
            options = {"prompt_logprobs": 2, "max_new_tokens": 2, "do_sample": False}
            found, expected = (each.submit(PROMPTS[3], **options).result() for each in (engine, one))
        numbers = [[note and note.logprob for note in each.prompt_logprobs] for each in (found, expected)]
        assert numbers[0][1:] == pytest.approx(numbers[1][1:], abs=1e-4)

    led(rank, loaded("llama"), act)


GREEDY = {"do_sample": False, "max_new_tokens": NEW}


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


def compare_shown(name: str, rank: int, **options: Any) -> dict[str, Any]:
    """Pictures beside texts, in chunks, put down in between, and once more in several ways from cached blocks."""
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
        ways = (GREEDY, {**GREEDY, "num_beams": 2}, {**KINDS[3], "max_new_tokens": NEW, "seed": 3})
        with Engine(one, **SMALL) as single:
            both = []
            for each in (engine, single):
                handles = [each.submit(**given[0], **way) for way in ways]
                both.append(checked_answers(each, handles))
        assert both[0] == both[1]
        assert both[0][0] == expected[0]
        if name == "llava":  # more pictures than places for them: an error of all ranks
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
        if kind != "seq2seq":
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
        assert stats["graphs"]["replayed"] > 10, stats["graphs"]


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

    asked = [(prompt, way) for prompt in PROMPTS[1:4] for way in (GREEDY, {**GREEDY, "num_beams": 3})]

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


def pause_and_new_weights(rank: int) -> None:
    model = loaded("llama")
    with Engine(model, **SMALL) as engine:
        if rank == 0:
            handle = engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False)
            cancelled = engine.submit(PROMPTS[3], max_new_tokens=NEW)
            for _ in range(4):
                engine.step()
            cancelled.cancel()
            engine.pause()
            raises(RuntimeError, "do not follow a paused engine", lambda: engine.broadcast(1))
        else:
            assert engine.follow() is True
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        if rank == 0:
            engine.resume()
            handle.result()
            found = answers(engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False).result())
            other = tf.AutoModelForCausalLM.from_pretrained(FOLDER / "llama").eval().to(model.device)
            with torch.no_grad():
                other.lm_head.weight.mul_(-1)
            assert found == alone(other, PROMPTS[1], max_new_tokens=NEW, do_sample=False)
            assert cancelled.result().finish_reason == "abort"
        else:
            assert engine.follow() is False


def weights_that_ranks_load(rank: int) -> None:
    """All are given the same whole tensors in a pause, and keep their parts of them: of rows, of columns, of
    two that lie in one, and what is whole on each.
    """
    chance = torch.Generator().manual_seed(9)
    for family in ("llama", "mixtral", "gpt-oss", "deepseek_v3"):
        model, other = loaded(family), copy.deepcopy(whole(family))
        state = other.state_dict()
        for tensor in state.values():
            tensor += 0.3 * torch.randn(tensor.shape, generator=chance).to(tensor)
        options = {"max_new_tokens": NEW, "do_sample": False}
        with Engine(model, **SMALL) as engine:
            if rank == 0:
                handle = engine.submit(PROMPTS[3], **options)
                engine.step()
                raises(
                    RuntimeError,
                    "ranks load weights together: call pause",
                    functools.partial(engine.load_weights, state),
                )
                engine.pause()
            else:
                assert engine.follow() is True
            raises(
                ValueError,
                "of shape .1, 2, 3.",
                lambda: engine.load_weights({"lm_head.weight": torch.ones(1, 2, 3)}),
            )
            assert engine.load_weights(state) >= {"lm_head.weight", "model.norm.weight"}
            if rank == 0:
                engine.resume()
                assert answers(handle.result())[0][-3:] != alone(whole(family), PROMPTS[3], **options)[0][-3:]
                for prompt in PROMPTS[1:4]:
                    assert answers(engine.submit(prompt, **options).result()) == alone(
                        other, prompt, **options
                    )
                engine.check()
            else:
                assert engine.follow() is False


def blocks_that_rank_0_drops(rank: int) -> None:
    """weights_changed() forgets what is cached, idle or paused; other ranks have no books, and keep nothing."""
    model = loaded("llama")
    prompt = PROMPTS[3]

    def act(engine: Engine) -> None:
        right = alone(whole("llama"), prompt, max_new_tokens=NEW, do_sample=False)

        def hits() -> int:
            before = engine.stats()["hits"]
            found = answers(engine.submit(prompt, max_new_tokens=NEW, do_sample=False).result())
            assert found == right
            return engine.stats()["hits"] - before

        assert not hits()
        assert hits()
        engine.weights_changed()
        assert not hits()
        assert hits()
        raises(ValueError, r'weights_changed\(kv="keep"\)', lambda: engine.weights_changed("keep"))
        handle = engine.submit(prompt, max_new_tokens=NEW, do_sample=False)
        for _ in range(3):
            engine.step()
        raises(RuntimeError, "pause", engine.weights_changed)
        engine.pause()
        engine.weights_changed()
        engine.resume()
        assert answers(handle.result()) == right
        assert engine.stats()["weights_changed"] == 2
        engine.check()

    with Engine(model, **SMALL) as engine:
        if rank == 0:
            act(engine)
        else:
            raises(RuntimeError, "rank 0", engine.weights_changed)
            while engine.follow():
                pass


def a_thread_that_waits(rank: int) -> None:
    """An idle engine is no hang: ranks wait for longer than a step may take."""

    def act(engine: Engine) -> None:
        engine.start()
        time.sleep(2)
        found = answers(engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False).result())
        assert found == alone(whole("llama"), PROMPTS[1], max_new_tokens=NEW, do_sample=False)

    led(rank, loaded("llama"), act, rank_timeout=1.5)


def an_error_of_all_ranks(rank: int) -> None:
    """It ends the request that causes it and no other; one for want of memory, too."""
    for error in (ZeroDivisionError, torch.OutOfMemoryError):
        _an_error_of_all_ranks(rank, error)


def _an_error_of_all_ranks(rank: int, error: type[Exception]) -> None:
    model = loaded("llama")
    forward = model.model.layers[1].mlp.forward

    def picky(states: torch.Tensor) -> torch.Tensor:
        if states.shape[1] == 5 or states.shape[1] == 5 + 17:
            raise error("five tokens")
        return forward(states)

    def act(engine: Engine) -> None:
        bad = engine.submit([9, 8, 7, 6, 5], max_new_tokens=3, do_sample=False)
        good = engine.submit(PROMPTS[1], max_new_tokens=3, do_sample=False)
        assert isinstance(bad.result().error, error)
        assert answers(good.result()) == alone(whole("llama"), PROMPTS[1], max_new_tokens=3, do_sample=False)

    model.model.layers[1].mlp.forward = picky
    led(rank, model, act, max_batch_tokens=64)


def no_memory_for_blocks_on_one_rank(rank: int) -> None:
    """Before a forward all ranks have memory for its blocks, or the step fails on all as in one process."""
    full = [rank == 1]

    def scarce(act: Callable[..., Any]) -> Callable[..., Any]:
        def take(*given: Any) -> Any:
            if full[0]:
                raise torch.OutOfMemoryError("no memory on purpose")
            return act(*given)

        return take

    def receive(scarcity: bool) -> None:
        full[0] = scarcity and rank == 1

    def act(engine: Engine) -> None:
        long = [5 + k % 90 for k in range(150)]
        expected = alone(whole("llama"), long, **GREEDY)
        bad = engine.submit(PROMPTS[1], **GREEDY).result()
        assert bad.finish_reason == "error"
        assert "rank 1: OutOfBlocks: no memory" in str(bad.error), bad.error
        engine.broadcast(False)
        assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == right("llama", 1, 0, NEW)
        if CUDA:  # there all blocks have their memory from the first step on
            return
        engine.broadcast(True)
        handle = engine.submit(long, **GREEDY)
        raises(OutOfBlocks, "rank 1: OutOfBlocks: no memory", handle.result)
        raises(OutOfBlocks, "rank 1: OutOfBlocks: no memory", handle.result)
        engine.broadcast(False)
        assert answers(handle.result()) == expected
        engine.check()

    options = {**SMALL, "num_blocks": None}
    model = loaded("llama")
    with Engine(model, **options) as engine:
        (total,) = [each.pool.total for each in engine.pools.groups.values()]
        assert rank == 0 or not engine.follow()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged.engine.pools.SHARE_AT_FIRST", 20.5 / total)
        engine = Engine(model, **options)
        patch.setattr(group.Store, "grow", scarce(group.Store.grow))
        patch.setattr("hf_paged.kv.group.Store", scarce(group.Store))
        with engine:
            if rank:
                assert not engine.follow(receive)
            else:
                act(engine)


def no_memory_on_one_host(rank: int) -> None:
    """Blocks that one rank has no room for are computed again on all."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(HostBlocks, "reserve", lambda *_: False)
        stats = compare("llama", rank, preemption="swap", num_blocks=26, max_batch_sequences=10)
    if rank == 0:
        assert stats["preemptions"] > 0
        assert stats["swapped_out"] == 0


def no_memory_for_rank_0_to_sample(rank: int) -> None:
    """It fails as in one process; the others wait for the next step."""

    def act(engine: Engine) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InFlightStep, "sample", _full)
            handle = engine.submit(PROMPTS[1], **GREEDY)
            raises(MemoryError, "full", handle.result)
        assert answers(handle.result()) == right("llama", 1, 0, NEW)

    led(rank, loaded("llama"), act)


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


def no_memory_for_a_capture_on_one_rank(rank: int) -> None:
    """All ranks try it again later, as one process does."""
    with first_capture_without_memory(rank == 1):
        stats = compare("llama", rank, FEW, run_ahead=True)
    if rank == 0:
        assert stats["graphs"]["replayed"] > 5, stats["graphs"]
        assert not stats["graphs"].get("refused"), stats["graphs"]


def engines_that_cannot_be_made(rank: int) -> None:
    """All ranks get the error, and their process groups stay as they are."""
    model = loaded("llama")

    def refuse(*_: Any) -> Any:
        raise Unservable("on purpose")

    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged.engine.engine.Pools", refuse)
        try:
            Engine(model, **SMALL)
        except Unservable as error:
            if rank == 0:
                kept.append(error)  # and with its frames what the engine had
    gc.collect()
    time.sleep(0.5)
    assert len(kept) == (rank == 0)
    found = generated(model, MODES[0], cache_implementation="paged")
    assert found == generated(whole("llama"), MODES[0])


def engines_that_are_left_alone(rank: int) -> None:
    """Rank 0's engine is collected and was not closed: the others end as if it were."""
    model = loaded("llama")
    for _ in range(2):
        engine = Engine(model, **SMALL)
        if rank == 0:
            assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == right("llama", 1, 0, NEW)
            del engine
            gc.collect()
        else:
            assert not engine.follow()
    led(rank, model, lambda engine: asked(engine, FEW[:1]))


def models_that_go(rank: int) -> None:
    """Neither captured steps nor an engine keep a model, on any rank."""
    for paged in (True, False):
        model = loaded("llama")
        if paged:
            with first_capture_without_memory(False), pytest.MonkeyPatch.context() as patch:
                patch.setattr("hf_paged.model.capture.replay.LEAST_STEPS", 1)
                for _ in range(3):
                    generated(model, MODES[0], cache_implementation="paged")
        else:
            led(rank, model, lambda engine: asked(engine, FEW[:1]))
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None, paged


def groups_of_the_user(rank: int) -> None:
    """Ranks meet though one of them has a process group more, and a closed engine leaves none behind."""
    model = loaded("llama")
    own = dist.new_group([0])
    held = dist.distributed_c10d._world.pg_map
    before = set(held)
    for _ in range(2):
        led(rank, model, lambda engine: asked(engine, FEW[:1]))
    assert set(held) == before
    dist.destroy_process_group(own)


def the_smallest_rank_decides(rank: int) -> None:
    measured = budget.free_bytes
    from hf_paged.engine import pools

    pools.free_bytes = lambda device: (1 << 22) - (rank << 21)
    try:
        engine = Engine(loaded("llama"), block_size=4, memory_fraction=0.5, graphs=False)
    finally:
        pools.free_bytes = measured
    totals = engine.driver.books.executor.ranks.gather(
        [group.pool.total for group in engine.pools.groups.values()]
    )
    hosts = engine.driver.books.executor.ranks.gather(
        [group.host.most for group in engine.pools.groups.values()]
    )
    assert totals[0] == totals[1] == [(1 << 20) // engine.pools.groups[engine.pools.layers[0]].block_bytes]
    assert hosts[0] == hosts[1]
    if rank == 0:
        engine.close()
    else:
        assert not engine.follow()


def wrong_uses(rank: int) -> None:
    model = loaded("llama")
    with Engine(model, **SMALL) as engine:
        if rank == 0:
            raises(RuntimeError, "leads", engine.follow)
            engine.broadcast({"words": [1, 2]})
            raises((AttributeError, pickle.PicklingError), "local", lambda: engine.broadcast(lambda: 1))
            for dtype in (torch.float32, torch.bfloat16, torch.bool):
                engine.broadcast([torch.arange(40000).to(dtype), "large"])
            engine.broadcast(torch.arange(3))
        else:
            raises(RuntimeError, "rank 1 .*rank 0; call engine.follow", lambda: engine.submit([5, 6]))
            raises(RuntimeError, "rank 1", engine.step)
            raises(RuntimeError, "rank 1 .*rank 0", lambda: engine.add_adapter("one", {}, lora()))
            raises(RuntimeError, "rank 1 .*rank 0", lambda: engine.remove_adapter("one"))
            raises(RuntimeError, "rank 1 .*rank 0", lambda: engine.broadcast(1))
            received: list[Any] = []
            assert not engine.follow(received.append)
            assert received[0] == {"words": [1, 2]}
            for dtype, (tensor, word) in zip(
                (torch.float32, torch.bfloat16, torch.bool), received[1:4], strict=True
            ):
                assert torch.equal(tensor, torch.arange(40000).to(dtype))
                assert word == "large"
            assert received[4].tolist() == [0, 1, 2]
            raises(RuntimeError, "closed", engine.follow)
    raises(
        ValueError,
        "different block_size: 4, 8; give",
        lambda: Engine(model, block_size=4 << rank),
    )
    other = loaded(("llama", "qwen3")[rank])
    raises(ValueError, "different model: .*LlamaFor.*, .*Qwen3For", lambda: Engine(other, **SMALL))
    other = loaded("llama").to((torch.float32, torch.float64)[rank])
    raises(ValueError, "different model: .*float32.*float64", lambda: Engine(other, **SMALL))
    other = loaded("llama")
    with torch.no_grad():
        other.model.norm.weight[3] += rank
    with pytest.MonkeyPatch.context() as patch:
        words: list[str] = []
        patch.setattr(joining.logger, "warning", words.append)
        Engine(model, **SMALL).close()
        assert not words
        Engine(other, **SMALL).close()
        assert "load one checkpoint" in words[0]
    raises(ValueError, "compile=True", lambda: Engine(model, compile=True))
    raises(ValueError, "lm_head_fp32=True is for one", lambda: Engine(model, lm_head_fp32=True))


def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], words: str, act: Callable[[], Any]
) -> None:
    with pytest.raises(kind, match=f"(?s){words}"):
        act()


def words_of_rank_0(rank: int) -> None:
    """What ends rank 0's block reaches the others."""
    model = loaded("llama")
    if rank == 0:
        try:
            with Engine(model, **SMALL):
                raise LookupError("no prompts")
        except LookupError:
            return
    with Engine(model, **SMALL) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "ended", lambda ranks: None)  # as if the store's process were gone
        raises(RankError, "rank 0 raised LookupError: no prompts", engine.follow)


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


def other_families(rank: int) -> None:
    """Experts, norms of heads, windows and sinks: whole KV heads on each rank, or a part."""
    for name in sorted(set(DIVIDED) - {"llama", "qwen2-window", "llama-3", "llama-5"}):
        compare(name, rank, FEW, twice=False)


def heads_that_ranks_do_not_divide(rank: int) -> None:
    try:
        model = loaded("llama-5")
    except ValueError as error:
        raise AssertionError("transformers refuses it by now") from error
    words = "5 KV heads, which 2 ranks cannot divide"
    raises(ValueError, words, lambda: Engine(model, **SMALL))
    ids = torch.tensor([PROMPTS[1]], device=model.device)
    raises(ValueError, words, lambda: model.generate(ids, cache_implementation="paged"))


# ---- adapters

RANKS_OF = {"one": 4, "two": 3, "three": 8}
ADAPTED = ["one", None, "two", "three", ["one", "three"], "two", "one"]


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


def add_all(engine: Engine, name: str) -> None:
    for seed, (adapter, rank) in enumerate(RANKS_OF.items()):
        engine.add_adapter(adapter, adapter_of(name, seed, rank), lora(r=rank))


def asked_with_adapters(engine: Engine, requests: list[tuple[int, int]]) -> list[Any]:
    """The answers of requests with an adapter each, submitted together; then of the first of them again."""
    found = []
    for several in (requests, requests[:3]):
        handles = [
            engine.submit(
                PROMPTS[p], adapter=ADAPTED[i % len(ADAPTED)], max_new_tokens=NEW, seed=p, **KINDS[k]
            )
            for i, (p, k) in enumerate(several)
        ]
        found.append(checked_answers(engine, handles))
    return found


def compare_adapters(name: str, rank: int, requests: list[tuple[int, int]], **options: Any) -> dict[str, Any]:
    """Requests with adapters on all ranks, held to the same in one process: the engine's counts."""

    def act(engine: Engine) -> dict[str, Any]:
        with Engine(whole(name), **SMALL) as one:
            add_all(one, name)
            expected = asked_with_adapters(one, requests)
            plain = asked(one, requests)
        assert expected[0] != plain
        add_all(engine, name)
        found = asked_with_adapters(engine, requests)
        assert found == expected, (found, expected)
        assert asked(engine, requests[:3]) == plain[:3]
        return engine.stats()

    stats: dict[str, Any] = led(rank, loaded(name), act, **options) or {}
    return stats


def adapters_in_few_places(rank: int) -> None:
    """Mixed batches, beams, samples, sets of adapters, prefixes found, and requests that begin again."""
    name = "llama-3" if dist.get_world_size() == 3 else "llama"
    requests = ASKED if dist.get_world_size() == 2 else ASKED[2:9]
    options = {"preemption": "recompute", "num_blocks": 26, "max_batch_sequences": 10}
    stats = compare_adapters(name, rank, requests, max_adapters=2, **options)
    if rank == 0:
        assert stats["preemptions"] > 0
        assert stats["hits"] > 0
        assert stats["adapters"]["on_device"] == 2


def adapters_and_swap(rank: int) -> None:
    options = {"preemption": "swap", "num_blocks": 26, "max_batch_sequences": 10}
    stats = compare_adapters("llama", rank, ASKED, run_ahead=True, **options)
    if rank == 0:
        assert stats["swapped_in"] > 0


def adapters_of_other_families(rank: int) -> None:
    """Biases behind the sum, norms of heads, experts, KV heads that lie whole on every rank."""
    for name in ("mixtral", "qwen3", "gpt-oss"):
        compare_adapters(name, rank, FEW + [(1, 2)])


def adapters_and_pictures(rank: int) -> None:
    """The request's adapter is in the vision tower, too, while its pictures are encoded."""

    def answered(engine: Engine) -> Any:
        add_all(engine, "llava")
        adapters = ["one", None, ["one", "three"], "two"]
        given = shown_to("llava")
        asked = [(each, name) for name in adapters for each in given]
        return checked_answers(
            engine, [engine.submit(**each, adapter=name, **GREEDY) for each, name in asked]
        )

    def act(engine: Engine) -> None:
        with Engine(whole("llava"), **SMALL) as one:
            expected = answered(one)
        assert expected[0] != expected[2]
        assert answered(engine) == expected

    led(rank, loaded("llava"), act, max_adapters=2)


def adapters_that_come_and_go(rank: int) -> None:
    """A folder, a name that is given again, and what is refused: other requests go on."""
    state = adapter_of("llama", 0, 4)
    again = adapter_of("llama", 5, 16)
    layer = "model.layers.0.self_attn.q_proj"
    if rank == 0:
        save_file(state, FOLDER / "adapter_model.safetensors")
        lora(r=4).save_pretrained(FOLDER)

    def answered(engine: Engine, adapter: str = "one") -> Any:
        return answers(
            engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False, adapter=adapter).result()
        )

    def act(engine: Engine) -> None:
        with Engine(whole("llama"), **SMALL) as one:
            expected = []
            for source, config in ((state, lora(r=4)), (again, lora(r=16))):
                one.add_adapter("one", source, config)
                expected.append(answered(one))
                one.remove_adapter("one")
        assert expected[0] != expected[1]
        engine.add_adapter("one", FOLDER)
        assert answered(engine) == expected[0]
        running = engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False, adapter="one")
        engine.step()
        raises(ValueError, "already", lambda: engine.add_adapter("one", again, lora(r=16)))
        raises(ValueError, "1 requests have", lambda: engine.remove_adapter("one"))
        few = {f"{layer}.lora_A.weight": torch.ones(2, 3), f"{layer}.lora_B.weight": torch.ones(3, 2)}
        raises(ValueError, "for another model", lambda: engine.add_adapter("few", few, lora(r=2)))
        raises(ValueError, "expected a linear", lambda: engine.add_adapter("few", embedded, lora(r=2)))
        raises(ValueError, "DoRA", lambda: engine.add_adapter("few", state, lora(r=4, use_dora=True)))
        engine.remove_adapter("one", when="idle")
        assert answers(running.result()) == expected[0]
        raises(ValueError, "no adapter 'one'", lambda: answered(engine))
        engine.add_adapter("one", again, lora(r=16))
        assert answered(engine) == expected[1]
        running = engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False, adapter="one")
        engine.step()
        engine.pause()
        taken = {path: tensor.clone() for path, tensor in state.items()}
        engine.add_adapter("two", taken, lora(r=4))
        engine.add_adapter("three", taken, lora(r=4))
        for tensor in taken.values():
            tensor.zero_()  # it was read once
        engine.remove_adapter("three")
        engine.resume()
        assert answers(running.result()) == expected[1]
        assert answered(engine, adapter="two") == expected[0]
        engine.pause()
        engine.remove_adapter("one")
        engine.add_adapter("one", state, lora(r=4))
        engine.resume()
        assert answered(engine) == expected[0]
        assert set(engine.adapters()) == {"one", "two"}

    table = "model.embed_tokens"
    embedded = {f"{table}.lora_A.weight": torch.ones(2, 3), f"{table}.lora_B.weight": torch.ones(3, 2)}
    model = loaded("llama")
    with Engine(model, max_adapters=1, **SMALL) as engine:
        if rank == 0:
            act(engine)
        else:
            assert engine.follow()
            assert engine.follow()
            assert not engine.follow()
            assert set(engine._adapters.numbers) == {"one", "two"}, (
                "what rank 0 has removed is gone here, too"
            )


def layers_divided_in_another_way(rank: int) -> None:
    """An adapter of a layer whose part the engine does not know is refused by the layer's name."""

    def act(engine: Engine) -> None:
        state = adapter_of("llama", 0, 4)
        words = "layers.0.mlp.gate_proj is divided over 2 ranks as 'packed_colwise'"
        raises(ValueError, words, lambda: engine.add_adapter("one", state, lora(r=4)))
        found = answers(engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False).result())
        assert found == alone(whole("llama"), PROMPTS[1], max_new_tokens=NEW, do_sample=False)

    model = loaded("llama")
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.gate_proj": "packed_colwise"}
    led(rank, model, act)


# ---- adapters in a peft model


ADAPTED_LAYERS = r".*layers.*proj"


def fine_tuned(model: Any, name: str) -> Any:
    """A model with adapters that peft has put into it; on several ranks each has its part."""
    model.to(whole(name).device)
    wrapped: Any = None
    for seed, (adapter, rank) in enumerate(RANKS_OF.items()):
        config = lora(r=rank, target_modules=ADAPTED_LAYERS)
        if wrapped is None:
            wrapped = peft.get_peft_model(model, config, adapter)
        else:
            wrapped.add_adapter(adapter, config)
        fill(wrapped, name, seed, adapter)
    return wrapped.eval()


def fill(wrapped: Any, name: str, seed: int, adapter: str) -> None:
    """Give an adapter its weights."""
    state = adapter_of(name, seed, RANKS_OF[adapter])
    own = {f"base_model.model.{path}": each for path, each in state.items() if "lm_head" not in path}
    assert not peft.set_peft_model_state_dict(wrapped, own, adapter).unexpected_keys


def peft_models(rank: int) -> None:
    """Fine-tuned models in generate() and in the engine: what is active, and an adapter for each request."""
    names = {2: ("llama", "gpt-oss"), 3: ("llama-3",)}
    for name in names[dist.get_world_size()]:
        model, one = (fine_tuned(each, name) for each in (loaded(name), build(BY_NAME[name])))

        def act(engine: Engine, one: Any = one, name: str = name) -> None:
            with Engine(one, **SMALL) as alone:
                expected = [asked_with_adapters(alone, FEW), asked(alone, FEW)]
            found = [asked_with_adapters(engine, FEW), asked(engine, FEW)]
            assert found == expected, (name, found, expected)
            owners = {adapter: info.owner for adapter, info in engine.adapters().items()}
            assert owners == dict.fromkeys(RANKS_OF, "model")

        led(rank, model, act, max_adapters=2)
    plain = generated(one, MODES[0])
    for mode in (MODES[2], {**MODES[0], "adapter_names": ["two", "__base__"]}):
        assert generated(model, mode, cache_implementation="paged") == generated(one, mode), mode
    for each in (model, one):
        each.base_model.set_adapter(["two", "three"])
    active = generated(one, MODES[1])
    assert generated(model, MODES[1], cache_implementation="paged") == active
    with model.disable_adapter(), one.disable_adapter():
        found = generated(model, MODES[0], cache_implementation="paged")
        assert found == generated(one, MODES[0]) != plain


def peft_models_that_change(rank: int) -> None:
    """While the engine is paused adapters are trained, deleted, added and made active, on all ranks alike."""
    model, one = (fine_tuned(each, "llama") for each in (loaded("llama"), build(BY_NAME["llama"])))

    def train(wrapped: Any) -> None:
        for path, weight in wrapped.named_parameters():
            if "lora_B.one" in path:
                weight.data.mul_(-1)

    def train_the_last_ranks_part(wrapped: Any) -> None:
        for path, weight in wrapped.named_parameters():
            if "lora_B.one" in path and ("k_proj" in path or "v_proj" in path):
                if not hasattr(weight, "_local_tensor"):
                    weight.data[len(weight) // 2 :] *= -2
                elif rank == 1:
                    weight._local_tensor.data.mul_(-2)

    def delete(wrapped: Any) -> None:
        wrapped.set_adapter("three")
        wrapped.delete_adapter("one")

    def add_again(wrapped: Any) -> None:
        wrapped.add_adapter("one", lora(r=4, target_modules=ADAPTED_LAYERS))
        fill(wrapped, "llama", 7, "one")

    def answered(engine: Engine) -> list[Any]:
        names = list(engine.adapters())
        handles = [
            engine.submit(PROMPTS[1], adapter=each, max_new_tokens=NEW, do_sample=False)
            for each in ("active", *names, names[:2])
        ]
        return checked_answers(engine, handles)

    changes = [train, train_the_last_ranks_part, delete, add_again]
    with Engine(model, **SMALL) as engine:
        if rank:
            for change in changes:
                assert engine.follow()
                change(model)
            assert not engine.follow()
            return
        with Engine(one, **SMALL) as alone:
            both = (engine, alone)
            found, expected = map(answered, both)
            assert found == expected
            for change in changes:
                options = {"adapter": "two", "max_new_tokens": NEW, "do_sample": False}
                running = [each.submit(PROMPTS[3], **options) for each in both]
                for each in both:
                    each.step()
                    each.pause()
                change(model)
                change(one)
                for each in both:
                    each.resume()
                found, expected = (answers(each.result()) for each in running)
                assert found == expected, change
                found, expected = map(answered, both)
                assert found == expected, (change, found, expected)


def adapters_that_differ_among_ranks(rank: int) -> None:
    """One rank alone was given another adapter, or peft cannot divide it: an error says so."""
    model = fine_tuned(loaded("llama"), "llama")
    with Engine(model, **SMALL) as engine:
        if rank == 0:
            engine.pause()
        else:
            assert engine.follow()
            model.delete_adapter("two")
        if rank == 0:
            engine.resume()

            def wait() -> Any:
                return engine.submit(PROMPTS[1], max_new_tokens=2, adapter="one").result()

            raises(RuntimeError, "different adapters in their models .*rank 0.*'two'", wait)
            engine.pause()
            model.delete_adapter("two")
            engine.resume()
            wait()
        else:
            assert engine.follow()
            assert not engine.follow()
    model = peft.get_peft_model(loaded("llama"), peft.LoHaConfig(target_modules=["q_proj"]))
    words = r"q_proj \(loha.Linear\) among ranks"
    raises(ValueError, words, lambda: Engine(model, **SMALL))
    ids = torch.tensor([PROMPTS[1]], device=model.device)
    raises(
        ValueError,
        words,
        lambda: model.generate(input_ids=ids, max_new_tokens=2, cache_implementation="paged"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft's, of a head that it does not divide
        model = peft.get_peft_model(loaded("llama"), lora(target_modules=["lm_head"]))
    raises(ValueError, "peft cannot divide the adapter of lm_head", lambda: Engine(model, **SMALL))
    model, one = (fine_tuned(each, "llama") for each in (loaded("llama"), build(BY_NAME["llama"])))
    base = model.base_model.model
    raises(ValueError, "each rank has a part of 'one'", lambda: load_adapter(base, model, None, "one"))
    state = {**adapter_of("llama", 0, 4), "lm_head.weight": whole("llama").lm_head.weight}
    words = "saved with lm_head.weight, of which each rank has a part"
    raises(ValueError, words, lambda: load_adapter(base, state, lora(r=4), "four"))
    last = base.model.layers[0].mlp.down_proj
    last.base_layer.register_forward_hook(lambda *_: None)

    def act(engine: Engine) -> None:
        raises(ValueError, "or it has hooks", lambda: engine.submit(PROMPTS[1], adapter="two"))
        expected = answers(Engine(one, **SMALL).submit(PROMPTS[1], max_new_tokens=NEW).result())
        assert answers(engine.submit(PROMPTS[1], max_new_tokens=NEW).result()) == expected

    led(rank, model, act)


# ---- generate()

MODES: list[dict[str, Any]] = [
    {"do_sample": False},
    {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    {"do_sample": True, "top_k": 30, "num_return_sequences": 2},
]


def generated(model: Any, mode: dict[str, Any], **options: Any) -> list[list[int]]:
    """What generate() answers to two prompts, one of them padded, with draws under one seed."""
    ids = torch.tensor([[0] * 8 + PROMPTS[2], PROMPTS[1]], device=model.device)
    torch.manual_seed(11)
    mask = (ids != 0).long()
    answer = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **mode, **options)
    tokens: list[list[int]] = answer.tolist()
    return tokens


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
    """Rank 0 alone runs code of the user between steps, which takes long and changes its model: all ranks still
    take the same steps.
    """
    model, one = loaded("llama"), whole("llama")
    ids = torch.tensor([PROMPTS[1]], device=model.device)
    options: dict[str, Any] = {"max_new_tokens": 3 * NEW, "do_sample": False}
    expected = one.generate(ids, **options).tolist()
    with first_capture_without_memory(False), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged.model.capture.replay.LEAST_STEPS", 1)
        patch.setattr("hf_paged.model.ranks.votes._votes", {})
        patch.setattr("hf_paged.model.ranks.votes.MEETING", 0.1)
        for call in range(6):
            streamer = _Notes(model, 24 + call) if rank == 0 else None
            found = model.generate(ids, streamer=streamer, cache_implementation="paged", **options)
            assert found.tolist() == expected, (found.tolist(), expected)
    counts = captures_of(model).pool.counts
    assert counts["replayed"] > 10, counts


def sums_of_different_things(rank: int) -> None:
    """A rank has begun a sum more than the others, as one does whose device had no memory in a capture: no token
    comes of it.
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
    """What rank 1 waits for meanwhile, in the process group of the model, is no sum of a call that begins later.
    In the middle of one it may be: the error says what to do.
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
    """Each has process groups of its own. One rank runs the one first, the other one the other: no lock of the
    process is held while ranks meet.
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
    """A rank whose call has failed begins another one, while the others are in the middle of the first: none of
    them has a token of that.
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
    """A layer's forward that the user sets is computed by generate(), and by an engine that was made before."""
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


def experts_divided(rank: int) -> None:
    """Each rank has some of the experts, whole."""
    try:
        plan = DistributedConfig(tp_plan="auto", ep_size=2)
    except TypeError:
        return  # this release of transformers has another option
    model = loaded("qwen3-moe", distributed_config=plan)
    for mode in MODES[:2]:
        assert generated(model, mode, cache_implementation="paged") == generated(whole("qwen3-moe"), mode)

    def act(engine: Engine) -> None:
        assert asked(engine, FEW) == [right("qwen3-moe", p, k, NEW) for p, k in FEW]

    led(rank, model, act)


def requests_at_random(rank: int) -> None:
    """Requests of all kinds that come, are cancelled and paused at any time: each has its answer, or none."""
    draw = random.Random(7)

    def act(engine: Engine) -> None:
        handles: dict[Any, tuple[int, int]] = {}
        for _ in range(60):
            what = draw.random()
            if what < 0.4:
                p, k = draw.randrange(len(PROMPTS)), draw.randrange(len(KINDS))
                handle = engine.submit(PROMPTS[p], max_new_tokens=NEW, seed=p, **KINDS[k])
                handles[handle] = p, k
            elif what < 0.5 and handles:
                draw.choice(list(handles)).cancel()
            elif what < 0.55 and pauses:
                pauses.pop()
                engine.pause()
                engine.resume()
            else:
                engine.step()
        for handle, (p, k) in handles.items():
            output = handle.result()
            if output.finish_reason != "abort":
                assert answers(output) == right("llama", p, k, NEW), (p, k)
        while pauses:
            pauses.pop()
            engine.pause()
            engine.resume()
        engine.check()

    pauses = [1, 2, 3]
    options = {**SMALL, "num_blocks": 30, "max_batch_sequences": 8, "run_ahead": True}
    with Engine(loaded("llama"), **options) as engine:
        if rank == 0:
            act(engine)
        else:
            for _ in pauses:
                assert engine.follow()
            assert not engine.follow()


def a_capture_that_fails_on_one_rank(rank: int) -> None:
    """Then no rank replays, and all answer as before."""
    device = "cuda" if CUDA else "cpu"
    recorder = RECORDERS.get(device)

    own = recorder or record

    def broken(*given: Any) -> Any:
        own(*given)  # a tape computes, with the other rank
        raise RuntimeError("no capture on this rank")

    RECORDERS[device] = broken if rank else own
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stats = compare("llama", rank, FEW, run_ahead=True)
    finally:
        RECORDERS.pop(device)
        if recorder is not None:
            RECORDERS[device] = recorder
    if rank == 0:
        assert not stats["graphs"].get("replayed"), stats["graphs"]


def generate_batch(rank: int) -> None:
    """All ranks call it, and all have the tokens; the engine stays from call to call."""
    model = loaded("llama")
    config = tf.GenerationConfig(eos_token_id=-1, pad_token_id=0, **GREEDY)
    drawn = tf.GenerationConfig(
        eos_token_id=-1, pad_token_id=0, do_sample=True, num_return_sequences=2, max_new_tokens=NEW
    )
    expected = [alone(whole("llama"), each, **GREEDY) for each in PROMPTS[:4]]
    with batches_on_pages():
        many = tf.ContinuousBatchingConfig(max_requests_per_batch=4096)  # more than max_batch_tokens
        for several, batching in ((PROMPTS[:4], None), (PROMPTS[:2], None), (PROMPTS[:3], many)):
            found = model.generate_batch(several, config, batching)
            assert [[each.generated_tokens] for each in found.values()] == expected[: len(several)]
        seeded = tf.ContinuousBatchingConfig(seed=3)
        outputs = [
            each.generate_batch(PROMPTS[:2], drawn, seeded, persistent_manager=True)
            for each in (model, whole("llama"))
        ]
        texts = [{name: each.generated_tokens for name, each in found.items()} for found in outputs]
        assert texts[0] == texts[1]
        for each in (model, whole("llama")):
            each.destroy_cached_continuous_batching_manager()
        compiled = tf.ContinuousBatchingConfig(num_blocks=20, max_batch_tokens=64, default_compile_level=1)
        with pytest.warns(hf_paged.FallbackWarning, match="compile=True is for one process"):
            manager = model.init_continuous_batching(config, compiled)
        manager.destroy()


@contextmanager
def batches_on_pages() -> Iterator[None]:
    hf_paged.install(generate_batch=True)
    try:
        yield
    finally:
        hf_paged.install(generate_batch=False)


def a_manager_of_batches(rank: int) -> None:
    """Streams, a pause in which all ranks change the weights, a request that is refused, and a stop. Where
    nothing else brings results to the other ranks, the pause and the stop do. Another manager waits for it.
    """
    model = loaded("llama")
    other = tf.AutoModelForCausalLM.from_pretrained(FOLDER / "llama").eval().to(model.device)
    config = tf.GenerationConfig(eos_token_id=-1, pad_token_id=0, **GREEDY)
    with batches_on_pages(), pytest.MonkeyPatch.context() as patch:
        manager = model.init_continuous_batching(config, tf.ContinuousBatchingConfig(num_blocks=60))
        for busy in (False, True):
            if busy:
                patch.setattr(EngineBatchingManager, "_broadcast", lambda manager: None)
            expected = alone(other, PROMPTS[1], **GREEDY)
            manager.start()
            another = model.init_continuous_batching(config, tf.ContinuousBatchingConfig(num_blocks=70))
            raises(RuntimeError, "another manager runs .* one at a time", another.start)
            raises(RuntimeError, "another manager", lambda: model.generate_batch(PROMPTS[:2], config))
            manager.add_request(PROMPTS[1], request_id="streamed", streaming=True)
            found = [manager.get_result(timeout=LIMIT).generated_tokens for _ in range(NEW)]
            assert found == [expected[0][:count] for count in range(1, NEW + 1)]
            manager.add_request([5] * 100000, request_id="refused")
            assert "100009 tokens" in manager.get_result(timeout=LIMIT).error
            with manager.pause(), torch.no_grad():
                for each in (model, other):
                    each.lm_head.weight.mul_(-1)
                manager.add_request([5] * 100000, request_id="refused in a pause")
            assert "100009 tokens" in manager.get_result(timeout=LIMIT).error
            assert alone(other, PROMPTS[1], **GREEDY) != expected
            manager.add_request(PROMPTS[1], request_id="later")
            later = manager.get_result(timeout=LIMIT)
            assert [later.generated_tokens] == alone(other, PROMPTS[1], **GREEDY), later
            assert manager.add_request(PROMPTS[2], max_new_tokens=200, request_id="cut") in ("cut", None)
            manager.stop(timeout=LIMIT, hard_stop=True)
            assert manager.get_result(timeout=LIMIT).status == RequestStatus.FAILED
            assert not manager.is_running()
        broadcast = Engine.broadcast
        refused: list[str] = []

        def another_starts_before(engine: Engine, value: Any) -> None:
            try:
                another.start()
            except RuntimeError as error:
                refused.append(str(error))
            broadcast(engine, value)

        manager.start()
        if rank == 0:
            patch.setattr(Engine, "broadcast", another_starts_before)  # by which the others hear of the stop
        manager.stop(timeout=LIMIT)
        assert (rank == 0) == any("another manager runs" in each for each in refused)
        manager.destroy()


def a_manager_whose_engine_is_closed(rank: int) -> None:
    """On rank 0, behind its manager: those of the other ranks end as well, and all may be started again."""
    model = loaded("llama")
    config = tf.GenerationConfig(eos_token_id=-1, pad_token_id=0, **GREEDY)
    with batches_on_pages():
        manager = model.init_continuous_batching(config, tf.ContinuousBatchingConfig(num_blocks=60))
        manager.start()
        manager.add_request(PROMPTS[2], max_new_tokens=200, streaming=True)
        assert manager.get_result(timeout=LIMIT).status == RequestStatus.DECODING
        if rank == 0:
            manager.engine.close()
        manager.join(0.0, 20)
        assert "closed" in str(manager.background_thread_status.fatal_error)
        while (output := manager.get_result()) is not None:
            last = output
        assert rank > 0 or last.status == RequestStatus.FAILED, last
        manager.start()
        manager.add_request(PROMPTS[1])
        found = manager.get_result(timeout=LIMIT)
        assert [found.generated_tokens] == alone(whole("llama"), PROMPTS[1], **GREEDY), found
        manager.stop(timeout=LIMIT)
        manager.destroy()


def a_fork_of_a_rank(rank: int) -> None:
    """It ends, by an error within the engine's block: the ranks go on. It votes for no rank."""
    model = loaded("llama")
    expected = generated(model, MODES[0], cache_implementation="paged")
    with Engine(model, **SMALL) as engine:
        for turn in range(2):
            if rank == turn:
                gc.collect()
                gc.freeze()  # a fork that collects torch's groups of earlier cases crashes: it has no threads
                child = os.fork()
                if child == 0:
                    words = "in forked subprocess" if CUDA else "forked from"  # CUDA says it first
                    try:
                        raises(
                            RuntimeError,
                            words,
                            lambda: generated(model, MODES[0], cache_implementation="paged"),
                        )
                        if rank:
                            raises(RuntimeError, words, engine.follow)
                            os._exit(3)
                        with engine:
                            raises(RuntimeError, words, lambda: engine.submit(PROMPTS[1], **GREEDY).result())
                            raise SystemExit(3)
                    except SystemExit as error:
                        os._exit(int(str(error.code)))
                    except BaseException:
                        traceback.print_exc()
                    finally:
                        os._exit(4)
                gc.unfreeze()
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                assert code == 3, f"the fork has ended with {code}; if that is 4, its error is above"
            if rank == 0:
                assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == right("llama", 1, 0, NEW)
                if turn == 0:
                    engine.pause()
                    engine.resume()
            else:
                assert engine.follow() is (turn == 0)
    assert generated(model, MODES[0], cache_implementation="paged") == expected


def requests_of_a_processor(rank: int) -> None:
    """A processor may add requests, as a tool's call would, while outputs go to the other ranks."""
    model = loaded("llama")
    config = tf.GenerationConfig(eos_token_id=-1, pad_token_id=0, do_sample=False, max_new_tokens=20)
    batching = tf.ContinuousBatchingConfig(
        num_blocks=400, max_batch_tokens=512, max_requests_per_batch=16, per_request_processors=True
    )
    with batches_on_pages():
        manager = model.init_continuous_batching(config, batching)
        manager.start()

        def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] % 4 == 0:
                time.sleep(0.03)  # outputs of the step before are on their way
                manager.add_request(PROMPTS[2], max_new_tokens=2)
            return scores

        for given in ([processor], None, None, None):
            manager.add_request(PROMPTS[1], streaming=True, logits_processor=given)
        found = [manager.get_result(timeout=LIMIT) for _ in range(4 * 20 + 5)]
        assert None not in found
        manager.stop(timeout=LIMIT)
        assert not manager.is_running()
        manager.destroy()


def a_pause_beside_a_stop(rank: int) -> None:
    """One thread enters a pause while another stops the manager: the pause ends first, then all ranks stop."""
    model = loaded("llama")
    cancel = Handle.cancel
    entered = threading.Event()
    with batches_on_pages(), pytest.MonkeyPatch.context() as patch:
        manager = model.init_continuous_batching(
            tf.GenerationConfig(eos_token_id=-1, pad_token_id=0, **GREEDY),
            tf.ContinuousBatchingConfig(num_blocks=60),
        )
        manager.start()

        def hold() -> None:
            with manager.pause():
                entered.set()
                time.sleep(0.3)

        holding = threading.Thread(target=hold)

        def while_a_pause_begins(handle: Handle) -> None:
            holding.start()
            entered.wait()
            cancel(handle)

        if rank == 0:
            patch.setattr(Handle, "cancel", while_a_pause_begins)
        else:
            holding.start()
        manager.add_request(PROMPTS[2], max_new_tokens=200)
        manager.stop(timeout=LIMIT, hard_stop=True)  # it cancels the request
        assert not manager.is_running()
        assert manager.background_thread_status.fatal_error is None
        holding.join()
        manager.destroy()


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


# ---- FSDP


def rollouts(rank: int, wrapped: Any, model: Any, gathered: Callable[[], Any]) -> None:
    """Steps of an optimizer on a divided model, and samples between them: those of a model that is trained
    whole in every process. wrapped: what trains; model: what samples. Rank 0's samples end early.
    """
    single = to_train()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (wrapped, single)]
    batches = [torch.tensor([PROMPTS[1][:3] + [40 + k]] * 2, device=single.device) for k in range(2)]
    ids = batches[rank]
    ends = list(range(20, 60)) if rank == 0 and model is wrapped else -1
    mode = {"do_sample": True, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": ends}
    paged = {"cache_implementation": "paged", "cache_config": {"prefix_caching": True}}
    seen = set()
    for step in range(4):
        found = []
        with gathered():
            for each, word in ((single, {}), (model, {}), (model, paged), (model, paged)):
                torch.manual_seed(step)
                found.append(each.generate(ids, attention_mask=torch.ones_like(ids), **mode, **word).tolist())
        assert found == found[:1] * 4, (step, found)
        seen.add(str(found[0]))
        wrapped(input_ids=ids, labels=ids).loss.backward()
        (sum(single(input_ids=each, labels=each).loss for each in batches) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(seen) > 2, seen
    stats = hf_paged.stats(model)
    assert set(stats.layers) == {"paged"}
    assert stats.reused == 0
    raises(ValueError, "FSDP divides the weights of", lambda: Engine(model, **SMALL))


def to_train() -> Any:
    """A model that is trained, the same on every rank."""
    torch.manual_seed(0)
    return build(BY_NAME["llama"]).to("cuda" if CUDA else "cpu").train()


def weights_divided_by_fsdp(rank: int) -> None:
    """Each forward gathers them, layer by layer; or in every other step the caller does for some time."""
    model = to_train()
    parts = [*model.model.layers, model]
    for part in parts:
        fully_shard(part)
    model._is_fsdp_managed_module = True  # as transformers marks it: ranks that are done go on
    steps = itertools.count()

    @contextmanager
    def gathered() -> Iterator[None]:
        several = parts if next(steps) % 2 else []
        for part in several:
            part.unshard()
        yield
        for part in several:
            part.reshard()

    rollouts(rank, model, model, gathered)


def weights_that_fsdp_gathers(rank: int) -> None:
    """The first version, whose outermost weights TRL gathers for generate()."""
    inner = to_train()
    policy = ModuleWrapPolicy({type(inner.model.layers[0])})
    wrapped = FullyShardedDataParallel(
        inner, auto_wrap_policy=policy, use_orig_params=True, device_id=inner.device
    )
    summon = functools.partial(wrapped.summon_full_params, wrapped, recurse=False, writeback=False)
    rollouts(rank, wrapped, inner, summon)


def samples_while_fsdp_trains(rank: int) -> None:
    """All ranks compute them, rank 0 shows them, and the next step of training finds the ranks in step."""
    tokenizer = SimpleNamespace(
        apply_chat_template=lambda ids, **_: {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        },
        decode=lambda ids, **_: str(ids.tolist()),
    )
    mode = {"max_new_tokens": NEW, "do_sample": True, "pad_token_id": 0, "eos_token_id": list(range(20, 60))}
    state = SimpleNamespace(global_step=1, is_world_process_zero=rank == 0)
    policy = ModuleWrapPolicy({type(to_train().model.layers[0])})
    for version in (1, 2):
        model: Any = to_train()
        if version == 1:
            model = FullyShardedDataParallel(
                model, auto_wrap_policy=policy, use_orig_params=True, device_id=model.device
            )
        for part in [*model.model.layers, model] if version == 2 else []:
            fully_shard(part)
        callback = SampleCallback([PROMPTS[1]] * 3, every=1, tokenizer=tokenizer, **mode)
        torch.manual_seed(rank)
        callback.on_step_end(None, state, None, model=model)
        assert len(callback.samples) == (rank == 0)
        assert model.training
        ids = torch.tensor([PROMPTS[1]], device=next(model.parameters()).device)
        model(input_ids=ids, labels=ids).loss.backward()


# ---- faults: the process groups are gone behind each of them


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


def _spoiled(model: Any, rank: int, act: Callable[[], Any]) -> None:
    """Let a rank do something in the middle of its fifth forward behind now."""
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    count = [0]

    def spoilt(states: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if dist.get_rank() == rank and count[0] == 5:
            act()
        return forward(states)

    mlp.forward = spoilt


def _broken(rank: int, act: Callable[[], Any], words: str, seconds: float, **options: Any) -> None:
    """One error on all ranks, soon, and nothing that hangs behind it."""
    model = loaded("llama-3" if dist.get_world_size() == 3 else "llama")
    engine = Engine(model, graphs=False, **{**SMALL, **options})
    _spoiled(model, 1, act)
    begin = time.monotonic()
    if rank == 0:
        handle = engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=False)
        raises(RankError, words, handle.result)
        raises(RankError, words, handle.result)
    else:
        raises(RankError, words, engine.follow)
    assert time.monotonic() - begin < seconds
    engine.close()


def a_rank_that_raises(rank: int) -> None:
    def act() -> None:
        raise ValueError("mine")

    _broken(rank, act, "rank 1 raised ValueError: mine", 8.0)


def captured_steps_of_a_rank_that_raises(rank: int) -> None:
    """NCCL ends the waits of a group only when no captured step has its collectives: the engine drops them,
    also if it is left open, and no thread of the user's waits for that.
    """
    begin_again(10)
    dropped = threading.Event()
    broken = threading.Event()
    break_waits = ranks.break_waits
    close = Runner.close
    closed: list[None] = []

    def end(*given: Any) -> None:
        break_waits(*given)
        if dropped.wait(5):
            broken.set()

    def drop(model: Any) -> None:
        assert model.config.model_type == "llama"
        dropped.set()

    def act() -> None:
        raise ValueError("mine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "break_waits", end)
        patch.setattr(Runner, "close", lambda runner: closed.append(close(runner)))
        patch.setattr("hf_paged.engine.driver.drop_captures", drop)  # those of generate() on the same ranks
        patch.setattr(Engine, "close", lambda engine: None)
        _broken(rank, act, "rank 1 raised ValueError: mine", 4.0)
        assert broken.wait(2)
        assert closed


def adapters_that_one_rank_has_no_memory_for(rank: int) -> None:
    """No rank has it then, and all others go on; inputs beside token ids are taken as adapters are."""
    model = loaded("llama")
    with Engine(model, **SMALL) as engine, pytest.MonkeyPatch.context() as patch:
        full = [rank == 1]

        def scarce(act: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: _full() if full[0] else act(*given)

        patch.setattr(EngineAdapters, "hold", scarce(EngineAdapters.hold))
        patch.setattr(follower, "on_device", scarce(follower.on_device))
        if rank:

            def receive(scarcity: int) -> None:
                full[0] = bool(scarcity)

            assert engine.follow(receive)
            assert not engine.follow(receive)
            assert list(engine.adapters()) == ["two"]
            return
        state = adapter_of("llama", 0, 4)
        row = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
        raises(MemoryError, "rank 1: MemoryError: full", lambda: engine.add_adapter("one", state, lora(r=4)))
        raises(ValueError, "no adapter", lambda: engine.submit(PROMPTS[1], adapter="one"))
        output = engine.submit(inputs_embeds=row.to(model.device), **GREEDY).result()
        assert "rank 1: MemoryError: full" in str(output.error), output
        assert answers(engine.submit(PROMPTS[1], **GREEDY).result()) == right("llama", 1, 0, NEW)
        engine.broadcast(0)
        output = engine.submit(inputs_embeds=row.to(model.device), **GREEDY).result()
        assert output.error is None
        engine.add_adapter("two", state, lora(r=4))
        found = answers(engine.submit(PROMPTS[1], adapter="two", **GREEDY).result())
        assert found != right("llama", 1, 0, NEW)
        engine.broadcast(1)
        engine.pause()
        engine.add_adapter("three", state, lora(r=4))  # the others get it when they follow
        engine.resume()
        waiting = engine.submit(PROMPTS[1], adapter="three", **GREEDY)
        handle = engine.submit(PROMPTS[1], adapter="two", **GREEDY)
        raises(MemoryError, "rank 1: MemoryError: full", handle.result)
        assert answers(handle.result()) == found
        assert "'three'" in str(waiting.result().error)


def _full(*_: Any) -> Any:
    raise MemoryError("full")


def a_rank_without_memory(rank: int) -> None:
    """In the middle of a forward others may wait in a sum already: one error says where and what to do."""
    begin_again(4)

    def act() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    words = (
        "rank 1 raised OutOfMemoryError: CUDA out of memory.*bytes are free on its .*lower max_batch_tokens"
    )
    _broken(rank, act, words, 8.0)


def errors_at_different_places(rank: int) -> None:
    """All ranks raise in one step, but one of them behind a sum that the others have not begun."""
    begin_again(5)
    model = loaded("llama-3")
    engine = Engine(model, graphs=False, **SMALL)
    forward = model.model.layers[1].mlp.forward
    calls = [0]

    def broken(states: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] < 3:
            return forward(states)
        if rank == 0:  # as a device does it: nothing waits for the others yet
            dist.all_reduce(states.clone(), group=mesh_of(model).get_group(), async_op=True)
        raise torch.OutOfMemoryError("on purpose")

    model.model.layers[1].mlp.forward = broken
    act = engine.submit(PROMPTS[1], **GREEDY).result if rank == 0 else engine.follow
    raises(RankError, "raised OutOfMemoryError: on purpose", act)
    engine.close()


def an_interrupt_of_a_rank_that_waits(rank: int) -> None:
    """It is raised there, and ends the next step on all."""
    begin_again(8)
    engine = Engine(loaded("llama-3"), **SMALL)
    if rank == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        raises(KeyboardInterrupt, "", engine.follow)
        (FOLDER / "interrupted").touch()
    else:
        end = time.monotonic() + 10  # a busy machine takes long to begin to follow
        while not (FOLDER / "interrupted").exists() and time.monotonic() < end:
            time.sleep(0.05)
        act = engine.submit(PROMPTS[1], **GREEDY).result if rank == 0 else engine.follow
        raises(RankError, "rank 1 raised KeyboardInterrupt", act)
    engine.close()


def a_rank_that_closes_early(rank: int) -> None:
    """What ends another rank's block reaches rank 0 with its next step, and by it all others."""
    begin_again(6)
    begin = time.monotonic()
    try:
        with Engine(loaded("llama-3"), **SMALL) as engine:
            dist.barrier()  # else a rank that still makes its engine gets the error there
            if rank == 1:
                raise LookupError("no file here")
            act = engine.submit(PROMPTS[1], **GREEDY).result if rank == 0 else engine.follow
            raises(RankError, "rank 1 raised LookupError: no file here", act)
    except LookupError:
        pass
    assert time.monotonic() - begin < 8


def an_engine_that_one_rank_cannot_make(rank: int) -> None:
    begin_again(7)
    model = loaded("llama-3")
    if rank == 1:
        model.train()
        model.config.attention_dropout = 0.1
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
    begin = time.monotonic()
    raises(RankError, "rank 1 raised RuntimeError: .*dropout", lambda: Engine(model, **SMALL))
    assert time.monotonic() - begin < 8


def weights_that_one_rank_cannot_load(rank: int) -> None:
    """The model would be none: the engine ends on all."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"no.such": torch.ones(2)}, "1 tensors, ValueError: .*'no.such'.*, 1 tensors; start again"),
        ({}, "1 tensors, 0 tensors, 1 tensors; start again"),
    ]
    for number, (given, words) in enumerate(cases):
        begin_again(20 + number)
        model = loaded("llama-3")
        state = given if rank == 1 else {"model.norm.weight": torch.ones(model.config.hidden_size)}
        load = functools.partial(_load_in_a_pause, model, state)
        raises(RankError, f"ranks have loaded different weights: {words}", load)


def _load_in_a_pause(model: Any, state: dict[str, Any]) -> None:
    with Engine(model, **SMALL) as engine:
        if engine.leads:
            engine.pause()
        else:
            assert engine.follow()
        engine.load_weights(state)


def a_rank_that_neither_makes_an_engine_nor_generates(rank: int) -> None:
    begin_again(11)
    model = loaded("llama-3")
    words = "ranks do not meet: .*each of them has to make"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_votes, "MEETING", 1.0)
        patch.setattr(rank_votes, "_patience", lambda group: 1.0)
        if rank != 1:
            raises(RankError, words, lambda: Engine(model, rank_timeout=1.0))
            ids = torch.tensor([PROMPTS[0]], device=model.device)
            raises(RuntimeError, words, lambda: model.generate(ids, cache_implementation="paged"))


def a_rank_that_hangs(rank: int) -> None:
    begin_again(1)
    seconds = 6 if CUDA else 1  # kernels are loaded, and devices connected, in the first step
    words = f"rank_timeout={seconds} seconds: rank 1 hangs"
    _broken(rank, lambda: time.sleep(4 * seconds), words, 7.0 * seconds, rank_timeout=seconds)


def a_rank_that_dies(rank: int) -> None:
    begin_again(2)
    _broken(rank, lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 has ended", 8.0)


def rank_0_that_ends_at_once(rank: int) -> None:
    """A process that has closed its engine may end, and the process groups' store with it. NCCL's groups are
    not destroyed while a captured step has their collectives.
    """
    model = loaded("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECORDERS, "cpu", record)
        for _ in range(3):
            generated(model, MODES[0], cache_implementation="paged")
        assert captures_of(model).pool.sizes()
    closed_too_late = Engine(model, **SMALL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port, 0)
    destroy_process_group()
    assert not captures_of(model).pool.sizes()
    closed_too_late.close()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torchrun's: rank 0 is to have the store here
    dist.init_process_group(
        BACKEND,
        init_method=f"tcp://127.0.0.1:{port[0]}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    model = loaded("llama")
    engine = Engine(model, **SMALL)
    if rank == 0:
        engine.submit(PROMPTS[1], **GREEDY).result()
        time.sleep(0.5)  # the other one waits
        engine.close()
        os._exit(0)
    receive = Ranks.receive

    def slowly(ranks: Ranks) -> list[int]:
        numbers = receive(ranks)
        if MessageKind(numbers[0]) is MessageKind.CLOSE:
            time.sleep(1)  # rank 0 is gone by now
        return numbers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "receive", slowly)
        assert not engine.follow()


def fork() -> None:
    """Run every rank in a fork of this process, which has imported all and made the models, and wait for all."""
    words = sys.argv[2:] or [f"{size}:{name}" for size, name, _ in CASES]
    wanted: dict[int, list[str]] = {}
    for size, _, name in (each.partition(":") for each in words):
        wanted.setdefault(int(size), []).append(name)
    for name in (*DIVIDED, *SHOWN):
        if not (FOLDER / name).exists():
            whole(name).save_pretrained(FOLDER / name)
    gc.collect()
    gc.freeze()  # else every collection of a fork walks, and copies, all that was imported
    context = multiprocessing.get_context("fork")
    for size, names in wanted.items():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
        ranks = [context.Process(target=_forked, args=(rank, size, names)) for rank in range(size)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()


def _forked(rank: int, size: int, names: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    main(names)


def main(wanted: list[str]) -> None:
    size = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for name in wanted:
        begin = time.monotonic()
        trouble = None
        try:
            if not dist.is_initialized():
                dist.init_process_group(BACKEND, timeout=timedelta(seconds=60))
            globals()[name](dist.get_rank())
        except BaseException:
            trouble = traceback.format_exc()
        line = {"case": name, "trouble": trouble, "seconds": time.monotonic() - begin}
        with (FOLDER / f"ranks-{size}-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if trouble is not None:
            print(os.environ["RANK"], name, trouble, file=sys.stderr, flush=True)
            break  # the others wait in a place of their own


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[2:] or [name for size, name, _ in CASES if size == int(os.environ["WORLD_SIZE"])])
    else:
        fork()
