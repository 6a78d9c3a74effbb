"""Ctrl-C at every place where the interpreter looks for it: model, books and locks are as before, the next
call is right.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import examples
from engine_answers import answers
from engine_parts import has_unfinished
from families import BY_NAME, build
from interrupting import DRIVING, OUTER, Interrupted
from invariance import compiles
from processes import LIMIT
from releases import RENAMED

import hf_paged
from hf_paged.engine import Engine
from hf_paged.generate import call as calls
from hf_paged.kv.reference import invariant
from hf_paged.model.attention import running
from hf_paged.model.registry import memory_of
from hf_paged.model.snapshot import call_snapshots
from hf_paged.model.thread_state import mode_depths

IDS = torch.randint(5, 80, (2, 6), generator=torch.Generator().manual_seed(3))
PAGED = {"cache_implementation": "paged", "cache_config": {"prefix_caching": True, "block_size": 4}}


def generate(model: Any, **options: Any) -> Any:
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, num_beams=2, **options)


def keep(module: Any, args: Any) -> None:
    """A hook of the user's, which changes nothing."""


def hooked(name: str) -> Any:
    model = build(BY_NAME[name])
    model.register_forward_pre_hook(keep)
    model.get_decoder().layers[0].register_forward_pre_hook(keep)
    return model


