"""The audit of a scheduler's books between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..blocks.pool import expect
from .limits import KVCacheGroup
from .policy import Key
from .request import SequenceGroup, Status


def check_kv_groups(kv_groups: Iterable[KVCacheGroup]) -> None:
    """Recount the pools, those of the host too (C7)."""
    for kv_group in kv_groups:
        kv_group.pool.check()
        if kv_group.host is not None:
            kv_group.host.check()


def check_groups(by_status: Mapping[Status, Sequence[SequenceGroup]], key: Key) -> None:
    """Check that every group is in the queue that its status names, in order, and that its tables hold what
    is computed, on the device or on the host (C30).
    """
    for status, groups in by_status.items():
        keys = [key(group) for group in groups]
        expect(keys == sorted(keys), f"the {status.value} groups are out of order")
        for group in groups:
            expect(group.status is status, f"{group!r} is queued as {status.value}")
            expect(not group.swapped or status is Status.PREEMPTED, f"{group!r} waits on the host")
            for sequence in group.sequences:
                for kv_group, table in zip(group.kv_groups, sequence.parked or sequence.tables, strict=True):
                    expect(
                        table.length == kv_group.kind.holds(sequence.computed, group.request.source),
                        f"{sequence!r} has a table of {table.length} tokens of {kv_group.kind} layers",
                    )
                here = any(table.blocks for table in sequence.tables)
                expect(status is Status.RUNNING or not here, f"{sequence!r} does not run and holds blocks")
                expect(bool(sequence.parked) == group.swapped, f"{sequence!r} is not where its group is")
                expect(
                    group.swapped or status is Status.RUNNING or not sequence.computed,
                    f"{sequence!r} has lost what it computed",
                )
