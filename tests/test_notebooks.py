"""The notebooks run as they stand, and show what they print; `scripts/notebooks` runs them in Jupyter."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))
NEEDS = {"adapters": "peft", "grpo": "trl"}
"""Packages that a notebook installs beside hf_paged."""


def cells(notebook: Path) -> list[dict[str, Any]]:
    """The cells with code."""
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def shown(cell: dict[str, Any]) -> str:
    """The output of a cell, as it is kept in the file."""
    assert all(output["name"] == "stdout" for output in cell["outputs"]), "run scripts/notebooks --inplace"
    return "".join(line for output in cell["outputs"] for line in output["text"])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tokens of a model as it is are the same anywhere; what was trained before may round to others."""
    if notebook.stem in NEEDS:
        pytest.importorskip(
            NEEDS[notebook.stem], reason=f"needs {NEEDS[notebook.stem]}, as the notebook says"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    for cell in cells(notebook):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), notebook.name, "exec"), names)
        if notebook.stem == "generate":
            assert printed.getvalue() == shown(cell)
        assert bool(printed.getvalue()) == bool(shown(cell))
    if notebook.stem == "adapters":
        answers = names["answers"]
        assert ["!" in answers[name] for name in ("the model", "loud", "moonlit")] == [False, True, False]
        assert "moon shone" in answers["moonlit"]
        assert names["same"]
        names["engine"].check()
    if notebook.stem == "grpo":
        assert sum(names["means"][-5:]) > sum(names["means"][:5])


def test_there_is_one_for_each_way_in() -> None:
    """generate() in two cells, an engine with two adapters, and training."""
    assert {each.stem for each in NOTEBOOKS} == {"generate", "adapters", "grpo"}
    assert len(cells(next(each for each in NOTEBOOKS if each.stem == "generate"))) == 2
