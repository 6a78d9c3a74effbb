"""The table of docs/adapters.md: it has every method of the installed peft, and a run fills its cells."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from releases import prefixes_are_ignored

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "adapters.md"


def without_numbers(row: str) -> str:
    """A row without those of its notes and of its steps."""
    return re.sub(r" \[\d+\]|[\d.]+ \|$", "", row)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("adapter_table")


def test_every_method_and_option_has_a_case(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the page: a case without a row means that it is to be made anew."""
    script.require_all()
    table = PAGE.read_text().split("\n## The table\n")[1]
    rows = set(re.findall(r"^\| (.+?) \| ", table, re.M))
    assert {case.name for case in (*script.LORA, *script.OTHERS)} <= rows
    assert "DIFFERENT" not in table
    assert "FAILS" not in table
    monkeypatch.setattr(script, "LORA", script.LORA[:3])
    with pytest.raises(SystemExit, match=r"no case covers .*'use_rslora'"):
        script.require_all()


def test_some_rows_are_those_of_the_page(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A guide\n\n## The table\n\nold\n")
    monkeypatch.setattr(script, "WARM_UP", 2)
    monkeypatch.setattr(script, "MEASURED", 2)
    words = ["rsLoRA", "DoRA", "prefix tuning"]
    monkeypatch.setattr("sys.argv", ["adapter_table", "--only", *words, "--write", str(page)])
    assert script.main() == 0
    found = page.read_text()
    assert found.startswith("# A guide\n\n## The table\n")
    assert "old" not in found.splitlines()
    for name in ("rsLoRA", "DoRA", "Prefix tuning"):
        made, written = [re.search(rf"^\| {name} \|.*$", text, re.M) for text in (found, PAGE.read_text())]
        assert made is not None
        assert written is not None
        if (
            name == "Prefix tuning" and prefixes_are_ignored()
        ):  # by stock as well: there is nothing to compare
            assert made[0] == "| Prefix tuning | its weights change no token |"
            continue
        assert without_numbers(made[0]) == without_numbers(written[0])
        assert float(made[0].split("|")[-2]) > 0
    assert "same, peft raises, same, same, same" in capsys.readouterr().out


def test_other_tokens_are_not_written_as_the_same(script: Any) -> None:
    """A paged call that computed other tokens, or an error of another kind, is named."""
    case = next(case for case in script.LORA if case.name == "rsLoRA")

    def fails(model: Any, case: Any) -> Any:
        from hf_paged.blocks import BlockPool

        return BlockPool(-1).no_such_thing

    assert script.compared([[1]], [[2]]).mark == "other"
    assert script.tried(fails, case).mark != "same"
    row = script.Row(case, "kernels", [script.Cell("other")] * 5)
    assert "| DIFFERENT | DIFFERENT |" in script.page([row])
