"""Decoding steps of the engine without a GPU: a tape stands in for CUDA graphs. Same tokens, and the graph
really made them.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from captures import counts, forms, kept, logits_of, policy, pool_of, reasons, sizes
from cases import pairwise
from engine_answers import PROMPTS, alone, answers
from engine_parts import eager_of
from engine_steps import watch_plans
from families import BY_NAME, build
from fused_models import Kernels
from tape import record
from torch import nn

import hf_paged
from hf_paged.engine import Engine
from hf_paged.engine.loop import StepLoop
from hf_paged.kv import Ops, StaticBatch
from hf_paged.model.capture.products import fused_product
from hf_paged.model.patches import ReplacedForward
from hf_paged.model.rehearsal import RECORDERS, Rehearsal
from hf_paged.scheduling import StepPlan

GREEDY = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False}


@pytest.fixture(autouse=True)
def _tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", record)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "gpt-neox", "phi3", "mistral-window"])
def test_same_tokens_from_replays(name: str) -> None:
    model = build(BY_NAME[name])
    with Engine(model, block_size=4) as engine:
        outputs = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
        beams = engine.submit(PROMPTS[3], num_beams=3, max_new_tokens=9, min_new_tokens=9)
        outputs = [handle.result() for handle in outputs]
        best = beams.result()
        engine.check()
        assert counts(engine)["replayed"] > 4, reasons(engine)
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert answers(output) == alone(model, prompt, **GREEDY)
    assert answers(best) == alone(model, PROMPTS[3], num_beams=3, max_new_tokens=9, min_new_tokens=9)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt-oss", "gpt2"])
def test_same_tokens_from_fused_projections(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C24: q, k and v, gate and up are one product in replays, and without the option no weight moves."""
    model = build(BY_NAME[name])
    places = [parameter.data_ptr() for parameter in model.parameters()]
    fused: list[int] = []

    def noted(x: torch.Tensor, layers: Sequence[nn.Linear]) -> Sequence[torch.Tensor] | None:
        found = fused_product(x, layers)
        fused.append(0 if found is None else len(layers))
        return found

    monkeypatch.setattr("hf_paged.model.capture.fusion.fused_product", noted)
    monkeypatch.setattr(Ops, "kernels", Kernels())
    widths = {"gpt2": set(), "gpt-oss": {3}}.get(name, {2, 3})
    for option in (False, True):
        fused.clear()
        with Engine(model, block_size=4, fuse_projections=option) as engine:
            outputs = engine.generate(PROMPTS[:2], **GREEDY)
            assert counts(engine)["replayed"] > 4, reasons(engine)
        assert [answers(output) for output in outputs] == [
            alone(model, prompt, **GREEDY) for prompt in PROMPTS[:2]
        ]
        assert set(fused) == (widths if option else {0 for _ in widths})
        moved = [parameter.data_ptr() for parameter in model.parameters()] != places
        assert moved == (option and bool(widths))


