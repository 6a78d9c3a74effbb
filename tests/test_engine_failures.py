"""A request that fails affects no other: others get the same tokens, and every block is freed (C11,
C22, C34).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers as tf
from cases import every_other, pairwise
from dropout import stop_dropout, train_with_dropout
from engine_answers import PROMPTS, alone, answers
from engine_faults import GREEDY, POISON, Does, Fails, assert_neighbours_unharmed, neighbours
from engine_parts import block_pools
from engine_steps import new_tokens
from families import VOCABULARY
from lookups import match
from transformers import LogitsProcessor

from hf_paged.blocks import BlockPool, extra_key
from hf_paged.engine import Engine, Unservable
from hf_paged.engine.worker.pools import Pools

BAD = [5, 6, 7, 8, POISON, 9, 10]


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


@pytest.mark.parametrize(
    ("where", "after", "kind"),
    pairwise(
        ["logits_processor", "stopping_criteria"],
        [0, 4],
        [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}],
    ),
)
def test_a_processor_or_criterion_that_raises(
    engine: Engine, where: str, after: int, kind: dict[str, Any]
) -> None:
    first = neighbours(engine)
    bad = engine.submit(PROMPTS[4], **{**GREEDY, **kind, where: [Fails(after, ZeroDivisionError("mine"))]})
    output = bad.result()
    assert (output.finish_reason, str(output.error)) == ("error", "mine")
    if not kind:
        assert output.sequences[0].token_ids == alone(engine.model, PROMPTS[4], **GREEDY)[0][:after]
    assert_neighbours_unharmed(engine, first)


@pytest.mark.parametrize("kind", [{}, {"num_beams": 2}, {"do_sample": True}])
def test_nan_logits(model: Any, engine: Engine, kind: dict[str, Any]) -> None:
    """The request whose logits are NaN ends; its blocks are used again by others, who do not read what it
    left there.
    """
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
    for _ in range(3):
        handles = neighbours(engine)
        output = engine.submit(BAD, **{**GREEDY, **kind}).result()
        assert output.finish_reason == "error"
        assert "NaN" in str(output.error)
        assert_neighbours_unharmed(engine, handles)
    mended = engine.submit(BAD, **GREEDY, remove_invalid_values=True).result()
    assert answers(mended) == alone(model, BAD, **GREEDY, remove_invalid_values=True)


def test_scores_that_leave_nothing(engine: Engine) -> None:
    """A processor that forbids everything is an error of its own request, not a draw from nothing."""

    class Nothing(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, -torch.inf)

    handles = neighbours(engine)
    output = engine.submit(
        PROMPTS[4], do_sample=True, max_new_tokens=4, logits_processor=[Nothing()]
    ).result()
    assert "no token" in str(output.error)
    assert_neighbours_unharmed(engine, handles)


def test_an_exception_in_the_forward(model: Any, engine: Engine) -> None:
    """Whose tokens break the forward of all is found out, and ends alone; what it wrote is found by nobody
    (C22).
    """
    embed = model.model.embed_tokens.forward

    def choke(ids: torch.Tensor) -> torch.Tensor:
        if (ids == POISON).any():
            raise ValueError("indigestible")
        return embed(ids)

    model.model.embed_tokens.forward = choke
    for _ in range(2):
        handles = neighbours(engine)
        bad = [
            engine.submit([*PROMPTS[3], POISON], **GREEDY),
            engine.submit(BAD, **{**GREEDY, "num_beams": 3}),
        ]
        assert [str(handle.result().error) for handle in bad] == ["indigestible"] * 2
        assert_neighbours_unharmed(engine, handles)
    model.model.embed_tokens.forward = embed
    again = engine.submit([*PROMPTS[3], POISON], **GREEDY).result()
    assert again.cached_tokens <= 24  # chunks that went through may be there, the one that broke is not
    assert answers(again) == alone(model, [*PROMPTS[3], POISON], **GREEDY)


class Breaks:
    """A model whose forwards write wrong keys and values for some tokens, and then raise, `times` times after
    `after` good ones.
    """

    def __init__(
        self, model: Any, monkeypatch: pytest.MonkeyPatch, token: int, times: int, after: int = 0
    ) -> None:
        self.token, self.times, self.after, self.broken = token, times, after, False
        self._embed, self._norm = model.model.embed_tokens.forward, model.model.norm.forward
        monkeypatch.setattr(model.model.embed_tokens, "forward", self.embed)
        monkeypatch.setattr(model.model.norm, "forward", self.norm)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        self.broken = False
        if self.times and bool((ids == self.token).any()):
            self.broken = self.after == 0
            self.times -= self.broken
            self.after -= not self.broken
        return self._embed(ids) + (7.0 if self.broken else 0.0)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.broken:  # every layer has written by now
            raise RuntimeError("a bit fell over")
        return self._norm(hidden)


def known(engine: Engine, prompt: list[int]) -> int:
    """How many blocks a later request with this prompt would find."""
    return min(len(match(pool, [*prompt, 5], extra_key(None)).blocks) for pool in block_pools(engine))


@pytest.mark.parametrize(
    ("after", "kind"),
    every_other([0, 1], [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}]),
)
def test_what_a_failed_forward_wrote_is_not_found(
    model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch, after: int, kind: dict[str, Any]
) -> None:
    """C22: a fault that passes. Its request ends; the same prompt later finds none of its blocks, and every
    block of its neighbours.
    """
    prompt = [POISON, *PROMPTS[3][:8], POISON, *PROMPTS[3][8:], POISON]  # in both of its chunks
    expected = alone(model, prompt, **GREEDY)
    breaks = Breaks(model, monkeypatch, POISON, times=2, after=after)  # once among others, once by itself
    handles = neighbours(engine)
    steps(engine, 3)
    bad = engine.submit(prompt, **{**GREEDY, **kind})
    assert (bad.result().finish_reason, str(bad.result().error)) == ("error", "a bit fell over")
    assert breaks.times == 0
    assert known(engine, prompt) == 0
    assert_neighbours_unharmed(engine, handles)
    assert [known(engine, each) for each in PROMPTS[:3]] == [len(each) // 4 for each in PROMPTS[:3]]
    for cached in (0, len(prompt) // 4 * 4):
        output = engine.submit(prompt, **GREEDY).result()
        assert output.cached_tokens == min(cached, (len(prompt) - 1) // 4 * 4)
        assert answers(output) == expected


def test_a_fault_among_many_that_passes(model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """C22: the forward of all breaks once and each is tried by itself: everybody comes through, and what is
    found later is right.
    """
    expected = [alone(model, prompt, **GREEDY) for prompt in PROMPTS]
    breaks = Breaks(model, monkeypatch, PROMPTS[3][20], times=1)
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
    assert [answers(handle.result()) for handle in handles] == expected
    assert breaks.times == 0
    again = [engine.submit(prompt, **GREEDY).result() for prompt in PROMPTS]
    assert [answers(output) for output in again] == expected
    for prompt, output in zip(PROMPTS, again, strict=True):
        most = len(prompt) - 1
        assert output.cached_tokens == (most if most % 4 != 1 else most - 1)  # one token is not worth a copy
    engine.check()


def test_a_forward_that_always_fails(model: Any, engine: Engine) -> None:
    """Everybody ends with the reason, and the next requests run."""
    handles = neighbours(engine)
    engine.step()
    forward, model.lm_head.forward = model.lm_head.forward, None
    while engine.stats()["running"] + engine.stats()["waiting"]:
        engine.step()
    assert {handle.result().finish_reason for handle in handles} == {"error"}
    model.lm_head.forward = forward
    assert_neighbours_unharmed(engine, neighbours(engine))


@pytest.mark.parametrize("kind", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_an_abort_in_any_state(engine: Engine, kind: dict[str, Any]) -> None:
    """C34: before, in the middle of the prompt, while decoding, preempted, after the end."""
    for done, preempted in ((0, False), (1, False), (3, False), (5, False), (5, True), (60, False)):
        first = neighbours(engine)
        handle = engine.submit(PROMPTS[3], **{**GREEDY, **kind})
        for _ in range(done):
            engine.step()
        said = len(new_tokens(handle))
        if preempted:
            engine.pause()
            engine.resume()
        handle.cancel()
        handle.cancel()
        output = handle.result()
        assert output.finish_reason == ("abort" if done < 60 else "length")
        assert sum(len(sequence.token_ids) for sequence in output.sequences) == said
        assert_neighbours_unharmed(engine, first)


def test_a_request_that_cancels_itself(engine: Engine) -> None:
    """From within a step, by a criterion: it ends with that step's successor."""
    handles: list[Any] = neighbours(engine)
    own = engine.submit(
        PROMPTS[4], max_new_tokens=20, do_sample=False, stopping_criteria=[Does(lambda: own.cancel())]
    )
    assert own.result().finish_reason == "abort"
    assert len(own.result().sequences[0].token_ids) == 1
    assert_neighbours_unharmed(engine, handles)


