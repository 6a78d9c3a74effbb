"""In which order requests come: the first is admitted first and preempted last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import SequenceGroup

Key = Callable[["SequenceGroup"], tuple[int, ...]]


def first_come(group: SequenceGroup) -> tuple[int, ...]:
    """By arrival (C26)."""
    return (group.request.number,)


def priority(group: SequenceGroup) -> tuple[int, ...]:
    """Higher priorities first, and by arrival among equals. A running group is not stopped for one that
    waits.

    There is no ageing: a group waits as long as higher ones keep the budgets full.
    """
    return (-group.request.priority, group.request.number)


POLICIES: dict[str, Key] = {"fcfs": first_come, "priority": priority}
