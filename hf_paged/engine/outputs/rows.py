"""Outputs as rows of a JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from .output import FinishReason, Output, SequenceOutput, TokenLogprob

OF_A_DEVICE = ("AcceleratorError", "CUDA error", "Triton Error")
"""Parts of errors behind which a process can compute nothing more on its device."""


def row_of(output: Output) -> dict[str, Any]:
    """An output as plain values: its text and finish_reason, its usage, and what else was asked for.

    One without a complete answer has its error, and no text.
    """
    error = error_of(output)
    if error is not None:
        return {"error": error, "finish_reason": output.finish_reason}
    first = output.sequences[0]
    row: dict[str, Any] = {"text": first.text, "finish_reason": first.finish_reason}
    if len(output.sequences) > 1:
        row["sequences"] = [_sequence(each) for each in output.sequences]
    else:
        row |= _beside_text(first)
    row["usage"] = usage_of(output)
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    return row


def error_of(output: Output) -> str | None:
    """Why an output is no complete answer, if it is none."""
    if output.error is not None:
        return described(output.error)
    if output.finish_reason == "abort":
        return "the request was cancelled before its end"
    return None


def described(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {error}"


def is_of_device(error: str) -> bool:
    """True if an error is one of the device, which every later request would meet, too."""
    return any(each in error for each in OF_A_DEVICE)


def failed_output(error: Exception, reason: FinishReason = "refused") -> Output:
    """The output of a request that was never made."""
    return Output([], [SequenceOutput([], None, reason)], error=error)


def usage_of(output: Output) -> dict[str, int]:
    """The tokens of a request: of its prompt, of these the cached ones, and of its answers."""
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.cached_tokens,
        "completion_tokens": sum(len(each.token_ids) for each in output.sequences),
    }


def _sequence(sequence: SequenceOutput) -> dict[str, Any]:
    row = {"text": sequence.text, "finish_reason": sequence.finish_reason}
    return row | _beside_text(sequence)


def _beside_text(sequence: SequenceOutput) -> dict[str, Any]:
    """The rest of a sequence: its tokens if it has no text or they have logprobs, its routing, its score."""
    row: dict[str, Any] = {}
    if sequence.text is None or sequence.logprobs is not None:
        row["token_ids"] = sequence.token_ids
    if sequence.logprobs is not None:
        row["logprobs"] = _logprobs(sequence.logprobs)
    if sequence.routing is not None:
        row["routing"] = sequence.routing.tolist()
    if sequence.score is not None:
        row["score"] = _number(sequence.score)
    return row


def _logprobs(notes: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    return [None if note is None else _logprob(note) for note in notes]


def _logprob(note: TokenLogprob) -> dict[str, Any]:
    found: dict[str, Any] = {"token_id": note.token_id, "logprob": _number(note.logprob)}
    if note.top_logprobs:
        found["top_logprobs"] = [[token, _number(logprob)] for token, logprob in note.top_logprobs]
    return found


def _number(value: float) -> float | None:
    """A number that JSON has; it has no infinity."""
    return float(value) if isfinite(value) else None
