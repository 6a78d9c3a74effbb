"""Scripts that must run to the end of an interpreter, in forks of one process that has imported the package and run no
test: the imports take seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from processes import LIMIT

ROOT = Path(__file__).parent.parent.parent
PATHS = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "support")]
SERVER = """
import json, os, signal, sys
sys.path[:0] = json.loads(sys.argv[1])
import hf_paged, torch, transformers
torch.set_num_threads(1)
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(asked["seconds"])
        for number, file in ((0, os.devnull), (1, asked["stdout"]), (2, asked["stderr"])):
            os.dup2(os.open(file, os.O_RDWR), number)
        sys.argv = asked["argv"]
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
exec(asked["code"])
"""


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


class FreshProcess:
    """The process; it ends with `close()`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._popen = subprocess.Popen(
            [sys.executable, "-c", SERVER, json.dumps(PATHS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._runs = 0

    def run(self, code: str, *argv: str, stderr: str | None = None) -> Ended:
        """Run a script in a fork. stderr: the file that it writes to instead of one that is read."""
        self._runs += 1
        files = [self._folder / f"{name}-{self._runs}" for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        asked = {"code": code, "argv": ["-c", *argv], "seconds": int(LIMIT)}
        asked |= {"stdout": str(files[0]), "stderr": stderr or str(files[1])}
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        print(json.dumps(asked), file=self._popen.stdin, flush=True)
        return Ended(int(self._popen.stdout.readline()), *[file.read_text() for file in files])

    def close(self) -> None:
        self._popen.communicate()
