"""Sequences in one row of tokens go through a convolution or a recurrence as each does alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hf_paged.kv.state_spans import StateSpans, rounded

CPU = torch.device("cpu")
COUNTS = [5, 1, 2, 1, 9]
READ = [3, 1, -1, -1, 0]
WRITTEN = [4, 1, 6, 2, -1]
TAPS, CHANNELS = 4, 6


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def spans() -> StateSpans:
    return StateSpans(COUNTS, READ, WRITTEN)


def test_each_span_is_convolved_behind_its_own_inputs(spans: StateSpans) -> None:
    weight = noise(CHANNELS, 1, TAPS, seed=1)
    x = noise(1, CHANNELS, sum(COUNTS))
    states = noise(8, CHANNELS, TAPS, seed=2)
    states[[2, 4, 5, 6]] = float("nan")
    before = states.clone()

    def convolve(row: torch.Tensor) -> torch.Tensor:
        return F.conv1d(F.pad(row, (TAPS - 1, 0)), weight, groups=CHANNELS)

    found = spans.convolve(convolve, x, states)
    begin = 0
    for count, read, written in zip(COUNTS, READ, WRITTEN, strict=True):
        past = torch.zeros(CHANNELS, TAPS) if read < 0 else before[read]
        inputs = torch.cat([past, x[0, :, begin : begin + count]], 1)
        wanted = convolve(inputs[None])[..., TAPS:]
        torch.testing.assert_close(found[..., begin : begin + count], wanted)
        if written >= 0:
            assert torch.equal(states[written], inputs[:, -TAPS:])
        begin += count
    assert torch.equal(states[[0, 3]], before[[0, 3]])
    assert states[5].isnan().all()


def test_spans_of_one_length_are_rows_beside_each_other(spans: StateSpans) -> None:
    x = noise(1, sum(COUNTS), 3)
    out = torch.zeros(sum(COUNTS), 3)
    groups = spans.rows(chunk=8, least=2, device=CPU)
    assert [(rows.rows, rows.length, rows.has_past) for rows in groups] == [
        (1, 1, True), (2, 2, False), (1, 5, True), (1, 9, True),
    ]  # fmt: skip
    for rows in groups:
        taken = rows.take(x)
        assert taken.shape == (rows.rows, rows.length, 3)
        rows.put(out, taken)
    assert torch.equal(out, x[0])
    _, pair, *_ = groups
    assert pair.source.tolist() == [-1, -1]
    assert pair.target.tolist() == [6, 2]
    assert not pair.ended(pair.take(x))[1, 1].any()
    assert pair.ended(pair.take(x))[:, 0].all()


def test_rows_are_at_most_a_quarter_longer_than_what_is_in_them() -> None:
    for chunk in (64, 256):
        assert [rounded(count, chunk, 16) for count in (1, 16, 17, 33, chunk - 1)] == [16, 16, 32, 64, chunk]
        for count in range(chunk + 1, 40 * chunk, 7):
            length = rounded(count, chunk, 16)
            assert length % chunk == 0
            assert count <= length <= (count + chunk) * 5 / 4
    assert rounded(3, 64, 64) == 64


def test_index_tensors_are_made_once(spans: StateSpans) -> None:
    assert spans.rows(8, 2, CPU) is spans.rows(8, 2, CPU)
    assert spans.slots(CPU)[0] is spans.slots(CPU)[0]
