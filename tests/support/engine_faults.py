"""Shared by the tests: Does, Fails, GREEDY, assert_neighbours_unharmed, neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from engine_answers import PROMPTS, alone, answers
from families import VOCABULARY
from transformers import LogitsProcessor, StoppingCriteria

from hf_paged.engine import Engine

POISON = next(token for token in range(5, VOCABULARY) if not any(token in prompt for prompt in PROMPTS))


"""A token that the models of these tests may choke on."""


GREEDY = {"max_new_tokens": 9, "do_sample": False, "bad_words_ids": [[POISON]]}


class Fails(LogitsProcessor):
    """Raises after some calls, on rows or criteria alike."""

    def __init__(self, after: int, error: BaseException) -> None:
        self.left, self.error = after, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return args[1] if args[1] is not None else torch.zeros(len(args[0]), dtype=torch.bool)


class Does(StoppingCriteria):
    """Does something in the middle of a step, and never stops."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.act()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def assert_neighbours_unharmed(engine: Engine, handles: list[Any]) -> None:
    """They have the tokens they get alone, and nothing is held or broken."""
    assert [answers(handle.result()) for handle in handles] == [
        alone(engine.model, prompt, **GREEDY) for prompt in PROMPTS[:3]
    ]
    engine.check()
    stats = engine.stats()
    assert stats["waiting"] == stats["running"] == stats["preempted"] == 0
    assert all(kind["held"] == 0 for kind in stats["blocks"].values())


def neighbours(engine: Engine) -> list[Any]:
    return [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
