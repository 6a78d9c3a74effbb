"""What the host does in a decoding step, and how long each part takes: with a model whose forward is next to
nothing.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from shapes import build

from hf_paged import Engine, demo
from hf_paged.engine.in_flight import InFlightStep
from hf_paged.engine.worker.captured import CapturedRunner
from hf_paged.engine.worker.model_check import ModelCheck
from hf_paged.model import rehearsal as capture
from hf_paged.model.capture import pool
from hf_paged.model.capture.step import bucket_of
from hf_paged.scheduling import Scheduler

PARTS: dict[str, list[tuple[type, str]]] = {
    "plan": [(Scheduler, "schedule"), (Scheduler, "launch")],
    "load": [(CapturedRunner, "_load")],
    "model": [(ModelCheck, "touched"), (CapturedRunner, "current")],
    "sample": [(InFlightStep, "sample")],
    "apply": [(InFlightStep, "apply")],
}
"""The parts of a step, and whose methods they are."""
THIN = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 64,
}
"""As many modules as any model of so many layers has, and nothing to compute."""

DRIVERS: dict[str, Callable[[Engine], Callable[[], Any]]] = {
    "the engine": lambda engine: engine.driver.advance_in_turn,
    "by hand": lambda engine: engine.step,
}
"""Who takes the steps: the engine's own loop, which looks at the model now and then, or somebody who calls
step(), which always does.
"""

PROMPT, MOST = (130, 146), 256
"""How long prompts are; while all have between 129 and 256 tokens no graph needs more room."""


class Still:
    """Stands for CUDA graphs on a CPU: a replay runs the step until `stop`, and leaves its answer as it is
    from then on.
    """

    def __init__(self) -> None:
        self.stopped = False

    def record(self, step: Callable[[], Any], pools: Any, devices: Any) -> tuple[Callable[[], None], Any]:
        def replay() -> None:
            if not self.stopped:
                step()

        return replay, step()


@contextmanager
def timed() -> Iterator[Counter[str]]:
    """Seconds spent in each part meanwhile."""
    seconds: Counter[str] = Counter()
    kept = [(owner, name, owner.__dict__[name]) for methods in PARTS.values() for owner, name in methods]
    for part, methods in PARTS.items():
        for owner, name in methods:
            setattr(owner, name, _counted(seconds, part, owner.__dict__[name]))
    try:
        yield seconds
    finally:
        for owner, name, method in kept:
            setattr(owner, name, method)


def _counted(seconds: Counter[str], part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[part] += time.thread_time() - begin

    return counted


def begin(engine: Engine, rows: int, asked: Mapping[str, Any]) -> None:
    """Have `rows` sequences decode from a graph. Their blocks are not full at the same time. asked: what every
    second request asks beyond that.
    """
    lengths = random.Random(1)
    for i in range(rows):
        prompt = [lengths.randrange(2, 62) for _ in range(lengths.randrange(*PROMPT))]
        engine.submit(prompt, max_new_tokens=MOST, do_sample=False, **(asked if i % 2 else {}))
    warming = engine.runner.warming
    while warming is not None and not warming.done:  # threads that compile kernels would be timed as well
        time.sleep(0.1)
    while engine.stats()["waiting"] or not _own_graph(engine, rows):
        engine.step()
    for _ in range(4):
        engine.step()


def _own_graph(engine: Engine, rows: int) -> bool:
    """Whether there is a trusted graph for just these rows: a larger one stands in at first, and a capture is
    not to be timed.
    """
    return bucket_of(rows) in engine.stats()["graphs"]["sizes"].get("single", ())


def measure(
    layers: int,
    device: str,
    rows: int,
    driver: str,
    steps: int = 40,
    asked: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Milliseconds of the host in a step of `rows` sequences, the whole (the median step, and the mean) and
    its parts (means). asked: what every second request asks.
    """
    still, kept = Still(), dict(capture.RECORDERS)
    padded = pool.PADDED
    pool.PADDED = 0  # a larger captured step is not to hold these for long
    if device == "cpu":
        capture.RECORDERS["cpu"] = still.record
    model = build("llama8b", device, torch.float32, num_hidden_layers=layers, **THIN)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    sizes = {
        "max_batch_sequences": rows,
        "max_batch_tokens": max(2048, 16 * rows),
        "num_blocks": rows * MOST // 8,
    }
    try:
        with Engine(model, demo.tokenizer(), run_ahead=True, **{**sizes, **options}) as engine:
            begin(engine, rows, asked or {})
            still.stopped = True
            step = DRIVERS[driver](engine)
            whole = _steps(engine, step, steps)
            with timed() as parts:
                again = sum(_steps(engine, step, steps))
    finally:
        pool.PADDED = padded
        capture.RECORDERS.clear()
        capture.RECORDERS.update(kept)
    shares = {part: parts[part] / steps * 1e3 for part in PARTS}
    return {
        "whole": statistics.median(whole) * 1e3,
        "mean": statistics.fmean(whole) * 1e3,
        **shares,
        "rest": again / steps * 1e3 - sum(shares.values()),
    }


def _steps(engine: Engine, step: Callable[[], Any], steps: int) -> list[float]:
    """What each step takes of the host's own time. Waiting for a device spins, so it is taken out."""
    seconds = []
    for _ in range(steps):
        if engine.model.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.thread_time()
        step()
        seconds.append(time.thread_time() - start)
    return seconds
