"""TRL's fused log-probabilities in `batch_invariant()`: the bits of `log_softmax(logits / temperature)`."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from typing import Any

import torch
from torch.nn.functional import linear

from ...kv.reference import invariant

ROWS = 256
"""Tokens whose logits are held at once."""
ARGUMENTS = "hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs"
"""The known arguments of TRL's function, in this order."""


def answer_fused_logprobs(refusal: type[Exception]) -> None:
    """Replace the log-probabilities of TRL's function behind `model(..., fused_lm_head=True)` in the mode,
    once it is imported. Its other outputs and its gradients stay. refusal: raised where the model's bits are
    unknown.
    """
    fused = getattr(sys.modules.get("trl.kernels.chunked_logprob"), "ChunkedLogProbFunction", None)
    if fused is None or hasattr(fused.forward, "__wrapped__"):
        return
    stock = fused.forward
    names = list(inspect.signature(stock).parameters)[1:]

    @functools.wraps(stock)
    def forward(ctx: Any, *given: Any) -> Any:
        answer = stock(ctx, *given)
        if not invariant.get():
            return answer
        asked = dict(zip(names, given, strict=False))
        why = f"arguments {names}" if names != ARGUMENTS.split() else _why_unknown(asked)
        if why is not None:
            raise refusal(
                f"batch_invariant() does not support fused log-probabilities with {why}; compute "
                "log_softmax(logits / temperature) of the model's logits"
            )
        return (_logprobs(asked), *answer[1:])

    fused.forward = staticmethod(forward)


def _why_unknown(asked: dict[str, Any]) -> str | None:
    """Which of the model's roundings after its head TRL's function cannot know."""
    scale = asked.get("logit_scale", 1.0)
    if math.frexp(scale)[0] != 0.5:  # models multiply by it, or divide by its inverse
        return f"a logit scale of {scale}, which is no power of two"
    dtype = linear(asked["hidden"][:0], asked["weight"][:0].to(asked["hidden"].dtype)).dtype
    if asked.get("final_logit_softcapping") is not None and dtype != torch.float32:
        return f"a cap of {dtype} logits, unless cast_lm_head_to_fp32=True"  # some models cap them in float32
    return None


def _logprobs(asked: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities [tokens] of targets, as models and samplers compute them."""
    hidden, bias, cap = asked["hidden"], asked["bias"], asked.get("final_logit_softcapping")
    head = asked["weight"].to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    found = []
    for rows, targets in zip(hidden.split(ROWS), asked["targets"].split(ROWS), strict=True):
        logits = linear(rows, *head) * asked.get("logit_scale", 1.0)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        scores = (logits.float() / asked["temperature"]).log_softmax(-1)
        found.append(scores.gather(1, targets[:, None])[:, 0])
    return torch.cat(found)
