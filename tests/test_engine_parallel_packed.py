"""Values as ranks send them: what is unpacked is what was packed, and large tensors are not pickled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.engine.parallel.packed import LARGE, Packed, unpack


def sent(value: Any) -> tuple[Any, Packed]:
    """A value as another rank unpacks it, and as it was sent."""
    packed = Packed(value)
    parts = iter(packed.tensors)

    def receive(into: torch.Tensor) -> None:
        into.copy_(next(parts))

    found = unpack(packed.pickled, receive)
    assert next(parts, None) is None
    return found, packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_large_tensors_are_sent_by_themselves(dtype: torch.dtype) -> None:
    """In their own dtype and shape, whether they lie in one piece or not."""
    large = torch.arange(LARGE).to(dtype).view(-1, 32)
    value = {"a": large, "b": [large.t(), torch.ones(3)], "c": "text"}
    found, packed = sent(value)
    assert len(packed.tensors) == 2
    assert len(packed.pickled) < 2000
    assert torch.equal(found["a"], large)
    assert torch.equal(found["b"][0], large.t())
    assert found["a"].dtype == found["b"][0].dtype == dtype
    assert torch.equal(found["b"][1], torch.ones(3))
    assert found["c"] == "text"


def test_tensors_with_more_than_bytes_are_pickled() -> None:
    """A tensor that learns, complex numbers, and a sparse one, which has no bytes to count."""
    learned = torch.zeros(LARGE, requires_grad=True)
    numbers = torch.randn(LARGE, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    sparse = torch.eye(9).to_sparse()
    (first, second, third), packed = sent((learned, numbers, sparse))
    assert packed.tensors == []
    assert first.requires_grad
    assert torch.equal(second, numbers)
    assert torch.equal(third.to_dense(), torch.eye(9))


def test_what_cannot_be_pickled_raises_before_anything_is_sent() -> None:
    with pytest.raises(Exception, match="pickle"):
        Packed(lambda: None)
