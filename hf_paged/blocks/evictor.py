"""Which cached block is evicted next."""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping


class _Queue:
    """The cached blocks of one tenant, least recently used first. A heap with lazy deletion: an entry counts
    only while `live` still names it.
    """

    __slots__ = ("heap", "live")

    def __init__(self) -> None:
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
    """Cached blocks without references, least recently used first (contract C20), and fairly by tenant (C43).

    Among blocks of one last access the block whose hash covers most tokens is evicted first: the end of a
    prefix is worth less than its beginning. With several tenants the one goes first that has the most blocks
    for its weight, those that running requests hold included. So a tenant with its share or less loses none
    while another with more has cached ones, and what it does not use of its share is there for the others.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """weights: of tenants; 1 for any other."""
        self._weights = {} if weights is None else weights
        self._queues: dict[str, _Queue] = {}
        """Those of tenants with blocks, and of tenants that had some."""
        self._queue_of: dict[int, _Queue] = {}
        self.named: Counter[str] = Counter()
        """How many blocks with a name each tenant has, held or cached."""

    def __len__(self) -> int:
        return len(self._queue_of)

    def __contains__(self, block: int) -> bool:
        return block in self._queue_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._queue_of)

    def counts(self) -> dict[str, int]:
        """How many blocks each tenant has, of those that have any."""
        return {tenant: len(queue.live) for tenant, queue in self._queues.items() if queue.live}

    def note_name(self, tenant: str, change: int) -> None:
        """Count a block of a tenant that has got a name, or has lost it."""
        self.named[tenant] += change
        if not self.named[tenant]:
            del self.named[tenant]

    def add(self, block: int, last_access: int, covered: int, tenant: str = "") -> None:
        """Make a block of a tenant evictable; `covered` is the number of tokens that its hash covers."""
        if block in self._queue_of:
            raise ValueError(f"block {block} is up for eviction already")
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = _Queue()
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
        if len(queue.heap) > 2 * len(queue.live) + 64:
            queue.sweep()

    def evict(self) -> int:
        """Give up the block that is worth least."""
        if not self._queue_of:
            raise ValueError("nothing to evict")
        queues = self._queues.values()
        queue = next(iter(queues)) if len(queues) == 1 else self._largest()
        block = queue.evict()
        del self._queue_of[block]
        return block

    def _largest(self) -> _Queue:
        """The queue of the tenant with the most blocks for its weight. Empty queues are forgotten."""
        for tenant in [tenant for tenant, queue in self._queues.items() if not queue.live]:
            del self._queues[tenant]
        most = max(self._queues, key=lambda tenant: self.named[tenant] / self._weights.get(tenant, 1.0))
        return self._queues[most]
