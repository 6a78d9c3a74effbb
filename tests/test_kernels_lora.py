"""Low-rank products of many adapters against a loop over the tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, GPU, load

kernels = load()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CLOSE = {FP32: 2e-5, FP16: 4e-3, BF16: 3e-2}


def noise(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Adapters:
    """Random adapters of one layer, of which some have a smaller rank than their slots hold."""

    def __init__(self, slots: int, n: int, out: int, rank: int, dtype: torch.dtype = FP32) -> None:
        self.a = noise(slots, rank, n, dtype=dtype) / n**0.5
        self.b = noise(slots, out, rank, dtype=dtype, seed=1)
        for slot in range(0, slots, 2):
            self.a[slot, rank // 2 :] = 0
            self.b[slot, :, rank // 2 :] = 0
        self.scale = torch.linspace(0.5, 2.0, slots, device=DEVICE)

    def expected(self, x: torch.Tensor, y: torch.Tensor, index: list[int]) -> torch.Tensor:
        """`y` with each token's own product added, in float64."""
        out = y.double()
        for token, slot in enumerate(index):
            if slot >= 0:
                product = x[token].double() @ self.a[slot].double().T @ self.b[slot].double().T
                out[token] += self.scale[slot].double() * product
        return out

    def compute(self, x: torch.Tensor, y: torch.Tensor, plan: object) -> torch.Tensor:
        out = y.clone()
        kernels.lora_expand(out, kernels.lora_shrink(x, self.a, plan), self.b, self.scale, plan)
        return out


def ints(index: list[int]) -> torch.Tensor:
    return torch.tensor(index, dtype=torch.int32, device=DEVICE)


def verify(adapters: Adapters, index: list[int], plan: object | None = None) -> None:
    dtype = adapters.a.dtype
    x = noise(len(index), adapters.a.shape[2], dtype=dtype, seed=2)
    y = noise(len(index), adapters.b.shape[1], dtype=dtype, seed=3)
    plan = plan or kernels.AdapterPlan(len(index), len(adapters.a), DEVICE)
    plan.update(ints(index))
    got = adapters.compute(x, y, plan)
    expected = adapters.expected(x, y, index)
    torch.testing.assert_close(got.double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype] * 4)
    base = [token for token, slot in enumerate(index) if slot < 0]
    assert torch.equal(got[base], y[base])


@settings(max_examples=40 if not GPU else 200, deadline=None)
@given(data=st.data())
def test_any_mix(data: st.DataObject) -> None:
    """Each token gets its own adapter's product, and the base's stay bit for bit as they were."""
    slots = data.draw(st.integers(1, 5))
    rank = data.draw(st.sampled_from([16, 32, 48]))
    index = data.draw(st.lists(st.integers(-1, slots - 1), min_size=1, max_size=40))
    verify(
        Adapters(slots, data.draw(st.sampled_from([16, 40, 130])), data.draw(st.sampled_from([8, 72])), rank),
        index,
    )


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_number_types(dtype: torch.dtype) -> None:
    verify(Adapters(3, 96, 136, 32, dtype), [2, 0, -1, 2, 1, 0, 0])


def test_many_columns_in_parts() -> None:
    """A wide input is read by several programs, whose sums are added in a fixed order."""
    adapters = Adapters(2, 1600, 24, 16)
    plan = kernels.AdapterPlan(3, 2, DEVICE)
    plan.update(ints([1, 0, 1]))
    x = noise(3, 1600, seed=2)
    assert len(kernels.lora_shrink(x, adapters.a, plan)) == 3
    verify(adapters, [1, 0, 1])
    once, again = (adapters.compute(x, noise(3, 24), plan) for _ in range(2))
    assert torch.equal(once, again)


def test_a_prompt_fills_tiles() -> None:
    """More tokens than a decoding step has: larger tiles, some of them full."""
    index = [0] * 200 + [-1] * 60 + [2] * 255 + [1]
    assert kernels.AdapterPlan(len(index), 3, DEVICE).tile == 64
    verify(Adapters(3, 32, 24, 16), index)


