"""The command `hf-paged trace`: the map of the blocks of a trace file, in a browser."""

from __future__ import annotations

import argparse
import sys
import tempfile
import webbrowser
from pathlib import Path

from ..serve.map.html import page


def run(given: argparse.Namespace) -> int:
    """Write the page, and open it unless it has a path of its own. The answer is the exit code."""
    if not Path(given.file).exists():
        raise ValueError(f"there is no file {given.file}; give one that engine.trace() wrote")
    if given.html and Path(given.html).exists() and Path(given.html).samefile(given.file):
        raise ValueError(f"--html {given.html} is the trace itself; give the page another path")
    found = page(given.file, given.partial)
    if given.html:
        Path(given.html).write_text(found, encoding="utf-8")
        return 0
    with tempfile.NamedTemporaryFile("w", suffix=".html", delete=False, encoding="utf-8") as file:
        file.write(found)
    url = Path(file.name).as_uri()
    print(url)
    if not webbrowser.open(url):
        print("no browser was found; open the file above, or write it with --html", file=sys.stderr)
    return 0
