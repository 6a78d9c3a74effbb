"""The code that a request brings along (processors, criteria, a tokenizer), and what it raises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OwnCode(Exception):
    """An exception of a request's own code that is no Exception: asyncio.CancelledError, SystemExit,
    KeyboardInterrupt.

    Wrapped in an Exception it is handled like every other error of a request: it ends this request and no
    other.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


def own_code(function: Callable[P, T]) -> Callable[P, T]:
    """A function that runs a request's own code: whatever that raises is an Exception."""

    @functools.wraps(function)
    def contained(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            raise OwnCode(error) from error

    return contained


def raised_by(error: BaseException) -> BaseException:
    """Own code's error, as it was raised."""
    return error.error if isinstance(error, OwnCode) else error


def reaches_driver(error: BaseException | None) -> bool:
    """True if an error of a request's own code is meant for the process, too, as asyncio's tasks have it."""
    return isinstance(error, (KeyboardInterrupt, SystemExit))
