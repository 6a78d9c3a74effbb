"""Tensors with a shape and no content: made once, by the first operation that reads them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged.model.lazy import LazyMask, LazyTensor, as_dense


def lazy() -> tuple[torch.Tensor, list[int]]:
    """A lazy tensor of the numbers 0 to 5, and how often it was made."""
    made: list[int] = []

    def make() -> torch.Tensor:
        made.append(1)
        return torch.arange(6.0).view(2, 3)

    return LazyTensor((2, 3), torch.float32, torch.device("cpu"), make), made


def test_shapes_are_read_without_content() -> None:
    tensor, made = lazy()
    assert (tensor.shape, tensor.dtype, tensor.device.type, tensor.dim()) == ((2, 3), torch.float32, "cpu", 2)
    assert "shape=(2, 3)" in repr(tensor)
    assert not made


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x + 1,
        lambda x: torch.cat([x, x]),
        lambda x: x.t(),
        lambda x: x[0],
        lambda x: torch.tensor(x.tolist()),
        lambda x: torch.from_numpy(x.numpy()),
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: torch.nn.functional.linear(x, torch.eye(3)),
    ],
)
def test_whatever_reads_it_gets_the_content(read: Callable[[Any], Any]) -> None:
    tensor, made = lazy()
    dense = torch.arange(6.0).view(2, 3)
    for _ in range(2):
        found = read(tensor)
        assert torch.equal(found, read(dense))
        assert not isinstance(found, LazyTensor)
    assert len(made) == 1


def test_anything_else_is_left_as_it_is() -> None:
    plain = torch.ones(2)
    assert as_dense(plain) is plain
    assert as_dense("text") == "text"
    tensor, _ = lazy()
    assert type(as_dense(tensor)) is torch.Tensor


def test_all_of_a_mask_is_the_mask() -> None:
    """Gemma 4 takes all of it in a flat row, whose mask must not be made."""

    def build() -> torch.Tensor:
        raise AssertionError("it is made")

    mask = LazyMask((1, 1, 3, 5), torch.bool, torch.device("cpu"), 4, build)
    whole = mask[:, :, slice(0, None), :]
    assert isinstance(whole, LazyMask)
    assert whole.window == 4
    with pytest.raises(AssertionError, match="it is made"):
        mask[:, :, slice(-2, None), :]
