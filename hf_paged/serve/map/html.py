"""The map's page: one HTML file, for the server and, with a trace in it, to open offline."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
from importlib import resources

from ...trace import encode, encode_header, read


def page(trace: str | os.PathLike[str] | None = None, partial: bool = False, needs_key: bool = False) -> str:
    """The page, whole in itself: style, scripts, and the records of a trace file, packed, if one is given.

    partial: take a trace that breaks off. needs_key: have the page ask for a key before it asks the server.
    """
    files = resources.files(__package__) / "page"
    style = (files / "map.css").read_text(encoding="utf-8")
    scripts = [
        (files / name).read_text(encoding="utf-8")
        for name in ("state.js", "drawing.js", "panels.js", "map.js")
    ]
    script = "\n".join(scripts)
    text = (files / "map.html").read_text(encoding="utf-8")
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src {_source(style)}; script-src {_source(script)}"
    )
    for mark, value in (
        ("POLICY", html.escape(policy)),
        ("KEY", "needed" if needs_key else ""),
        ("STYLE", style),
        ("SCRIPT", script),
        ("TRACE", "" if trace is None else _packed(trace, partial)),
    ):
        text = text.replace(f"<!--{mark}-->", value, 1).replace(f"%{mark}%", value, 1)
    return text


def _source(text: str) -> str:
    """A policy's name for an inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(path: str | os.PathLike[str], partial: bool) -> str:
    """The records of a trace, in base64."""
    trace = read(path, partial)
    lines = [json.dumps(each, separators=(",", ":")) for each in map(encode, trace.steps)]
    text = "\n".join([json.dumps(encode_header(trace)), *lines])
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
