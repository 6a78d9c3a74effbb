"""Shared by the tests: prompt."""

from __future__ import annotations


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return (first, *range(2, length + 1))
