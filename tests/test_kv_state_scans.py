"""Several tokens through Mamba's selective scan, in pieces, as transformers computes the whole."""

from __future__ import annotations

import pytest
import torch
from state_step_cases import jamba, noise

from hf_paged.kv.state_scans import SCANNED, scan_tokens
from hf_paged.kv.state_steps import times_of

ROWS, CHANNELS, DIM = 2, 6, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", [1, 5, SCANNED + 3])
def test_pieces_are_the_whole(cut: int, dtype: torch.dtype) -> None:
    tokens = SCANNED + 9
    x, dt = noise(2, ROWS, tokens, CHANNELS, dtype=dtype)
    b, c = noise(2, ROWS, tokens, DIM, dtype=dtype, seed=1)
    rates = -noise(CHANNELS, DIM, seed=2).exp()
    bias = noise(CHANNELS, seed=3)
    given = [each.transpose(1, 2) for each in (x, dt, b, c)]
    wanted, last = jamba.mamba_selective_scan(
        *given[:2], rates, *given[2:], delta_bias=bias, delta_softplus=True, return_last_state=True
    )
    times = times_of(dt, bias, softplus=True)
    found, states = [], None
    for part in (slice(cut), slice(cut, None)):
        out, states = scan_tokens(x[:, part], times[:, part], rates, b[:, part], c[:, part], states)
        found.append(out)
    torch.testing.assert_close(torch.cat(found, 1).transpose(1, 2), wanted, rtol=0, atol=0)
    torch.testing.assert_close(states, last, rtol=0, atol=0)


def test_tokens_that_take_no_time_change_nothing() -> None:
    past = noise(1, CHANNELS, DIM)
    x, b = noise(1, 3, CHANNELS, seed=1), noise(1, 3, DIM, seed=2)
    _, states = scan_tokens(x, torch.zeros_like(x), -noise(CHANNELS, DIM).exp(), b, b, past)
    assert torch.equal(states, past)
