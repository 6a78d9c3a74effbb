"""Kernels compiled while a model is tried out: exactly those that are launched later, by threads that end,
and nobody's trouble.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from captures import counts, forms, policy, pool_of, reasons, sizes
from compiling import MODELS, Compiler, Specialisation, make, noting_compiler  # noqa: F401  # a fixture
from engine_answers import alone, answers
from engine_parts import compiling_of, eager_of
from kernel_cases import GPU
from processes import LIMIT

from hf_paged.engine import Engine, Unservable, loop
from hf_paged.engine.worker import trial
from hf_paged.engine.worker import warmup as warming
from hf_paged.engine.worker.runner import Runner
from hf_paged.engine.worker.trial import Trial
from hf_paged.engine.worker.warmup import jobs
from hf_paged.kv.warmup import Warming
from hf_paged.model.capture.pool import CapturePool
from hf_paged.model.capture.step import Size

pytestmark = pytest.mark.skipif(GPU, reason="the interpreted copy is the CPU's")


def first_steps(engine: Engine, compiler: Compiler, prompt: int) -> set[Specialisation]:
    """The kernels launched by a trial, by the first prompt, by the step behind it, and by the first one that
    is captured.
    """
    assert "flat" not in engine.stats()["off"]
    engine.submit([5 + i % 90 for i in range(prompt)], max_new_tokens=6, min_new_tokens=6, do_sample=False)
    while not engine.stats()["graphs"].get("captured"):
        assert engine.stats()["running"] + engine.stats()["waiting"]
        engine.step()
    return set(compiler.params)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_launched_first_is_compiled_before(
    name: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every specialisation, and none that is not launched, but for the look at weights, which a CPU takes
    without kernels.
    """
    if name == "half":
        monkeypatch.setitem(trial.LONGER, "cpu", trial.LONGER["cuda"])
    engine = Engine(MODELS[name](), block_size=4, num_blocks=200)
    launched = first_steps(engine, compiler, 140 if name == "half" else 21)
    engine.generate([[7, 6, 5]], max_new_tokens=1)  # a short one, with another beginning
    launched |= compiler.params
    compiler.params.clear()
    for job in jobs(eager_of(engine), captures=True):
        job()
    foreseen = {(kernel, key) for kernel, key in compiler.params if kernel != "_digest"}
    assert {"_prefill", "_write", "_plan", "_decode"} <= {kernel for kernel, _ in launched}
    assert foreseen == launched
    assert len(compiler.params) == len(foreseen) + 1


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "warming" in thread.name}


def join(engine: Engine) -> None:
    """Until everything is compiled: no thread is left."""
    compiling_of(engine).join()
    assert not names()


