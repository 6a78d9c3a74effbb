"""Memory that the devices of several ranks reach in each other (no device here: what is kept of it, and how long)."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_paged.model import symmetric_memory


class Group:
    """Stands for a process group."""


def test_ranks_keep_their_memory_beside_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured steps of one model hold addresses while another model, on a group of its own, computes."""

    class Memory:
        sums = 3

        def __init__(self) -> None:
            self.tensors = [torch.zeros(1)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(symmetric_memory, "_made", lambda group, device: Memory())
    one: Any = Group()
    other: Any = Group()
    first = symmetric_memory.symmetric_memory_of(one)
    second = symmetric_memory.symmetric_memory_of(other)
    assert first is not second
    assert symmetric_memory.symmetric_memory_of(one) is first
    assert symmetric_memory.sums_of(one) == 3
    assert len(symmetric_memory.symmetric_memories()) == 2
    del one, other
    gc.collect()
    assert symmetric_memory.symmetric_memories() == []
