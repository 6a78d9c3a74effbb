"""Hooks of other people: one that changes arguments or answers is noticed, one that only looks is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_paged.model.hooks import HookMonitor


def changes_its_input(_: nn.Module, args: Any) -> None:
    args[0].mul_(2)


def gives_another_input(_: nn.Module, args: Any) -> Any:
    return (args[0] + 1,)


def looks(_: nn.Module, args: Any) -> None:
    len(args)


@pytest.mark.parametrize(
    ("hook", "changes"), [(changes_its_input, True), (gives_another_input, True), (looks, False)]
)
def test_a_change_is_noticed(hook: Callable[..., Any], changes: bool) -> None:
    module = nn.Linear(3, 3)
    module.register_forward_pre_hook(hook)
    expected = module(torch.ones(1, 3))
    monitor = HookMonitor()
    monitor.watch([module])
    assert monitor.some
    assert monitor.know([module])
    assert torch.equal(module(torch.ones(1, 3)), expected)
    assert monitor.changed == changes
    monitor.leave()
    assert list(module._forward_pre_hooks.values()) == [hook]


def test_a_hook_that_comes_later_is_not_known() -> None:
    module = nn.Linear(3, 3)
    monitor = HookMonitor()
    monitor.watch([module])
    assert not monitor.some
    assert monitor.know([module])
    handle = module.register_forward_hook(lambda *_: None)
    assert not monitor.know([module])
    handle.remove()
    assert monitor.know([module])


def test_calls_beside_each_other_share_the_place_of_a_hook() -> None:
    """The first that leaves takes nothing from the second; a hook that its owner removes stays away."""
    module = nn.Linear(3, 3)
    handle = module.register_forward_pre_hook(looks)
    first, second = HookMonitor(), HookMonitor()
    for monitor in (first, second):
        monitor.watch([module])
    first.leave()
    first.leave()
    assert second.know([module])
    assert list(module._forward_pre_hooks.values()) != [looks]
    handle.remove()
    second.leave()
    assert not module._forward_pre_hooks
