"""Shared by the tests: assert_own_logprobs."""

from __future__ import annotations

from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


NOISE = {torch.float32: 5e-4, torch.bfloat16: 2**-4}


def one_forward(model: Any, prompt: list[int], said: list[int]) -> torch.Tensor:
    """The logits [tokens, vocabulary] from which each token that was said follows."""
    with torch.no_grad():
        logits: torch.Tensor = (
            model(torch.tensor([prompt + said], device=DEVICE)).logits[0, -len(said) - 1 : -1].float()
        )
    return logits


def bound_of(logits: torch.Tensor, dtype: torch.dtype) -> float:
    return NOISE[dtype] * max(1.0, float(logits.abs().max()))


def assert_own_logprobs(model: Any, output: Any) -> None:
    """The logprobs of its tokens are those of one forward over all of them."""
    assert output.error is None
    for sequence in output.sequences:
        logits = one_forward(model, output.prompt_token_ids, sequence.token_ids)
        bound = bound_of(logits, model.dtype)
        right = logits.log_softmax(-1)
        found = torch.tensor([note.logprob for note in sequence.logprobs], device=DEVICE)
        chosen = right.gather(1, torch.tensor(sequence.token_ids, device=DEVICE)[:, None])[:, 0]
        assert float((found - chosen).abs().max()) <= bound
        best = torch.tensor([note.top_logprobs[0][1] for note in sequence.logprobs], device=DEVICE)
        assert float((best - right.amax(-1)).abs().max()) <= bound
