"""Cases: pauses, new weights, and weights that FSDP divides."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from engine_answers import PROMPTS, alone, answers, right
from families import BY_NAME, build
from rank_support import ASKED, CUDA, FOLDER, GREEDY, NEW, SMALL, asked, loaded, raises, whole
from tape import record
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import hf_paged
from hf_paged.engine import Engine
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.model.shards import local_part
from hf_paged.trainer import SampleCallback


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
        acts = [generates, gives_back, functools.partial(gives_back, 0)]
        if captures:
            acts = [generates, gives_back_and_moves, trains]
        with pytest.MonkeyPatch.context() as patch, Engine(model, **SMALL) as engine:
            if captures:
                patch.setitem(RECORDERS, "cpu", record)
                patch.setattr("hf_paged.model.capture.replay.LEAST_STEPS", 1)
            for act in acts:
                if rank:
                    assert engine.follow()
                    act()
                    continue
                for _ in range(1 + captures):
                    assert answers(engine.submit(PROMPTS[3], **GREEDY).result()) == expected
                running = engine.submit(PROMPTS[3], **GREEDY)
                for _ in range(5):
                    engine.step()
                engine.pause()
                act()
                engine.resume()
                late = [engine.submit(PROMPTS[3], **GREEDY) for _ in range(1 + captures)]
                for handle in (running, *late):
                    assert answers(handle.result()) == expected, act
            if rank:
                assert not engine.follow()
            elif captures:
                assert engine.stats()["graphs"]["replayed"] > 20


def swapped_blocks_after_a_pause(rank: int) -> None:
    """Blocks on the hosts have memory again where it was given back."""
    model = loaded("llama")
    options = {**SMALL, "preemption": "swap", "num_blocks": 21, "max_batch_sequences": 10}
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
    for family in ("mixtral", "gpt-oss", "deepseek_v3"):
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
                for prompt in PROMPTS[1:3]:
                    assert answers(engine.submit(prompt, **options).result()) == alone(
                        other, prompt, **options
                    )
                engine.check()
            else:
                assert engine.follow() is False


def blocks_that_rank_0_drops(rank: int) -> None:
    """weights_changed() forgets what is cached, idle or paused; other ranks have no books, keep nothing."""
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