def facts(model: Any) -> list[Any]:
    """State that an interrupt must leave as it was."""
    hooks = [
        hook
        for module in model.modules()
        for hook in [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    ]
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    return [
        model.config._attn_implementation,
        hooks,
        forwards,
        calls.current_call.get(),
        call_snapshots.get(),
        running.get(),
        gc.isenabled(),
        *thread_facts(),
    ]


def thread_facts() -> list[object]:
    """State that torch keeps for this thread. Modes that it enters again when a traceback goes do nothing."""
    return [torch.is_grad_enabled(), invariant.get()]


def in_another_thread(act: Callable[[], Any]) -> Any:
    """The answer of `act`; a lock that an interrupt has leaked keeps it from coming."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()), daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert found, "a lock is held by a thread that is done with it"
    return found[0]


def places(act: Callable[[], Any], files: tuple[str, ...], most: int, first: int = 0) -> list[int]:
    """Numbers of places in which to interrupt `act`: every one, or `most` of them all over it."""
    probe = Interrupted(files=files)
    assert probe(act)
    stride = max(1, probe.count // most)
    return list(range(1 + first % stride, probe.count + 1, stride))


def assert_whole(memory: Any, where: str) -> None:
    try:
        memory.check()
        assert memory.held == 0
    except AssertionError as error:
        raise AssertionError(f"after an interrupt at {where}") from error


def assert_generates_through_interrupts(name: str, files: tuple[str, ...], most: int, first: int = 0) -> int:
    """The number of interrupts."""
    model = hooked(name)
    expected = generate(model)
    generate(model, **PAGED)
    before, memory = facts(model), memory_of(model)
    numbers = places(lambda: generate(model, **PAGED), files, most, first)
    for turn, at in enumerate(numbers):
        if turn % 5 == 0:
            hf_paged.invalidate(model)  # next time the prompt is computed, then found
        interrupted = Interrupted(at, files)
        interrupted(lambda: generate(model, **PAGED))
        assert facts(model) == before, interrupted.where
        assert_whole(memory, interrupted.where)
        if turn % 7 == 0:
            assert torch.equal(in_another_thread(lambda: generate(model, **PAGED)), expected), (
                interrupted.where
            )
    assert torch.equal(generate(model, **PAGED), expected)
    assert torch.equal(generate(model), expected)
    return len(numbers)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_a_paged_call_that_is_begun_or_ended(name: str) -> None:
    """C22: places of the code that takes the model and gives it back."""
    assert assert_generates_through_interrupts(name, OUTER, most=60) > 50


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_a_paged_call_in_the_middle(name: str) -> None:
    """C22: places all over the package."""
    assert_generates_through_interrupts(name, ("",), most=examples(15))


def assert_engine_through_interrupts(
    files: tuple[str, ...], most: int, first: int = 0, **options: Any
) -> int:
    model = hooked("llama")
    kinds: list[tuple[list[int], dict[str, Any]]] = [
        ([5, 6, 7, 8, 9], {"max_new_tokens": 3, "do_sample": False}),
        ([5, 6, 7], {"max_new_tokens": 2, "num_beams": 2, "do_sample": False}),
        (
            [5, 6, 7, 8],
            {"max_new_tokens": 3, "do_sample": True, "num_return_sequences": 2, "seed": 1, "logprobs": 2},
        ),
    ]
    with Engine(
        model, block_size=4, num_blocks=40, max_batch_tokens=8, max_batch_sequences=4, **options
    ) as engine:
        expected = [answers(engine.submit(prompt, **kind).result()) for prompt, kind in kinds]
        before = facts(model)
        handles: list[Any] = []

        def serve() -> None:
            for prompt, kind in kinds:
                handles.append(engine.submit(prompt, **kind))
            for handle in handles:
                handle.result()

        numbers = places(serve, files, most, first)
        for at in numbers:
            handles.clear()
            interrupted = Interrupted(at, files)
            interrupted(serve)
            in_another_thread(engine.stats)
            engine.check()
            for handle, right in zip(handles, expected, strict=False):
                output = handle.result()
                broke = output.error is not None and "broke off" in str(
                    output.error
                )  # some of its samples had their token
                assert broke or answers(output) == right, f"{interrupted.where}: {output}"
            assert facts(model) == before, interrupted.where
            while has_unfinished(engine):
                engine.step()  # a request whose submit() was interrupted has no handle
            stats = engine.stats()
            assert stats["waiting"] == stats["running"] == stats["preempted"] == 0
            assert all(kind["held"] == 0 for kind in stats["blocks"].values())
        return len(numbers)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("files", [DRIVING, ("",)], ids=["driving", "anywhere"])
def test_a_step_of_the_engine(files: tuple[str, ...], ahead: bool) -> None:
    assert_engine_through_interrupts(files, most=examples(20 if files == DRIVING else 10), run_ahead=ahead)


TORCH_FILES = (
    "/autograd/grad_mode.py",
    "/utils/_contextlib.py",
    "/overrides.py",
    "/utils/_python_dispatch.py",
)
"""Where torch's context managers set what they keep for a thread."""


MODE_FILES = ("/invariant/mode.py", "/thread_state.py")


@pytest.mark.parametrize("how", ["generate", "engine", "invariant"])
def test_what_torch_keeps_for_a_thread(how: str) -> None:
    """C22: an interrupt in the first or last lines of torch's context managers leaves gradients on, and modes off."""
    model = build(BY_NAME["llama"])
    with Engine(model, block_size=4, num_blocks=40, batch_invariant=how == "invariant") as engine:

        def act() -> Any:
            if how == "generate":
                return generate(model, **PAGED)
            return answers(engine.submit([5, 6, 7], max_new_tokens=3, do_sample=False).result())

        expected, before = act(), thread_facts()
        assert places(act, MODE_FILES[:1] if how == "invariant" else MODE_FILES[1:], most=1)
        probe = Interrupted(files=MODE_FILES, torch_files=TORCH_FILES)
        assert probe(act)
        # Rotary positions have no context manager of torch's own any more.
        assert probe.count > (20 if how == "generate" and RENAMED else 40)
        for at in range(1, probe.count + 1, max(1, probe.count // examples(30))):
            interrupted = Interrupted(at, MODE_FILES, TORCH_FILES)
            interrupted(act)
            assert thread_facts() == before, interrupted.where
        found = act()
        assert torch.equal(found, expected) if how == "generate" else found == expected
        assert mode_depths() == (0, 0)


@compiles
def test_a_block_of_the_users() -> None:
    """C22, C44: after an interrupt while it is entered or left the mode is off."""
    x, w = torch.randn(3, 300), torch.randn(70, 300)

    def act() -> torch.Tensor:
        with hf_paged.batch_invariant():
            return torch.nn.functional.linear(x, w)

    stock, right, before = torch.nn.functional.linear(x, w), act(), thread_facts()
    assert not torch.equal(right, stock)
    assert places(act, MODE_FILES[:1], most=1)
    probe = Interrupted(files=MODE_FILES, torch_files=TORCH_FILES)
    assert probe(act)
    for at in range(1, probe.count + 1):
        interrupted = Interrupted(at, MODE_FILES, TORCH_FILES)
        interrupted(act)
        assert (thread_facts(), mode_depths()) == (before, (0, 0)), interrupted.where
        assert torch.equal(torch.nn.functional.linear(x, w), stock)
    assert torch.equal(act(), right)
    assert torch.equal(torch.nn.functional.linear(x, w), stock)


def test_an_interrupt_while_weights_are_found_to_be_others() -> None:
    """C22, C24: no block of the old weights is handed out after it, and the books are whole."""
    model = build(BY_NAME["llama"])
    prompt = list(range(5, 22))
    options = {"max_new_tokens": 3, "do_sample": False}
    files = (
        "/engine/engine.py",
        "/engine/worker/model_check.py",
        "/engine/worker/pools.py",
        "/blocks/pool.py",
    )
    with Engine(model, block_size=4, num_blocks=40) as engine:
        engine.generate([prompt], **options)

        def change() -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(-1.01)

        change()
        probe = Interrupted(files=files)
        assert probe(lambda: engine.driver.check_before_step())
        for at in range(1, probe.count + 1):
            engine.generate([prompt], **options)
            change()
            interrupted = Interrupted(at, files)
            interrupted(lambda: engine.driver.check_before_step())
            output = engine.generate([prompt], **options)[0]
            assert output.cached_tokens == 0, interrupted.where
            engine.check()
