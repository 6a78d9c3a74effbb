"""Boiling down tensors: the kernel against the same sum in plain torch."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, load

kernels = load()


def reference(words: torch.Tensor, count: int, step: int) -> int:
    """The formula, over int32 words."""
    weights = (torch.arange(count) * kernels.GOLDEN) | 1
    return int((words.cpu()[: (count - 1) * step + 1 : step].long() * weights).sum())


def table(pieces: list[tuple[torch.Tensor, int, int]]) -> torch.Tensor:
    return torch.tensor(
        [[x.data_ptr(), count, step] for x, count, step in pieces], device=DEVICE
    ).T.contiguous()


def noise(words: int) -> torch.Tensor:
    return torch.randint(
        -(2**31), 2**31, (words,), dtype=torch.int32, generator=torch.Generator().manual_seed(words)
    ).to(DEVICE)


def test_pieces_of_all_lengths_and_steps() -> None:
    pieces = [
        (noise(1), 1, 1),
        (noise(2048), 2048, 1),
        (noise(5000), 5000, 1),
        (noise(5000), 1000, 5),
        (noise(4099), 3, 2000),
    ]
    found = kernels.digest(table(pieces), [(0, 5)]).tolist()
    assert found == [reference(*piece) for piece in pieces]


def test_two_stretches_of_the_pieces() -> None:
    pieces = [(noise(100 + i), 100 + i, 1) for i in range(7)]
    every = kernels.digest(table(pieces), [(0, 7)]).tolist()
    assert kernels.digest(table(pieces), [(0, 2), (4, 6)]).tolist() == every[:2] + every[4:6]
    assert kernels.digest(table(pieces), [(3, 4)]).tolist() == every[3:4]
    assert kernels.digest(table(pieces), [(2, 2)]).tolist() == []


@pytest.mark.parametrize("place", [0, 1, 777, 4999])
def test_a_bit_anywhere_and_two_words_exchanged_are_seen(place: int) -> None:
    words = noise(5000)
    pieces = table([(words, 5000, 1)])
    before = kernels.digest(pieces, [(0, 1)]).item()
    words[place] ^= 1
    assert kernels.digest(pieces, [(0, 1)]).item() != before
    words[place] ^= 1
    assert kernels.digest(pieces, [(0, 1)]).item() == before
    words[[place, 42]] = words[[42, place]]
    assert kernels.digest(pieces, [(0, 1)]).item() != before


def test_refuses_what_does_not_fit() -> None:
    pieces = table([(noise(4), 4, 1)])
    with pytest.raises(ValueError, match="Invalid pieces"):
        kernels.digest(pieces.T, [(0, 1)])
    with pytest.raises(ValueError, match="Invalid ranges"):
        kernels.digest(pieces, [(0, 2)])
