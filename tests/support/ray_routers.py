"""Routers that scripts/try_ray.py compares with hf_paged's: at random, and one after the other."""

from __future__ import annotations

import itertools
import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class RandomRouter(RequestRouter):
    """Any replica."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [[random.choice(candidate_replicas)]] if candidate_replicas else []


class RoundRobinRouter(RequestRouter):
    """The replica that has waited longest."""

    def initialize_state(self, **options: Any) -> None:
        self._turn = itertools.count()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        replicas = sorted(candidate_replicas, key=lambda each: str(each.replica_id.unique_id))
        return [[replicas[next(self._turn) % len(replicas)]]]
