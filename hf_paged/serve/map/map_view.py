"""Whose the engine's requests are, and what of the map a tenant may see."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ...trace import MapState, Name, Step, encode
from ..http.keys import Tenant

PAST = 1024
"""How many requests that have ended are still known."""


class Owner(NamedTuple):
    """Whose an engine request is, the HTTP request that it came with, and its prompt."""

    tenant: str
    request_id: str
    ids: tuple[int, ...]


class Owners:
    """The owner of each engine request while it is under way, and for a while after."""

    def __init__(self) -> None:
        self._under_way: dict[int, Owner] = {}
        self._past: OrderedDict[int, Owner] = OrderedDict()

    def add(self, number: int, owner: Owner) -> None:
        """A request was submitted."""
        self._under_way[number] = owner

    def discard(self, numbers: Iterable[int | None]) -> None:
        """Requests have ended. The map may show them for a moment more."""
        for number in numbers:
            owner = None if number is None else self._under_way.pop(number, None)
            if number is not None and owner is not None:
                self._past[number] = owner
        while len(self._past) > PAST:
            self._past.popitem(last=False)

    def of(self, number: int, tenant: Tenant) -> Owner | None:
        """The owner of a request that a tenant may see; None for others' requests and unknown ones."""
        owner = self._under_way.get(number) or self._past.get(number)
        return owner if owner is not None and (tenant.sees_all or owner.tenant == tenant.name) else None


class Move(NamedTuple):
    """Blocks that a sequence gave up and took, in the pool of a kind of layer or, with `host`, in the host's
    memory.
    """

    name: Name
    kind: int
    host: bool
    left: tuple[int, ...]
    came: tuple[int, ...]


def moves(state: MapState, step: Step) -> list[Move]:
    """Moves of a step, by the state before it."""
    found: list[Move] = []
    for name, changes in step.tables.items():
        before = state.tables.get(name)
        for kind in range(len(state.kinds)):
            old = () if before is None else before[kind].blocks
            if changes is None:
                found.append(Move(name, kind, False, old, ()))
                continue
            change = changes[kind]
            passed = 0 if before is None else change.released - before[kind].released
            kept = old[passed:] if passed >= 0 else ()
            left = (*old[: len(old) - len(kept)], *kept[change.same :])
            if left or change.new:
                found.append(Move(name, kind, False, left, change.new))
    for name, waiting in step.host.items():
        old_waiting = state.host.get(name, ((),) * len(state.kinds))
        new = waiting or ((),) * len(state.kinds)
        found += [Move(name, i, True, *each) for i, each in enumerate(zip(old_waiting, new, strict=False))]
    return found


class _Shared:
    """The blocks of one pool, as those see them who own only some."""

    def __init__(self) -> None:
        self.own: Counter[int] = Counter()
        self.others: Counter[int] = Counter()
        self.shown: set[int] = set()
        """The blocks that are shown as others'."""
        self.known: set[int] = set()
        """The blocks whose content is an own request's."""
        self._touched: set[int] = set()

    def move(self, move: Move, own: bool) -> None:
        counts = self.own if own else self.others
        counts.subtract(move.left)
        counts.update(move.came)
        self._touched.update(move.left)
        self._touched.update(move.came)

    def settle(self, renamed: Iterable[int]) -> tuple[list[int], list[int]]:
        """After all moves of a step: the blocks that are others' from now on, and those that are not."""
        came = []
        left = []
        for block in self._touched:
            is_own = self.own[block] > 0
            is_others = self.others[block] > 0 and not is_own
            if is_own:
                self.known.add(block)
            elif is_others:
                self.known.discard(block)
            if is_others and block not in self.shown:
                came.append(block)
            elif block in self.shown and not is_others:
                left.append(block)
        self._touched = set()
        # A block got a name while no own request held it: of another's perhaps, between two records.
        self.known.difference_update(block for block in renamed if not self.own[block])
        self.shown.update(came)
        self.shown.difference_update(left)
        return sorted(came), sorted(left)


