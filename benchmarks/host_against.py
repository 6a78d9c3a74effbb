"""The host's time in a decoding step, alternated with another commit's on one machine.

python benchmarks/host_against.py COMMIT [--rows 64 256 1024] [--times 5] [--layers 32]

Each commit measures in a process of its own, in a worktree, with its own benchmarks/host.py. One of the two processes is
always stopped: they change places every tenth of a second, so that a machine that is slower for a while is so for
both. A step in whose middle a process was stopped is long, and a median does not see it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEASURE = """
import json, sys
sys.path.insert(0, "benchmarks")
from host import measure
print(json.dumps(measure(int(sys.argv[1]), "cpu", int(sys.argv[2]), "the engine")["whole"]))
"""


TURN = 0.1
"""Seconds that a process runs while the other is stopped."""


def in_turns(trees: Sequence[Path], layers: int, rows: int) -> list[float]:
    """Milliseconds of each tree's median step."""
    running = [_begin(tree, layers, rows) for tree in trees]
    try:
        while any(each.poll() is None for each in running):
            for each in running:
                if each.poll() is None:
                    each.send_signal(signal.SIGCONT)
                    time.sleep(TURN)
                    each.send_signal(signal.SIGSTOP)
        return [_answer(each) for each in running]
    finally:
        for each in running:
            each.kill()


def _begin(tree: Path, layers: int, rows: int) -> subprocess.Popen[str]:
    """A process that measures, still stopped."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree}/kernels", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(layers), str(rows)]
    process = subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
    process.send_signal(signal.SIGSTOP)
    return process


def _answer(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    answer = process.stdout.read()
    if process.wait() != 0:
        raise RuntimeError(f"a measurement ended with {process.returncode}; its error is above")
    return float(json.loads(answer.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--layers", type=int, default=32)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", before, asked.commit], cwd=ROOT, check=True
        )
        try:
            print(
                f"{'rows':>6} {asked.commit[:9]:>10} {'now':>8} {'ratio':>7}   (ms a step, medians of {asked.times})"
            )
            for rows in asked.rows:
                pairs = [in_turns((before, ROOT), asked.layers, rows) for _ in range(asked.times)]
                then, now = (statistics.median(each) for each in zip(*pairs, strict=True))
                ratio = statistics.median(new / old for old, new in pairs)
                print(f"{rows:>6} {then:>10.3f} {now:>8.3f} {ratio:>7.3f}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