def test_threads_compile_and_end(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model is tried out kernels are compiled in other threads, before the first launch, and no
    thread is left.
    """
    monkeypatch.setattr(warming, "COMPILED_FOR", {"cpu"})
    before: list[set[Specialisation]] = []
    why_not_flat = Trial._why_not_flat

    def watched(tried: Any, *arguments: Any) -> Any:
        tried.runner.warming.wait()
        before.append(set(compiler.params))
        return why_not_flat(tried, *arguments)

    monkeypatch.setattr(Trial, "_why_not_flat", watched)
    engine = Engine(make("Llama"), block_size=4, num_blocks=200)
    assert compiler.here == {"_prefill", "_write"}
    join(engine)
    compiler.params.clear()
    assert first_steps(engine, compiler, 21) <= before[0]


def test_an_engine_that_is_dropped_leaves_nothing(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its model nor threads that compile for it."""
    monkeypatch.setattr(warming, "COMPILED_FOR", {"cpu"})
    begun: list[int] = []

    def job() -> None:
        begun.append(1)
        time.sleep(0.05)

    monkeypatch.setattr(warming, "later_jobs", lambda eager: [(label, [job]) for label in range(1000)])
    engine = Engine(make("Llama"), block_size=4, num_blocks=200)
    thread, model = compiling_of(engine), weakref.ref(engine.model)
    assert thread is not None
    del engine
    gc.collect()
    assert model() is None
    thread.join()
    assert len(begun) < 500


def test_larger_steps_find_their_kernels(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the threads have ended, captured steps of any size launch nothing that is not compiled."""
    monkeypatch.setattr(warming, "COMPILED_FOR", {"cpu"})
    policy(monkeypatch, padded=0)
    model = make("Llama", num_hidden_layers=1)
    engine = Engine(model, block_size=4, num_blocks=200, max_batch_tokens=12, max_batch_sequences=4)
    join(engine)
    known, captured = set(compiler.params), []
    capture = CapturePool._capture

    def watched(pool: Any, key: Any, source: Any) -> Any:
        compiler.params.clear()
        step = capture(pool, key, source)
        captured.append((source.size, compiler.params - known))
        return step

    monkeypatch.setattr(CapturePool, "_capture", watched)
    prompts = [[5 + i % 90 for i in range(length)] for length in (12, 24, 3, 9)]
    options = [{"max_new_tokens": new, "min_new_tokens": new, "do_sample": False} for new in (14, 11, 8, 5)]
    handles = [engine.submit(prompt, **each) for prompt, each in zip(prompts, options, strict=True)]
    for handle in handles:
        handle.result()
    for first in (
        53,
        63,
    ):  # lengths of a step of three tokens begin where no 16 bytes begin; the second is captured
        engine.generate([[first, first + 1, first + 2]], max_new_tokens=1)
    assert {size.form for size, _ in captured} == {"single", "spans"}
    assert 3 in {size.rows for size, _ in captured if size.form == "spans"}
    assert len({size.rows for size, _ in captured if size.form == "single"}) > 2
    assert [(size, new) for size, new in captured if new] == []


@pytest.mark.parametrize("broken", ["find_driver", "decode"])
def test_trouble_in_there_harms_no_request(
    broken: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that cannot be compiled ahead are met where they are launched, and all others are compiled."""
    monkeypatch.setattr(warming, "COMPILED_FOR", {"cpu"})
    kernels = sys.modules["hf_paged_kernels"]
    whole, calls = getattr(kernels, broken), []

    def breaks(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return whole(*arguments, **options)
        calls.append(threading.current_thread().name)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels, broken, breaks)
    engine = Engine(make("Llama"), block_size=4, num_blocks=200)
    assert calls
    join(engine)
    assert {"_prefill", "_write", "_advance", "_swiglu", "_rotary"} <= {
        kernel for kernel, _ in compiler.params
    }
    assert (
        len(
            engine.generate([[5, 6, 7, 8]], max_new_tokens=2, min_new_tokens=2, do_sample=False)[0]
            .sequences[0]
            .token_ids
        )
        == 2
    )


def test_threads_end_where_the_model_is_refused(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they compile: a trial that ends before they begin has nothing to end."""
    monkeypatch.setattr(warming, "COMPILED_FOR", {"cpu"})

    def apart(*given: Any) -> float:
        end = time.monotonic() + LIMIT
        while not compiler.params and time.monotonic() < end:
            time.sleep(0.01)
        return 1.0

    monkeypatch.setattr(Trial, "_apart", apart)
    with pytest.raises(Unservable):
        Engine(make("Llama"), block_size=4, num_blocks=200)
    assert not names()
    assert compiler.params


@pytest.mark.parametrize("options", [{"kernels": "torch"}, {}], ids=["torch", "auto"])
def test_a_cpu_compiles_nothing(
    options: dict[str, Any], compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does an engine whose pages plain torch reads, wherever it is."""
    if options:
        monkeypatch.setattr(warming, "COMPILED_FOR", {"cpu"})
    monkeypatch.setattr(Warming, "__init__", lambda *given: pytest.fail("threads for nothing"))
    Engine(make("Llama"), block_size=4, num_blocks=200, **options)
    assert {kernel for kernel, _ in compiler.params} == compiler.here


def test_without_data_nothing_is_computed(compiler: Compiler) -> None:
    """A kernel on tensors without data is compiled as for those with data, and touches none."""
    kernels = sys.modules["hf_paged_kernels"]
    x, weight = torch.randn(3, 1, 64), torch.ones(64)
    made = kernels.rms_norm(x.to("meta"), weight.to("meta"), 1e-6)
    assert made.is_meta
    assert made.shape == x.shape
    params = set(compiler.params)
    kernels.rms_norm(x, weight, 1e-6)
    assert compiler.params == params
    assert len(params) == 1


def test_cudnn_is_left_out_of_a_trial_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only where somebody else is left who takes everything."""
    backends = torch.backends.cuda
    known = backends.cudnn_sdp_enabled(), backends.math_sdp_enabled()
    seen = []
    try:
        for math in (True, False):
            backends.enable_cudnn_sdp(True)
            backends.enable_math_sdp(math)
            with warming.without_plans(torch.device("cuda")):
                seen.append(backends.cudnn_sdp_enabled())
            assert backends.cudnn_sdp_enabled()
    finally:
        backends.enable_cudnn_sdp(known[0])
        backends.enable_math_sdp(known[1])
    assert seen == [False, True]


class Packed(torch.nn.Linear):
    """A layer whose weight is not what is multiplied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("full", [False, True])
def test_each_product_is_met_before_steps_are(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each shape of plain weights, with as many rows as steps may have; as many as there is memory
    for.
    """
    monkeypatch.setattr(warming, "COMPILED_FOR", {"cpu"})
    met = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> None:
        if full:
            raise torch.OutOfMemoryError("full")
        met.append((*x.shape, len(weight)))

    monkeypatch.setattr(warming.functional, "linear", linear)
    layers = [torch.nn.Linear(4, 6), torch.nn.Linear(4, 6), torch.nn.Linear(6, 2), Packed(8, 8)]
    layers.append(torch.nn.Linear(9, 9).to(torch.float64))
    warming.load_products(torch.nn.Sequential(*layers), [3, 5, 3])
    assert sorted(met) == ([] if full else [(3, 1, 4, 6), (3, 1, 6, 2), (5, 1, 4, 6), (5, 1, 6, 2)])


def watch_sizes(monkeypatch: pytest.MonkeyPatch) -> set[Size]:
    """The sizes that steps have from now on."""
    found: set[Size] = set()
    find = CapturePool.find

    def watched(pool: CapturePool, state: Any, size: Size, holders: Any) -> Any:
        found.add(size)
        return find(pool, state, size, holders)

    monkeypatch.setattr(CapturePool, "find", watched)
    return found


@pytest.mark.parametrize("slack", [-1.0, 1e9])
def test_likely_sizes_are_captured_while_the_host_would_wait(
    slack: float, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a step has them, and beside sequences whose pages they leave alone; not where nothing is waited
    for.
    """
    monkeypatch.setattr(loop, "SLACK", slack)
    model = make("Llama", num_hidden_layers=1)
    prompts = [[5 + (3 * i + row) % 90 for i in range(13 + row)] for row in range(4)]
    new = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    options = {"block_size": 4, "num_blocks": 200, "max_batch_tokens": 12, "max_batch_sequences": 4}
    with Engine(model, **options, run_ahead=True) as engine:
        had = watch_sizes(monkeypatch)
        outputs = engine.generate(prompts, **new)
        engine.check()
        captured = {step.size for step in pool_of(engine)}
        assert reasons(engine) == ""
    assert [answers(output) for output in outputs] == [alone(model, prompt, **new) for prompt in prompts]
    if slack > 0:
        assert captured <= had
    else:
        assert {size.form for size in captured - had} == {"single", "spans"}


def test_no_step_goes_for_one_that_may_come(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where few are kept, what is captured ahead would put those out that steps have, and be put out by
    them.
    """
    monkeypatch.setattr(loop, "SLACK", -1.0)
    policy(monkeypatch, most=2)
    model = make("Llama", num_hidden_layers=1)
    prompts = [[5 + (3 * i + row) % 90 for i in range(7)] for row in range(3)]
    options = {"block_size": 4, "num_blocks": 200, "max_batch_tokens": 8, "max_batch_sequences": 4}
    with Engine(model, **options, run_ahead=True) as engine:
        engine.generate(prompts, max_new_tokens=9, min_new_tokens=9, do_sample=False)
        assert counts(engine)["replayed"] > 5
        assert counts(engine)["captured"] <= 3


WARM = {"block_size": 4, "num_blocks": 200, "max_batch_tokens": 8, "max_batch_sequences": 4}
"""An engine's options."""


def test_an_idle_engine_captures_what_requests_will_need(compiler: Compiler) -> None:
    """Also what no step has computed yet. Requests get the model's answers, most of them from these steps,
    once a few have agreed.
    """
    model = make("Llama", num_hidden_layers=1)
    new = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    prompts = [[5 + (3 * i + row) % 90 for i in range(9 + row)] for row in range(3)]
    with Engine(model, **WARM) as engine:
        assert engine.warm_up()
        warm = counts(engine)["captured"]
        assert sizes(engine, "single") >= {1, 4}
        assert max(sizes(engine, "spans")) == 8
        assert engine.warm_up()
        assert (counts(engine)["captured"], reasons(engine)) == (warm, "")
        outputs = engine.generate(prompts, **new)
        engine.check()
        assert counts(engine)["captured"] == warm
        assert counts(engine)["replayed"] > 5
    assert [answers(output) for output in outputs] == [alone(model, prompt, **new) for prompt in prompts]


def test_a_request_ends_the_warm_up(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed next; what is missing is captured when the engine is idle again."""
    model = make("Llama", num_hidden_layers=1)
    once = Runner.warm_up
    handles: list[Any] = []

    def interrupted(self: Runner) -> int:
        left = once(self)
        if not handles:
            handles.append(engine.submit([5, 6, 7], max_new_tokens=3, do_sample=False))
        return left

    monkeypatch.setattr(Runner, "warm_up", interrupted)
    with Engine(model, **WARM) as engine:
        assert not engine.warm_up()
        assert counts(engine)["captured"] == 1
        assert answers(handles[0].result()) == alone(model, [5, 6, 7], max_new_tokens=3, do_sample=False)
        assert engine.warm_up()
        assert counts(engine)["captured"] > 4


def test_what_still_compiles_is_not_waited_for(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "is_ready", lambda self, size: size.form == "single")
    with Engine(make("Llama", num_hidden_layers=1), **WARM) as engine:
        assert not engine.warm_up()
        assert forms(engine) == {"single"}


def test_nothing_of_the_users_runs_without_a_request(compiler: Compiler) -> None:
    """A model with code of the user's, a paused engine, one without captured steps and one that compiles them
    are left alone.
    """
    model = make("Llama", num_hidden_layers=1)
    with Engine(model, **WARM) as engine:
        engine.pause()
        assert not engine.warm_up()
        engine.resume()
        calls: list[Any] = []
        model.model.layers[0].register_forward_hook(lambda *given: calls.append(given))
        assert engine.warm_up()
        assert (counts(engine)["captured"], calls) == (0, [])
    with Engine(model, graphs=False, **WARM) as engine:
        assert engine.warm_up()
    with Engine(make("Llama", num_hidden_layers=1), compile=True, **WARM) as engine:
        assert engine.warm_up()
        assert counts(engine)["captured"] == 0
    with pytest.raises(RuntimeError, match="closed"):
        engine.warm_up()


def test_a_signal_handler_within_a_capture_drives_nothing(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compute into the captured step. It may submit and close, which is done behind the capture."""
    model = make("Llama", num_hidden_layers=1)
    capture = CapturePool.capture_or_compare
    handles: list[Any] = []
    closes = False

    def interrupted(self: CapturePool, *arguments: Any) -> None:
        if not handles:
            handles.append(engine.submit([5, 6, 7], max_new_tokens=3, do_sample=False))
            with pytest.raises(RuntimeError, match="a step is running already"):
                handles[0].result()
        if closes:
            engine.close()
        capture(self, *arguments)

    monkeypatch.setattr(CapturePool, "capture_or_compare", interrupted)
    with Engine(model, **WARM) as engine:
        assert not engine.warm_up()
        assert (counts(engine)["captured"], reasons(engine)) == (1, "")
        assert answers(handles[0].result()) == alone(model, [5, 6, 7], max_new_tokens=3, do_sample=False)
        closes = True
        assert not engine.warm_up()
        assert (counts(engine)["captured"], reasons(engine)) == (2, "")


def test_a_model_of_another_dtype_is_captured_once_its_layers_are_known(compiler: Compiler) -> None:
    """By the first step after the change."""
    model = make("Llama", num_hidden_layers=1)
    new = {"max_new_tokens": 3, "do_sample": False}
    with Engine(model, **WARM) as engine:
        model.half()
        assert not engine.warm_up()
        assert counts(engine)["refused"] == 0
        assert answers(engine.generate([[5, 6, 7]], **new)[0]) == alone(model, [5, 6, 7], **new)
        assert engine.warm_up()
        assert (max(sizes(engine, "spans")), reasons(engine)) == (8, "")
