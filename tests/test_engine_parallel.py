"""An engine on several ranks answers as in one process, and ends on all of them if one fails (C23, C41, C42).

All cases share one start of a process, which costs seconds, and its forks: support/rank_cases.py has them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_models
import torch
from rank_names import CASES

ROOT = Path(__file__).parent.parent
REFUSED = "refused: "
LIMIT = 400
"""Seconds that all cases may take."""


@pytest.fixture(scope="module")
def lines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For a number of ranks what each case has left: rank by rank None or its error."""
    folder = tmp_path_factory.mktemp("ranks")
    wanted: dict[int, list[str]] = {}
    for item in request.session.items:
        given = getattr(item, "callspec", None)
        if given is not None and getattr(item, "function", None) is test_ranks:
            wanted.setdefault(given.params["size"], []).append(given.params["case"])
    program = [str(ROOT / "tests" / "support" / "rank_cases.py"), str(folder)]
    if not torch.cuda.is_available():
        _start([*program, *[f"{size}:{case}" for size, cases in wanted.items() for case in cases]])
        return functools.partial(_found, folder)
    rank_models.save(folder)
    for size, cases in wanted.items():  # a device that a process has seen is of no use to its forks
        options = ["--nproc-per-node", str(size), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        _start(["-m", "torch.distributed.run", *options, *program, *cases])
    return functools.partial(_found, folder)


def _start(program: list[str]) -> None:
    """Run it to its end, or to the end of its time."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        [sys.executable, *program], env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        started.wait(LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # ranks too
        started.wait()


def _found(folder: Path, size: int) -> dict[str, list[str | None]]:
    found: dict[str, list[str | None]] = {}
    for rank in range(size):
        file = folder / f"ranks-{size}-{rank}.jsonl"
        for line in map(json.loads, file.read_text().splitlines() if file.exists() else []):
            said = REFUSED + line["refused"] if line["refused"] else line["trouble"] or ""
            found.setdefault(line["case"], [None] * size)[rank] = said
    return found


@pytest.mark.parametrize(("size", "case", "ends"), CASES)
def test_ranks(lines: Any, size: int, case: str, ends: tuple[int, ...]) -> None:
    """Every rank has come to the end of the case, but those that the case ends."""
    expected = [None if rank in ends else "" for rank in range(size)]
    found = lines(size).get(case)
    if found and all((each or "").startswith(REFUSED) for each in found):
        pytest.skip(str(found[0]))
    assert found == expected
