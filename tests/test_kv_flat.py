"""Many sequences in one row of tokens: each one's attention against the float64 formula, over pools that are
NaN where nobody wrote.
"""

from __future__ import annotations

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import GPU, load
from paged_layer import HEADS, formula

import hf_paged_native as native
from hf_paged.blocks import BlockPool, BlockTable, append
from hf_paged.kv import FlatBatch, Layout, Ops, Pages, Seen, Store, TritonOps
from hf_paged.kv.ops import NativeOps

DIMS = (8, 6)


class Flat:
    """Sequences over one layer's pages, beside their keys and values as plain tensors."""

    def __init__(
        self, block_size: int, window: int | None, ops: Ops | None = None, device: str = "cpu"
    ) -> None:
        self.pool, self.window, self.device = BlockPool(64, block_size), window, device
        self.store = Store(
            Layout(torch.device(device), torch.float32, HEADS, *DIMS), 1, 64, block_size, "torch"
        )
        self.ops = ops or self.store.ops
        self.sequences: list[tuple[BlockTable, list[torch.Tensor]]] = []

    def new_sequence(self) -> int:
        empty = [torch.empty(1, HEADS, 0, dim, device=self.device) for dim in DIMS]
        self.sequences.append((BlockTable(self.pool), empty))
        return len(self.sequences) - 1

    def fork(self, number: int) -> None:
        table, known = self.sequences[number]
        self.sequences.append((table.fork(), list(known)))

    def step(self, counts: dict[int, int]) -> tuple[Pages, tuple[torch.Tensor, torch.Tensor]]:
        tables = [self.sequences[i][0] for i in counts]
        if self.window is not None:
            for table in tables:
                table.release_before(table.length - self.window + 1)
        copies = append(tables, list(counts.values()))
        if copies:
            self.store.copy(copies)
        new = tuple(torch.randn(1, HEADS, sum(counts.values()), dim, device=self.device) for dim in DIMS)
        begin = 0
        for i, count in counts.items():
            known = self.sequences[i][1]
            for which in range(2):
                known[which] = torch.cat([known[which], new[which][:, :, begin : begin + count]], 2)
            begin += count
        keys, values = self.store.of_layer[0]
        pages = Pages(keys, values, FlatBatch(tables, list(counts.values())), self.ops)
        pages.ops.write(pages, *new)
        self.pool.check()
        return pages, new

    def assert_attends(
        self,
        counts: dict[int, int],
        query_heads: int,
        softcap: float | None,
        sinks: bool,
        keep_new: bool = True,
        tolerance: float = 1e-5,
    ) -> None:
        pages, new = self.step(counts)
        query = torch.randn(1, query_heads, sum(counts.values()), DIMS[0], device=self.device)
        sink = torch.randn(query_heads, device=self.device) if sinks else None
        seen = Seen(pages.batch.first_visible(self.window), causal=True, window=self.window)
        out = pages.ops.attend(query, pages, seen, new if keep_new else None, softcap=softcap, sinks=sink)
        begin = 0
        for i, count in counts.items():
            keys, values = self.sequences[i][1]
            expected = formula(
                query[:, :, begin : begin + count], keys, values, self.window, None, softcap, sink
            )
            torch.testing.assert_close(
                out[:, begin : begin + count], expected, atol=tolerance, rtol=tolerance
            )
            begin += count


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("apart", [False, True], ids=["side by side", "apart"])
def test_one_sequence_alone(apart: bool, window: int | None) -> None:
    """C3: its blocks are read in place where they follow each other, and gathered where they do not."""
    flat = Flat(4, window)
    one = flat.new_sequence()
    flat.assert_attends({one: 6}, 4, None, False)
    if apart:
        other = flat.new_sequence()
        flat.assert_attends({other: 6}, 4, None, False)
    for _ in range(9):
        flat.assert_attends({one: 1}, 4, None, False)
    blocks = flat.sequences[one][0].blocks
    assert (blocks == list(range(blocks[0], blocks[0] + len(blocks)))) == (not apart or window is not None)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_attention_of_each_is_its_own(data: st.DataObject) -> None:
    """C3, C10, C14: prompts, chunks and decoding in one row, forks among them, over any block size and
    window.
    """
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    flat = Flat(data.draw(st.sampled_from([1, 2, 4, 16])), data.draw(st.sampled_from([None, None, 1, 3, 7])))
    for _ in range(data.draw(st.integers(1, 5))):
        if not flat.sequences or (len(flat.sequences) < 5 and data.draw(st.booleans())):
            flat.new_sequence()
        elif len(flat.sequences) < 6 and data.draw(st.booleans()):
            flat.fork(data.draw(st.integers(0, len(flat.sequences) - 1)))
        rows = data.draw(st.permutations(range(len(flat.sequences))))
        counts = {
            i: data.draw(st.sampled_from([1, 1, 1, 2, 5]))
            for i in rows[: data.draw(st.integers(1, len(rows)))]
        }
        flat.assert_attends(
            counts,
            data.draw(st.sampled_from([2, 4, 6])),
            data.draw(st.sampled_from([None, 3.0])),
            data.draw(st.booleans()),
            data.draw(st.booleans()),
        )


@pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler to build the op with")
@pytest.mark.parametrize("window", [None, 5])
def test_the_c_op_reads_a_flat_row_of_decodes(window: int | None) -> None:
    """Rows in any order and number; prompts among them are torch's."""
    torch.manual_seed(0)
    flat = Flat(4, window, NativeOps(native.load(native.build())))
    for _ in range(3):
        flat.new_sequence()
    flat.assert_attends({0: 5, 1: 3, 2: 9}, 4, None, False)
    for counts in ({0: 1, 1: 1, 2: 1}, {2: 1, 0: 1}, {1: 1}, {1: 1, 0: 6}, {0: 1, 2: 1, 1: 1}):
        flat.assert_attends(counts, 4, 3.0, True)
        flat.assert_attends(counts, 2, None, False)


@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_reads_a_flat_row(window: int | None) -> None:
    """The same through the Triton kernel: on a GPU compiled, else in the interpreter."""
    torch.manual_seed(0)
    ops = TritonOps(load())
    flat = Flat(4, window, ops, "cuda" if GPU else "cpu")
    for _ in range(3):
        flat.new_sequence()
    flat.assert_attends({0: 5, 1: 3}, 4, None, False, tolerance=1e-4)
    flat.assert_attends({1: 1, 2: 6, 0: 2}, 4, 3.0, True, tolerance=1e-4)
    flat.assert_attends({0: 1, 1: 1, 2: 1}, 4, None, False, tolerance=1e-4)
