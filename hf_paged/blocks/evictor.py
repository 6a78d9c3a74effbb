"""Which cached block is evicted next."""

import heapq
from collections.abc import Iterator


class Evictor:
    """Cached blocks without references, least recently used first (contract C20).

    Among blocks of one last access the block whose hash covers most tokens is evicted first: the end of a
    prefix is worth less than its beginning. A heap with lazy deletion: an entry counts only while `_live`
    still names it.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[int, int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, block: int) -> bool:
        return block in self._live

    def __iter__(self) -> Iterator[int]:
        return iter(self._live)

    def add(self, block: int, last_access: int, covered: int) -> None:
        """Make `block` evictable; `covered` is the number of tokens that its hash covers."""
        if block in self._live:
            raise ValueError(f"block {block} is up for eviction already")
        entry = (last_access, -covered, block)
        self._live[block] = entry
        heapq.heappush(self._heap, entry)

    def remove(self, block: int) -> None:
        """Take `block` out because it is used again."""
        if self._live.pop(block, None) is None:
            raise ValueError(f"block {block} is not up for eviction")
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def evict(self) -> int:
        """Give up the block that is worth least."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._live.get(entry[2]) == entry:
                del self._live[entry[2]]
                return entry[2]
        raise ValueError("nothing to evict")
