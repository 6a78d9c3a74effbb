"""Tensors that outlive a step: ordinary ones in every mode, also if Ctrl-C comes while one is made (C22)."""

from __future__ import annotations

import gc

import torch
from interrupting import Interrupted

from hf_paged.kv.ordinary import ordinary_tensors
from hf_paged.kv.store import allocate
from hf_paged.model.dispatch import below_autograd

HERE = torch.device("cpu")


def gradients_are_computed() -> bool:
    return bool((torch.ones(1, requires_grad=True) * 2).requires_grad)


def test_ordinary_in_every_mode() -> None:
    with torch.inference_mode():
        with ordinary_tensors():
            made = [torch.zeros(2), allocate(2, torch.float32, HERE)]
            assert not torch.is_inference_mode_enabled()
        assert torch.is_inference_mode_enabled()
        assert torch.zeros(2).is_inference()
    assert not any(each.is_inference() for each in made)
    for each in made:
        each += 1
    assert gradients_are_computed()


def test_an_interrupt_leaves_no_guard_behind() -> None:
    """At every place of our code and of torch's modes: gradients are computed afterwards, and when all that
    the interrupt held is collected.
    """

    def act() -> None:
        with torch.no_grad():
            below_autograd(lambda: allocate(2, torch.float32, HERE), {})

    at = 1
    while not (interrupted := Interrupted(at, torch_files=("grad_mode.py",)))(act):
        torch.set_grad_enabled(True)  # as an engine's steps and paged calls do
        assert gradients_are_computed(), interrupted.where
        gc.collect()
        assert torch.is_grad_enabled(), interrupted.where
        assert gradients_are_computed(), interrupted.where
        at += 1
    assert at > 5
