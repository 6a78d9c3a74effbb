"""Forwards below autograd: of which models, and that what comes after them computes gradients as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import examples
from engine_answers import PROMPTS, alone, answers
from families import BY_NAME, build
from interrupting import Interrupted

from hf_paged.engine import Engine
from hf_paged.model import dispatch
from hf_paged.model.dispatch import may_skip_autograd
from hf_paged.model.lazy import LazyMask

SHORT = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
IDS = torch.tensor([PROMPTS[0]])
FORWARD = ("/model/dispatch.py", "/model/attention.py", "/engine/worker/eager.py", "/generate/forward.py")


@pytest.fixture
def model() -> Any:
    return build(BY_NAME["llama"])


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each forward below autograd, True if gradients were computed; the list grows."""
    seen: list[bool] = []

    def guard() -> Any:
        made = BELOW()
        seen.append(with_gradients())
        return made

    monkeypatch.setattr(dispatch, "BelowAutograd", guard)
    return seen


BELOW = dispatch.BelowAutograd


def with_gradients() -> bool:
    """True if autograd records operations."""
    with torch.enable_grad():
        return (torch.ones(1, requires_grad=True) * 2).requires_grad


def paged(model: Any, **more: Any) -> Any:
    return model.generate(IDS, **SHORT, **more, cache_implementation="paged")


class _Own(torch.nn.Linear):
    """A module of the user's."""


def hooked(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: None)


def replaced(model: Any) -> None:
    model.lm_head.__class__ = _Own


def patched(model: Any) -> None:
    inner = model.model.forward
    model.model.forward = lambda *args, **kwargs: inner(*args, **kwargs)


def compiled(model: Any) -> None:
    model.model.layers[0].compile(backend="eager")


def trained(model: Any) -> None:
    model.train()


def elsewhere(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.to("meta"))


@pytest.mark.parametrize("change", [hooked, replaced, patched, compiled, trained, elsewhere])
def test_models_whose_forward_may_need_autograd(model: Any, change: Callable[[Any], None]) -> None:
    assert may_skip_autograd([*model.modules()])
    change(model)
    assert not may_skip_autograd([*model.modules()])


@pytest.mark.parametrize("mode", [torch.enable_grad, lambda: torch.autocast("cpu")])
def test_a_forward_with_gradients_or_autocast_keeps_autograd(model: Any, used: list[bool], mode: Any) -> None:
    with mode():
        answer = dispatch.below_autograd(model, {"input_ids": IDS})
    assert not used
    assert answer.logits.requires_grad


def test_generate_computes_its_forwards_below_autograd(model: Any, used: list[bool]) -> None:
    """User code is given ordinary tensors, and runs with autograd."""
    outside: list[bool] = []

    def change(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        outside.append(with_gradients())
        scores[:, ids[0, -1] + 1] += 50
        return scores

    wanted = {"return_dict_in_generate": True, "output_logits": True, "logits_processor": [change]}
    expected = model.generate(IDS, **SHORT, **wanted)
    found = paged(model, **wanted)
    assert torch.equal(found.sequences, expected.sequences)
    assert used == [False] * 6
    assert all(outside)
    assert not any(tensor.is_inference() for tensor in found.logits)


def test_an_engine_computes_its_forwards_below_autograd(model: Any, used: list[bool]) -> None:
    with Engine(model, block_size=4, num_blocks=64) as engine:
        found = engine.generate(PROMPTS[:3], **SHORT)
        assert used
        assert not any(used)
        used.clear()
        hooked(model)
        hooked_too = engine.generate(PROMPTS[:3], **SHORT)
    assert not used
    assert list(map(answers, found)) == list(map(answers, hooked_too))
    assert [answers(each) for each in found] == [alone(model, prompt, **SHORT) for prompt in PROMPTS[:3]]


def test_a_write_counts_as_a_version(model: Any) -> None:
    """C24: the model is found to have changed, whatever has written to it."""
    weight = model.model.norm.weight
    before = weight._version
    with torch.no_grad():
        dispatch.below_autograd(lambda: weight.mul_(1.0), {})
        dispatch.below_autograd(lambda: weight.view(2, -1).mul_(1.0), {})
    assert weight._version == before + 2


SAME = {
    "to a dtype": lambda tensor: tensor.to(torch.float32),
    "to a device": lambda tensor: tensor.to("cpu"),
    "float": lambda tensor: tensor.float(),
    "type_as": lambda tensor: tensor.type_as(torch.ones(1)),
    "flatten": lambda tensor: tensor.flatten(0, 0),
    "contiguous": lambda tensor: tensor.contiguous(),
}


@pytest.mark.parametrize("operation", SAME.values(), ids=SAME)
@pytest.mark.parametrize("mode", ["autograd", "below", "inference"])
def test_operations_that_do_nothing_make_no_lazy_content(operation: Callable[[Any], Any], mode: str) -> None:
    """C3: or a model would leave the pages, or its flat row."""

    def build() -> torch.Tensor:
        raise AssertionError("the content was made")

    lazy = LazyMask((1, 1, 2, 3), torch.float32, torch.device("cpu"), None, build)
    with torch.inference_mode(mode == "inference"), torch.no_grad():
        found = dispatch.below_autograd(lambda: operation(lazy), {}) if mode == "below" else operation(lazy)
    assert found is lazy


def test_a_model_is_trained_afterwards(model: Any, used: list[bool]) -> None:
    paged(model)
    with Engine(model, block_size=4, num_blocks=64) as engine:
        engine.generate(PROMPTS[:1], **SHORT)
    assert used
    model.train()
    model(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_error_that_is_kept_leaves_gradients_on(model: Any) -> None:
    """With its traceback, which keeps what the functions of the forward have named."""
    model.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="size of tensor") as kept, torch.no_grad():
        dispatch.below_autograd(model, {"input_ids": IDS})
    assert kept.value.__traceback__ is not None
    assert with_gradients()


@pytest.mark.parametrize("way", ["generate", "engine"])
def test_an_interrupt_anywhere_leaves_gradients_on(model: Any, used: list[bool], way: str) -> None:
    """C22: Ctrl-C wherever the interpreter looks for it in the code around a forward; the error is kept, and
    what it keeps with it.
    """
    with Engine(model, block_size=4, num_blocks=64, prefix_caching=False) as engine:
        kept: list[BaseException] = []

        def act() -> None:
            try:
                if way == "generate":
                    paged(model)
                else:
                    engine.generate(PROMPTS[:1], **SHORT, progress=False)
            except BaseException as error:
                kept.append(error)
                raise

        probe = Interrupted(files=FORWARD)
        assert probe(act)
        assert used
        own = Interrupted(files=FORWARD[:1])
        own(act)
        places = [(at, FORWARD[:1]) for at in range(1, own.count + 1)]
        places += [(at, FORWARD) for at in range(1, probe.count + 1, max(1, probe.count // examples(12)))]
        for at, files in places:
            interrupted = Interrupted(at, files)
            assert not interrupted(act)
            assert with_gradients(), interrupted.where
        assert len(kept) == len(places)
        assert with_gradients()
    assert torch.equal(paged(model), model.generate(IDS, **SHORT))
