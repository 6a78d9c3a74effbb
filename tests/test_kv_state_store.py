"""Recurrent states of one layout: slots keep their content when their allocation moves."""

from __future__ import annotations

import pytest
import torch

from hf_paged.blocks import Copy
from hf_paged.kv.layout import StateLayout
from hf_paged.kv.state_store import StateStore


def filled(layers: int = 2, slots: int = 3) -> StateStore:
    made = StateStore(StateLayout.of(torch.zeros(1, 4, 5)), layers, slots, "torch")
    made.data.normal_(generator=torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize("way", ["grow", "grow_by_host"])
def test_growth_keeps_every_slot(way: str) -> None:
    """All but the slot of rows that are not there, which is behind the last one."""
    made = filled()
    before = made.data[:, :3].clone()
    getattr(made, way)(5)
    assert made.blocks == 5
    assert torch.equal(made.data[:, :3], before)


def test_slots_are_copied_in_all_layers() -> None:
    made = filled()
    assert not made.blocks_agree([(0, 2)])
    made.copy([Copy(0, 2)])
    assert made.blocks_agree([(0, 2)])
    assert not made.blocks_agree([(0, 2), (0, 1)])


def test_rows_without_a_slot_write_nothing() -> None:
    made = filled()
    before = made.data[:, :3].clone()
    made.write(1, torch.tensor([2, -1]), torch.ones(2, 4, 5))
    assert torch.equal(made.read(1, torch.tensor([2])), torch.ones(1, 4, 5))
    before[1, 2] = 1
    assert torch.equal(made.data[:, :3], before)