def test_the_engine_is_not_driven_from_within(engine: Engine) -> None:
    handles = neighbours(engine)
    output = engine.submit(PROMPTS[4], max_new_tokens=4, stopping_criteria=[Does(engine.step)]).result()
    assert "a step is running already" in str(output.error)
    assert_neighbours_unharmed(engine, handles)


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("forward", {}),
        ("forward", {"num_beams": 3}),
        ("processor", {}),
        ("processor", {"do_sample": True, "num_return_sequences": 2}),
        ("copy", {"num_beams": 3}),
        ("copy", {"do_sample": True, "num_return_sequences": 2}),
        ("schedule", {}),
    ],
)
def test_an_interrupt(
    model: Any, engine: Engine, where: str, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a step reaches the caller; requests that ran are computed again and no token
    changes.
    """
    expected = answers(engine.submit(PROMPTS[4], seed=3, **{**GREEDY, **kind}).result())
    handles = neighbours(engine)
    breaks = Fails(3 if where == "processor" else 99, KeyboardInterrupt())
    own = engine.submit(PROMPTS[4], seed=3, **{**GREEDY, **kind, "logits_processor": [breaks]})
    engine.step()
    engine.step()
    target = {
        "forward": (model.lm_head, "forward"),
        "copy": (Pools, "prepare"),
        "schedule": (BlockPool, "take"),  # one needs a block, and others in the step have theirs already
    }.get(where)
    with monkeypatch.context() as patch:
        if target is not None:
            patch.setattr(*target, Fails(0, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            steps(engine, 9)
    engine.check()
    breaks.left = 99
    if where == "processor":  # its own code raised: it ends with that
        assert (own.result().finish_reason, type(own.result().error)) == ("error", KeyboardInterrupt)
    else:
        assert answers(own.result()) == expected
    assert_neighbours_unharmed(engine, handles)


def test_a_consumer_that_goes_away(engine: Engine) -> None:
    """Whoever stops listening to a stream ends its request."""
    handles = neighbours(engine)
    stream = engine.stream(PROMPTS[3], max_new_tokens=30, do_sample=False)
    next(stream)
    stream.close()
    assert engine.stats()["running"] + engine.stats()["waiting"] == 3
    assert_neighbours_unharmed(engine, handles)


def test_the_infeasible_are_refused(engine: Engine) -> None:
    """C11: at once, with both numbers, as an output and not as an exception for the batch."""
    handles = neighbours(engine)
    for prompt, options, numbers in (
        ([5] * 200, {"max_new_tokens": 50}, ("63 blocks", "60 can be had")),
        ([5] * 250, {"max_new_tokens": 50}, ("300 tokens", "256")),
        (
            [5] * 4,
            {"do_sample": True, "num_return_sequences": 9, "max_new_tokens": 2},
            ("9 sequences", "at most 8"),
        ),
    ):
        output = engine.submit(prompt, **options).result()
        assert output.finish_reason == "refused"
        assert all(number in str(output.error) for number in numbers)
    assert_neighbours_unharmed(engine, handles)


def test_a_training_model_is_not_asked(model: Any, engine: Engine) -> None:
    handle = engine.submit(PROMPTS[0], **GREEDY)
    train_with_dropout(model)
    with pytest.raises(RuntimeError, match="training mode"):
        handle.result()
    stop_dropout(model)
    assert answers(handle.result()) == alone(model, PROMPTS[0], **GREEDY)


def test_closing_ends_everything(engine: Engine) -> None:
    handles = neighbours(engine)
    engine.step()
    with engine:
        pass
    engine.close()
    assert {handle.result().finish_reason for handle in handles} == {"abort"}
    for use in (engine.step, lambda: engine.submit(PROMPTS[0])):
        with pytest.raises(RuntimeError, match="closed"):
            use()


@pytest.mark.parametrize(
    ("kind", "reason"), [("rwkv", "keeps a state of its own"), ("pictures", "takes pixel_values")]
)
def test_models_that_cannot_be_served(kind: str, reason: str) -> None:
    """A recurrent state, an encoder of pictures: each is told by name."""
    if kind == "rwkv":
        model: Any = tf.RwkvForCausalLM(
            tf.RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY)
        )
    else:
        eyes = tf.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
        )
        voice = tf.GPT2Config(n_embd=32, n_layer=1, n_head=4, n_positions=64, vocab_size=VOCABULARY)
        model = tf.VisionEncoderDecoderModel(
            tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(eyes, voice)
        )
    with pytest.raises(Unservable, match=reason):
        Engine(model.eval())


@pytest.mark.parametrize(("seed", "preemption"), [(0, "recompute"), (1, "swap"), (2, "auto")])
def test_a_soak_of_aborts_and_faults(model: Any, seed: int, preemption: str) -> None:
    """Random requests of all kinds, aborted and failing at random, on few blocks: who comes through is right,
    and nothing leaks.
    """
    rng = random.Random(seed)
    kinds = [{}, {}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2, "temperature": 1.5}]
    options = {"block_size": 2, "num_blocks": 40, "max_batch_tokens": 12, "max_batch_sequences": 6}
    options |= {"preemption": preemption, "run_ahead": seed > 0}
    with Engine(model, **options) as engine, Engine(model) as other:
        expected = {
            (p, k): answers(other.generate([prompt], seed=1, **{**GREEDY, **kind})[0])
            for p, prompt in enumerate(PROMPTS)
            for k, kind in enumerate(kinds)
        }
        alive: list[tuple[Any, int, int, bool]] = []
        through = 0
        for step in range(170):
            if step < 130 and rng.random() < 0.4 and len(alive) < 10:
                p, k, bad = rng.randrange(len(PROMPTS)), rng.randrange(len(kinds)), rng.random() < 0.2
                trouble = {"logits_processor": [Fails(rng.randrange(9), ZeroDivisionError())]} if bad else {}
                alive.append(
                    (engine.submit(PROMPTS[p], seed=1, **{**GREEDY, **kinds[k], **trouble}), p, k, bad)
                )
            if rng.random() < 0.05 and alive:
                alive.pop(rng.randrange(len(alive)))[0].cancel()
            if rng.random() < 0.03:
                engine.pause()
                engine.resume()
            engine.step()
            engine.check()
            for handle, p, k, bad in [each for each in alive if each[0].done or step == 169]:
                alive.remove((handle, p, k, bad))
                output = handle.result()
                assert (output.error is not None) == (bad and output.finish_reason == "error")
                if output.error is None:
                    through += 1
                    assert answers(output) == expected[p, k]
        engine.check()
        stats = engine.stats()
        assert all(kind["held"] == 0 for kind in [*stats["blocks"].values(), *stats["host"].values()])
        assert stats["preemptions"] > 5
        assert (stats["swapped_out"] > 0) == (preemption != "recompute")
        assert through > 12
