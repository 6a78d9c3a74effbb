"""How soon the first engine of a process answers, weights loaded: with no kernel compiled yet, and with all
of them in a cache on the disk.

    python benchmarks/startup.py                    # on a GPU; 8B Llama shape, random weights, bfloat16
    OMP_NUM_THREADS=1 python benchmarks/startup.py --shape tiny    # does it run? on any CPU

Each line is a process of its own, the first with an empty folder for Triton's cache, the second with the same
folder. The parts lie within each other where one calls the other. `--alone` is what these processes run;
`--apart` has the kernels compiled as they are met.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import torch
from shapes import SHAPES, build, common_parser, line, where

from hf_paged import Engine
from hf_paged.engine.worker import runner
from hf_paged.engine.worker.eager import EagerModel
from hf_paged.engine.worker.model_check import ModelCheck
from hf_paged.engine.worker.pools import Pools
from hf_paged.engine.worker.runner import Runner
from hf_paged.engine.worker.trial import Trial
from hf_paged.kv.store import Store
from hf_paged.kv.warmup import Warming
from hf_paged.model.capture.fusion import Fusion
from hf_paged.model.capture.pool import CapturePool

CONTEXT, NEW = 384, 24
PARTS = {
    "pools laid out": (Pools, "__init__"),
    "runner made": (Runner, "__init__"),
    "model tried out": (Trial, "run"),
    "- forwards without a cache": (Trial, "_without_cache"),
    "- forwards on pages": (Trial, "_on_pages"),
    "- waited for kernels": (Warming, "wait"),
    "kernels compiled, in threads": (Warming, "_run"),
    "pools sized": (Pools, "settle"),
    "pools allocated": (Store, "_allocate"),
    "model checked": (ModelCheck, "_check"),
    "forwards of steps": (EagerModel, "flat"),
    "steps captured": (CapturePool, "_capture"),
    "- modules compared": (Fusion, "__init__"),
}


class Clock:
    """Seconds spent in functions, those within it included, and how often they were called."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def watch(self, part: str, owner: Any, name: str, only_main: bool = False) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if not only_main or threading.current_thread() is threading.main_thread():
                    self.seconds[part] += time.perf_counter() - begin
                    self.calls[part] += 1

        setattr(owner, name, timed)


def watched(kernels: bool) -> Clock:
    clock = Clock()
    for part, (owner, name) in PARTS.items():
        clock.watch(part, owner, name)
    if not kernels:
        return clock
    import triton
    from triton.compiler import CompiledKernel

    clock.watch("kernels compiled where they were met", triton.JITFunction, "_do_compile", only_main=True)
    clock.watch("kernels loaded", CompiledKernel, "_init_handles")
    clock.watch("all kernels, compiled anywhere", triton.JITFunction, "_do_compile")
    return clock


def alone(options: argparse.Namespace) -> dict[str, Any]:
    """One engine in this process, and its first answer."""
    model = build(options.shape, options.device, getattr(torch, options.dtype))
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    if options.apart:
        runner.warming = lambda *options: nullcontext()  # type: ignore[assignment]
    if options.plans:
        runner.without_plans = lambda device: nullcontext()  # type: ignore[assignment]
    if options.device != "cpu":
        torch.cuda.synchronize()
    clock, found = watched(options.kernels), {}
    vocabulary = SHAPES[options.shape]["vocab_size"]
    begin = time.perf_counter()
    with Engine(model, max_batch_sequences=8, **options.engine) as engine:
        found["made"] = time.perf_counter() - begin
        for number, _ in enumerate(
            engine.submit(
                [10 + 7 * i % (vocabulary - 20) for i in range(CONTEXT)], max_new_tokens=NEW, do_sample=False
            )
        ):
            now = time.perf_counter() - begin
            if number < 4:
                found[f"token {number + 1}"] = now
                parts = {part: round(seconds, 3) for part, seconds in clock.seconds.items()}
                print(f"  behind token {number + 1}, {now:.2f} s: {parts}", file=sys.stderr)
            if engine.stats()["graphs"].get("replayed"):
                found.setdefault("replayed", now)
    found["parts"] = {part: (seconds, clock.calls[part]) for part, seconds in clock.seconds.items()}
    return found


def show(name: str, found: dict[str, Any]) -> None:
    print(
        f"\n{name}: "
        + ", ".join(f"{what} {seconds:.2f} s" for what, seconds in found.items() if what != "parts")
    )
    for part, (seconds, calls) in found["parts"].items():
        print(f"  {seconds:7.3f} s in {calls:4d} calls  {part}")


def main() -> None:
    parser = common_parser(__doc__, engine=True)
    parser.add_argument(
        "--alone",
        action="store_true",
        help="one engine in this process, with whatever caches there are; JSON",
    )
    parser.add_argument(
        "--apart", action="store_true", help="no threads: every kernel is compiled where it is launched first"
    )
    parser.add_argument(
        "--plans", action="store_true", help="let torch's attention be cuDNN's in the trial, too"
    )
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="watch Triton, too, which is imported before anything is timed then",
    )
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(alone(options)))
        return
    print(line(where(options.device)))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("no kernel compiled yet", "kernels in a cache"):
            command = [sys.executable, __file__, *sys.argv[1:], "--alone"]
            said = subprocess.run(
                command,
                env={**os.environ, "TRITON_CACHE_DIR": folder},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found = json.loads(said.stdout.splitlines()[-1])
            show(name, found)
            if options.json is not None:
                with options.json.open("a") as file:
                    print(
                        json.dumps({"section": "startup", "cache": name, **found, **where(options.device)}),
                        file=file,
                    )


if __name__ == "__main__":
    main()
