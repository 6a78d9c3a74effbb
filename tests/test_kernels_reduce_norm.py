"""A sum over ranks with an addition and a norm: all ranks in one process, what they send put there by hand."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
import traceback
from collections.abc import Callable

import pytest
import torch
from cases import pairwise
from kernel_cases import DEVICE, load

kernels = load()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5


def noise(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def empty(ranks: int, room: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Empty inboxes, as they are between launches."""
    size = room * dtype.itemsize
    return [
        torch.full((ranks, size), 255, dtype=torch.uint8, device=DEVICE).view(dtype) for _ in range(ranks)
    ]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


class Ranks:
    """The ranks of a sum, one after the other: what the others send is put into the inbox of each."""

    def __init__(self, shape: tuple[int, ...], count: int, dtype: torch.dtype, shots: int) -> None:
        self.parts = [noise(*shape, dtype=dtype, seed=5 + seed) for seed in range(count)]
        self.residual = noise(*shape, dtype=dtype, seed=3)
        self.weight = noise(shape[-1], dtype=dtype, seed=4)
        self.shots = shots
        self.lines = self.residual.numel() // shape[-1]
        lines = torch.arange(self.lines, device=DEVICE)
        self.owners = (lines + lines // min(self.lines, kernels.reduce_norm.PROGRAMS)) % count
        self.totals = [torch.zeros_like(self.residual) for _ in self.parts]

    def empty(self) -> list[torch.Tensor]:
        size = self.residual.numel() + 8
        return empty(len(self.parts), size, self.residual.dtype)

    def send(self, inboxes: list[torch.Tensor], sender: int) -> None:
        """The tensor that a rank sends to all others."""
        part, total = (each[sender].view(self.lines, -1) for each in (self.parts, self.totals))
        for other, inbox in enumerate(inboxes):
            place = inbox[sender, : part.numel()].view(self.lines, -1)
            if other != sender and self.shots == 1:
                place.copy_(part)
            elif other != sender:
                place[self.owners == other] = part[self.owners == other]
                place[self.owners == sender] = total[self.owners == sender]

    def sum(self, rank: int, *, centered: bool) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """A rank's answers, and all inboxes behind it."""
        inboxes = self.empty()
        for other in range(len(self.parts)):
            received = self.empty()
            self.send(received, other)
            if other != rank:
                inboxes[rank][other] = received[rank][other]
        given = self.parts[rank], inboxes, rank, self.residual, self.weight, EPS
        return *kernels.reduce_add_rms_norm(*given, centered=centered, shots=self.shots), inboxes


def compare(shape: tuple[int, ...], count: int, dtype: torch.dtype, centered: bool, shots: int) -> None:
    ranks = Ranks(shape, count, dtype, shots)
    if shots == 2:
        ranks.totals = [ranks.sum(rank, centered=centered)[0] for rank in range(count)]
    found = []
    for rank in range(count):
        total, normed, inboxes = ranks.sum(rank, centered=centered)
        sent = ranks.empty()
        ranks.send(sent, rank)
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(inboxes, sent, strict=True))
        found.append((total, normed))
    for one, other in itertools.pairwise(found):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    summed = ranks.parts[0].to(FP32)
    for part in ranks.parts[1:]:
        summed = summed + part
    given = summed.to(dtype), ranks.residual, ranks.weight, EPS
    total, normed = kernels.add_rms_norm(*given, centered=centered)
    # The interpreter cuts off where bfloat16 should be rounded.
    close = {} if DEVICE == "cuda" or dtype != BF16 else {"rtol": 4e-2, "atol": 4e-2}
    torch.testing.assert_close(found[0][0], total, **(close or {"rtol": 0, "atol": 0}))
    norms = close or {"rtol": 2e-3 if dtype == FP16 else 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found[0][1], normed, **norms)


@pytest.mark.parametrize(
    ("shape", "ranks", "dtype", "centered", "shots"),
    pairwise([(1, 1, 64), (5, 1, 300), (1, 3, 1024)], [2, 3, 4], [FP32, BF16, FP16], [False, True], [1, 2]),
)
def test_as_one_after_the_other(
    shape: tuple[int, ...], ranks: int, dtype: torch.dtype, centered: bool, shots: int
) -> None:
    """On all ranks the bits of a sum, an addition and a norm. A rank sends its parts to the others, or to the
    one that adds them and has the total from it, and leaves its inbox empty.
    """
    compare(shape, ranks, dtype, centered, shots)


@pytest.mark.parametrize("shots", [1, 2])
def test_more_lines_than_programs(monkeypatch: pytest.MonkeyPatch, shots: int) -> None:
    """A program takes several."""
    monkeypatch.setattr(kernels.reduce_norm, "PROGRAMS", 3)
    compare((7, 1, 96), 2, FP32, False, shots)


