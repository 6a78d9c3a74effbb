"""Parameters as a list: an extension of griffe, by which mkdocstrings reads the package.

A docstring explains its parameters in its prose, each behind its name: `seed: of its draws.` The site shows
a list of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import griffe


class Parameters(griffe.Extension):
    """Makes a list of what docstrings say of parameters and fields."""

    def on_function(self, *, func: Any, **_: Any) -> None:
        """List the parameters of a function."""
        _list(func, [each.name for each in func.parameters])

    def on_class(self, *, cls: Any, **_: Any) -> None:
        """List the fields of a class."""
        _list(
            cls, [name for name, member in cls.members.items() if not member.is_alias and member.is_attribute]
        )


def _list(shown: Any, names: Iterable[str]) -> None:
    if shown.docstring is not None:
        shown.docstring.value = with_list(shown.docstring.value, names)


def with_list(text: str, names: Iterable[str]) -> str:
    """A docstring with a list of what it says of these names. What comes behind a blank line is prose again."""
    known = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    if not known:
        return text
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        first, *found = re.split(rf"(?:^|(?<=[.;]))\s*\b((?:(?:{known})(?:, )?)+): ", paragraph)
        items = [
            f"- **`{name.strip(', ')}`**: {' '.join(said.split())}"
            for name, said in zip(found[::2], found[1::2], strict=True)
        ]
        paragraphs += [part for part in (first.rstrip(), "\n".join(items)) if part]
    return "\n\n".join(paragraphs)
