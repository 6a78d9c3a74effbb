"""Cases: steps of an engine on several ranks, of all kinds of requests and families."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from engine_answers import KINDS, PROMPTS, answers, right
from rank_models import DIVIDED
from rank_support import (
    ASKED,
    CUDA,
    FEW,
    GREEDY,
    MODES,
    NEW,
    SMALL,
    asked,
    compare,
    generated,
    led,
    loaded,
    whole,
)
from releases import OLD_RANKS
from tape import record
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from uneven_rows import PLAIN, advance

from hf_paged.engine import Engine
from hf_paged.engine.parallel import Ranks
from hf_paged.model.capture import pool
from hf_paged.model.dispatch import has_foreign_code
from hf_paged.model.rehearsal import RECORDERS


def chunks_recomputation_and_hits(rank: int) -> None:
    name = "llama-3" if dist.get_world_size() == 3 else "llama"
    requests = ASKED if dist.get_world_size() == 2 else ASKED[2:7]
    stats = compare(name, rank, requests, preemption="recompute", num_blocks=21, max_batch_sequences=10)
    if rank == 0 and not OLD_RANKS:  # older ranks run eagerly, by other plans
        assert stats["preemptions"] > 0
        assert stats["hits"] > 0


def swap(rank: int) -> None:
    """Under checks of bytes, which find nothing."""
    options = {"preemption": "swap", "num_blocks": 21, "max_batch_sequences": 10, "verify": "bytes"}
    stats = compare("llama", rank, **options)
    if rank == 0:
        assert stats["verify"]["checked"] > stats["verify"]["mismatched"] == 0
        assert stats["swapped_out"] > 0
        assert stats["swapped_in"] > 0 or OLD_RANKS


def rows_that_advance_unequally(rank: int) -> None:
    """No, one or several tokens of a row in a step, waiting, and preemption with tokens pending."""
    asked_for = [
        (PROMPTS[i % 6], {**PLAIN[i % len(PLAIN)], "max_new_tokens": NEW, "seed": i}) for i in range(8)
    ]
    with Engine(whole("llama"), block_size=4, num_blocks=200) as engine:
        truths = [answers(engine.submit(prompt, **kind).result()) for prompt, kind in asked_for]

    def act(engine: Engine) -> None:
        for seed in range(2):
            handles = [engine.submit(prompt, **kind) for prompt, kind in asked_for]
            took = advance(engine, handles, truths, random.Random(seed))
            assert [answers(handle.result()) for handle in handles] == truths
            assert min(took[count] for count in range(4)), took

    led(
        rank, loaded("llama"), act, run_ahead=False, num_blocks=80, max_batch_tokens=20, max_batch_sequences=8
    )


def steps_ahead_of_their_tokens(rank: int) -> None:
    compare("llama", rank, FEW + [(1, 2)], run_ahead=True, verify="bytes")


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
    """In steps that no rank replays, though some are captured."""

    def act(engine: Engine) -> None:
        for _ in range(6):
            engine.submit(PROMPTS[3], **GREEDY).result()
        assert CUDA or OLD_RANKS or engine.stats()["graphs"]["replayed"]
        with Engine(whole("llama"), **SMALL) as one:
            for each in (engine, one):
                each.submit(PROMPTS[3], max_new_tokens=1, do_sample=False).result()  # a part is cached
            options = {"prompt_logprobs": 2, "max_new_tokens": 2, "do_sample": False}
            found, expected = (each.submit(PROMPTS[3], **options).result() for each in (engine, one))
        numbers = [[note and note.logprob for note in each.prompt_logprobs] for each in (found, expected)]
        assert numbers[0][1:] == pytest.approx(numbers[1][1:], abs=1e-4)

    if not CUDA:
        RECORDERS["cpu"] = record
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "PADDED", -1)
            led(rank, loaded("llama"), act)
    finally:
        RECORDERS.pop("cpu", None)


def other_families(rank: int) -> None:
    """Experts, windows and sinks: whole KV heads on each rank, or a part. Other cases compare engines on the rest."""
    elsewhere = {"llama", "qwen2-window", "llama-3", "llama-5", "qwen3_5_text", "qwen3", "olmo2"}
    for name in sorted(set(DIVIDED) - elsewhere):
        compare(name, rank, [FEW[0], FEW[2]], twice=False)


def recurrent_states(rank: int) -> None:
    """Each rank has whole states, in slots of the same numbers; prompts begin with snapshots."""
    stats = compare("qwen3_5_text", rank, FEW, state_every=4)
    if rank == 0:
        assert stats["states"]["hits"]
        assert not stats["states"]["used"]


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
