"""The page of what works together, pair by pair: the capabilities that tests/test_together.py runs.

    python scripts/together.py > docs/together.md

The table is in tests/support/capabilities.py. Nothing is run here: a test holds each cell, and the page to the table.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "support")]

from capabilities import CAPABILITIES, OFF, REFUSED, UNTRIED  # noqa: E402 (it needs the line above)

HEAD = """# What works together

Made by `scripts/together.py` of the table that `tests/test_together.py` runs: tiny models, float32, one CPU, and two processes for
ranks. Requests of a pair run in one engine, beside requests with one of the two and with none, behind prompts that are cached.

| cell | meaning |
|---|---|
| = | the tokens of stock `generate()`, or of peft's, on each prompt alone; also the routing, and the bits in a batch-invariant engine |
| refused | an error with the words of the note, and no other request fails |
| off | the same tokens; the first of the two has no effect beside the second, and `stats()["off"]` says so |
| untried | no test has it, for the reason in the note |

Two adapters in a cell are two requests of one batch. [adapters.md](adapters.md) says which adapters one request may name together.

## The capabilities

| capability | switched on by |
|---|---|
"""


def page() -> str:
    """The page in Markdown."""
    names = [each.name for each in CAPABILITIES]
    lines = [f"| {each.name} | {each.words} |" for each in CAPABILITIES]
    lines += ["", "## The pairs", "", f"| | {' | '.join(names[1:])} |", f"|---{'|---' * len(names[1:])}|"]
    notes: dict[str, int] = {}
    for row, first in enumerate(names[:-1]):
        cells = [_cell(first, second, notes) for second in names[row + 1 :]]
        lines.append(f"| **{first}** | {' | '.join([''] * row + cells)} |")
    lines += ["", "### Notes", "", "| note | message |", "|---|---|"]
    lines += [f"| {number} | {words} |" for words, number in notes.items()]
    return HEAD + "\n".join(lines) + "\n"


def _cell(first: str, second: str, notes: dict[str, int]) -> str:
    for mark, table in (("refused", REFUSED), ("off", OFF), ("untried", UNTRIED)):
        words = table.get((first, second))
        if words is not None:
            return f"{mark} [{notes.setdefault(words, len(notes) + 1)}]"
    return "="


if __name__ == "__main__":
    print(page(), end="")
