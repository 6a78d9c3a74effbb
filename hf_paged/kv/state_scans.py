"""Several tokens of rows through Mamba's selective scan, behind states; transformers' has none there."""

from __future__ import annotations

import torch

SCANNED = 64
"""Tokens of a scan whose decays and inputs are at hand together."""


def scan_tokens(
    x: torch.Tensor,
    times: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    past: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Several tokens of Mamba's selective scan behind states `past` [rows, channels, N]: the answers
    [rows, tokens, channels], without what skips the scan, and the states behind them. Token by token, as
    transformers computes a whole prompt.

    x and times [rows, tokens, channels], A [channels, N], B and C [rows, tokens, N]. A token that takes no
    time leaves the state as it is.
    """
    rows, tokens, channels = x.shape
    out = x.new_empty(rows, tokens, channels)
    state = x.new_zeros(rows, channels, A.shape[1]) if past is None else past
    for begin in range(0, tokens, SCANNED):
        part = slice(begin, begin + SCANNED)
        t = times[:, part, :, None]
        decays = torch.exp(A * t)
        added = t * B[:, part, None].float() * x[:, part, :, None].float()
        for i in range(decays.shape[1]):
            state = decays[:, i] * state + added[:, i]
            out[:, begin + i] = (state.to(x.dtype) @ C[:, begin + i, :, None])[..., 0]
    return out, state
