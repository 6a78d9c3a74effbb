"""Tasks: adapters of some methods compute each request by the number of its task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..prompt_learning import BY_TASK, kind_of
from ..switch import modules_of

TASKS = {BY_TASK: "num_tasks", "POLY": "n_tasks"}
"""The methods whose adapters know tasks, and the entries of their configs that say how many."""


def tasks_of(config: Any) -> int | None:
    """How many tasks an adapter with this config of peft's knows; None if it knows none."""
    where = TASKS.get(kind_of(config))
    return None if where is None else int(getattr(config, where))


def task_of(config: Any, name: str, task: Any) -> int | None:
    """The task of a request, checked against what its adapter knows."""
    count = tasks_of(config)
    if count is None:
        if task is not None:
            raise ValueError(f"task_ids={task!r}: {name!r} has no tasks; leave it out")
        return None
    found = task.tolist() if hasattr(task, "tolist") else task
    while isinstance(found, (list, tuple)) and len(found) == 1:
        found = found[0]
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < count:
        what = "a multitask prompt" if kind_of(config) == BY_TASK else "an adapter of several tasks"
        raise ValueError(
            f"task_ids={task!r}: {name!r} is {what}; give the number of the request's task, 0 to {count - 1}"
        )
    return found


def modules_by_task(twin: nn.Module) -> list[nn.Module]:
    """The modules of a twin that compute each task in another way."""
    return [each for each in modules_of(twin) if "poly_router" in each._modules]


@contextmanager
def giving_task(modules: list[nn.Module], task: int) -> Iterator[None]:
    """Give modules the task of the rows that forwards compute meanwhile, as peft's own generate() does."""
    ids = torch.tensor([task], device="cpu")  # where peft compares it with the number of tasks

    def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "task_ids": ids}

    handles = [each.register_forward_pre_hook(give, with_kwargs=True) for each in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
