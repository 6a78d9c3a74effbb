"""Repetition penalties of many requests at once: the tokens of generate(), while requests join, end and are
preempted.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, alone, answers, each_alone
from engine_steps import broken_into
from families import BY_NAME, build
from tape import record
from transformers import RepetitionPenaltyLogitsProcessor

from hf_paged.engine import Engine
from hf_paged.engine.sampling import columns
from hf_paged.engine.sampling.histories import FIRST_ROWS, Histories
from hf_paged.engine.sampling.warp import penalised
from hf_paged.model.rehearsal import RECORDERS


def test_ids_without_a_score_cost_nothing() -> None:
    """Each token of a row is penalised once, however often it is there; UNKNOWN fills up shorter rows."""
    scores = torch.ones(3, 12)
    ids = torch.tensor([[3, 5, 3], [-1, 1, 99], [-1, -1, -1]])
    found = penalised(scores, ids, torch.tensor([[2.0], [4.0], [2.0]]))
    assert [(row != 1).nonzero()[:, 0].tolist() for row in found] == [[3, 5], [1], []]
    assert found[0, 3] == 0.5
    assert found[1, 1] == 0.25


def owner(group: Any, tokens: list[int], index: int = 0) -> Any:
    """Parameters of a request, and a sequence of its own with these tokens in it."""
    return SimpleNamespace(seen=lambda tokens: tokens), SimpleNamespace(
        group=group, index=index, tokens=tokens
    )


def test_lines_are_of_what_a_sequence_has_in_it() -> None:
    """Those that the host knows at first, then what was chosen, of which the host may not know."""
    histories, one, other = Histories(), object(), object()
    first, second, twin = owner(one, [3, 5, 3]), owner(other, [1, 9]), owner(one, [7], index=1)
    cpu = torch.device("cpu")

    def read(*owners: Any, lengths: list[int]) -> list[list[int]]:
        histories.enter(owners, cpu)
        return histories.read(owners, lengths, max(lengths), -1).tolist()

    assert read(first, second, twin, lengths=[3, 2, 1]) == [[3, 5, 3], [-1, 1, 9], [-1, -1, 7]]
    histories.note([first, second, twin], [3, 2, 1], torch.tensor([8, 9, 7]))
    first[1].tokens.append(-1)
    assert read(second, first, lengths=[3, 4]) == [[-1, 1, 9, 9], [3, 5, 3, 8]]
    assert histories.whole([second, first], [3, 4], -1).tolist() == [[1, 9, 9, -1], [3, 5, 3, 8]]
    assert histories.whole([twin], [0], -1).tolist() == [[]]
    histories.drop(one)
    others = [owner(object(), [i]) for i in range(3 * FIRST_ROWS)]
    assert read(*others, second, lengths=[1] * len(others) + [3])[-1] == [1, 9, 9]
    histories.clear()
    assert read(second, lengths=[2]) == [[1, 9]]


KINDS: list[dict[str, Any]] = [
    {"do_sample": False, "repetition_penalty": 1.8},
    {"do_sample": False},
    {"do_sample": True, "seed": 3, "num_return_sequences": 2, "repetition_penalty": 0.7, "top_k": 30},
    {"do_sample": False, "repetition_penalty": 1.2, "logprobs": 2},
]


def test_long_rows_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long row does not pad all others."""
    assert list(columns.parts_of([3, 5, 9])) == [slice(0, 3)]
    monkeypatch.setattr(columns, "MOST_IDS", 16)
    assert list(columns.parts_of([3, 5, 9, 40, 50])) == [
        slice(0, 2),
        slice(2, 3),
        slice(3, 4),
        slice(4, 5),
    ]
    model = build(BY_NAME["llama"])
    options = {"do_sample": False, "repetition_penalty": 1.7, "max_new_tokens": 8}
    with Engine(model, num_blocks=200) as engine:
        found = [answers(output) for output in engine.generate(PROMPTS[:4], **options)]
    assert found == [alone(model, prompt, **options) for prompt in PROMPTS[:4]]


PARAMS = [(prompt, {**kind, "max_new_tokens": 14}) for prompt in PROMPTS[:3] for kind in KINDS]


@functools.cache
def right() -> list[list[list[int]]]:
    """The answers to each of them alone: those without draws are those of generate()."""
    return each_alone(PARAMS, lambda model, prompt, asked: alone(model, prompt, **asked))


@pytest.mark.parametrize(("ahead", "graphs"), [(False, False), (True, True)])
def test_every_group_pays_for_its_own_blocks(
    ahead: bool, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others in small pools, preempted and broken into: what an interrupt threw away was not said by
    whoever begins again.
    """
    expected = right()
    if graphs:
        monkeypatch.setitem(RECORDERS, "cpu", record)
    with Engine(
        build(BY_NAME["llama"]),
        block_size=4,
        num_blocks=14,
        max_batch_tokens=16,
        max_batch_sequences=6,
        run_ahead=ahead,
    ) as engine:
        # Captured steps call it rarely.
        assert broken_into(engine, PARAMS, 4 if graphs else 12) == expected
        assert engine.stats()["preemptions"]
        assert not engine.driver.loop._sampling.histories._lines


class Own(RepetitionPenaltyLogitsProcessor):
    """The same as a user's processor, which is called with a request's own rows."""


@pytest.mark.parametrize("samples", [1, 2])
def test_draws_are_those_of_the_processor(samples: int) -> None:
    """C35: in the crew and beside it, before the cuts."""
    options = {
        "do_sample": True,
        "num_return_sequences": samples,
        "top_k": 20,
        "temperature": 1.3,
        "seed": 2,
        "max_new_tokens": 20,
    }
    with Engine(build(BY_NAME["llama"]), num_blocks=200) as engine:
        for prompt in PROMPTS[:3]:
            expected = engine.submit(prompt, logits_processor=[Own(1.7)], **options)
            found = engine.submit(prompt, repetition_penalty=1.7, **options)
            assert (
                answers(found.result())
                == answers(expected.result())
                != answers(engine.submit(prompt, **options).result())
            )
        assert engine.stats()["slow_processors"] == {"Own": 3}


def test_embeddings_without_ids_pay_for_their_answers_only() -> None:
    model = build(BY_NAME["llama"])
    embeds = model.get_input_embeddings()(torch.tensor(PROMPTS[0])).detach()
    options = {"do_sample": False, "repetition_penalty": 1.7, "max_new_tokens": 8}
    with Engine(model, num_blocks=200) as engine:
        handle = engine.submit(inputs_embeds=embeds, **options)
        assert answers(handle.result()) == model.generate(inputs_embeds=embeds[None], **options).tolist()


def test_any_driver_in_any_mode() -> None:
    """Histories begun in inference mode go on outside it."""
    options = {"do_sample": False, "repetition_penalty": 1.7, "max_new_tokens": 8}
    model = build(BY_NAME["llama"])
    with Engine(model, num_blocks=200) as engine:
        handles = [engine.submit(prompt, **options) for prompt in PROMPTS[:3]]
        with torch.inference_mode():
            for _ in range(4):
                engine.step()
        assert [answers(handle.result()) for handle in handles] == [
            alone(model, prompt, **options) for prompt in PROMPTS[:3]
        ]
