"""Decisions of several ranks alike: by numbers on the host (gloo), beside the model's own collectives."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from ...kv.forks import in_forked_process
from .connections import Connections
from .symmetric_memory import sums_of

MEETING = 60.0
"""Seconds that ranks wait for each other at least."""
AGAIN = "look for the first error of another rank, and start all of them again"
FORKED = "this process was forked from one of the ranks, which alone computes with the others"
TOGETHER = "each of them has to make the engine, or to call generate(), of a divided model"
before_groups: list[Callable[[], None]] = []
"""Calls before a process group is made: that waits for other ranks, and no thread of this process runs
meanwhile.
"""
before_groups_end: list[Callable[[dist.ProcessGroup], None]] = []
"""Calls before a process group ends: while a captured step has its collectives, NCCL would wait for ever."""
_made: Counter[str] = Counter()
"""How many groups for numbers on the host were made beside each group: as many on each of its ranks."""


def host_group(group: dist.ProcessGroup, seconds: float) -> dist.ProcessGroup:
    """A process group of the same ranks for numbers on the host.

    Not by `dist.new_group`: without all other ranks it names a group after how many a rank has, which differs
    where the user's own groups (rank 0 alone, say) have some of them only.
    """
    _watch_ends()
    for act in before_groups:
        act()
    members = dist.get_process_group_ranks(group)
    name = f"hf_paged/{'-'.join(map(str, members))}/{group.group_name}"
    c10d: Any = dist.distributed_c10d
    try:
        made: dist.ProcessGroup = c10d._new_process_group_helper(
            len(members),
            dist.get_rank(group),
            members,
            "gloo",
            c10d._get_default_store().clone(),  # threads that wait at one connection keep each other waiting
            f"{name}/{_made[name]}",
            timeout=timedelta(seconds=max(seconds, MEETING)),
        )[0]
    except RuntimeError as error:
        raise RuntimeError(f"ranks do not meet: {error}; {TOGETHER}") from error
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(members)}
    _made[name] += 1
    return made


@functools.cache
def _watch_ends() -> None:
    """Have torch do `before_groups_end`, also in a `destroy_process_group` that was imported long ago."""
    stock = dist.ProcessGroup.shutdown

    def shutdown(group: dist.ProcessGroup) -> None:
        for act in before_groups_end:
            act(group)
        stock(group)

    groups: Any = dist.ProcessGroup  # mypy takes no new method
    groups.shutdown = functools.wraps(stock)(shutdown)


def smallest(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """For each number the smallest of all ranks'."""
    found = torch.tensor(list(numbers), dtype=torch.long, device="cpu")
    dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
    least: list[int] = found.tolist()
    return least


def collectives_begun(group: Any) -> int:
    """The collectives of a divided model that this process has begun."""
    count: int = group._get_sequence_number_for_group()
    return count + sums_of(group)


def differing(fewest: int, most: int) -> str:
    """In words that ranks have not begun as many collectives."""
    return (
        f"ranks have computed different things ({fewest} to {most} collectives), so that their sums are "
        "wrong from now on; if your own code has sent or received something meanwhile, give it a process "
        "group of its own (dist.new_group())"
    )


def _patience(group: Any) -> float:
    """Seconds that the ranks' own collectives wait: code of the user may run long between two steps."""
    backend = group._get_backend(group._device_types[0])
    seconds: float = backend.options._timeout.total_seconds()
    return seconds


class Votes:
    """Decisions that all processes of a model make together. Here one process has all of the model, and its
    own values decide.
    """

    alone = True
    """True if no other process computes the model."""
    each_decides = False
    """True if each rank decides by itself what it captures and replays, so that all ask in each step."""

    def model_group(self) -> dist.ProcessGroup | None:
        """The process group of the model's own collectives, if there are any."""
        return None

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks; for what is rare."""
        return [value]

    def smallest(self, numbers: Sequence[int], place: str = "") -> list[int]:
        """For each number the smallest of all ranks'. They are at one place."""
        return list(numbers)

    def same(self, value: object, place: str) -> bool:
        """True if all ranks, which are at one place, have this value."""
        return True

    def least(self, number: int, computed: bool = True, place: str = "a capture") -> int:
        """The smallest of a number on all ranks, which are at one place. computed: whether all have computed
        the same since they last met; if they have not, later sums would be of different things, so the ranks
        end.
        """
        return number


class RankVotes(Votes):
    """Decisions of the ranks of a divided model, each of which runs all of generate(). Numbers travel over
    the host, so that no device waits.
    """

    alone = False
    each_decides = True

    def __init__(self, group: dist.ProcessGroup, seconds: float, patience: float | None) -> None:
        """All ranks make theirs together. seconds: the time in which they do. patience: that of a vote."""
        self._model_group = weakref.ref(group)
        self._group = host_group(group, seconds)
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        self._connections = Connections(self.rank, self.gather, patience)
        self._met = collectives_begun(group)
        """The model's collectives that this rank had begun when the ranks last met."""
        self.reason: str | None = None
        """Why the ranks cannot go on together: a capture that fails says it again outside."""

    def model_group(self) -> dist.ProcessGroup | None:
        return self._model_group()

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def smallest(self, numbers: Sequence[int], place: str = "") -> list[int]:
        """Messages of up to three numbers have one length: ranks at different places read each other's."""
        if self.reason is not None:
            raise RuntimeError(self.reason)
        digest = crc32(place.encode())
        asked = [*numbers, *[0] * (3 - len(numbers)), digest, -digest]
        try:
            if self._connections.complete:  # faster than gloo's ring
                *found, least, most = self._connections.smallest(asked)
            else:
                *found, least, most = smallest(asked, self._group)
        except BaseException as error:  # also an interrupt, which leaves an answer unread
            lost = self._ended("another rank does not answer, or has ended")
            self._connections.shut()  # no other rank needs to wait for this one
            if not isinstance(error, (OSError, RuntimeError)):
                raise
            raise lost from error
        if least != -most:
            raise self._ended(f"ranks are at different places, this one at {place}")
        return found[: len(numbers)]

    def same(self, value: object, place: str) -> bool:
        digest = crc32(f"{place}: {value!r}".encode())
        least, most = self.smallest([digest, -digest], place)
        return least == -most

    def least(self, number: int, computed: bool = True, place: str = "a capture") -> int:
        begun = self._begun()
        least, fewest, most = self.smallest([number, begun, -begun], place)
        self._met += begun
        if computed and fewest != -most:
            raise self._ended(differing(fewest, -most))
        return least

    def _begun(self) -> int:
        """The model's collectives that this rank has begun since the ranks last met."""
        return collectives_begun(self.model_group()) - self._met

    def _ended(self, why: str) -> Exception:
        """The ranks cannot go on together: the error to raise."""
        self.reason = f"{why}; {AGAIN}"
        return RuntimeError(self.reason)

    def forget(self) -> None:
        """This process is a fork of the rank's: it has its connections, and would answer for it."""
        self._connections.close()
        self.reason = FORKED


_votes: weakref.WeakKeyDictionary[dist.ProcessGroup, RankVotes] = weakref.WeakKeyDictionary()


def votes_of(group: dist.ProcessGroup) -> RankVotes:
    """Those of the ranks of a group. All ranks ask together."""
    if group not in _votes:
        _votes[group] = RankVotes(group, _patience(group), _patience(group))
    return _votes[group]


def _forget() -> None:
    for votes in _votes.values():
        votes.forget()


in_forked_process(_forget)
