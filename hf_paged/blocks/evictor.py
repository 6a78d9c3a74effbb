"""Which cached block is evicted next."""

import heapq
from collections.abc import Iterator


class _Queue:
    """The cached blocks of one tenant, least recently used first. A heap with lazy deletion: an entry counts
    only while `live` still names it.
    """

    __slots__ = ("heap", "live", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.live: dict[int, tuple[int, int, int]] = {}
        self.heap: list[tuple[int, int, int]] = []

    def sweep(self) -> None:
        """Drop the entries that do not count any more."""
        self.heap = list(self.live.values())
        heapq.heapify(self.heap)

    def evict(self) -> int:
        """Give up the least block. There is one."""
        while True:
            entry = heapq.heappop(self.heap)
            if self.live.get(entry[2]) == entry:
                del self.live[entry[2]]
                return entry[2]


class Evictor:
    """Cached blocks without references by tenant, least recently used first (contract C20).

    Among blocks of one last access the block whose hash covers most tokens is evicted first: the end of a
    prefix is worth less than its beginning.
    """

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._queue_of: dict[int, _Queue] = {}

    def __len__(self) -> int:
        return len(self._queue_of)

    def __contains__(self, block: int) -> bool:
        return block in self._queue_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._queue_of)

    def counts(self) -> dict[str, int]:
        """How many blocks each tenant has, of those that have any."""
        return {tenant: len(queue.live) for tenant, queue in self._queues.items()}

    def add(self, block: int, last_access: int, covered: int, tenant: str = "") -> None:
        """Make a block of a tenant evictable; `covered` is the number of tokens that its hash covers."""
        if block in self._queue_of:
            raise ValueError(f"block {block} is up for eviction already")
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = _Queue(tenant)
        self._queue_of[block] = queue
        entry = (last_access, -covered, block)
        queue.live[block] = entry
        heapq.heappush(queue.heap, entry)

    def remove(self, block: int) -> None:
        """Take `block` out because it is used again."""
        queue = self._queue_of.pop(block, None)
        if queue is None:
            raise ValueError(f"block {block} is not up for eviction")
        del queue.live[block]
        if not queue.live:
            del self._queues[queue.tenant]
        elif len(queue.heap) > 2 * len(queue.live) + 64:
            queue.sweep()

    def evict(self, tenant: str = "") -> int:
        """Give up the block of a tenant that is worth least."""
        queue = self._queues.get(tenant)
        if queue is None:
            raise ValueError("nothing to evict")
        block = queue.evict()
        del self._queue_of[block]
        if not queue.live:
            del self._queues[tenant]
        return block
