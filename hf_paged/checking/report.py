"""Results of a comparison of two computations, as values that print well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["identical", "rounding", "unknown", "mismatch"]
ORDER: tuple[Verdict, ...] = ("identical", "rounding", "unknown", "mismatch")
"""From good to bad."""
MEANING: dict[Verdict, str] = {
    "identical": "the same tokens",
    "rounding": "the same up to rounding",
    "unknown": "different, and not comparable",
    "mismatch": "DIFFERENT beyond rounding",
}


def worst(verdicts: list[Verdict]) -> Verdict:
    """The verdict on all of them together."""
    return max(verdicts, key=ORDER.index, default="identical")


@dataclass(frozen=True)
class RowMismatch:
    """One row whose answers differ, and how far apart the two tokens are at the first difference.

    Distances are relative to the row's largest logit. None: not comparable there (`reason` says why).
    """

    row: int
    step: int | None
    """How many tokens of the answer are the same before the first difference."""
    stock: int | None
    paged: int | None
    """The token that each of the two chose."""
    gap: float | None
    """By how much one token leads the other in stock's logits after the common prefix, processors applied."""
    apart: float | None
    """The largest difference between stock's and the paged logits after the common prefix."""
    verdict: Verdict
    reason: str

    def __str__(self) -> str:
        where = (
            ""
            if self.step is None
            else f" at token {self.step}: {self.stock} (stock) or {self.paged} (paged)"
        )
        return f"row {self.row}{where}; {self.reason}"


@dataclass(frozen=True)
class LogprobGap:
    """How far a sampler's log-probabilities of some tokens are from those of a trainer's forward on the same
    tokens.

    The importance ratio of a token is exp(trainer - sampler).
    """

    tokens: int
    largest: float
    mean: float
    """Of the absolute differences."""
    lowest_ratio: float
    highest_ratio: float
    outside: float
    """The share of tokens whose ratio is outside [0.9, 1.1]."""

    def __str__(self) -> str:
        return (
            f"log-probabilities of {self.tokens:,} tokens: |difference| mean {self.mean:.1e}, largest "
            f"{self.largest:.1e}; ratio {self.lowest_ratio:.4f} to {self.highest_ratio:.4f}, "
            f"{self.outside:.2%} outside [0.9, 1.1]"
        )


@dataclass(frozen=True)
class Mismatch:
    """The result of `hf_paged.check_mismatch`. `ok`: all that differs is explained by rounding in the model's
    dtype.
    """

    model: str
    dtype: str
    mode: Literal["greedy", "samples", "beams", "beam samples", "log-probabilities"]
    rows: int
    """Rows of the answer."""
    tokens: int
    """Tokens that were compared: in each row all up to the first difference."""
    rounding: float
    """How far rounding moves a logit, relative to the largest one."""
    measured: bool
    """True if `rounding` was measured on this model; else it is what the dtype lets expect."""
    different: tuple[RowMismatch, ...]
    """Rows whose answers are not the same."""
    logprobs: LogprobGap | None = None
    logprobs_verdict: Verdict = "identical"

    @property
    def verdict(self) -> Verdict:
        """The worst verdict on any row."""
        return worst([*(row.verdict for row in self.different), self.logprobs_verdict])

    @property
    def identical(self) -> bool:
        """True if all tokens are the same."""
        return self.verdict == "identical"

    @property
    def ok(self) -> bool:
        """True if nothing differs beyond rounding."""
        return self.verdict in ("identical", "rounding")

    def __str__(self) -> str:
        source = "measured on this model" if self.measured else f"expected in {self.dtype}"
        lines = [
            f"{self.model}, {self.dtype}, {self.mode}: {MEANING[self.verdict]}",
            f"compared  {self.rows:,} rows, {self.tokens:,} tokens; {len(self.different):,} rows differ",
            f"rounding  {self.rounding:.1e} of the largest logit ({source})",
        ]
        lines += [f"          {row}" for row in self.different]
        if self.logprobs is not None:
            lines.append(str(self.logprobs))
        return "\n".join(lines)
