"""The C++ op of CPUs against float64 and against stock; nothing here runs where no compiler is."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import examples, pairwise
from compare import assert_clean, assert_equal
from families import BY_NAME, VOCABULARY, build
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import GPU, Case, assert_close, ints
from modes import MODES
from native_cases import attend
from paged_layer import HEADS, Paged, formula

import hf_paged
import hf_paged_native as native
from hf_paged.blocks import Full
from hf_paged.kv import Layout, Memory, Pages, Rows, Seen
from hf_paged.kv.config import CacheConfig
from hf_paged.kv.ops import FEW, NativeOps, Ops
from hf_paged_native import plan as plan_module

pytestmark = [
    pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler to build the op with"),
    pytest.mark.skipif(GPU, reason="where there is a GPU the cases lie on it, and the op is the CPU's"),
]

REGISTERS = ("DEFAULT", "AVX2", "AVX512")
HERE = torch.backends.cpu.get_cpu_capability()
RUNS_HERE = REGISTERS[: REGISTERS.index(HERE) + 1] if HERE in REGISTERS else (HERE,)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def _extensions(native_folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(native_folder))
        yield


@pytest.fixture(scope="module")
def library() -> native.Library:
    return native.load(native.build())


# ---- attention

RAGGED = [37, 1, 0, 70, 16]
LONG = [511, 512, 513, 1500]
"""Around the borders of the chunks that rows are cut into."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    **{f"blocks of {size}": {"block_size": size} for size in (1, 2, 32, 64)},
    **{f"a group of {group}": {"group": group} for group in (1, 3, 4, 7, 16)},
    **{f"heads of {dim}": {"key_dim": dim} for dim in (1, 8, 40, 80, 128, 256)},
    "wide keys": {"key_dim": 48, "value_dim": 20},
    "wide values": {"key_dim": 20, "value_dim": 72},
    "one head": {"heads": 1, "group": 1},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "softcap": {"softcap": 5.0},
    "small softcap": {"softcap": 0.2},
    "sinks": {"with_sinks": True},
    "everything": {"window": 24, "softcap": 30.0, "with_sinks": True, "group": 4},
    "long": {"lengths": LONG},
    "long with a window": {"lengths": LONG, "window": 600, "with_sinks": True},
    "several tokens": {"tokens": 5},
    "several tokens, a window": {"tokens": 5, "window": 7, "group": 3},
    "several tokens over a border": {"tokens": 3, "lengths": LONG, "window": 512},
    "several tokens that see everything": {"tokens": 4, "causal": False},
}


@pytest.mark.parametrize(
    ("name", "dtype", "registers"), pairwise([*CASES], [FP32, BF16, FP16], RUNS_HERE), ids=str
)
def test_like_the_reference(name: str, dtype: torch.dtype, registers: str) -> None:
    """C3: blocks anywhere, NaN wherever nothing was written, for each kind of registers that this machine
    has.
    """
    given = dict(CASES[name])
    lengths, tokens = given.pop("lengths", RAGGED), given.pop("tokens", 1)
    if tokens > 1:
        lengths = [length for length in lengths if length >= tokens]
    case = Case(lengths, [tokens] * len(lengths), dtype=dtype, seed=len(name), **given)
    assert_close(attend(native.load(native.build(registers)), case, tokens), case.expected())


@settings(max_examples=examples(30))
@given(data=st.data())
def test_attention_over_any_history(data: st.DataObject) -> None:
    """C3, C10, C14: appends, forks, reorders and crops in any order, over any block size, window and
    padding.
    """
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    count = data.draw(st.integers(1, 3))
    window = data.draw(st.sampled_from([None, None, 1, 3, 7]))
    starts = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=count, max_size=count))
    size, expected = data.draw(st.sampled_from([1, 2, 4, 16])), data.draw(st.sampled_from([0, 40]))
    dims = data.draw(st.sampled_from([(8, 6), (16, 16), (40, 24)]))
    dtype = data.draw(st.sampled_from([FP32, FP32, BF16]))
    paged = Paged(count, size, window, starts, expected, dims, kernels="native", dtype=dtype)
    paged.rows.keep_past = data.draw(st.booleans())
    tolerance = 1e-5 if dtype == FP32 else 3e-2
    for _ in range(data.draw(st.integers(1, 6))):
        pages = paged.step(data.draw(st.sampled_from([1, 1, 1, 2, 5, 9])))
        assert isinstance(pages.ops, NativeOps)
        heads, cap = data.draw(st.sampled_from([2, 4, 6])), data.draw(st.sampled_from([None, 3.0]))
        paged.assert_attends(pages, heads, cap, data.draw(st.booleans()), tolerance)
        paged.change(data, pages.batch.new)
    paged.rows.free()
    assert paged.group.pool.held == 0


