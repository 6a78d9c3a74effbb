"""The request router of Ray Serve that sends a prompt where its prefix is cached."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .replica import HttpCall
from .routing import LoadBound, PrefixIndex, ranked


class PrefixRouter(RequestRouter):
    """Routes calls of `Replica.answer` by the names of their prompts' blocks, with bounded load.

    Ray's own PrefixCacheAffinityRouter matches characters, in a tree of another actor, for which its event
    loop waits. Here names are those of the engine's blocks (C24), and the index, which is the router's own,
    forgets what a replica of that size has evicted.
    """

    def initialize_state(self, **options: Any) -> None:
        """options: the fields of LoadBound, from request_router_kwargs."""
        self._bound = LoadBound(**options)
        self._index = PrefixIndex()
        self._draw = random.Random()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The ranks of `ranked`."""
        if not candidate_replicas:
            return []
        replicas = {_name(each.replica_id): each for each in candidate_replicas}
        loads = await self._loads(candidate_replicas)
        ranks = ranked(_digests(pending_request), loads, self._index, self._bound, self._draw)
        return [[replicas[name] for name in rank] for rank in ranks]

    async def _loads(self, replicas: list[RunningReplica]) -> dict[str, int]:
        """Requests under way; replicas are asked where the last count is too old."""
        counts = {each.replica_id: self.replica_queue_len_cache.get(each.replica_id) for each in replicas}
        unknown = [each for each in replicas if counts[each.replica_id] is None]
        for replica, count in await self._probe_queue_lens(unknown, 0):
            counts[replica.replica_id] = count
        known = [count for count in counts.values() if count is not None]
        # One that does not answer is taken for as busy as the busiest.
        return {
            _name(each): max(known, default=0) if count is None else count for each, count in counts.items()
        }

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """The replica is going to hold the prompt's blocks."""
        self._index.add(_name(replica_id), _digests(pending_request))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Its blocks are gone."""
        super().on_replica_actor_died(replica_id)
        self._index.forget(_name(replica_id))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas have come or gone, or report another pool. One that was away has changed its weights."""
        super().update_replicas(replicas)
        self._index.keep({_name(each.replica_id): each.routing_stats.get("blocks") for each in replicas})


def _name(replica: ReplicaID) -> str:
    return str(replica.unique_id)


def _digests(request: PendingRequest | None) -> tuple[bytes, ...]:
    """The names of a request's blocks; none of other calls."""
    call = request.args[0] if request is not None and request.args else None
    return call.digests if isinstance(call, HttpCall) else ()
