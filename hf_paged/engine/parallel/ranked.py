"""The common part of all ranks of a tensor-parallel engine, whether they lead or follow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from ..worker.executor import Executor
from ..worker.runner import Runner
from .joining import load_alike, made_alike, tried_alike
from .ranks import Ranks


class Ranked(Executor):
    """Carries out forwards together with the other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def making(self) -> AbstractContextManager[None]:
        return made_alike(self.ranks)

    def trying(self, runner: Runner) -> AbstractContextManager[None]:
        return tried_alike(self.ranks, runner)

    def look_now(self, look: Callable[[], object]) -> None:
        """Nothing: several look at their models together, before the next step."""

    def load(self, load: Callable[[], set[str]]) -> set[str]:
        return load_alike(self.ranks, load)

    def require_paused(self, paused: bool) -> None:
        if not paused:
            raise RuntimeError(
                "ranks load weights together: call pause(), then load_weights() on all ranks (on the others "
                "behind follow()), then resume()"
            )

    def require_alone(self, act: str) -> None:
        raise ValueError(
            f"a tensor-parallel engine has no {act}; call pause(), change the weights on all ranks, then "
            "resume()"
        )

    def leave(self) -> None:
        self.ranks.close()

    def abandon(self) -> None:
        self.ranks.abandon()

    def forked(self) -> None:
        self.ranks.forget()
