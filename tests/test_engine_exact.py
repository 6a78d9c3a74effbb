"""The engine's one promise: every request gets the tokens it gets alone, whatever the pool, the budgets and
the neighbours.

Greedy and beams are held to model.generate() on that prompt alone, draws to the engine with nobody else in it
(C23, C26 to C35).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import state_spans_in_torch
import torch
from captures import policy
from cases import examples
from engine_answers import KINDS, PROMPTS, _model, alone, answers, right
from families import BY_NAME, UNLIKE, build
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import poison_free_slots
from releases import FLAT_STATES
from tape import record

from hf_paged.engine import Engine, Output
from hf_paged.kv.state_spans import StateSpans
from hf_paged.kv.state_store import StateStore
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.model.state_layers import StoredStates
from hf_paged.model.state_spans import FlatStates

FORMS = {"bloom": "rows", "falcon": "rows"}
CAUSAL = [family for family in UNLIKE if not family.seq2seq]


@pytest.mark.parametrize("family", CAUSAL, ids=lambda family: family.name)
def test_every_family_answers_as_alone(family: Any) -> None:
    """C23: chunked prompts, few blocks and few seats; models whose sequences cannot share a row run them one
    by one.
    """
    model = build(family)
    options = {"max_new_tokens": 10, "do_sample": False}
    with Engine(model, block_size=4, num_blocks=12, max_batch_tokens=11, max_batch_sequences=4) as engine:
        handles = [engine.submit(prompt, **options) for prompt in PROMPTS[:4]]
        for _ in range(5):
            engine.step()
        engine.pause()  # everybody is computed again
        engine.resume()
        outputs = [handle.result() for handle in handles]
        engine.check()
        assert engine.stats()["form"] == FORMS.get(family.name, "flat")
        assert engine.stats()["preemptions"] > 1
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert answers(output) == alone(model, prompt, **options)


WAYS_TO_GO: list[dict[str, Any]] = [
    {"preemption": "recompute"},
    {"preemption": "swap"},
    {"preemption": "swap", "host_blocks": 9},
    {"preemption": "auto"},
]


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    sequences = draw(st.integers(3, 8))
    return {
        "block_size": draw(st.sampled_from([1, 2, 4, 16])),
        "max_batch_tokens": draw(st.integers(sequences, 40)),
        "max_batch_sequences": sequences,
        "prefix_caching": draw(st.booleans()),
        "verify": draw(st.sampled_from([None, "tokens", "bytes", "bytes"])),
        "watermark": draw(st.sampled_from([0.0, 0.05])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "admission": draw(st.sampled_from(["watermark", "future"])),
        "run_ahead": draw(st.booleans()),
        **draw(st.sampled_from(WAYS_TO_GO)),
    }


class Ask(NamedTuple):
    """A request of the property: which prompt and options, how many new tokens, and when it comes and perhaps
    has to go for once.
    """

    prompt: int
    kind: int
    new: int
    late: int
    pushed: bool


asks = st.builds(
    Ask,
    st.integers(0, len(PROMPTS) - 1),
    st.integers(0, len(KINDS) - 1),
    st.sampled_from([1, 6, 13]),
    st.sampled_from([0, 0, 1, 4]),
    st.booleans(),
)


def least_blocks(params: list[Ask], size: int) -> int:
    """The blocks that the largest request needs to its end."""

    def need(ask: Ask) -> int:
        width = KINDS[ask.kind].get("num_return_sequences", 1)
        return -(-(len(PROMPTS[ask.prompt]) + ask.new) // size) * (
            max(width, KINDS[ask.kind].get("num_beams", 1)) + 1
        )

    return max(map(need, params)) + 10


@settings(max_examples=examples(12))
@given(
    name=st.sampled_from(["llama", "qwen2-window"]),
    options=engines(),
    params=st.lists(asks, min_size=1, max_size=7),
    share=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
)
def test_nothing_changes_a_token(name: str, options: dict[str, Any], params: list[Ask], share: float) -> None:
    """{block size, pool size, budgets, chunking, preemption, admission, cache, order of arrival} change no
    token of any request.

    Drawn under a seed or greedy, beams and samples among them; the books are recounted after every step.
    """
    with Engine(_model(name), num_blocks=blocks_for(params, options, share), **options) as engine:
        outputs = run_all(engine, params)
    assert [answers(output) for output in outputs] == rights(name, params)


def blocks_for(params: list[Ask], options: dict[str, Any], share: float) -> int:
    """From barely enough for the largest to enough for all."""
    return int(least_blocks(params, options["block_size"]) * (1 + 3 * share))


def rights(name: str, params: list[Ask]) -> list[list[list[int]]]:
    return [right(name, ask.prompt, ask.kind, ask.new) for ask in params]


def run_all(engine: Engine, params: list[Ask]) -> list[Output]:
    """The outputs of all requests; the books are recounted after every step."""
    handles = []
    for i, ask in enumerate(params):
        if ask.pushed:
            engine.pause()  # everybody is computed again
            engine.resume()
        handles.append(
            engine.submit(
                PROMPTS[ask.prompt],
                max_new_tokens=ask.new,
                seed=ask.prompt,
                priority=i % 3,
                **KINDS[ask.kind],
            )
        )
        for _ in range(ask.late):
            engine.step()
            engine.check()
    while not all(handle.done for handle in handles):
        engine.step()
        engine.check()
    engine.step()  # names the states that a step in flight has computed
    stats = engine.stats()
    assert all(kind["held"] == 0 for kind in [*stats["blocks"].values(), *stats["host"].values()])
    assert stats["waiting"] == stats["running"] == stats["preempted"] == 0
    assert stats["verify"]["mismatched"] == 0
    return [handle.result() for handle in handles]


HYBRIDS = [
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba",
    "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba", "zamba2", "zaya",
]  # fmt: skip
ADVANCE = [(StateSpans, "convolve"), (FlatStates, "_recur"), (StoredStates, "_write")]
"""Where layers advance their states: in flat rows, and in rows by themselves."""


@contextmanager
def broken_off(after: int) -> Iterator[None]:
    """A step fails once, behind a layer that has advanced its states: at that call of all layers; 0 for never."""
    left = [after]

    def failing(advance: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            answer = advance(*given, **named)
            left[0] -= 1
            if not left[0]:
                raise RuntimeError("broke off behind a layer")
            return answer

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ADVANCE if after else ():
            patch.setattr(owner, name, failing(getattr(owner, name)))
        yield


@FLAT_STATES
@settings(max_examples=examples(10))
@given(
    name=st.sampled_from(HYBRIDS),
    options=engines(),
    params=st.lists(asks, min_size=1, max_size=6),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    slots=st.integers(3, 6),
    snapshots=st.integers(0, 3),
    every=st.sampled_from([4, 16, 512]),
    fault=st.sampled_from([0, 0, 3, 17, 40, 90]),
    captured=st.booleans(),
)
def test_nothing_changes_a_token_of_a_hybrid(
    name: str, options: dict[str, Any], params: list[Ask], share: float, slots: int, snapshots: int, every: int,
    fault: int, captured: bool,
) -> None:  # fmt: skip
    """The same over recurrent states: few slots, snapshots that give way, a step that breaks off in any layer, and
    steps that are captured, over kernels in plain torch. Slots that nothing names have no numbers.
    """
    states = {"state_slots": slots, "state_snapshots": snapshots, "state_every": every}
    with pytest.MonkeyPatch.context() as patch:
        poison_free_slots(patch)
        if captured:
            policy(patch, after=1, agree=1)
            patch.setitem(RECORDERS, "cpu", record)
            patch.setattr(StateStore, "steps", state_spans_in_torch)
        with Engine(
            _model(name), num_blocks=blocks_for(params, options, share), **options, **states
        ) as engine, broken_off(fault):  # fmt: skip
            outputs = run_all(engine, params)
    failed = [output for output in outputs if output.error is not None]
    assert len(failed) <= bool(fault)  # a request that was alone in the step ends with its error
    assert all("broke off behind a layer" in str(output.error) for output in failed)
    for output, wanted in zip(outputs, rights(name, params), strict=True):
        assert output in failed or answers(output) == wanted


def test_equal_prompts_are_computed_once() -> None:
    """C18, C21: in flight and afterwards; what was there already is said in the output."""
    model = _model("llama")
    with Engine(model, block_size=4, num_blocks=100, max_batch_tokens=64) as engine:
        first = engine.generate([PROMPTS[3]] * 4, max_new_tokens=8, do_sample=False)
        computed = engine.stats()["tokens"]
        again = engine.generate([PROMPTS[3]], max_new_tokens=8, do_sample=False)[0]
    assert [output.cached_tokens for output in first] == [0, 28, 28, 28]
    assert computed == 30 + 3 * 2 + 4 * 7
    assert again.cached_tokens == 28
    expected = alone(model, PROMPTS[3], max_new_tokens=8, do_sample=False)
    assert all(answers(output) == expected for output in [*first, again])


def by_depth_alone(parent: bytes, tokens: Any, extra: bytes = b"") -> bytes:
    """A name that says where a block stands and nothing of what it holds."""
    return bytes(31) + bytes([parent[-1] + 1])


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_names_that_collide_hand_out_nothing(preemption: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C25: with check_hits tokens are compared wherever a name leads to a block; without it the answers are
    wrong here.
    """
    for where in ("blocks.prefix", "blocks.prefix_lookup"):
        monkeypatch.setattr(f"hf_paged.{where}.chain", by_depth_alone)
    model = _model("llama")
    expected = [alone(model, prompt, max_new_tokens=14, do_sample=False) for prompt in PROMPTS]

    def params(check: bool) -> list[list[list[int]]]:
        with Engine(
            model, block_size=4, num_blocks=19, max_batch_sequences=4, check_hits=check, preemption=preemption
        ) as engine:
            handles = [engine.submit(prompt, max_new_tokens=14, do_sample=False) for prompt in PROMPTS * 2]
            while not all(handle.done for handle in handles):
                engine.step()
                engine.check()
            assert not check or engine.stats()["swapped_in" if preemption == "swap" else "preemptions"] > 0
            return [answers(handle.result()) for handle in handles]

    assert params(check=True) == expected * 2
    assert params(check=False) != expected * 2


