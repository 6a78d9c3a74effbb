"""Draws: cut as transformers cuts, distributed as the scores say, and nobody's but the request's own
(C35).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_paged.blocks import Column
from hf_paged.engine.sampling import parameters
from hf_paged.engine.sampling.parameters import (
    CUTS,
    FREQUENCY,
    NO_WARP,
    PENALTIES,
    PRESENCE,
    REPETITION,
    Parameter,
    Warp,
    Warps,
    warp_of,
)
from hf_paged.engine.sampling.penalties import AnswerPenalties, with_counts_off
from hf_paged.engine.sampling.random_numbers import gumbel, row_numbers, row_states, uniform
from hf_paged.engine.sampling.warp import cut, draw, greedy_tokens, mend, penalised, scaled
from hf_paged.scheduling import UNKNOWN

VOCABULARY = 40
PROMPT = 4
"""Ids of a row that are no answer."""
NUMBERS: dict[str, list[float]] = {
    "repetition": [1.3, 0.8],
    "presence": [0.5, -1.5],
    "frequency": [0.25, -0.5],
    "temperature": [0.7, 2.5],
    "top_k": [1, 5, 39, 400],
    "top_p": [0.9, 0.3, 1e-4, 1 - 1e-9],
    "min_p": [0.05, 0.9],
}
warps = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(numbers) for name, numbers in NUMBERS.items()}
)


def stock(wanted: Warp) -> LogitsProcessorList:
    """The same by transformers, as generate() makes them."""
    made = LogitsProcessorList()
    if "repetition" in wanted:
        made.append(RepetitionPenaltyLogitsProcessor(wanted["repetition"]))
    if "presence" in wanted or "frequency" in wanted:
        made.append(AnswerPenalties(PROMPT, wanted.get("presence", 0), wanted.get("frequency", 0)))
    if "temperature" in wanted:
        made.append(TemperatureLogitsWarper(wanted["temperature"]))
    if "top_k" in wanted:
        made.append(TopKLogitsWarper(int(wanted["top_k"])))
    if "top_p" in wanted:
        made.append(TopPLogitsWarper(wanted["top_p"]))
    if "min_p" in wanted:
        made.append(MinPLogitsWarper(wanted["min_p"]))
    return made


@settings(max_examples=examples(40))
@given(rows=st.lists(warps, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_rows_are_cut_as_transformers_cuts_them(rows: list[Warp], seed: int) -> None:
    """Every row under its own options, all in one go: exactly the scores that transformers' processors
    leave.
    """
    torch.manual_seed(seed)
    scores = torch.randn(len(rows), VOCABULARY) * 3
    scores[:, 7] = scores[:, 3]  # a tie
    ids = torch.randint(0, VOCABULARY, (len(rows), 9))
    numbers = Warps.of(rows, scores.device)
    together = penalised(scores, ids, numbers.number(REPETITION))
    answers = ids[:, PROMPT:]
    there = torch.ones_like(answers, dtype=torch.bool)
    together = with_counts_off(together, answers, there, *map(numbers.number, (PRESENCE, FREQUENCY)))
    together = cut(scaled(together, numbers), numbers)
    for i, row in enumerate(rows):
        processors = stock(row)
        assert warp_of(processors, sampled=True) == row
        assert torch.equal(together[i : i + 1], processors(ids[i : i + 1], scores[i : i + 1].clone()))


def test_other_processors_are_not_cuts() -> None:
    """Warps leave all else to the processors themselves."""
    assert warp_of([], sampled=True) == warp_of([], sampled=False) == NO_WARP
    assert warp_of([RepetitionPenaltyLogitsProcessor(1.2)], sampled=False) == {"repetition": 1.2}
    assert warp_of([RepetitionPenaltyLogitsProcessor(1.0)], sampled=True) == NO_WARP
    assert warp_of([RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=3)], sampled=False) is None
    assert warp_of([TemperatureLogitsWarper(2.0)], sampled=False) is None
    others: list[list[Any]] = [
        [TemperatureLogitsWarper(2.0), TypicalLogitsWarper(0.9)],
        [TopKLogitsWarper(5), TemperatureLogitsWarper(2.0)],
        [TemperatureLogitsWarper(2.0), RepetitionPenaltyLogitsProcessor(1.2)],
        [TopKLogitsWarper(5, filter_value=-5.0)],
        [TopPLogitsWarper(0.9, min_tokens_to_keep=2)],
        [TemperatureLogitsWarper(2.0), TemperatureLogitsWarper(2.0)],
    ]
    assert [warp_of(each, sampled=True) for each in others] == [None] * len(others)


def test_a_parameter_is_declared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processor is read, and rows are laid out with it, without an edit in between."""

    class Bonus:
        amount = 2.5

    own = Parameter(Column("bonus", "float64", empty=-1, sent=False, captured=False), Bonus, "amount")
    monkeypatch.setattr(parameters, "CUTS", (*CUTS, own))
    warp = warp_of([TemperatureLogitsWarper(2.0), Bonus()], sampled=True)
    assert warp == {"temperature": 2.0, "bonus": 2.5}
    rows = Warps.of([warp, NO_WARP, {"top_k": 3}], torch.device("cpu"))
    assert rows.numbers == {"temperature": (2.0, 1, 1), "top_k": (0, 0, 3), "bonus": (2.5, -1, -1)}
    found = rows.part(slice(0, 2)).number(own)
    assert isinstance(found, torch.Tensor)
    assert (found.dtype, found.tolist()) == (torch.float64, [[2.5], [-1.0]])
    assert not rows.numbers.keys() & {each.name for each in PENALTIES}
    assert rows.number(PRESENCE) == 0