def test_the_same_bits_in_any_batch(library: native.Library) -> None:
    """Threads, neighbours and places of blocks change nothing: C35 asks for as much."""
    case = Case([1500, 40, 0, 700], heads=4, group=3, key_dim=40, window=1100, with_sinks=True)
    alone = attend(library, case)
    torch.set_num_threads(2)
    try:
        for _ in range(10):
            assert torch.equal(attend(library, case), alone)
    finally:
        torch.set_num_threads(1)
    case.lengths, case.table, case.query = [700], case.table[3:], case.query[3:]
    assert torch.equal(attend(library, case), alone[3:])
    used = -(-700 // case.block_size)
    order = torch.randperm(used)
    for data in (case.keys, case.values):
        data[order + 1] = data[case.table[0, :used].long()]
    case.table = (order + 1)[None].int()
    assert torch.equal(attend(library, case), alone[3:])


@pytest.mark.parametrize("entry", ["openmp", "nobody's"])
def test_threads_of_older_releases(
    library: native.Library, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """Releases without an entry to torch's own threads lend their OpenMP runtime's; without either there is
    one thread.
    """
    case = Case([1500, 40, 0, 700], heads=4, group=3, key_dim=40)
    expected = attend(library, case)
    gomp = plan_module._address(ctypes.CDLL(None), "GOMP_parallel") if entry == "openmp" else None
    if entry == "openmp" and gomp is None:
        pytest.skip("this torch works without GNU OpenMP")
    torch.set_num_threads(2)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(plan_module, "_threads_of_torch", lambda: (gomp, None))
            other = native.Library(library.file)
            assert torch.equal(attend(other, case), expected)
    finally:
        native.Library(library.file)  # the entries belong to the file, which is loaded once
        torch.set_num_threads(1)


def test_many_threads_with_little_to_do(library: native.Library) -> None:
    case = Case([3, 0, 1], heads=1, group=1, key_dim=8)
    torch.set_num_threads(8)
    try:
        assert_close(attend(library, case), case.expected())
    finally:
        torch.set_num_threads(1)


def test_rows_with_nothing_to_see_give_zero(library: native.Library) -> None:
    for sinks in (False, True):
        assert attend(library, Case([0, 9, 0], key_dim=24, with_sinks=sinks))[::2].count_nonzero() == 0


def test_what_is_not_a_number_shows(library: native.Library) -> None:
    """A row of NaN is answered with NaN, not with something that looks like an answer; its neighbour is not
    touched.
    """
    case = Case([20, 20], key_dim=32)
    case.query[0] = torch.nan
    out = attend(library, case)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_large_scores_do_not_overflow(library: native.Library) -> None:
    case = Case([600], key_dim=64, seed=2)
    case.query *= 300
    assert_close(attend(library, case), case.expected())


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bfloat16", "float16"])
def test_halves_round_as_torch_does(library: native.Library, dtype: torch.dtype) -> None:
    """One token is answered with its own value, whatever that is: every finite half comes back as it was."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    values = torch.where(bits.isfinite(), bits, 0).view(256, 1, 256)
    keys = torch.zeros(256, 1, 8, dtype=dtype)
    plan = native.Attend(library, keys.view(256, 1, 1, 8), keys, values, 1)
    plan.update(torch.arange(256, dtype=torch.int32)[:, None].contiguous(), ints([1] * 256))
    assert torch.equal(plan.run(keys.view(256, 1, 1, 8), keys, values).flatten(), values.flatten())


# ---- writing


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("starts", "expected"), [([0, 6, 2], 0), (None, 90)], ids=["padded", "side by side"])
def test_writes_what_it_is_given(dtype: torch.dtype, starts: list[int] | None, expected: int) -> None:
    """Padding takes no slot; keys come in any strides and dtypes; what is not written stays as it was."""
    paged, plain = (
        Paged(3, 4, starts=starts, expected=expected, dims=(10, 6), kernels=kernels, dtype=dtype)
        for kernels in ("native", "torch")
    )
    shapes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x,
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
        lambda x: x.double(),
    ]
    for new, shape in zip((5, 1, 3, 1, 70), shapes, strict=True):
        made = [layer.step(new) for layer in (paged, plain)]
        for pages in made:
            torch.manual_seed(new)
            keys, values = (shape(torch.randn(3, HEADS, new, dim, dtype=dtype)) for dim in (10, 6))
            pages.ops.write(pages, keys, values)
            assert (pages.batch.strided is None) is (starts is not None)
        for data in ("keys", "values"):
            mine, theirs = (getattr(pages, data)[: 3 * 92 if expected else 4 * 80] for pages in made)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_large_prompts_are_written_by_all_threads() -> None:
    torch.set_num_threads(2)
    try:
        paged = Paged(2, 16, dims=(16, 16), kernels="native")
        pages = paged.step(700)
        for data, expected in ((pages.keys, paged.keys), (pages.values, paged.values)):
            assert torch.equal(pages.ops.gather(data, pages.batch, 0), expected)
    finally:
        torch.set_num_threads(1)


# ---- what stays with torch


def test_what_it_has_no_words_for_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, other dtypes, prompts and queries that somebody learns from are answered by plain torch, and
    right.
    """
    paged = Paged(2, 4, dims=(8, 8), kernels="native")
    paged.step(9)
    pages = paged.step(1)
    monkeypatch.setattr(native.Attend, "run", lambda *arguments, **options: pytest.fail("the op was asked"))
    query, causal = torch.randn(2, 4, 1, 8), Seen(0, causal=True)
    expected = formula(query, paged.keys, paged.values, None, None, None, None)
    torch.testing.assert_close(pages.ops.attend(query, pages, Seen(0, torch.zeros(1, 1, 1, 10))), expected)
    torch.testing.assert_close(
        pages.ops.attend(query.clone().requires_grad_(), pages, causal).detach(), expected
    )
    learned = query.clone().requires_grad_()
    pages.ops.attend(learned, pages, causal).sum().backward()
    assert learned.grad is not None
    assert learned.grad.abs().sum() > 0
    paged.step(FEW + 1)
    paged.assert_attends(paged.step(FEW + 1), 4, None, False)


def test_a_plan_is_made_once_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one step share it, steps keep it, and a table that grows is followed."""
    made: list[object] = []
    original = native.Attend.__init__
    monkeypatch.setattr(
        native.Attend,
        "__init__",
        lambda self, *rest, **options: made.append(self) or original(self, *rest, **options),
    )
    paged = Paged(2, 4, kernels="native")
    for _ in range(40):
        pages = paged.step(1)
        for _layer in range(2):
            paged.assert_attends(pages, 4, None, False)
    assert len(made) == 1


def test_answers_and_steps_have_memory_of_their_own() -> None:
    """An answer stays when the plan runs again, and the lengths of a step are its own."""
    paged = Paged(2, 4, dims=(8, 6), expected=40, kernels="native")
    kept = []
    for _ in range(5):
        pages = paged.step(1)
        query = torch.randn(2, 4, 1, 8)
        out = pages.ops.attend(query, pages, Seen(0, causal=True))
        assert out.is_contiguous()
        assert not out.requires_grad
        expected = formula(query, paged.keys, paged.values, None, None, None, None)
        kept.append((out, expected, pages.batch.lengths(torch.device("cpu")), paged.rows.columns))
    for out, expected, lengths, columns in kept:
        torch.testing.assert_close(out, expected)
        assert lengths.tolist() == [columns] * 2
    assert len({out.data_ptr() for out, *_ in kept}) == len(kept)
    with torch.inference_mode():
        assert pages.ops.attend(query, pages, Seen(0, causal=True)).is_inference()


def test_layers_of_other_heads_in_one_step() -> None:
    """Layers whose key heads differ have the same queries and one table: each is read by its own plan."""
    memory = Memory()
    group = memory.group(Full(), CacheConfig(block_size=4, kernels="native"), 3, 1.0)
    rows = Rows(group)
    kept: dict[int, list[torch.Tensor]] = {1: [], 2: [], 4: []}
    for new in (7, 1, 1):
        batch = None
        for layer, heads in enumerate(kept):
            keys, values = torch.randn(2, 2, heads, new, 8)
            group.place(layer, Layout.of(keys, values))
            batch = batch or rows.extend(2, new)
            made, index = group.store(layer)
            pages = Pages(*made.of_layer[index], batch, made.ops)
            pages.ops.write(pages, keys, values)
            kept[heads].append(torch.stack([keys, values]))
            query, history = torch.randn(2, 4, new, 8), torch.cat(kept[heads], 3)
            out = pages.ops.attend(query, pages, Seen(0, causal=True))
            torch.testing.assert_close(
                out, formula(query, *history, None, None, None, None), atol=1e-5, rtol=1e-5
            )
    rows.free()


# ---- generate()

FAMILIES = ["llama", "qwen2-window", "gemma2", "gpt-oss", "bart"]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


def _model(models: dict[str, Any], name: str) -> Any:
    if name not in models:
        models.clear()
        models[name] = build(BY_NAME[name])
        object.__setattr__(models[name], "assistant", build(BY_NAME[name]))
    return models[name]


CALLS = ["greedy-padded", "sample-padded", "beams-padded", "assisted", "prompt-lookup", "chunks-padded-beams"]
CELLS = [
    (name, mode)
    for name in FAMILIES
    for mode in CALLS
    if not (BY_NAME[name].seq2seq and mode in ("prompt-lookup", "chunks-padded-beams"))
    # Stock's own sliding cache breaks there in some releases.
    and not (mode == "assisted" and name in ("qwen2-window", "gemma2", "gpt-oss"))
]


@pytest.mark.parametrize(("name", "mode"), CELLS, ids=[f"{name}-{mode}" for name, mode in CELLS])
def test_same_as_stock(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, mode: str) -> None:
    """The tokens of stock, read by the op from its pages."""
    model = _model(models, name)
    setting = model.config._attn_implementation
    ids = torch.randint(5, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(len(name)))
    arguments = {"input_ids": ids, **MODES[mode](model, ids)}
    if "attention_mask" not in arguments:
        arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    answers = []
    asked = []
    run = native.Attend.run
    monkeypatch.setattr(native.Attend, "run", lambda *rest: asked.append(1) or run(*rest))
    for options in (
        {},
        {"cache_implementation": "paged", "cache_config": {"block_size": 4, "kernels": "native"}},
    ):
        torch.manual_seed(0)
        answers.append(model.generate(**copy.copy(arguments), **options))
    assert_equal(*answers)
    assert asked
    answers.clear()
    assert_clean(model, setting)


# ---- where it runs


def test_auto_takes_what_is_built(
    llama: Any, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "auto" is the op where somebody built it, and builds nothing."""
    call = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 3,
        "cache_implementation": "paged",
        "return_dict_in_generate": True,
    }
    native.build()
    for folder, expected in ((None, NativeOps), (tmp_path, Ops)):
        if folder is not None:
            monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        cache = llama.generate(ids, **call).past_key_values
        (rows,) = cache.sequences.rows.values()
        assert type(rows.group.store(0)[0].ops) is expected
        del cache, rows
        hf_paged.release(llama)
    assert not list(tmp_path.iterdir())


def test_tensors_elsewhere_are_refused(library: native.Library) -> None:
    """An address on a device means nothing to the op."""
    keys = torch.empty(4, 1, 8, device="meta")
    with pytest.raises(ValueError, match="Invalid device of keys or values: expected cpu, got meta"):
        native.Attend(library, torch.empty(1, 1, 1, 8), keys, keys, 4)


def test_a_default_dtype_of_two_bytes(library: native.Library) -> None:
    """The buffers that the op writes floats to are of floats, on the CPU, whatever torch's defaults are: else
    it writes over others' memory.
    """
    keys, before = torch.zeros(640, 1, 8), torch.get_default_dtype()
    query = torch.zeros(1, 1, 1, 8)
    torch.set_default_dtype(BF16)
    try:
        with torch.device("meta"):
            plan = native.Attend(library, query, keys, keys, 16)
            plan.update(ints([list(range(40))]), ints([600]))
            assert (plan._scratch.dtype, plan._scratch.device.type) == (FP32, "cpu")
            assert plan._scratch.numel()
            assert plan.run(query, keys, keys).device.type == "cpu"
    finally:
        torch.set_default_dtype(before)