def test_salts_and_an_engine_without_a_cache_share_nothing() -> None:
    """C24."""
    with Engine(_model("llama"), block_size=4, num_blocks=60) as engine:
        for salt, cached in (("a", 0), ("b", 0), ("a", 28), (None, 0)):
            assert engine.generate([PROMPTS[3]], max_new_tokens=2, salt=salt)[0].cached_tokens == cached
    with Engine(_model("llama"), block_size=4, num_blocks=60, prefix_caching=False) as engine:
        for _ in range(2):
            assert engine.generate([PROMPTS[3]], max_new_tokens=2)[0].cached_tokens == 0


def test_blocks_of_other_precision_are_not_found() -> None:
    """C24: autocast belongs to the thread that drives, and may change from call to call."""
    model = _model("llama")
    with torch.no_grad():
        last = model(torch.tensor([PROMPTS[3]])).logits[0, -1].log_softmax(-1)
    with Engine(model, block_size=4, num_blocks=60) as engine:
        for rounds in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
                output = engine.generate([PROMPTS[3]], max_new_tokens=1, do_sample=False, logprobs=True)[0]
            [sequence] = output.sequences
            error = abs(sequence.logprobs.processed[0] - last[sequence.token_ids[0]].item())
            assert (error > 1e-4) == rounds, error


