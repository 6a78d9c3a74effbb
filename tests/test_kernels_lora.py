"""Low-rank products of many adapters against a loop over the tokens."""

from __future__ import annotations

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, GPU, load

kernels = load()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CLOSE = {FP32: 2e-5, FP16: 4e-3, BF16: 3e-2}


def noise(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Adapters:
    """Random adapters of layers with one input, of mixed ranks; slot 1 leaves the last layer as it is."""

    def __init__(
        self,
        slots: int,
        n: int,
        outs: list[int],
        rank: int,
        dtype: torch.dtype = FP32,
        model: torch.dtype | None = None,
    ) -> None:
        self.n, self.outs, self.slots, self.dtype, self.model = n, outs, slots, dtype, model or dtype
        self.table = kernels.LoraWeights(len(outs), slots, -(-rank // 16) * 16, dtype, DEVICE)
        self.weights: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, float]] = {}
        for slot in range(slots):
            for layer in range(len(outs)):
                if slot != 1 or layer < len(outs) - 1 or len(outs) == 1:
                    self.put(layer, slot, max(8, rank - 8 * slot))

    def put(self, layer: int, slot: int, rank: int, seed: int = 0) -> None:
        a = noise(rank, self.n, dtype=self.dtype, seed=7 * slot + layer + seed) / self.n**0.5
        b = noise(self.outs[layer], rank, dtype=self.dtype, seed=7 * slot + layer + 100 + seed)
        scale = 0.5 + slot
        self.weights[layer, slot] = a, b, scale
        self.table.put(layer, slot, a, b, scale)
        self.table.upload()

    def expected(self, x: torch.Tensor, y: torch.Tensor, index: list[int], layer: int = 0) -> torch.Tensor:
        """`y` with each token's own product added, in float64."""
        out = y.double()
        for token, slot in enumerate(index):
            if (layer, slot) in self.weights:
                a, b, scale = self.weights[layer, slot]
                out[token] += scale * (x[token].double() @ a.double().T @ b.double().T)
        return out

    def compute(self, x: torch.Tensor, ys: list[torch.Tensor], plan: object, together: bool = True) -> None:
        shrunk = kernels.lora_shrink(x, self.table, plan)
        if together:
            kernels.lora_expand(ys, shrunk, self.table, plan)
        for layer, y in enumerate([] if together else ys):
            kernels.lora_expand([y], shrunk, self.table, plan, first=layer)


def ints(index: list[int]) -> torch.Tensor:
    return torch.tensor(index, dtype=torch.int32, device=DEVICE)


def verify(adapters: Adapters, index: list[int], plan: object | None = None) -> None:
    x = noise(len(index), adapters.n, dtype=adapters.model, seed=2)
    before = [noise(len(index), out, dtype=adapters.model, seed=3 + i) for i, out in enumerate(adapters.outs)]
    plan = plan or kernels.AdapterPlan(len(index), adapters.slots, DEVICE)
    plan.update(ints(index))
    after = [y.clone() for y in before]
    adapters.compute(x, after, plan)
    close = CLOSE[adapters.model]
    base = [token for token, slot in enumerate(index) if slot < 0]
    for layer, (y, got) in enumerate(zip(before, after, strict=True)):
        torch.testing.assert_close(
            got.double(), adapters.expected(x, y, index, layer), rtol=close, atol=close * 8
        )
        assert torch.equal(got[base], y[base])


@settings(max_examples=examples(20 if not GPU else 200))
@given(data=st.data())
def test_any_mix(data: st.DataObject) -> None:
    """Each token gets its own adapter's product, and the base's stay bit for bit as they were."""
    slots = data.draw(st.integers(1, 5))
    rank = data.draw(st.sampled_from([8, 16, 32, 40]))
    n = data.draw(st.sampled_from([16, 40, 136]))
    outs = data.draw(st.lists(st.sampled_from([8, 24, 72]), min_size=1, max_size=3))
    index = data.draw(st.lists(st.integers(-1, slots - 1), min_size=1, max_size=40))
    verify(Adapters(slots, n, outs, rank), index)


@pytest.mark.parametrize(
    ("dtype", "model"), [(FP32, FP32), (FP16, FP16), (BF16, BF16), (FP32, BF16), (FP32, FP16)]
)
def test_number_types(dtype: torch.dtype, model: torch.dtype) -> None:
    """Adapters of the model's type, and in float32 beside a model in half precision, as peft keeps them."""
    verify(Adapters(3, 96, [136, 40], 32, dtype, model), [2, 0, -1, 2, 1, 0, 0])


def test_many_columns_in_parts() -> None:
    """A wide input is read by several programs, whose sums are added in a fixed order."""
    adapters = Adapters(2, 1600, [24], 16)
    plan = kernels.AdapterPlan(3, 2, DEVICE)
    plan.update(ints([1, 0, 1]))
    x = noise(3, 1600, seed=2)
    assert len(kernels.lora_shrink(x, adapters.table, plan)) == 2
    verify(adapters, [1, 0, 1])
    once, again = noise(3, 24), noise(3, 24)
    adapters.compute(x, [once], plan)
    adapters.compute(x, [again], plan)
    assert torch.equal(once, again)


def test_a_prompt_fills_tiles() -> None:
    """More tokens than a decoding step has: larger tiles, some of them full."""
    index = [0] * 200 + [-1] * 60 + [2] * 255 + [1]
    assert kernels.AdapterPlan(len(index), 3, DEVICE).tile == 64
    verify(Adapters(3, 32, [24], 16), index)


@pytest.mark.parametrize("rank", [8, 16, 80, 128])
def test_ranks(rank: int) -> None:
    verify(Adapters(2, 48, [40], rank), [1, -1, 0, 1])


def test_adapters_come_go_and_move() -> None:
    """A plan and a table hold what was said last: none, one, many, another adapter in a slot, none in it."""
    adapters = Adapters(4, 32, [24, 16], 16)
    plan = kernels.AdapterPlan(20, 4, DEVICE)
    mixed = [i % 5 - 1 for i in range(20)]
    for index in ([-1] * 20, [3] * 20, mixed, [-1] * 19 + [0], [-1] * 20):
        verify(adapters, index, plan)
    adapters.put(0, 2, 8, seed=50)
    verify(adapters, mixed, plan)
    adapters.table.clear(2)
    adapters.table.upload()
    adapters.weights = {key: value for key, value in adapters.weights.items() if key[1] != 2}
    verify(adapters, mixed, plan)


def test_weights_are_read_where_they_lie() -> None:
    """An adapter that is trained in place is the new one at once."""
    adapters = Adapters(2, 32, [24], 16)
    adapters.weights[0, 0][0].mul_(-3)
    verify(adapters, [0, 1, -1])


def test_views_of_larger_tensors() -> None:
    adapters = Adapters(2, 32, [24], 16)
    plan = kernels.AdapterPlan(3, 2, DEVICE)
    plan.update(ints([0, -1, 1]))
    x, y = noise(3, 80)[:, 16:48], noise(3, 60, seed=3)
    expected = adapters.expected(x, y[:, 10:34], [0, -1, 1])
    adapters.compute(x, [y[:, 10:34]], plan)
    torch.testing.assert_close(y[:, 10:34].double(), expected, rtol=2e-5, atol=8e-5)


def test_wrong_shapes_are_refused() -> None:
    adapters = Adapters(2, 32, [24], 16)
    plan = kernels.AdapterPlan(3, 2, DEVICE)
    with pytest.raises(ValueError, match="expected 1 token"):
        kernels.AdapterPlan(0, 2, DEVICE)
    with pytest.raises(ValueError, match=r"expected \[3\] of torch.int32"):
        plan.update(ints([0, 1]))
    with pytest.raises(ValueError, match="Invalid shape of x"):
        kernels.lora_shrink(noise(2, 32), adapters.table, plan)
    with pytest.raises(ValueError, match="rounded up to 16"):
        kernels.LoraWeights(1, 1, 8, FP32, DEVICE)
    with pytest.raises(ValueError, match="r up to 16"):
        adapters.table.put(0, 0, noise(24, 32), noise(24, 24), 1.0)
    with pytest.raises(ValueError, match="multiple of 8"):
        adapters.table.put(0, 0, noise(4, 32), noise(24, 4), 1.0)
    plan.update(ints([0, 1, 1]))
    shrunk = kernels.lora_shrink(noise(3, 32), adapters.table, plan)
    with pytest.raises(ValueError, match="Invalid shape of out"):
        kernels.lora_expand(noise(2, 24), shrunk, adapters.table, plan)


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("captured", [[-1] * 24, [i % 4 for i in range(24)]], ids=["none", "many"])
def test_a_captured_mix_is_right_for_every_other(captured: list[int]) -> None:
    """A graph captured without an adapter and replayed with many, and the reverse."""
    adapters = Adapters(4, 256, [192], 16, BF16)
    plan = kernels.AdapterPlan(24, 4, DEVICE)
    x = noise(24, 256, dtype=BF16, seed=2)
    y = noise(24, 192, dtype=BF16, seed=3)
    out = torch.empty_like(y)
    index = ints(captured)

    def step() -> None:
        plan.update(index)
        out.copy_(y)
        adapters.compute(x, [out], plan)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    adapters.put(0, 1, 8, seed=9)
    for mix in ([-1] * 24, [0] * 24, [i % 5 - 1 for i in range(24)], [3, -1] * 12):
        index.copy_(ints(mix))
        graph.replay()
        torch.testing.assert_close(out.double(), adapters.expected(x, y, mix), rtol=3e-2, atol=0.24)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_factors_and_shifts(dtype: torch.dtype) -> None:
    """DoRA and biases: outputs of some slots times a factor, plus a shift; of plain ones the same bits as
    without.
    """
    outs, index = [136, 40], [2, 0, -1, 2, 1, 0, 3]
    adapters = Adapters(4, 96, outs, 32, dtype)
    plain, scaled = adapters.table, kernels.LoraWeights(2, 4, 32, dtype, DEVICE, scaled=True)
    kept: dict[tuple[int, int], list[torch.Tensor | None]] = {}
    for (layer, slot), (a, b, scale) in adapters.weights.items():
        factor = noise(outs[layer], seed=slot) if slot in (0, 2) else None
        shift = noise(outs[layer], seed=slot + 9) if slot in (0, 1) else None
        kept[layer, slot] = [factor, shift]
        scaled.put(layer, slot, a, b, scale, factor, shift)
        if factor is not None:
            with pytest.raises(ValueError, match="made without"):
                plain.put(layer, slot, a, b, scale, factor)
    scaled.upload()
    x = noise(len(index), 96, dtype=dtype, seed=2)
    before = [noise(len(index), out, dtype=dtype, seed=3) for out in outs]
    plan = kernels.AdapterPlan(len(index), 4, DEVICE)
    plan.update(ints(index))
    found = [[y.clone() for y in before] for _ in range(2)]
    for ys, table in zip(found, (plain, scaled), strict=True):
        adapters.table = table
        adapters.compute(x, ys, plan)
    for layer, (y, without, got) in enumerate(zip(before, *found, strict=True)):
        expected = adapters.expected(x, y, index, layer)
        for token, slot in enumerate(index):
            factor, shift = kept.get((layer, slot), [None, None])
            if factor is None and shift is None:
                assert torch.equal(got[token], without[token])
                continue
            wanted = expected[token] * (1 if factor is None else factor.double())
            wanted = wanted if shift is None else wanted + shift.double()
            torch.testing.assert_close(got[token].double(), wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype] * 40)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rank", [8, 40])
def test_columns_by_id(dtype: torch.dtype, rank: int) -> None:
    """LoRA on embeddings: the first product is a column of A, that of a token's id."""
    adapters = Adapters(3, 50, [40], rank, dtype)
    index, ids = [2, 0, -1, 2, 1, 0], torch.tensor([49, 0, 3, 7, 7, 48], device=DEVICE)
    plan = kernels.AdapterPlan(len(index), 3, DEVICE)
    plan.update(ints(index))
    y = noise(len(index), 40, dtype=dtype, seed=3)
    got = y.clone()
    kernels.lora_expand([got], kernels.lora_gather(ids, adapters.table, plan, 50), adapters.table, plan)
    one_hot = torch.nn.functional.one_hot(ids, 50)
    expected = adapters.expected(one_hot, y, index)
    torch.testing.assert_close(got.double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype] * 8)
