"""The map's page: one HTML file, for the server and, with a trace in it, to open offline."""

from __future__ import annotations

import base64
import gzip
import json
import os
from importlib import resources

from ...trace import encode, encode_header, read
from ...trace.picture import colours, signs
from ..http.page import inlined

SCRIPTS = ("state.js", "drawing.js", "panels.js", "map.js")


def page(trace: str | os.PathLike[str] | None = None, partial: bool = False, needs_key: bool = False) -> str:
    """The page, whole in itself: style, scripts, and the records of a trace file, packed, if one is given.

    partial: take a trace that breaks off. needs_key: have the page ask for a key before it asks the server.
    """
    script = f"const DRAWING = {json.dumps(signs())};"
    marks = {
        "KEY": "needed" if needs_key else "",
        "TRACE": "" if trace is None else _packed(trace, partial),
    }
    folder = resources.files(__package__) / "page"
    return inlined(folder, "map", SCRIPTS, marks, colours(), script)


def _packed(path: str | os.PathLike[str], partial: bool) -> str:
    """The records of a trace, in base64."""
    trace = read(path, partial)
    lines = [json.dumps(each, separators=(",", ":")) for each in map(encode, trace.steps)]
    text = "\n".join([json.dumps(encode_header(trace)), *lines])
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
