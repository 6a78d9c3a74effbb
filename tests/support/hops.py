"""Which functions of hf_paged a decode step of the engine enters: what a reader follows from plan to tokens."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hf_paged
from hf_paged.engine import Engine

PACKAGE = str(Path(hf_paged.__file__).parent)


@contextmanager
def recorded_hops() -> Iterator[dict[tuple[str, str], None]]:
    """The functions and methods that are entered meanwhile, by file and name, in order; lambdas and
    comprehensions aside.
    """
    hops: dict[tuple[str, str], None] = {}

    def note(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            hops[code.co_filename[len(PACKAGE) + 1 :], code.co_qualname] = None

    sys.setprofile(note)
    try:
        yield hops
    finally:
        sys.setprofile(None)


class FrozenGraphs:
    """Stands for CUDA graphs on a CPU: a replay runs its step until `frozen`, and does nothing from then on."""

    def __init__(self) -> None:
        self.frozen = False

    def record(self, step: Callable[[], Any], *_: Any) -> tuple[Callable[[], None], Any]:
        def replay() -> None:
            if not self.frozen:
                step()

        return replay, step()


def begin_steady_decode(engine: Engine, graphs: FrozenGraphs, rows: int = 3) -> None:
    """Bring an engine to captured, greedy steps in which no sequence fills a block or ends."""
    chance = random.Random(1)
    for _ in range(rows):
        prompt = [chance.randrange(2, 60) for _ in range(10)]
        engine.submit(prompt, max_new_tokens=50, do_sample=False)
    for _ in range(12):
        engine.step()
    replayed = engine.stats()["graphs"]["replayed"]
    engine.step()
    assert engine.stats()["graphs"]["replayed"] == replayed + 1
    graphs.frozen = True