def test_draws_follow_the_scores() -> None:
    torch.manual_seed(0)
    scores = torch.randn(1, 12) * 1.5
    scores[0, 4] = -torch.inf
    count = 20_000
    tokens = draw(scores.expand(count, -1), row_states([1] * count, [0] * count), range(count))
    found = torch.bincount(tokens, minlength=12) / count
    assert found[4] == 0
    torch.testing.assert_close(found.double(), scores[0].softmax(-1).double(), atol=0.012, rtol=0)


def test_a_draw_is_the_requests_own() -> None:
    """C35: seed, sample and place decide, not the row, not who else is there."""
    torch.manual_seed(0)
    scores = torch.randn(30, 50)
    keys = [(i % 4, i % 3, i) for i in range(30)]
    seeds, samples, positions = zip(*keys, strict=True)
    together = draw(scores, row_states(seeds, samples), positions).tolist()
    alone = [
        int(draw(scores[i : i + 1], row_states(*([key] for key in keys[i][:2])), [i])) for i in range(30)
    ]
    assert together == alone
    same = scores[:1].expand(200, -1)
    for place in range(3):
        varied = [[5] * 200, [0] * 200, [9] * 200]
        varied[place] = list(range(200))
        assert len(set(draw(same, row_states(*varied[:2]), varied[2]).tolist())) > 10


def test_numbers_are_even_and_unlike() -> None:
    """Uniform in [0, 1), and neighbours in seed, sample or place have nothing to do with each other."""
    places = torch.arange(50_000)
    for keys in ((places, torch.tensor(3)), (torch.tensor(3), places), (torch.tensor(2**62 + 1), places)):
        numbers = uniform(*keys)
        assert float(numbers.min()) >= 0
        assert float(numbers.max()) < 1
        assert torch.histc(numbers, 20, 0, 1).tolist() == pytest.approx([2500] * 20, abs=250)
        assert abs(float(torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1])) < 0.02
    assert float(uniform(torch.tensor(7), torch.tensor(9))) == float(
        uniform(torch.tensor([7, 8]), torch.tensor([9, 9]))[0]
    )


def test_the_host_makes_the_same_numbers() -> None:
    """C35: bit by bit those of torch, at the ends of what seeds and positions may be, too."""
    seeds = [0, 1, 5, 2**31, 2**62 + 1, 2**63 - 1]
    indices, positions = [0, 7, 1, 0, 3, 127], [0, 1, 2**20, 31, 9, 512]
    states = row_states(seeds, indices)
    for more in range(3):
        places = [each + more for each in positions]
        numbers = uniform(*map(torch.tensor, (seeds, indices, places)))
        assert row_numbers(states, places).tolist() == numbers.tolist()


def test_noise_draws_without_putting_back() -> None:
    """The largest of log weights + noise are drawn in order, each by its weight among those that are left."""
    weights = torch.tensor([0.5, 0.3, 0.15, 0.05])
    trials = torch.arange(20_000)
    noise = gumbel(trials[:, None], torch.arange(4))
    order = (weights.log() + noise).topk(2)[1]
    first = torch.bincount(order[:, 0], minlength=4) / len(trials)
    torch.testing.assert_close(first.float(), weights, atol=0.012, rtol=0)
    second = torch.bincount(order[order[:, 0] == 0, 1], minlength=4) / (order[:, 0] == 0).sum()
    torch.testing.assert_close(second.float(), torch.tensor([0, 0.6, 0.3, 0.1]), atol=0.015, rtol=0)


@pytest.mark.parametrize("place", [0, 17, VOCABULARY - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_number_is_nan(place: int, dtype: torch.dtype) -> None:
    """Whoever looks for a row's best token finds NaN, wherever it stands: that is how rows of NaN are
    known.
    """
    scores = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(dtype)
    scores[1, place], scores[1, 5], scores[2, 7] = torch.nan, torch.inf, torch.inf
    assert scores.argmax(-1)[1] == place
    assert scores.amax(-1).isnan().tolist() == [False, True, False]


def test_logits_without_an_answer_are_reported() -> None:
    """Where there is NaN some token of the vocabulary goes on, and the host is told that there is none."""
    scores = torch.tensor([[1.0, 3.0, 2.0], [1.0, torch.nan, 5.0], [torch.inf, 0.0, 0.0]])
    tokens, told = greedy_tokens(scores)
    assert tokens.tolist() == [1, 1, 0]
    assert told.tolist() == [1, UNKNOWN, 0]
    chosen = torch.stack([tokens, told])
    chosen[0, 2] = 3  # a draw that found nothing
    tokens, told = mend(chosen, 3)
    assert tokens.tolist() == [1, 1, 2]
    assert told.tolist() == [1, UNKNOWN, UNKNOWN]
