"""The part of an engine that computes: in this process, or with others (parallel/)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import call
from typing import Any, NamedTuple

import torch

from ...model.parts import Parts
from ...scheduling import SequenceGroup, StepPlan
from ..multimodal.media import Media
from ..requests.params import RequestParams
from .adapters import EngineAdapters
from .forward_batch import Answer, ForwardBatch, LastTokens
from .model_check import ModelCheck
from .runner import Runner


def use_device(device: torch.device) -> None:
    """Let the calling thread compute on a device: every thread has its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class EngineParts(NamedTuple):
    """The parts of an engine that computing needs. requests: those that are more than token ids."""

    runner: Runner
    adapters: EngineAdapters
    model_check: ModelCheck
    last_tokens: LastTokens
    requests: Mapping[SequenceGroup, RequestParams]


class Executor:
    """Carries out forwards in this process, and what the pools do before them.

    Engine, driver and loop ask it and nothing else for what several ranks do in another way.
    """

    leads = True
    """Requests come to this process."""
    run: Callable[[ForwardBatch], Answer]
    """The logits behind the rows that are sampled from."""
    wait: Callable[[Callable[[], bool]], bool]
    """Wait for the tokens of a step. True if a request may end with them."""
    wait_whole: Callable[[Callable[[], bool]], bool]
    """The same for all of the device's work."""

    def begin(self, parts: EngineParts) -> None:
        """Take the parts of an engine."""
        self.runner = parts.runner
        self.pools = parts.runner.eager.pools
        self.run = parts.runner.run
        self.wait = self.wait_whole = call

    def making(self) -> AbstractContextManager[None]:
        """A stretch in which an engine is made: if that fails on one rank, it does on all."""
        return nullcontext()

    def trying(self, runner: Runner) -> AbstractContextManager[None]:
        """A stretch in which a model is tried out and pools are sized, on all ranks alike."""
        return nullcontext()

    # ---- a step

    def expect(self, groups: list[SequenceGroup]) -> None:
        """Know which groups are to be admitted, while none runs."""
        self.pools.expect(groups)

    def prepare(self, plan: StepPlan) -> None:
        """Have memory for a plan, and check, copy and swap the blocks that it says; or raise OutOfBlocks."""
        checks = self.pools.checks
        self.pools.prepare(plan, checks.take())
        checks.launch()

    def seal(self) -> None:
        """Take the checksums of blocks that a step has filled."""
        self.pools.checks.carry_out(self.pools.checks.take_fresh())

    def encode_media(self, media: Media, group: SequenceGroup) -> None:
        """Encode a request's pictures or recordings."""
        self.runner.encode_media(media, group.request.first_adapter)

    def capture_ahead(self, sequences: int) -> None:
        """Capture a step that is likely to come, while the device is busy."""
        self.runner.capture_ahead(sequences)

    def warm_up(self) -> int:
        """Capture a step that many requests will need: how many are missing still."""
        return self.runner.warm_up()

    def forget(self) -> None:
        """Forget what was prepared for a step that broke off."""

    # ---- the model

    def changed(self, look: Callable[[], bool]) -> bool:
        """True if the model has changed, as `look` sees it here, on any rank."""
        return look()

    def look_now(self, look: Callable[[], object]) -> None:
        """Look at a model that has changed; ranks do so together, before the next step."""
        look()

    def load(self, load: Callable[[], set[str]]) -> set[str]:
        """Load weights: the names of those that were loaded."""
        return load()

    def add_adapter(self, name: str, layers: Parts, paused: bool) -> None:
        """Give an adapter that this process has to all that compute."""

    # ---- its caller's

    def require_lead(self) -> None:
        """Raise where requests do not come to this process."""

    def require_alone(self, act: str) -> None:
        """Raise where several processes compute the model."""

    def require_paused(self, paused: bool) -> None:
        """Raise where weights are loaded in a pause only."""

    def require_media(self, media: object) -> None:
        """Raise for media that several processes do not compute together."""

    def require_between_forwards(self, call: str) -> None:
        """Raise if a signal handler calls in the middle of what ranks do together."""

    def broadcast(self, value: Any) -> None:
        """Send a value to all other ranks, between two steps."""

    def require_follower(self) -> None:
        """Raise where requests come to this process."""
        raise RuntimeError("only ranks other than 0 of a tensor-parallel engine follow; this one leads")

    def follow(self, receive: Callable[[Any], object]) -> bool:
        """Compute what rank 0 schedules: False once it has closed its engine, True when it has paused."""
        raise NotImplementedError

    def pause(self) -> None:
        """Let other ranks change their models."""

    def close(self) -> None:
        """Compute nothing any more."""

    def leave(self) -> None:
        """Leave the other ranks, once the pools are given back."""

    def abandon(self) -> None:
        """The engine was collected before it was closed: note it, in the middle of anything."""

    def forked(self) -> None:
        """This process is a fork: have nothing in common with the ranks."""
