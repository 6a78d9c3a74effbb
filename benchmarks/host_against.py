"""The host's time in a decoding step, alternated with another commit's on one machine.

python benchmarks/host_against.py COMMIT [--rows 64 256 1024] [--times 5] [--layers 32]

Each commit measures in a process of its own, in a worktree, with its own benchmarks/host.py. Once both decode they
take turns of a few steps, and one waits while the other steps: a machine that is slower for a while is so for both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEASURE = """
import sys, time
sys.path.insert(0, "benchmarks")
import host

take = host.DRIVERS["the engine"]

seconds = []

def in_turns(engine):
    step = take(engine)

    def advance():
        if len(seconds) % TURN == 0:
            print("ready", flush=True)
            sys.stdin.readline()
        begin = time.thread_time()
        step()
        seconds.append(time.thread_time() - begin)

    return advance

host.DRIVERS["the engine"] = in_turns
host.measure(int(sys.argv[1]), "cpu", int(sys.argv[2]), "the engine", steps=STEPS)
print(1e3 * sorted(seconds[:STEPS])[STEPS // 4])
"""
TURN = 3
"""Steps that a process takes while the other waits."""
STEPS = 48
"""Steps that are measured, and as many behind them by their parts: with more, prompts would outgrow their graph."""


def in_turns(trees: Sequence[Path], layers: int, rows: int) -> list[float]:
    """Milliseconds of each tree's lower quartile of steps, which a busy neighbour moves least."""
    running = [_begin(tree, layers, rows) for tree in trees]
    try:
        said = [_line(each) for each in running]
        while "ready" in said:
            for i, each in enumerate(running):
                if said[i] == "ready":
                    assert each.stdin is not None
                    each.stdin.write("go\n")
                    each.stdin.flush()
                    said[i] = _line(each)
        return [float(each) for each in said]
    finally:
        for each in running:
            each.kill()


def _begin(tree: Path, layers: int, rows: int) -> subprocess.Popen[str]:
    """A process that measures once it is told to go."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree}/kernels", "OMP_NUM_THREADS": "1"}
    code = MEASURE.replace("TURN", str(TURN)).replace("STEPS", str(STEPS))
    command = [sys.executable, "-c", code, str(layers), str(rows)]
    return subprocess.Popen(
        command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _line(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints: "ready", or its answer."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"a measurement ended with {process.wait()}; its error is above")
    return line


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
                f"{'rows':>6} {asked.commit[:9]:>10} {'now':>8} {'ratio':>7}   ms of the engine's thread a step, medians of {asked.times}; all ratios"
            )
            for rows in asked.rows:
                pairs = [in_turns((before, ROOT), asked.layers, rows) for _ in range(asked.times)]
                then, now = (statistics.median(each) for each in zip(*pairs, strict=True))
                ratio = statistics.median(new / old for old, new in pairs)
                spread = " ".join(sorted(f"{new / old:.2f}" for old, new in pairs))
                print(f"{rows:>6} {then:>10.3f} {now:>8.3f} {ratio:>7.3f}   {spread}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
