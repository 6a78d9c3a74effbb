"""The host's time in a decoding step, alternated with another commit's on one machine.

python benchmarks/host_against.py COMMIT [--rows 64 256 1024] [--times 5] [--layers 32]

Each measurement is a process of its own in a worktree of its commit, with that commit's benchmarks/host.py; the two
take turns, so that a machine that is slower for a while is so for both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEASURE = """
import json, sys
sys.path.insert(0, "benchmarks")
from host import measure
print(json.dumps(measure(int(sys.argv[1]), "cpu", int(sys.argv[2]), "the engine")["whole"]))
"""


def once(tree: Path, layers: int, rows: int) -> float:
    """Milliseconds of a tree's median step."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree}/kernels", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(layers), str(rows)]
    ran = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(ran.stdout.splitlines()[-1]))


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
                pairs = [
                    [once(tree, asked.layers, rows) for tree in (before, ROOT)] for _ in range(asked.times)
                ]
                then, now = (statistics.median(each) for each in zip(*pairs, strict=True))
                ratio = statistics.median(new / old for old, new in pairs)
                print(f"{rows:>6} {then:>10.3f} {now:>8.3f} {ratio:>7.3f}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
