"""Comparison of two computations of a model: their tokens and log-probabilities, and why they differ."""

from .mismatch import check_mismatch
from .report import LogprobGap, Mismatch, RowMismatch

__all__ = ["LogprobGap", "Mismatch", "RowMismatch", "check_mismatch"]
