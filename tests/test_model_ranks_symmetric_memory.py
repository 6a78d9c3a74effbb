"""Memory that the devices of several ranks reach in each other (no device here: what is kept of it, and how long)."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_paged.model.ranks import symmetric_memory


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
    monkeypatch.setattr(symmetric_memory, "made_together", lambda group, device: Memory())
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


@pytest.mark.parametrize("fails", ["", "links", "kernels"])
def test_ranks_whose_devices_cannot_sum_there_use_nccl(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Without links between devices, or with 3 of them, which no kernel of torch's sums."""
    tried: list[str] = []

    class Memory:
        def __init__(self, group: Any, device: torch.device) -> None:
            self._act("links")

        def meet(self) -> None:
            self._act("kernels")

        def _act(self, what: str) -> None:
            tried.append(what)
            if what == fails:
                raise RuntimeError("Not implemented for world_size=3")

    monkeypatch.setattr(symmetric_memory, "SymmetricMemory", Memory)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made = symmetric_memory.made_together(dist.group.WORLD, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert (made is None) == bool(fails)
    assert tried == ["links", "kernels"][: 1 if fails == "links" else 2]


class _LetGo(Exception):
    """No kernel waits any more."""


@pytest.mark.parametrize("ranks", [2, 3])
def test_kernels_that_wait_for_a_failed_rank_come_to_their_end(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """A sum of torch's signals to all ranks, its own among them, and waits for the signals of all: a rank that
    fails takes none and gives none. One with a norm waits for what others send. Sums that follow in the same
    queue end as well.
    """
    monkeypatch.setattr(symmetric_memory, "LETTING_GO", 30.0)
    pads = [torch.zeros(2 * ranks, dtype=torch.int32) for _ in range(ranks)]
    inbox = torch.full((64,), symmetric_memory.EMPTY, dtype=torch.uint8)
    over = threading.Event()

    def turn(pad: torch.Tensor, place: int, found: int, left: int) -> None:
        while not over.is_set() and int(pad[place]) != found:
            time.sleep(0)
        pad[place] = left

    def program(number: int) -> None:
        for _ in range(8):
            for other in range(ranks):
                turn(pads[other], number * ranks, 0, 1)
                turn(pads[0], number * ranks + other, 1, 0)

    def with_norm() -> None:
        for _ in range(8):
            while not over.is_set() and (inbox == symmetric_memory.EMPTY).any():
                time.sleep(0)
            inbox.fill_(symmetric_memory.EMPTY)

    kernels = [threading.Thread(target=program, args=(number,)) for number in range(2)]
    kernels.append(threading.Thread(target=with_norm))
    for each in kernels:
        each.start()

    def settle() -> None:
        time.sleep(1e-4)
        if not any(each.is_alive() for each in kernels):
            raise _LetGo

    try:
        with pytest.raises(_LetGo):
            symmetric_memory.let_go(pads, inbox, settle)
    finally:
        over.set()
        for each in kernels:
            each.join()
