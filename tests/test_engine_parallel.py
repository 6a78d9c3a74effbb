"""An engine on several ranks answers as in one process, and ends on all of them if one fails (C23, C41, C42).

All cases of a number of ranks share one start of processes, which costs seconds: support/rank_cases.py has them.
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
LIMIT = 300
"""Seconds that all cases of a number of ranks may take."""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For a number of ranks what each case has left: rank by rank None or its error."""
    folder = tmp_path_factory.mktemp("ranks")
    rank_models.save(folder)
    return functools.cache(functools.partial(_run, folder))


def _run(folder: Path, size: int) -> dict[str, list[str | None]]:
    program = [str(ROOT / "tests" / "support" / "rank_cases.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    if torch.cuda.is_available():  # a device that a process has seen is of no use to its forks
        options = ["--nproc-per-node", str(size), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        program = ["-m", "torch.distributed.run", *options, *program]
    else:
        environment["WORLD_SIZE"] = str(size)
    started = subprocess.Popen(
        [sys.executable, *program], env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        started.wait(LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # ranks too
        started.wait()
    found: dict[str, list[str | None]] = {}
    for rank in range(size):
        file = folder / f"ranks-{size}-{rank}.jsonl"
        for line in map(json.loads, file.read_text().splitlines() if file.exists() else []):
            found.setdefault(line["case"], [None] * size)[rank] = line["trouble"] or ""
    return found


@pytest.mark.parametrize(("size", "case", "ends"), CASES)
def test_ranks(lines: Any, size: int, case: str, ends: tuple[int, ...]) -> None:
    """Every rank has come to the end of the case, but those that the case ends."""
    expected = [None if rank in ends else "" for rank in range(size)]
    assert lines(size).get(case) == expected
