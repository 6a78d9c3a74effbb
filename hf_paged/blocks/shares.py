"""How tenants divide the blocks of a pool (contract C43)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush


class _Peers:
    """The tenants of one weight that have blocks. Their shares are equal.

    The blocks of a tenant are numbered from 1 on, held ones first: what it has cached within its share are
    the cached blocks of numbers up to the share.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.tenants = 0
        self.most: list[tuple[int, int, str]] = []
        """A heap of those with cached blocks: -used, since when, name. Entries may be out of date."""
        self._cached = [0]
        """How many of the tenants have a cached block of a number."""
        self._share = 0
        self._within = 0
        """The sum of `_cached` up to `_share`."""

    def count(self, first: int, last: int, by: int) -> None:
        """A tenant has a cached block more of each number behind `first` up to `last`; by=-1: one less."""
        if last >= len(self._cached):
            self._cached.extend([0] * (last + 1 - len(self._cached)))
        for number in range(first + 1, last + 1):
            self._cached[number] += by
        self._within += by * max(0, min(last, self._share) - first)

    def within(self, share: int) -> int:
        """The blocks that all these tenants have cached within their shares."""
        if share > self._share:
            self._within += sum(self._cached[self._share + 1 : share + 1])
        elif share < self._share:
            self._within -= sum(self._cached[share + 1 : self._share + 1])
        self._share = share
        return self._within


class TenantBooks:
    """The blocks of each tenant of a pool, counted where a block changes hands.

    No answer costs more with more tenants; with more different weights each costs more.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """weights: 1 without an entry. A tenant keeps its weight while it has blocks."""
        self.used: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        """Those of the used blocks that tables name; the others are cached."""
        self.since: dict[str, int] = {}
        """The tenants with cached blocks, numbered in the order in which they came to have some."""
        self.peers: dict[float, _Peers] = {}
        self.peers_of: dict[str, _Peers] = {}
        self._weights = weights
        self._outdated: set[str] = set()
        """Tenants with cached blocks whose entries in the heap of their peers are out of date."""
        self._came = 0

    def weight(self, tenant: str) -> float:
        """The weight of a tenant, with blocks or without."""
        peers = self.peers_of.get(tenant)
        return self._weights.get(tenant, 1.0) if peers is None else peers.weight

    def change(self, tenant: str, used: int, held: int) -> None:
        """A tenant has so many blocks more, and holds so many more; below 0 so many fewer."""
        had, had_held = self.used[tenant], self.held[tenant]
        has, has_held = had + used, had_held + held
        self.used[tenant] = has
        self.held[tenant] = has_held
        if had and has and had == had_held and has == has_held:
            return
        peers = self.peers_of.get(tenant)
        if peers is None:
            weight = self.weight(tenant)
            peers = self.peers_of[tenant] = self.peers.setdefault(weight, _Peers(weight))
            peers.tenants += 1
        if had > had_held or has > has_held:
            peers.count(min(had, has), max(had, has), 1 if used > 0 else -1)
            peers.count(min(had_held, has_held), max(had_held, has_held), -1 if held > 0 else 1)
            self._rank(tenant, has > has_held)
        if not has:
            del self.used[tenant], self.held[tenant], self.peers_of[tenant]
            peers.tenants -= 1
            if not peers.tenants:
                del self.peers[peers.weight]

    def _rank(self, tenant: str, cached: bool) -> None:
        """The blocks of a tenant have changed, of which it has cached ones or has no longer."""
        if cached:
            self._outdated.add(tenant)
            self._came += 1
            self.since.setdefault(tenant, self._came)
        else:
            self.since.pop(tenant, None)
            self._outdated.discard(tenant)

    def firsts(self) -> list[str]:
        """Of each weight the tenant with the most blocks, of those that have cached ones."""
        for tenant in self._outdated:
            heappush(self.peers_of[tenant].most, (-self.used[tenant], self.since[tenant], tenant))
        self._outdated.clear()
        found = []
        for peers in self.peers.values():
            heap = peers.most
            if len(heap) > 2 * peers.tenants + 64:
                heap[:] = sorted({entry for entry in heap if self._holds(entry)})
            while heap and not self._holds(heap[0]):
                heappop(heap)
            found += [heap[0][2]] if heap else []
        return found

    def _holds(self, entry: tuple[int, int, str]) -> bool:
        used, since, tenant = entry
        return self.since.get(tenant) == since and self.used[tenant] == -used


class Shares:
    """The blocks that each tenant may keep of a pool of `total` at a moment, while `tenant` needs some.

    The tenants that have blocks, and the one that needs some, divide the pool by their weights.
    """

    def __init__(self, books: TenantBooks, total: int, tenant: str, hits: Iterable[str] = ()) -> None:
        """hits: the tenants of cached blocks that are as good as held, one for each block."""
        self.tenant = tenant
        self._books = books
        self._hits = Counter(hits)
        weights = sum(peers.tenants * peers.weight for peers in books.peers.values())
        self._unit = total / (weights + (0 if tenant in books.peers_of else books.weight(tenant)))

    def of(self, tenant: str) -> int:
        """The share of a tenant, in whole blocks; at least one."""
        return self._share(self._books.weight(tenant))

    def _share(self, weight: float) -> int:
        return max(1, int(self._unit * weight + 1e-6))

    def over(self, tenant: str, more: int = 0) -> bool:
        """True if a tenant with so many blocks more has more than its share."""
        return self._books.used[tenant] + more > self.of(tenant)

    def reserved(self) -> int:
        """The cached blocks that lie within the shares of other tenants."""
        every = sum(peers.within(self._share(peers.weight)) for peers in self._books.peers.values())
        hits = sum(self._kept(each) - self._kept(each, count) for each, count in self._hits.items())
        own = self._kept(self.tenant, self._hits[self.tenant])
        return every - hits - own

    def _kept(self, tenant: str, hits: int = 0) -> int:
        """The blocks that a tenant has cached within its share, but for so many hits."""
        share = self.of(tenant)
        return min(share, self._books.used[tenant]) - min(share, self._books.held[tenant] + hits)

    def loser(self) -> str:
        """The tenant that loses a cached block: of those above their shares the one with the most blocks for
        its share, else the one that needs the block, if it has a cached one itself.
        """
        books = self._books
        every = dict.fromkeys(books.firsts())
        if self.tenant in books.since:
            every[self.tenant] = None
        used = {each: books.used[each] + (each == self.tenant) for each in every}
        over = [each for each in used if used[each] > self.of(each)]
        if not over and self.tenant in used:
            return self.tenant
        return min(over or used, key=lambda each: (-used[each] / books.weight(each), books.since[each]))


def recount(
    total: int, used: Mapping[str, int], cached: Mapping[str, int], weights: Mapping[str, float], tenant: str
) -> tuple[int, str]:
    """`reserved` and `loser` of Shares, counted from the blocks of every tenant: for the audit of a pool."""
    unit = total / sum(weights[each] for each in {*used, tenant})
    share = {each: max(1, int(unit * weights[each] + 1e-6)) for each in {*used, tenant}}
    reserved = sum(
        max(0, min(count, share[each] - used[each] + count))
        for each, count in cached.items()
        if each != tenant
    )
    need = {**used, tenant: used.get(tenant, 0) + 1}
    over = [each for each in cached if need[each] > share[each]]
    if not over and tenant in cached:
        return reserved, tenant
    return reserved, max(over or cached, key=lambda each: need[each] / weights[each], default="")