def test_samples_share_their_prompt() -> None:
    """C6, C14: one prompt, one computation, however many samples."""
    with Engine(_model("llama"), block_size=4, num_blocks=60, prefix_caching=False) as engine:
        handle = engine.submit(PROMPTS[3], max_new_tokens=6, do_sample=True, num_return_sequences=4, seed=1)
        engine.step()
        assert engine.stats()["tokens"] == 30
        assert engine.stats()["blocks"]["full"]["held"] == 8
        handle.result()


def test_the_engine_beside_generate(ids: torch.Tensor) -> None:
    """One model, both ways by turns, stock's cache and the paged one: nobody disturbs the other."""
    model = build(BY_NAME["llama"])
    expected = [alone(model, prompt, max_new_tokens=10, do_sample=False) for prompt in PROMPTS]
    stock = model.generate(ids, max_new_tokens=6, do_sample=False)
    with Engine(model, block_size=4, num_blocks=60, max_batch_tokens=16) as engine:
        handles = [engine.submit(prompt, max_new_tokens=10, do_sample=False) for prompt in PROMPTS]
        while not all(handle.done for handle in handles):
            engine.step()
            assert torch.equal(
                model.generate(ids, max_new_tokens=6, do_sample=False, cache_implementation="paged"), stock
            )
        assert [answers(handle.result()) for handle in handles] == expected
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in model.__dict__
