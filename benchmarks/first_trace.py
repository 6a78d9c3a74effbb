"""What a first trace pays for kernels and captures: its speed beside that of a second one, and the first token.

    python benchmarks/first_trace.py                                  # on a GPU; 8B Llama shape, bfloat16
    OMP_NUM_THREADS=1 python benchmarks/first_trace.py --shape tiny --at-once 8 --requests 24   # on any CPU

Each line is a process of its own with an empty folder for Triton's cache, or with `--kernels-on-disk` the second
of two with the same folder. Then calls of generate() of 64 new tokens, each number of rows four times.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from peers import Ours
from shapes import SHAPES, build, common_parser, line, where
from traces import Ask, trace

import hf_paged

NEW = 64


def engine(options: argparse.Namespace, model: Any) -> None:
    """Seconds to the first token, and output tokens a second of two traces."""
    at_once, requests = options.at_once[0], options.requests[0]
    begin = time.perf_counter()
    ours = Ours(model, at_once, **options.engine)
    made = time.perf_counter() - begin
    served, graphs = [], []
    asks = trace(options.trace, requests, SHAPES[options.shape]["vocab_size"])
    for shift in range(2):
        # The same lengths of other tokens: nothing of the first trace is found in the second.
        asks = [Ask([token + shift for token in ask.prompt], ask.new) for ask in asks]
        served.append(ours.serve(asks))
        graphs.append(ours.engine.stats()["graphs"])
    first = made + min(served[0].first)
    speeds = [each.tokens / each.seconds for each in served]
    print(
        f"{requests} at {at_once}: engine made {made:.2f} s, first token {first:.2f} s; {speeds[0]:.0f} and "
        f"{speeds[1]:.0f} tok/s, {speeds[0] / speeds[1]:.3f}"
    )
    for name, found in zip(("first", "second"), graphs, strict=True):
        print(f"  {name}: {found}")
    ours.close()


def generate(options: argparse.Namespace, model: Any) -> None:
    """Seconds of calls, each number of rows four times."""
    for rows in options.rows:
        ids = torch.randint(10, 1000, (rows, 128), device=model.device)
        seconds = []
        for _ in range(4):
            begin = time.perf_counter()
            model.generate(
                ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, cache_implementation="paged"
            )
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        print(f"generate(), {rows} rows: " + ", ".join(f"{each:.2f}" for each in seconds) + " s")


def main() -> None:
    parser = common_parser(__doc__, engine=True)
    parser.add_argument("--alone", choices=["engine", "generate"], help="one of them in this process")
    parser.add_argument("--at-once", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--requests", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 8, 128])
    parser.add_argument("--trace", default="sharegpt")
    parser.add_argument("--kernels-on-disk", action="store_true", help="each twice with one folder")
    options = parser.parse_args()
    if options.alone:
        hf_paged.install()
        model = build(options.shape, options.device, getattr(torch, options.dtype))
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        if options.device != "cpu":
            torch.cuda.synchronize()
        {"engine": engine, "generate": generate}[options.alone](options, model)
        return
    print(line(where(options.device)), flush=True)
    shared = [f"--{name}={getattr(options, name)}" for name in ("shape", "device", "dtype", "trace")]
    runs = [
        ["--alone", "engine", "--at-once", str(at_once), "--requests", str(requests)]
        for at_once, requests in zip(options.at_once, options.requests, strict=True)
    ]
    runs.append(["--alone", "generate", "--rows", *map(str, options.rows)])
    for run in runs:
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(1 + options.kernels_on_disk):
                subprocess.run(
                    [sys.executable, __file__, *shared, *run],
                    env={**os.environ, "TRITON_CACHE_DIR": folder},
                    check=True,
                )


if __name__ == "__main__":
    main()