class Sight:
    """The view of one tenant: its own requests whole, of others only which blocks they hold."""

    def __init__(self, tenant: Tenant, owners: Owners, state: MapState) -> None:
        self.tenant = tenant
        self._owners = owners
        self._state = state
        self._pools = [_Shared() for _ in state.kinds]
        self._hosts = [_Shared() for _ in state.kinds]
        for name, tables in state.tables.items():
            self._move(Move(name, i, False, (), table.blocks) for i, table in enumerate(tables))
        for name, waiting in state.host.items():
            self._move(Move(name, i, True, (), blocks) for i, blocks in enumerate(waiting))
        self._settle(({},) * len(state.kinds))

    def _sees(self, number: int) -> bool:
        return self.tenant.sees_all or self._owners.of(number, self.tenant) is not None

    def _move(self, some: Iterable[Move]) -> None:
        for move in some:
            pools = self._hosts if move.host else self._pools
            pools[move.kind].move(move, self._sees(move.name.request))

    def _settle(self, names: tuple[Mapping[int, Any], ...]) -> tuple[list[Any], list[Any]]:
        renamed: tuple[Iterable[int], ...] = names or ((),) * len(self._pools)
        others = [pool.settle(some) for pool, some in zip(self._pools, renamed, strict=True)]
        return others, [host.settle(()) for host in self._hosts]

    def step(self, step: Step, some: list[Move]) -> dict[str, Any]:
        """A step as this tenant is shown it; the state is the one behind it."""
        if self.tenant.sees_all:
            return self._with_ids(step, encode(step))
        known = [set(pool.known) for pool in self._pools]
        self._move(some)
        others, others_host = self._settle(step.names)
        names = []
        for i, (pool, before) in enumerate(zip(self._pools, known, strict=True)):
            renamed = {} if not step.names else step.names[i]
            new = {block: renamed[block] for block in pool.known.intersection(renamed)}
            now = self._state.names[i]
            new.update({block: now[block] for block in pool.known - before if block in now})
            names.append(new)
        shown = self._shown(step, tuple(names))
        value = self._with_ids(shown, encode(shown))
        if any(came or left for came, left in others):
            value["others"] = others
        if any(came or left for came, left in others_host):
            value["others_host"] = others_host
        return value

    def whole(self, last: Step) -> dict[str, Any]:
        """All that this tenant may see, as one step after none."""
        step = self._state.whole(last)
        if self.tenant.sees_all:
            return self._with_ids(step, encode(step))
        names = tuple(
            {block: name for block, name in known.items() if block in pool.known}
            for known, pool in zip(step.names, self._pools, strict=True)
        )
        shown = self._shown(step, names)
        value = self._with_ids(shown, encode(shown))
        value["others"] = [[sorted(pool.shown), []] for pool in self._pools]
        value["others_host"] = [[sorted(pool.shown), []] for pool in self._hosts]
        return value

    def _shown(self, step: Step, names: tuple[Mapping[int, str | None], ...]) -> Step:
        """A step without what belongs to others."""
        sees = self._sees
        return replace(
            step,
            rows=tuple(row for row in step.rows if sees(row.request)),
            admitted=tuple(filter(sees, step.admitted)),
            preempted=tuple(filter(sees, step.preempted)),
            ended=tuple(each for each in step.ended if sees(each.request)),
            tables={name: changes for name, changes in step.tables.items() if sees(name.request)},
            arrived=tuple(each for each in step.arrived if sees(each.request)),
            states={number: state for number, state in step.states.items() if sees(number)},
            names=names if any(names) else (),
            copies=tuple(self._copies(step)),
            host={name: blocks for name, blocks in step.host.items() if sees(name.request)},
        )

    def _copies(self, step: Step) -> Iterator[tuple[tuple[int, int], ...]]:
        for pool, copies in zip(self._pools, step.copies, strict=False):
            yield tuple(copy for copy in copies if pool.own[copy[1]] > 0)

    def _with_ids(self, step: Step, value: dict[str, Any]) -> dict[str, Any]:
        owners = [(each.request, self._owners.of(each.request, self.tenant)) for each in step.arrived]
        ids = {number: owner.request_id for number, owner in owners if owner is not None}
        return {**value, "ids": ids} if ids else value
