"""How a kernel is found again: by a digest of its code, whatever threads compile beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import DEVICE, GPU, assert_replays, load

kernels = load()

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


@pytest.mark.skipif(not GPU, reason="branches of a graph are a GPU's")
def test_a_launch_behind_branches_of_a_graph() -> None:
    """A kernel that may begin early begins behind all the branches that it reads, here long ones."""
    rows, width = 64, 4096
    x = torch.empty(rows, width, dtype=torch.bfloat16, device=DEVICE)
    weights = [torch.randn(width, width, device=DEVICE).to(torch.bfloat16) / 64 for _ in range(3)]
    scale = torch.ones(width, dtype=torch.bfloat16, device=DEVICE)

    def branch(weight: torch.Tensor, times: int) -> torch.Tensor:
        y = x
        for _ in range(times):
            y = torch.nn.functional.linear(y, weight)
        return y

    def behind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kernels.add_rms_norm(kernels.swiglu(k, v), q, scale, 1e-6)[1]

    streams = [torch.cuda.Stream() for _ in range(2)]

    def step() -> torch.Tensor:
        main = torch.cuda.current_stream()
        answers = []
        for stream, weight, times in zip(streams, weights[1:], (6, 3), strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                answers.append(branch(weight, times))
        q = branch(weights[0], 1)
        for stream in streams:
            main.wait_stream(stream)
        return behind(q, *answers)

    inputs = [torch.randn(rows, width, device=DEVICE).to(torch.bfloat16) for _ in range(4)]
    expected = []
    for each in inputs:
        x.copy_(each)
        parts = [branch(weight, times) for weight, times in zip(weights, (1, 6, 3), strict=True)]
        torch.cuda.synchronize()
        expected.append(behind(*parts).clone())
    x.copy_(inputs[0])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = step()
    assert_replays(graph, x, answer, list(zip(inputs, expected, strict=True)), 2_000)


def test_an_older_triton_launches_one_kernel_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no word for waiting within a kernel, whatever the device could do."""
    launching = load().launching
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launching, "_is_hopper", lambda index: True)
    device = torch.device("cuda")
    assert launching.early(device) == {"EARLY": True, "launch_pdl": True}
    monkeypatch.setattr(launching, "cuda", object())
    assert launching.early(device) == {"EARLY": False}
