"""The source code of modules' forwards: they are known by it, not by their names."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

STANDS_FOR = "_hf_paged_stands_for"
"""Of a function that a capture has put in the place of another: that other."""


def reads_like(function: Any, known: Any) -> bool:
    """True if two functions have the same code, names, annotations and comments of the signature aside."""
    # Another thread's capture may have put itself in their place.
    function, known = (getattr(one, STANDS_FOR, one) for one in (function, known))
    return function is known or (
        callable(function) and _code(function) is not None and _code(function) == _code(known)
    )


@cache
def _code(function: Callable[..., Any]) -> str | None:
    definition = definition_of(function)
    if definition is None:
        return None
    body = [
        line
        for line in definition.body
        if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
    ]
    names = [argument.arg for argument in definition.args.args]
    defaults = [ast.dump(default) for default in definition.args.defaults]
    return ast.dump(ast.Module(body, [])) + repr(names) + repr(defaults)


def definition_of(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """A function's source, parsed; None if there is none, or if other code than transformers' wraps it."""
    try:
        # What transformers itself wraps around a forward (kernels from a hub, renamed arguments) changes
        # nothing; others may.
        while hasattr(function, "__wrapped__") and function.__globals__["__name__"].startswith(
            "transformers."
        ):
            function = function.__wrapped__
        if hasattr(function, "__wrapped__"):
            return None
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, AttributeError):
        return None
    definition = tree.body[0] if len(tree.body) == 1 else None
    return definition if isinstance(definition, ast.FunctionDef) else None
