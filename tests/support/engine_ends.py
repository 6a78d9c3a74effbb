"""Shared by the tests: ENDS."""

from __future__ import annotations

ENDS = [2, 9, 30, 41, 60, 77]


"""Ends of sequence that come soon."""
