"""Which cached block is evicted next."""

import heapq
from collections.abc import Iterator

_Entry = tuple[int, int, int, int, int]
"""The worth of a block, its last access, the negative of what it covers, its number, and the queue's worth at
its last use.
"""


class _Queue:
    """The cached blocks of one tenant, the one that is worth least first. A heap with lazy deletion: an entry
    counts only while `live` still names it.
    """

    __slots__ = ("heap", "live", "tenant", "worth")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.worth = 0
        """The worth of the last evicted block: a block that is used from now on is worth more."""
        self.live: dict[int, _Entry] = {}
        self.heap: list[_Entry] = []

    def put(self, block: int, since: int, saves: int, last_access: int, depth: int) -> None:
        """Add a block that was used last when the queue's worth was `since`, or change what it saves."""
        entry = self.live[block] = (since + saves, last_access, depth, block, since)
        heapq.heappush(self.heap, entry)
        if len(self.heap) > 2 * len(self.live) + 64:
            self.sweep()

    def sweep(self) -> None:
        """Drop the entries that do not count any more."""
        self.heap = list(self.live.values())
        heapq.heapify(self.heap)

    def least(self) -> int:
        """The block that is worth least. There is one."""
        while self.live.get(self.heap[0][3]) != self.heap[0]:
            heapq.heappop(self.heap)
        return self.heap[0][3]

    def evict(self) -> int:
        """Give up the least block. There is one."""
        block = self.least()
        self.worth = heapq.heappop(self.heap)[0]
        del self.live[block]
        return block


class Evictor:
    """Cached blocks without references by tenant, least recently used first (contract C20).

    Among blocks of one last access the block whose hash covers most tokens is evicted first: the end of a
    prefix is worth less than its beginning.

    Blocks that save different numbers of tokens are ordered by these and by their use (GreedyDual): a block
    is worth the tokens that it saves, added to the worth of the last block that was evicted before its use.
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

    def add(self, block: int, last_access: int, covered: int, tenant: str = "", saves: int = 0) -> None:
        """Make a block of a tenant evictable; `covered` is the number of tokens that its hash covers, `saves`
        how many of them would be computed again without it, where blocks differ in that.
        """
        if block in self._queue_of:
            raise ValueError(f"block {block} is up for eviction already")
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = _Queue(tenant)
        self._queue_of[block] = queue
        queue.put(block, queue.worth, saves, last_access, -covered)

    def change(self, block: int, saves: int) -> None:
        """A block that is evictable saves so many tokens from now on."""
        queue = self._queue_of[block]
        _, last_access, depth, _, since = queue.live[block]
        queue.put(block, since, saves, last_access, depth)

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

    def least(self, tenant: str = "") -> int:
        """The block of a tenant that `evict` would give up. There is one."""
        return self._queues[tenant].least()

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
