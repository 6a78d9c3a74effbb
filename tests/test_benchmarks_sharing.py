"""The benchmark of what sharing saves runs on any CPU."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_answers_of_one_prompt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Output tokens a second by samples, beside the blocks of these and of rows apart."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sharing = importlib.import_module("sharing")
    given = ["--device", "cpu", "--shape", "tiny", "--dtype", "float32"]
    monkeypatch.setattr("sys.argv", ["sharing", "--sections", "answers", "--counts", "1", "8", *given])
    sharing.main()
    rows = re.findall(r"^\| (\d+) \|(?: [\d,.]+ \|){4} (\d+) \| (\d+) \|$", capsys.readouterr().out, re.M)
    assert [int(count) for count, *_ in rows] == [1, 8]
    assert [int(blocks) for *_, blocks in rows] == [5, 40]
    assert [int(blocks) for _, blocks, _ in rows] == [5, 4 + 8]
