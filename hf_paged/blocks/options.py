"""Types of the options that users give: True is no number, and 1 is no flag."""

from __future__ import annotations

from typing import Any


def is_number(value: object, kind: Any = (int, float)) -> bool:
    """True if a value is a number of a kind."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_number(name: str, value: object, what: str = "a number") -> None:
    """Raise unless an option is a number. what: the word for it in the error."""
    if not is_number(value):
        raise TypeError(f"{name} must be {what}, got {value!r}")


def check_int(name: str, value: object) -> None:
    """Raise unless an option is an int."""
    if not is_number(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise unless an option is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
