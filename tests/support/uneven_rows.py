"""An engine whose rows take no, one or several tokens in a step, as the host has them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from engine_parts import scheduler_of
from engine_steps import job_of

from hf_paged.engine import Engine
from hf_paged.engine.requests.job import Job
from hf_paged.scheduling import Status, TokenSequence

PLAIN: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 1.3, "top_k": 9},
    {"do_sample": True, "num_return_sequences": 2},
    {"do_sample": False, "num_beams": 2},
]
"""Kinds of requests; beams stay as they are among the others."""


def advance(
    engine: Engine, handles: Sequence[Any], truths: Sequence[list[list[int]]], chance: random.Random
) -> Counter[int]:
    """Step until all requests are done: how often a row took so many tokens. Between two steps some sequences get
    several of their next tokens, which `truths` has, some wait, and groups are preempted.
    """
    scheduler = scheduler_of(engine)
    took: Counter[int] = Counter()
    schedule = scheduler.schedule

    def watched() -> Any:
        plan = schedule()
        took.update(row.count for row in plan.rows if row.start >= len(row.sequence.group.request.prompt))
        return plan

    scheduler.schedule = watched  # type: ignore[method-assign]
    truth = {job_of(handle): rows for handle, rows in zip(handles, truths, strict=True)}
    while not all(handle.done for handle in handles):
        engine.step()
        engine.check()
        running = [sequence for group in scheduler.running for sequence in group.sequences]
        for sequence in running:
            job = next(job for job in truth if job.group is sequence.group)
            if job.beams is None:
                give_more(scheduler, job, sequence, truth[job], chance)
                scheduler.wait(sequence, chance.random() < 0.25)
                took[0] += sequence.waits
        if running and all(sequence.waits for sequence in running):
            for sequence in running:
                scheduler.wait(sequence, False)
        if chance.random() < 0.1 and scheduler.running:
            scheduler.preempt(chance.choice(scheduler.running), swap=chance.random() < 0.5)
            engine.check()
    return took


def give_more(
    scheduler: Any, job: Job, sequence: TokenSequence, truth: list[list[int]], chance: random.Random
) -> None:
    """Some of its next tokens, but not its last, which a step brings."""
    answer = truth[sequence.index]
    known = len(sequence.tokens) - len(job.params.prompt)
    decodes = (
        known > 0 and sequence.group.status is Status.RUNNING and sequence.computed < len(sequence.tokens)
    )
    for token in answer[known : len(answer) - 1][: chance.randrange(4) if decodes else 0]:
        job.append(scheduler, {sequence: token}, {}, torch.device("cpu"))
