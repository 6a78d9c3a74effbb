"""Which linear layers a kernel for few rows stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from families import BY_NAME, build
from fused_models import Kernels
from torch import nn

from hf_paged import batch_invariant
from hf_paged.model.capture.fusion import Fusion, fused
from hf_paged.model.capture.gemv import calls_of, few_rows, may_read
from hf_paged.model.fp32_head import Fp32Head


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


class _Fused(Kernels):
    """The kernels of captured steps in torch, with this one."""

    launches_early = staticmethod(_Kernels.launches_early)

    def gemv(self, *given: Any) -> torch.Tensor:
        self.calls["gemv"] += 1
        return _Kernels.gemv(*given)


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


@pytest.mark.parametrize("float32", [False, True])
@torch.no_grad()
def test_products_of_a_captured_forward(float32: bool) -> None:
    """Four a layer, as q, k and v are one, and gate and up; and the head, where it is not computed in float32."""
    model: Any = build(BY_NAME["llama"]).eval().bfloat16()
    kernels = _Fused()
    ids = torch.tensor([[5]])
    head = Fp32Head(model, float32)
    with head.in_place():
        expected = model(input_ids=ids, use_cache=False).logits
        with fused(Fusion(model, kernels)):
            found = model(input_ids=ids, use_cache=False).logits
    assert found.dtype == (torch.float32 if float32 else torch.bfloat16)
    assert kernels.calls["gemv"] == 4 * len(model.model.layers) + (not float32)
    torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)


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
