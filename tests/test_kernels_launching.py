"""How a kernel is found again: by a digest of its code, whatever threads compile beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "kernels"
PROGRAM = """
import os, random, sys, threading
import triton
import hf_paged_kernels

sys.setswitchinterval(1e-6)
kernels = {
    f"{name}.{kernel.__name__}": kernel
    for name, module in list(sys.modules.items())
    if name.startswith("hf_paged_kernels.")
    for kernel in vars(module).values()
    if isinstance(kernel, triton.JITFunction)
}
for _ in range(3):
    child = os.fork()
    if not child:
        break
    if os.waitpid(child, 0)[1]:
        sys.exit("a process failed")
else:
    sys.exit()
start = threading.Barrier(8)

def ask(names):
    start.wait()
    for name in names:
        kernels[name].cache_key

orders = [random.sample(sorted(kernels), len(kernels)) for _ in range(8)]
threads = [threading.Thread(target=ask, args=(order,)) for order in orders]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(*[f"{name} {kernel.cache_key}" for name, kernel in sorted(kernels.items())], end="\\n", flush=True)
"""


def test_kernels_have_one_digest_whatever_threads_ask_for_it() -> None:
    """Else a process would compile again what another has left in Triton's cache on disk. The processes are forks, which
    have asked for none yet.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(FOLDER)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    answers = ran.stdout.splitlines()
    assert len(answers) == 3
    assert "decode._decode" in answers[0]
    assert set(answers) == {answers[0]}
