"""Which linear layers a kernel for few rows stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hf_paged import batch_invariant
from hf_paged.model.capture.gemv import calls_of, few_rows, may_read


class _Kernels:
    """Plain torch in the kernel's place, on a device that can launch early."""

    @staticmethod
    def launches_early(device: torch.device) -> bool:
        return True

    @staticmethod
    def gemv(
        x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None
    ) -> torch.Tensor:
        assert x.ndim == 2
        bias = None if biases is None else torch.cat([*biases])
        return nn.functional.linear(x, torch.cat([*weights]), bias)


KERNELS = _Kernels()


def layer(n: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    return nn.Linear(16, n, bias=bias, dtype=dtype)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 16, dtype=torch.bfloat16)


def test_plain_layers_of_halves_are_read() -> None:
    class Other(nn.Linear):
        pass

    lent = layer(4)
    lent.forward = lambda x: x  # type: ignore[method-assign]
    turned = layer(4)
    turned.weight = nn.Parameter(torch.randn(16, 4, dtype=torch.bfloat16).T)
    computed = layer(4)
    del computed.weight
    computed.weight = torch.randn(4, 16, dtype=torch.bfloat16)  # a step may have written it
    assert may_read(layer(4))
    assert may_read(layer(4, bias=True))
    others = [layer(4, dtype=torch.float32), Other(16, 4, dtype=torch.bfloat16), lent, turned, computed]
    assert not any(map(may_read, others))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (2, 4), (3,)])
@torch.no_grad()
def test_products_of_few_rows(shape: tuple[int, ...], bias: bool) -> None:
    layers = [layer(n, bias) for n in (4, 8, 2)]
    x = rows(*shape)
    found = few_rows(KERNELS, x, layers)
    assert found is not None
    for each, product in zip(layers, found, strict=True):
        torch.testing.assert_close(product, each(x))


@torch.no_grad()
def test_what_others_compute() -> None:
    assert few_rows(KERNELS, rows(9, 1), [layer(4)]) is None
    assert few_rows(KERNELS, rows(0, 1), [layer(4)]) is None
    assert few_rows(KERNELS, rows(1).float(), [layer(4)]) is None
    assert few_rows(KERNELS, rows(1), [layer(4)] * 4) is None
    assert few_rows(KERNELS, rows(1), [layer(4), layer(4, bias=True)]) is None
    with batch_invariant():
        assert few_rows(KERNELS, rows(1), [layer(4)]) is None
    older: Any = _Kernels()
    older.launches_early = lambda device: False
    assert few_rows(older, rows(1), [layer(4)]) is None
    assert not calls_of(older, [layer(4)], 1, torch.bfloat16)


def test_kernels_are_compiled_for_each_form_once() -> None:
    calls = {}
    for layers in ([layer(4)], [layer(4)], [layer(8), layer(2)]):
        calls.update(calls_of(KERNELS, layers, 8, torch.bfloat16))
    assert len(calls) == 2
    for call in calls.values():
        made = call()
        assert isinstance(made, torch.Tensor)
        assert made.is_meta
    assert not calls_of(KERNELS, [layer(4)], 9, torch.bfloat16)