@pytest.mark.parametrize(("do_sample", "functions", "files"), [(False, 25, 12), (True, 35, 15)])
def test_a_step_is_followed_in_few_hops(
    do_sample: bool, functions: int, files: int, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls from the plan of a replayed step to its tokens, in most steps: in others a table gets a
    block. Whether the model is still the same is a question of its own.
    """
    steps: list[dict[tuple[str, str], None]] = []
    aside: list[Any] = []

    def follow(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "return" and aside and aside[-1] is frame:
            aside.pop()
        if event != "call" or aside or "hf_paged" not in code.co_filename or "<" in code.co_qualname:
            return
        if code.co_qualname == "CapturedRunner._check":
            aside.append(frame)
        steps[-1][code.co_filename, code.co_qualname] = None

    def followed(loop: StepLoop) -> Any:
        steps.append({})
        sys.setprofile(follow)
        try:
            return step(loop)
        finally:
            sys.setprofile(None)

    step = StepLoop.step
    with Engine(llama, block_size=16) as engine:
        options = {"max_new_tokens": 60, "eos_token_id": 299, "do_sample": do_sample, "seed": 1}
        handles = [engine.submit(prompt, **options) for prompt in PROMPTS[:3]]
        for _ in range(40):
            engine.step()
        before = counts(engine)["replayed"]
        monkeypatch.setattr(StepLoop, "step", followed)
        for _ in range(11):
            engine.step()
        monkeypatch.setattr(StepLoop, "step", step)
        assert counts(engine)["replayed"] == before + 11
        for handle in handles:
            handle.cancel()
    hops = sorted(steps, key=len)[len(steps) // 2]
    names = [name for _, name in hops]
    assert names[0] == "StepLoop.step"
    assert "Scheduler.confirm" in names
    assert len(hops) <= functions, names
    assert len({file for file, _ in hops}) <= files, names


def test_requests_come_and_go_over_one_graph(llama: Any) -> None:
    """Rows of a graph are whoever runs: what an earlier one left in a place is never seen."""
    with Engine(llama, block_size=4, max_batch_sequences=2) as engine:
        outputs = engine.generate([torch.tensor(prompt) for prompt in PROMPTS], **GREEDY)
        assert counts(engine)["captured"] <= 2
        assert counts(engine)["replayed"] > 20
    assert [answers(output) for output in outputs] == [alone(llama, prompt, **GREEDY) for prompt in PROMPTS]


@pytest.mark.parametrize(("worth", "spare", "rows"), [(1000, 2, {3}), (1000, 1, {1, 3}), (4, 2, {1, 2, 3})])
def test_a_larger_graph_stands_in(
    worth: int, spare: int, rows: set[int], llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one of three has ended the graph of three goes on with two, and with one, until it has computed
    enough rows for nobody.
    """
    policy(monkeypatch, padded=worth, spare=spare)
    lengths = [6, 18, 30]
    with Engine(llama, block_size=4, max_batch_sequences=3, max_batch_tokens=64) as engine:
        for _ in range(2):
            params = [{"max_new_tokens": new, "min_new_tokens": new, "do_sample": False} for new in lengths]
            handles = [engine.submit(prompt, **one) for prompt, one in zip(PROMPTS[1:4], params, strict=True)]
            outputs = [handle.result() for handle in handles]
            assert [answers(output) for output in outputs] == [
                alone(llama, prompt, **one) for prompt, one in zip(PROMPTS[1:4], params, strict=True)
            ]
        assert sizes(engine, "single") == rows


def test_one_step_of_a_model_is_rehearsed(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that a step must not do are looked for once; after the model has changed again."""
    rehearsed: list[int] = []

    class Counted(Rehearsal):
        def __enter__(self) -> Any:
            rehearsed.append(1)
            return super().__enter__()

    monkeypatch.setattr("hf_paged.model.capture.pool.Rehearsal", Counted)
    policy(monkeypatch, padded=0)
    with Engine(llama, block_size=4, max_batch_tokens=12, max_batch_sequences=5) as engine:
        for turn in (1, 2):
            engine.generate(PROMPTS * 3, **GREEDY)
            assert kept(engine) > len(forms(engine)) > 1
            assert len(rehearsed) == turn
            llama.config.hidden_act = "other"  # a setting that nobody reads any more


@pytest.mark.parametrize("fails", [False, True], ids=["at once", "behind a run"])
def test_further_sizes_cost_one_forward(llama: Any, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The first size of some code is rehearsed and compared twice. Others are recorded at once and compared
    once; what cannot be recorded so is run outside first.
    """
    tries: list[Any] = []

    def recorder(step: Any, pools: Any, devices: Any) -> Any:
        tries.append(step)
        if fails and len(tries) % 2 == 0:
            raise RuntimeError("a kernel is loaded while a stream is captured")
        return record(step, pools, devices)

    monkeypatch.setitem(RECORDERS, "cpu", recorder)
    policy(monkeypatch, padded=0)
    params = [dict(GREEDY, max_new_tokens=new, min_new_tokens=new) for new in (6, 18, 30)]
    with Engine(llama, block_size=4, max_batch_sequences=3, max_batch_tokens=64) as engine:
        handles = [engine.submit(prompt, **one) for prompt, one in zip(PROMPTS, params, strict=False)]
        outputs = [handle.result() for handle in handles]
        assert sizes(engine, "single") == {1, 2, 3}
        steps = list(pool_of(engine))
        assert all(step.trusted for step in steps)
        assert sorted(step.agreed for step in steps if step.size.form == "single") == [1, 1, 2]
        assert len(tries) == (2 * len(steps) - 1 if fails else len(steps))
        assert not reasons(engine)
    assert [answers(each) for each in outputs] == [
        alone(llama, prompt, **one) for prompt, one in zip(PROMPTS, params, strict=False)
    ]


def test_what_a_broken_capture_has_made_is_not_used(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that no other size has launched cannot be loaded in a capture. What was made for the step before
    (a plan with counters, say) was recorded and never computed, so the step is made anew.
    """
    begun: list[list[int]] = []
    begin = StaticBatch.begin

    def noting(batch: StaticBatch, *arguments: Any) -> Any:
        assert "left" not in batch.workspace
        begun[-1].append(id(batch))
        return begin(batch, *arguments)

    def recorder(step: Any, pools: Any, devices: Any) -> Any:
        begun.append([])
        with pytest.MonkeyPatch.context() as capture:
            capture.setattr(StaticBatch, "begin", noting)
            taped = record(step, pools, devices)
        if len(begun) == 2:
            for batch in step.args[1].batches.values():
                batch.workspace["left"] = True
            raise RuntimeError("operation not permitted when stream is capturing")
        return taped

    monkeypatch.setitem(RECORDERS, "cpu", recorder)
    policy(monkeypatch, padded=0)
    params = [dict(GREEDY, max_new_tokens=new, min_new_tokens=new) for new in (6, 18)]
    with Engine(llama, block_size=4, max_batch_sequences=2) as engine:
        handles = [engine.submit(prompt, **one) for prompt, one in zip(PROMPTS, params, strict=False)]
        outputs = [handle.result() for handle in handles]
        assert sizes(engine, "single") == {1, 2}
    assert len(begun) == 3
    for prompt, one, output in zip(PROMPTS, params, outputs, strict=False):
        assert answers(output) == alone(llama, prompt, **one)


class _Value:
    """Holds something where no check of the model looks for it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Scale(torch.nn.Module):
    """A user's module that scales what three rows and more compute, by a number that Python holds."""

    def __init__(self, inner: torch.nn.Module, held: Any) -> None:
        super().__init__()
        self.inner = inner
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        return out * self.held.value.value if x.shape[0] * x.shape[1] >= 3 else out


@pytest.mark.parametrize("small_first", [True, False])
def test_sizes_of_unknown_code_are_each_watched(small_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's module may compute otherwise with more rows, so a size that was right proves no other."""
    policy(monkeypatch, padded=0)
    model = build(BY_NAME["llama"])
    held = _Value(_Value(1.0))
    for layer in model.model.layers:
        layer.mlp = _Scale(layer.mlp, held)

    def serve(graphs: bool) -> list[Any]:
        held.value.value = 1.0
        with Engine(model, block_size=4, max_batch_sequences=4, graphs=graphs) as engine:
            if small_first:
                engine.generate([PROMPTS[0]], progress=False, **GREEDY)
            handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[1:5]]
            while not all(handle.done for handle in handles):
                engine.step()
                held.value.value *= 0.8
            return [answers(handle.result()) for handle in handles]

    assert serve(graphs=True) == serve(graphs=False)


def test_a_model_that_changes_between_two_steps(llama: Any) -> None:
    with Engine(llama, block_size=4) as engine:
        engine.generate([PROMPTS[0]], **GREEDY)
        before = counts(engine)["replayed"]
        assert before
        for layer in llama.model.layers:
            layer.self_attn.scaling = 3.0
        (output,) = engine.generate([PROMPTS[0]], **GREEDY)
    assert answers(output) == alone(llama, PROMPTS[0], **GREEDY)


def test_hooks_are_called(llama: Any) -> None:
    called = []
    llama.model.layers[0].mlp.register_forward_hook(lambda *_: called.append(1))
    with Engine(llama, block_size=4) as engine:
        (output,) = engine.generate([PROMPTS[0]], **GREEDY)
        assert "hooks" in reasons(engine)
    assert len(called) >= GREEDY["max_new_tokens"]
    assert answers(output) == alone(llama, PROMPTS[0], **GREEDY)


def test_a_replay_that_differs_is_never_trusted(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(step: Any, pools: Any, devices: Any) -> Any:
        replay, answer = record(step, pools, devices)
        return lambda: (replay(), logits_of(engine)[0].mul_(2)), answer

    monkeypatch.setitem(RECORDERS, "cpu", wrong)
    with Engine(llama, block_size=4) as engine:
        (output,) = engine.generate([PROMPTS[0]], **GREEDY)
        assert not counts(engine)["replayed"]
        assert "differs" in reasons(engine)
    assert answers(output) == alone(llama, PROMPTS[0], **GREEDY)


@pytest.mark.parametrize(
    ("form", "size", "name"), pairwise(["rows", "spans"], [1, 4, 16], ["llama", "gemma3"])
)
def test_chunks_of_prompts_in_a_graph(
    form: str, name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C23, C32: beside rows that decode and without them, through windows, behind prefixes that are there
    already.
    """
    if form == "spans":
        policy(monkeypatch, pairs=0)
    model = build(BY_NAME[name])
    params = [PROMPTS[3], PROMPTS[1], PROMPTS[5], PROMPTS[3][:20] + PROMPTS[0], PROMPTS[2], PROMPTS[3]] * 2
    with Engine(model, block_size=size, max_batch_tokens=12, max_batch_sequences=4) as engine:
        plans: list[tuple[int, list[int]]] = []

        def watched(plan: StepPlan) -> None:
            """How many replays there were before this plan, and what its rows bring."""
            plans.append((counts(engine)["replayed"], [row.count for row in plan.rows]))

        watch_plans(engine, watched)
        outputs = engine.generate(params, **GREEDY)
        engine.check()
        assert form in forms(engine)
    assert [answers(output) for output in outputs] == [alone(model, prompt, **GREEDY) for prompt in params]
    replayed = [
        brought
        for (before, brought), (after, _) in itertools.pairwise(plans)
        if after > before and max(brought) > 1
    ]
    assert any(1 in brought for brought in replayed)


def test_one_thread_captures_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All captures of a device are on one stream, whatever engine they are of."""
    here, most = [], []

    def watched(*given: Any) -> Any:
        here.append(threading.get_ident())
        most.append(len(here))
        time.sleep(0.02)
        try:
            return record(*given)
        finally:
            here.remove(threading.get_ident())

    monkeypatch.setitem(RECORDERS, "cpu", watched)
    policy(monkeypatch, padded=0, after=1)
    models = [build(BY_NAME["llama"]) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        serve = lambda model: Engine(model, block_size=4).generate(PROMPTS, **GREEDY)  # noqa: E731
        found = list(threads.map(serve, models))
    assert len(most) >= 4
    assert max(most) == 1
    for model, outputs in zip(models, found, strict=True):
        assert [answers(each) for each in outputs] == [alone(model, each, **GREEDY) for each in PROMPTS]


def test_the_head_computes_the_rows_that_are_wanted(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a captured step with chunks of prompts those of its sequences, not every token's."""
    policy(monkeypatch, pairs=0)
    linear, rows = torch.nn.Linear.forward, []

    def noted(module: Any, x: torch.Tensor) -> torch.Tensor:
        rows.extend([len(x)] if module is llama.lm_head and len(x) > 1 else [])
        return linear(module, x)

    with Engine(llama, block_size=4, max_batch_tokens=12, max_batch_sequences=2) as engine:
        monkeypatch.setattr(torch.nn.Linear, "forward", noted)
        outputs = engine.generate([PROMPTS[3], PROMPTS[1], PROMPTS[3]], **GREEDY)
        assert 12 in sizes(engine, "spans")
    assert rows
    assert max(rows) == 2
    monkeypatch.undo()
    assert [answers(each) for each in outputs] == [alone(llama, PROMPTS[i], **GREEDY) for i in (3, 1, 3)]


def test_an_interrupt_leaves_a_head_of_all_rows(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C where the model gets its head back: what the user computes with it then is of all rows."""
    policy(monkeypatch, pairs=0)
    restore = ReplacedForward.restore

    def interrupted(replaced: ReplacedForward) -> None:
        if replaced.module is llama.lm_head:
            monkeypatch.setattr(ReplacedForward, "restore", restore)
            raise KeyboardInterrupt
        restore(replaced)

    ids = torch.arange(5, 29).view(12, 2)
    expected = llama(ids).logits
    with Engine(llama, block_size=4, max_batch_tokens=12, max_batch_sequences=2) as engine:
        monkeypatch.setattr(ReplacedForward, "restore", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPTS[3], PROMPTS[1]], **GREEDY)
        assert torch.equal(llama(ids).logits, expected)
        outputs = engine.generate([PROMPTS[3], PROMPTS[1]], **GREEDY)
    assert [answers(each) for each in outputs] == [alone(llama, PROMPTS[i], **GREEDY) for i in (3, 1)]


def test_long_prompts_are_no_rows(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of their tokens would read all before it by itself."""
    policy(monkeypatch, pairs=50, pairs_in_torch=50)
    with Engine(llama, block_size=4, max_batch_tokens=12, prefix_caching=False) as engine:
        engine.generate([PROMPTS[3]], max_new_tokens=1)
        assert not counts(engine)
        for _ in range(4):
            engine.generate([PROMPTS[0]] * 4, max_new_tokens=1)
        assert counts(engine) == {"captured": 1, "replayed": 1}


def test_all_graphs_answer_in_one_place(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for the logits of one step, however many graphs there are."""
    policy(monkeypatch, padded=0)
    with Engine(llama, block_size=4, max_batch_tokens=12, max_batch_sequences=5) as engine:
        engine.generate(PROMPTS * 3, **GREEDY)
        places = logits_of(engine)
        assert len(places) > 3
        assert len({place.data_ptr() for place in places}) == 1
        assert max(map(len, places)) == 5


@pytest.mark.parametrize(
    "error", [RuntimeError("device"), torch.OutOfMemoryError("full"), IndexError("list")]
)
def test_a_capture_that_fails_costs_no_answer(
    error: Exception, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setitem(RECORDERS, "cpu", fails)
    with Engine(llama, block_size=4) as engine:
        (output,) = engine.generate([PROMPTS[0]], **GREEDY)
        assert bool(reasons(engine)) != isinstance(error, torch.OutOfMemoryError)
    assert answers(output) == alone(llama, PROMPTS[0], **GREEDY)


def test_a_step_of_one_token_after_the_pools_were_given_back(llama: Any) -> None:
    with Engine(llama, block_size=4) as engine:
        engine.generate([PROMPTS[0]], **GREEDY)
        assert hf_paged.release(llama)
        (output,) = engine.generate([PROMPTS[4]], **GREEDY)
        assert len(PROMPTS[4]) == 1
    assert answers(output) == alone(llama, PROMPTS[4], **GREEDY)


def test_graphs_can_be_turned_off(llama: Any) -> None:
    with Engine(llama, block_size=4, graphs=False) as engine:
        engine.generate([PROMPTS[0]], **GREEDY)
        assert engine.stats()["graphs"] == {}


def test_what_was_not_captured_is_counted_as_none(llama: Any) -> None:
    """Every count of docs/engine_reference.md is there from the first step on."""
    with Engine(llama, num_blocks=40) as engine:
        graphs = engine.stats()["graphs"]
    assert [graphs[name] for name in ("captured", "compiled", "replayed", "refused")] == [0] * 4


def test_captured_steps_are_bounded_and_counted(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used goes first; stats() has how many there are, their bytes and what they took."""
    policy(monkeypatch, padded=0, most=2)
    with Engine(llama, block_size=4, max_batch_tokens=12, max_batch_sequences=5) as engine:
        outputs = engine.generate(PROMPTS * 2, **GREEDY)
        graphs = engine.stats()["graphs"]
        assert graphs["captured"] > graphs["kept"] == kept(engine) == 2
        assert graphs["bytes"] >= sum(step.bytes for step in pool_of(engine)) > 0
        assert graphs["seconds"] > 0
    assert [answers(output) for output in outputs] == [
        alone(llama, prompt, **GREEDY) for prompt in PROMPTS * 2
    ]


def test_a_bound_in_bytes(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy(monkeypatch, padded=0)
    monkeypatch.setattr("hf_paged.engine.worker.captured.MOST_BYTES", 1)
    with Engine(llama, block_size=4, max_batch_tokens=12, max_batch_sequences=5) as engine:
        engine.generate(PROMPTS, **GREEDY)
        assert counts(engine)["captured"] > kept(engine) == 1


def test_pools_leave_room_for_captured_steps(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device whose memory is short, what captured steps may take is given to no pool."""
    for module in ("pools", "captured"):
        monkeypatch.setattr(f"hf_paged.engine.worker.{module}.free_bytes", lambda device: 2**22)
    with Engine(llama, block_size=4, memory_fraction=0.5) as engine:
        with_steps = engine.stats()["memory"]["most_bytes"]
        room = engine.runner.capture_bytes
    with Engine(llama, block_size=4, memory_fraction=0.5, graphs=False) as engine:
        without = engine.stats()["memory"]["most_bytes"]
    assert 0 < room < 2**22
    assert abs(without - with_steps - room // 2) < 2**13


def test_a_smaller_step_is_compared_with_the_one_that_stood_in(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture behind a larger captured step costs no forward of its own."""
    policy(monkeypatch, padded=4)
    with Engine(llama, block_size=4, max_batch_sequences=3, max_batch_tokens=64) as engine:
        engine.generate(PROMPTS[:3], **GREEDY)
        assert sizes(engine, "single") == {3}
        flat, eager = eager_of(engine).flat, []
        monkeypatch.setattr(eager_of(engine), "flat", lambda *given: eager.append(1) or flat(*given))
        (output,) = engine.generate(PROMPTS[4:5], **GREEDY)  # a prompt of one token
        assert sizes(engine, "single") == {1, 3}
        assert engine.stats()["graphs"]["sizes"]["single"] == [1, 3]
        assert not eager
    assert answers(output) == alone(llama, PROMPTS[4], **GREEDY)


def test_pools_of_generate_that_move_drop_no_step_of_the_engine(llama: Any) -> None:
    with Engine(llama, block_size=4) as engine:
        engine.generate([PROMPTS[0]], **GREEDY)
        before = kept(engine)
        assert before
        llama.generate(torch.tensor([PROMPTS[1]]), **GREEDY, cache_implementation="paged")
        hf_paged.release(llama)
        engine.generate([PROMPTS[0]], **GREEDY)
        llama.generate(torch.tensor([PROMPTS[1]] * 9), **GREEDY, cache_implementation="paged")
        assert kept(engine) == before


def test_steps_make_the_greedy_choice_themselves(llama: Any) -> None:
    """Beside their logits, of all rows, in the same memory for all steps."""
    with Engine(llama, block_size=4, max_batch_sequences=4) as engine:
        engine.generate(PROMPTS[:4], **GREEDY)
        steps = list(pool_of(engine))
        assert steps
        for step in steps:
            assert step.best.tolist() == [step.logits.argmax(-1).tolist()] * 2
            assert step.logits.data_ptr() == steps[0].logits.data_ptr()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_of_a_captured_step_that_has_no_token(ahead: bool) -> None:
    """One of the crew comes to a token whose embedding is NaN while its steps are replayed: it ends there,
    its neighbours go on.
    """
    model, options = build(BY_NAME["llama"]), {"do_sample": False, "max_new_tokens": 16}
    right: list[Any] = [alone(model, prompt, **options) for prompt in PROMPTS[:3]]
    seen = {token for row in right[1:] for token in row[0]} | {
        token for prompt in PROMPTS[:3] for token in prompt
    }
    place = next(i for i, token in enumerate(right[0][0]) if i > 6 and token not in seen)
    with Engine(model, block_size=4, run_ahead=ahead) as engine:
        with torch.no_grad():
            model.get_input_embeddings().weight[right[0][0][place]] = torch.nan
        outputs = engine.generate(PROMPTS[:3], **options)
        assert engine.stats()["graphs"]["replayed"] > 6
        engine.check()
    assert outputs[0].finish_reason == "error"
    assert "NaN" in str(outputs[0].error)
    first = right[0][0].index(right[0][0][place])
    assert outputs[0].sequences[0].token_ids == right[0][0][: first + 1]
    assert [answers(output) for output in outputs[1:]] == right[1:]
