"""Keys and values of layers of one layout: one allocation, whose slots keep their content when it moves (C5)."""

from __future__ import annotations

import pytest
import torch

from hf_paged.blocks import Copy
from hf_paged.kv import Layout, Store, store, tensors_agree

LAYOUT = Layout(torch.device("cpu"), torch.float32, 2, 4, 3)


def filled(blocks: int = 3) -> Store:
    """A store of two layers with other numbers in every slot."""
    made = Store(LAYOUT, 2, blocks, 4, "torch")
    for number, data in enumerate((made.keys, made.values)):
        data.copy_(torch.arange(data.numel()).view(data.shape) + 10_000.0 * number)
    return made


def contents(of: Store, slots: int) -> list[torch.Tensor]:
    return [data[:slots].clone() for pair in of.of_layer for data in pair]


def test_layers_are_views_of_one_allocation() -> None:
    made = filled()
    assert (made.blocks, made.bytes) == (3, 2 * 3 * 4 * 2 * (4 + 3) * 4)
    assert made.bytes == made.keys.untyped_storage().nbytes()
    assert made.keys.untyped_storage().data_ptr() == made.values.untyped_storage().data_ptr()
    assert [tuple(key.shape) for key, _ in made.of_layer] == [(12, 2, 4)] * 2
    assert [tuple(value.shape) for _, value in made.of_layer] == [(12, 2, 3)] * 2


@pytest.mark.parametrize("way", ["grow", "grow_by_host"])
def test_growth_keeps_every_slot(way: str) -> None:
    made = filled()
    before = contents(made, 12)
    getattr(made, way)(5)
    assert made.blocks == 5
    assert all(map(torch.equal, contents(made, 12), before))


def test_growth_that_finds_no_memory_leaves_what_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = filled()
    before = contents(made, 12)
    inner = store.allocate

    def scarce(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if elements > made.bytes // 4:
            raise MemoryError
        return inner(elements, dtype, device)

    monkeypatch.setattr(store, "allocate", scarce)
    for way in (made.grow, made.grow_by_host):
        with pytest.raises(MemoryError):
            way(5)
        assert made.blocks == 3
        assert all(map(torch.equal, contents(made, 12), before))


def test_blocks_are_copied_in_all_layers() -> None:
    made = filled()
    assert not made.blocks_agree([(0, 2)])
    made.copy([Copy(0, 2)])
    assert made.blocks_agree([(0, 2)])
    assert not made.blocks_agree([(0, 2), (0, 1)])
    for data in (made.keys, made.values):
        assert torch.equal(data[:, :4], data[:, 8:])
        assert not torch.equal(data[:, :4], data[:, 4:8])


def test_tensors_agree_up_to_rounding() -> None:
    one = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert tensors_agree(one, one * (1 + 1e-4))
    assert not tensors_agree(one, one * 1.1)
    assert tensors_agree(one.bfloat16(), (one * 1.01).bfloat16())
