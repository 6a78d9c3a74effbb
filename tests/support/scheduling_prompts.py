"""Prompts of the scheduler's tests."""

from __future__ import annotations


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return (first, *range(2, length + 1))


def squares(count: int, first: int = 1) -> tuple[int, ...]:
    """Tokens that hardly repeat; another first, other tokens."""
    return tuple((first * 31 + i * i) % 50 for i in range(count))