@pytest.mark.parametrize("rank", [16, 80, 128])
def test_ranks(rank: int) -> None:
    verify(Adapters(2, 48, 40, rank), [1, -1, 0, 1])


def test_layers_with_one_input_share_a_shrink() -> None:
    """The ranks of q, k and v are stacked; each expands its own columns."""
    layers = [Adapters(2, 64, out, 16) for out in (32, 16, 48)]
    index = [1, 0, -1]
    plan = kernels.AdapterPlan(3, 2, DEVICE)
    plan.update(ints(index))
    x = noise(3, 64, seed=2)
    shrunk = kernels.lora_shrink(x, torch.cat([layer.a for layer in layers], 1), plan)
    for number, layer in enumerate(layers):
        out = noise(3, layer.b.shape[1], seed=3)
        expected = layer.expected(x, out, index)
        kernels.lora_expand(out, shrunk, layer.b, layer.scale, plan, offset=16 * number)
        torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=8e-5)


def test_one_plan_for_every_mix() -> None:
    """A plan holds what the last update said: none, one, many, and none again."""
    adapters = Adapters(4, 32, 24, 16)
    plan = kernels.AdapterPlan(20, 4, DEVICE)
    for index in ([-1] * 20, [3] * 20, [i % 5 - 1 for i in range(20)], [-1] * 19 + [0], [-1] * 20):
        verify(adapters, index, plan)


def test_views_of_larger_tensors() -> None:
    adapters = Adapters(2, 32, 24, 16)
    plan = kernels.AdapterPlan(3, 2, DEVICE)
    plan.update(ints([0, -1, 1]))
    x, y = noise(3, 80)[:, 16:48], noise(3, 60, seed=3)
    expected = adapters.expected(x, y[:, 10:34], [0, -1, 1])
    kernels.lora_expand(
        y[:, 10:34], kernels.lora_shrink(x, adapters.a, plan), adapters.b, adapters.scale, plan
    )
    torch.testing.assert_close(y[:, 10:34].double(), expected, rtol=2e-5, atol=8e-5)


def test_wrong_shapes_are_refused() -> None:
    adapters = Adapters(2, 32, 24, 16)
    plan = kernels.AdapterPlan(3, 2, DEVICE)
    with pytest.raises(ValueError, match="expected 1 token"):
        kernels.AdapterPlan(0, 2, DEVICE)
    with pytest.raises(ValueError, match=r"expected \[3\] of torch.int32"):
        plan.update(ints([0, 1]))
    with pytest.raises(ValueError, match="Invalid shape of x or a"):
        kernels.lora_shrink(noise(2, 32), adapters.a, plan)
    with pytest.raises(ValueError, match="multiple of 16"):
        kernels.lora_shrink(noise(3, 32), adapters.a[:, :8].contiguous(), plan)
    plan.update(ints([0, 1, 1]))
    shrunk = kernels.lora_shrink(noise(3, 32), adapters.a, plan)
    with pytest.raises(ValueError, match="Invalid shape of shrunk"):
        kernels.lora_expand(noise(3, 24), shrunk, adapters.b, adapters.scale, plan, offset=8)


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("captured", [[-1] * 24, [i % 4 for i in range(24)]], ids=["none", "many"])
def test_a_captured_mix_is_right_for_every_other(captured: list[int]) -> None:
    """A graph captured without an adapter and replayed with many, and the reverse."""
    adapters = Adapters(4, 256, 192, 16, BF16)
    plan = kernels.AdapterPlan(24, 4, DEVICE)
    x = noise(24, 256, dtype=BF16, seed=2)
    y = noise(24, 192, dtype=BF16, seed=3)
    out = torch.empty_like(y)
    index = ints(captured)

    def step() -> None:
        plan.update(index)
        out.copy_(y)
        shrunk = kernels.lora_shrink(x, adapters.a, plan)
        kernels.lora_expand(out, shrunk, adapters.b, adapters.scale, plan)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for mix in ([-1] * 24, [0] * 24, [i % 5 - 1 for i in range(24)], [3, -1] * 12):
        index.copy_(ints(mix))
        graph.replay()
        torch.testing.assert_close(out.double(), adapters.expected(x, y, mix), rtol=3e-2, atol=0.12)
