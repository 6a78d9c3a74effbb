"""Pages for those who come from another server: flags, keywords, methods and routes that they name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hf_paged
from hf_paged.engine import EngineOptions, RequestKeywords
from hf_paged_cli.other_servers import ABSENT
from hf_paged_cli.parser import parser

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ["from_vllm.md", "from_tgi.md", "from_transformers_serve.md"]
FLAG = re.compile(r"`(--[a-z][\w-]*)`")
SERVE = set(parser()[1]["serve"]._option_string_actions)


def rows(page: str) -> list[tuple[str, str, str]]:
    """The rows of the table of flags: theirs, ours, and what differs."""
    part = (DOCS / page).read_text().split("\n## Flags\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| (.*?) \| ?(.*?) \| ?(.*?) \|$", part, re.M)
    assert len(found) > 15
    return [row for row in found if row[0].startswith(("`", "the model"))]


@pytest.mark.parametrize("page", PAGES)
def test_flags_are_there(page: str) -> None:
    """Ours are flags of `hf-paged serve`. Theirs have the advice of the command line, and its flags are named;
    those that both have are said to be ours.
    """
    text = (DOCS / page).read_text()
    for theirs, ours, notes in rows(page):
        assert set(FLAG.findall(ours + notes)) <= SERVE, ours + notes
        advised: set[str] = set()
        for flag in FLAG.findall(theirs):
            advice = ABSENT.get(flag)
            if advice is None:
                assert flag in SERVE, f"{page}: {flag} has neither an advice nor a flag of its name"
                assert flag in FLAG.findall(ours), f"{page}: {flag} is a flag here, too"
            else:
                advised |= set(re.findall(r"--[a-z][\w-]*", advice))
        assert advised <= set(FLAG.findall(ours + notes)), f"{page}: {theirs} has the advice {advised}"
    commands = re.findall(r"^\+ hf-paged serve .*$", text, re.M)
    assert len(commands) == 1
    assert set(re.findall(r" (--[\w-]+)", commands[0])) <= SERVE
    before = re.findall(r"^- (?:vllm|text-generation-launcher|transformers) .*$", text, re.M)
    assert set(re.findall(r" (--[\w-]+)", before[0])) <= SERVE | ABSENT.keys()


@pytest.mark.parametrize("page", PAGES)
def test_calls_are_there(page: str) -> None:
    """In the column of ours: methods of the engine, keywords of a request or of `Engine`, and routes. Where
    it says "the same", those of the other column.
    """
    text = (DOCS / page).read_text()
    calls = re.split(r"\n## (?:Python|Calls)\n", text)[1].split("\n## ")[0]
    cells = [row.strip("| ").split(" | ") for row in re.findall(r"^\| .*\|$", calls, re.M)]
    ours = [there if here.startswith("the same") else here for there, here in cells if set(here) != {"-"}]
    known = {*EngineOptions.__annotations__, *RequestKeywords.__annotations__}
    serving = (DOCS / "serving.md").read_text()
    seen = 0
    for cell in ours:
        for name in re.findall(r"`engine\.(\w+)\(", cell):
            seen += 1
            assert hasattr(hf_paged.Engine, name), cell
        for name in re.findall(r"`(\w+)=", cell):
            seen += 1
            assert name in known, cell
        for name in re.findall(r"hf_paged\.(\w+)\(", cell):
            seen += 1
            assert name in hf_paged.__all__, cell
        for route in re.findall(r"(?<![\w`])(/[\w/]+)", cell):
            seen += 1
            assert route in serving, cell
    assert seen >= 3
