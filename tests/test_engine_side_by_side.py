"""An engine and others on one model at the same time: other engines, calls of generate(), checks from other
threads (C24, C34).
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, alone, answers
from model_checks import count_checks
from tape import record

from hf_paged.engine import Engine
from hf_paged.kv import LayerGroup
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.model.switch import original_implementation, restore, switch

GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_in_the_middle_of_a_call(llama: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A paged generate() sets attributes of the model while it runs: no change of the model, for requests
    that ran before.
    """
    if graphs:
        monkeypatch.setitem(RECORDERS, "cpu", record)
    expected = [alone(llama, prompt, **GREEDY) for prompt in PROMPTS[:3]]
    with Engine(llama, block_size=4, num_blocks=60) as engine:
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:2]]
        engine.step()
        steps = [0]

        def between(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            engine.step()
            steps[0] += 1
            return torch.zeros(len(ids), dtype=torch.bool)

        options = {
            "stopping_criteria": [between],
            "cache_implementation": "paged",
            "cache_config": {"prefix_caching": True},
        }
        row = llama.generate(torch.tensor([PROMPTS[2]]), **GREEDY, **options)[0]
        assert steps[0] == 8
        assert [row[len(PROMPTS[2]) :].tolist()] == expected[2]
        assert [answers(handle.result()) for handle in handles] == expected[:2]


def test_an_engine_that_is_made_in_the_middle_of_a_call(llama: Any) -> None:
    """It takes the model for what it is afterwards."""
    made: list[Engine] = []

    def between(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if not made:
            made.append(Engine(llama, block_size=4, num_blocks=40))
            made[0].submit(PROMPTS[0], **GREEDY)
            made[0].step()
        return torch.zeros(len(ids), dtype=torch.bool)

    llama.generate(
        torch.tensor([PROMPTS[2]]), **GREEDY, stopping_criteria=[between], cache_implementation="paged"
    )
    with made[0] as engine:
        llama.marked = True  # something is another setting: all of them are asked what they say
        del llama.marked
        assert [answers(output) for output in engine.generate(PROMPTS[:2], **GREEDY)] == [
            alone(llama, prompt, **GREEDY) for prompt in PROMPTS[:2]
        ]


def test_captured_steps_survive_a_paged_call_around_them(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", record)
    long = {"max_new_tokens": 16, "do_sample": False}
    with Engine(llama, block_size=16, num_blocks=40) as engine:
        for _ in range(2):
            engine.generate(PROMPTS[:1], **long)
        before = engine.stats()["graphs"]
        handle = engine.submit(PROMPTS[0], **long)

        def between(ids: torch.Tensor, scores: Any) -> torch.Tensor:
            engine.step()
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor([PROMPTS[2]])
        llama.generate(ids, **GREEDY, stopping_criteria=[between], cache_implementation="paged")
        after = engine.stats()["graphs"]
        assert after["captured"] == before["captured"]
        assert after["replayed"] > before["replayed"]
        assert answers(handle.result()) == alone(llama, PROMPTS[0], **long)


def test_pools_do_not_move_in_the_middle_of_a_forward(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards hold the lock of the model's memory: whoever gives pools back, or asks the model's settings,
    has it, too.
    """
    lock, seen = memory_of(llama).lock, Counter[str]()

    def note(name: str) -> None:
        assert lock._is_owned()
        seen[name] += 1

    def giving_back(group: LayerGroup) -> Any:
        note("pools")
        return give_back(group)

    give_back = LayerGroup.give_back
    monkeypatch.setattr(LayerGroup, "give_back", giving_back)
    count_checks(monkeypatch, note)
    with Engine(llama, block_size=4, num_blocks=40) as engine:
        handle = engine.submit(PROMPTS[0], **GREEDY)
        for _ in range(3):
            engine.step()
        handle.result()
    assert {"pools", "weights", "all"} <= seen.keys()


def test_the_user_s_attention_is_asked_for_while_another_thread_switches_it() -> None:
    """Who asks gets the user's, never ours: the other thread waits for the answer."""
    switched = threading.Event()

    class Config:
        _attn_implementation_internal = "sdpa"
        thread: threading.Thread | None = None

        @property
        def _attn_implementation(self) -> str:
            if self.thread is None:
                self.thread = threading.Thread(
                    target=lambda: (switch([self], "hf_paged", self), switched.set())
                )
                self.thread.start()
                switched.wait(0.2)  # it comes in between, if nothing keeps it out
            return self._attn_implementation_internal

    config = Config()
    assert original_implementation(config) == "sdpa"
    assert config.thread is not None
    config.thread.join()
    assert original_implementation(config) == "sdpa"
    restore([config], config)
    assert config._attn_implementation == "sdpa"