@pytest.mark.skipif(DEVICE == "cuda", reason="ranks have a GPU each; benchmarks/sums.py compares them")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_compute_at_once(ranks: int) -> None:
    """Processes with memory in common: sums in a row take two sets of inboxes in turns, and no rank overwrites
    what another has not read, however far one is behind.
    """
    shapes = [(1, 64), (7, 64), (3, 128), (2, 64)]
    sums = [(shape, shots) for _ in range(2) for shape in shapes for shots in (1, 2)]
    inboxes = [torch.full((2, ranks, 512 * 4), 255, dtype=torch.uint8).share_memory_() for _ in range(ranks)]
    totals = torch.zeros(ranks, len(sums), 512).share_memory_()
    normed = torch.zeros_like(totals).share_memory_()

    def parts(number: int) -> list[torch.Tensor]:
        return [noise(*sums[number][0], dtype=FP32, seed=100 * rank + number) for rank in range(ranks)]

    def compute(rank: int) -> None:
        late = random.Random(rank)
        for number, (shape, shots) in enumerate(sums):
            time.sleep(late.choice((0, 0, 0.02)))
            residual, weight = torch.full(shape, 0.5), torch.ones(shape[-1])
            given = parts(number)[rank], [each[number % 2].view(FP32) for each in inboxes], rank
            found = kernels.reduce_add_rms_norm(*given, residual, weight, EPS, shots=shots)
            for place, each in zip((totals, normed), found, strict=True):
                place[rank, number, : each.numel()] = each.flatten()

    _at_once(ranks, compute)
    for number, (shape, _) in enumerate(sums):
        summed = sum(parts(number)[1:], start=parts(number)[0])
        right = kernels.add_rms_norm(summed, torch.full(shape, 0.5), torch.ones(shape[-1]), EPS)
        for rank in range(ranks):
            torch.testing.assert_close(totals[rank, number, : summed.numel()].view(shape), right[0])
            torch.testing.assert_close(normed[rank, number, : summed.numel()].view(shape), right[1])
            assert torch.equal(totals[rank, number], totals[0, number])
    assert all(bool((each == 255).all()) for each in inboxes)


def _at_once(ranks: int, act: Callable[[int], None]) -> None:
    """Do something in a process for each rank."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            try:
                signal.alarm(60)  # of the child alone: it waits for the others
                torch.set_num_threads(1)
                act(rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * ranks


@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_every_number_arrives(dtype: torch.dtype, shots: int) -> None:
    """Zeros of both signs, infinities and NaN, also the one that stands for what has not come: as that it
    would be waited for.
    """
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 0.0])
    part = special.to(DEVICE, dtype)[None]
    bits(part)[..., -dtype.itemsize :] = 255
    other = torch.zeros_like(part)
    other[:, 1] = -0.0
    inboxes = empty(2, 8, dtype)
    inboxes[0][1] = other[0]
    residual = torch.full_like(part, -0.0)
    weight = torch.ones(8, dtype=dtype, device=DEVICE)
    total, _ = kernels.reduce_add_rms_norm(part, inboxes, 0, residual, weight, EPS, shots=shots)
    assert torch.equal(total.nan_to_num(7.0), (part + other).nan_to_num(7.0))
    assert total[0].isnan().tolist() == [False] * 4 + [True, False, False, True]
    assert torch.signbit(total[0, :2]).tolist() == [False, True]
    sent = inboxes[1][0]
    whole = torch.full_like(bits(sent), 255).view(-1, dtype.itemsize)
    assert not (bits(sent).view(-1, dtype.itemsize) == whole).all(-1).any()
    assert torch.equal(sent.isnan(), part[0].isnan())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"part": torch.ones(2, 8, dtype=torch.float64)}, r"part: .*got \[2, 8\] of torch.float64"),
        ({"part": torch.ones(8, 2).t()}, "part: expected .* without gaps"),
        ({"inboxes": [torch.ones(1, 16)]}, r"inboxes: expected several.*got .*\[\(\[1, 16\]"),
        ({"inboxes": [torch.ones(2, 15)] * 2}, r"inboxes: .*\[ranks, 16 or more\].*got .*\[\(\[2, 15\]"),
        ({"inboxes": [torch.ones(2, 16, dtype=BF16)] * 2}, r"inboxes: .*of torch.float32, got .*bfloat16"),
        ({"residual": torch.ones(2, 4)}, r"residual or weight: expected \[2, 8\]"),
        ({"weight": torch.ones(4)}, r"residual or weight: .*\[8\], got"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], match: str) -> None:
    given = {
        "part": torch.ones(2, 8),
        "inboxes": [torch.ones(2, 16)] * 2,
        "rank": 0,
        "residual": torch.ones(2, 8),
        "weight": torch.ones(8),
        "eps": EPS,
    }
    with pytest.raises(ValueError, match=match):
        kernels.reduce_add_rms_norm(**{**given, **change})
