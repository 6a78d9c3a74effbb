"""What hf_paged changes on a model while a call runs is known as ours."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from typing import Any

import torch
from families import BY_NAME, build
from torch import nn

from hf_paged.model.patches import mark_wrapper, note_restless, only_observes, own_forward, restless_of


def wrapped(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


def test_the_users_forward_under_ours() -> None:
    module = nn.Linear(2, 2)
    assert own_forward(module) is None

    def ours(forward: Any) -> Any:
        made = wrapped(forward)
        mark_wrapper(made)
        return made

    module.forward = ours(module.forward)
    assert own_forward(module) is None

    def user(x: Any) -> Any:
        return x

    module.forward = ours(ours(user))
    assert own_forward(module) is user
    module.forward = user
    assert own_forward(module) is user
    module.forward = types.MethodType(user, module)
    assert own_forward(module) is module.forward


def test_a_wrapper_of_the_user_around_ours_is_the_users() -> None:
    """functools.wraps copies our mark."""
    module = nn.Linear(2, 2)
    inner = wrapped(module.forward)
    mark_wrapper(inner)
    module.forward = wrapped(inner)
    assert own_forward(module) is module.forward


def test_hooks_that_only_observe() -> None:
    def hook(*_: Any) -> None:
        return None

    assert not only_observes(hook)
    hook.__module__ = "transformers.utils.output_capturing"
    assert only_observes(hook)
    hook.__module__ = "hf_paged.model.hooks"
    assert only_observes(hook)


def test_attributes_that_forwards_set_add_up_and_keep_no_model() -> None:
    module = nn.Linear(2, 2)
    assert restless_of(module) == frozenset()
    note_restless(module, frozenset({(nn.Linear, "last")}))
    note_restless(module, frozenset({(nn.Linear, "calls")}))
    assert restless_of(module) == {(nn.Linear, "last"), (nn.Linear, "calls")}
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_a_paged_call_leaves_a_model_that_goes_with_its_last_reference() -> None:
    """Its memory is free at once, not when Python next collects cycles."""
    model = build(BY_NAME["llama"])
    ids = torch.tensor([[5, 6, 7]])
    gc.collect()
    gc.disable()
    try:
        model.generate(ids, max_new_tokens=3, do_sample=False, cache_implementation="paged")
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()
