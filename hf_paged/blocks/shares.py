"""How tenants divide the blocks of a pool (contract C43)."""

from collections import Counter
from collections.abc import Mapping


class Shares:
    """What each tenant has of a pool at a moment, and what it may keep while `tenant` needs blocks.

    The tenants that have blocks, and the one that needs some, divide the pool by their weights.
    """

    def __init__(
        self, total: int, used: Counter[str], cached: Counter[str], weights: Mapping[str, float], tenant: str
    ) -> None:
        """used: the blocks of each tenant, cached: those among them that no table names."""
        self.tenant = tenant
        self._used = used
        self._cached = cached
        self._weight = {each: weights.get(each, 1.0) for each in {*used, tenant}}
        self._unit = total / sum(self._weight.values())

    def of(self, tenant: str) -> int:
        """The share of a tenant, in whole blocks; at least one."""
        return max(1, int(self._unit * self._weight[tenant] + 1e-6))

    def over(self, tenant: str, more: int = 0) -> bool:
        """Whether a tenant has more than its share, with so many blocks more."""
        return self._used[tenant] + more > self.of(tenant)

    def reserved(self) -> int:
        """The cached blocks that lie within the shares of other tenants."""
        others = [(each, cached) for each, cached in self._cached.items() if each != self.tenant]
        return sum(max(0, min(cached, self.of(each) - self._used[each] + cached)) for each, cached in others)

    def loser(self) -> str:
        """The tenant that loses a cached block: of those above their shares the one with the most blocks for
        its share, else the one that needs the block, if it has a cached one itself.
        """
        used = self._used + Counter((self.tenant,))
        over = [each for each in self._cached if used[each] > self.of(each)]
        if not over and self.tenant in self._cached:
            return self.tenant
        return max(over or self._cached, key=lambda each: used[each] / self._weight[each])
