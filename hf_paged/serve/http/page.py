"""Pages of the server: HTML files that are whole in themselves, under a policy that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable


def inlined(
    folder: Traversable, name: str, scripts: Sequence[str], marks: Mapping[str, str], style: str, script: str
) -> str:
    """The page `name` of a folder, with its style sheet and some scripts.

    marks: values in the places of `%MARK%` and `<!--MARK-->`. style, script: come before the folder's own.
    """

    def text(file: str) -> str:
        return (folder / file).read_text(encoding="utf-8")

    style = f"{style}\n{text(f'{name}.css')}"
    script = "\n".join([script, *map(text, scripts)])
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src {_source(style)}; script-src {_source(script)}"
    )
    found = text(f"{name}.html")
    for mark, value in {"POLICY": html.escape(policy), "STYLE": style, "SCRIPT": script, **marks}.items():
        found = found.replace(f"<!--{mark}-->", value, 1).replace(f"%{mark}%", value, 1)
    return found


def _source(text: str) -> str:
    """A policy's name for an inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
