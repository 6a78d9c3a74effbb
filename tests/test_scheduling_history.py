"""How long answers were: the counted history against a sorted list, and what it says when nobody knows
(contract C40).
"""

from __future__ import annotations

import random

import pytest

from hf_paged.scheduling import AnswerLengths

NEVER = 10**9


@pytest.mark.parametrize(("keep", "doubt"), [(0, 1), (1, 0), (5, 3), (60, 0), (60, 1)])
def test_it_agrees_with_a_sorted_list(keep: int, doubt: int) -> None:
    """C40: given what is said already, the share of those that were longer; the oldest answers go first."""
    rng = random.Random(keep)
    history, lengths = AnswerLengths(keep, doubt), []
    for _ in range(200):
        length, limited = rng.choice([1, 2, rng.randrange(1, 9), rng.randrange(1, 400)]), rng.random() < 0.2
        history.add(length, limited)
        lengths = (lengths + [NEVER if limited else length])[-keep:] if keep else []
        assert len(history) == len(lengths)
        for _ in range(4):
            generated, share = rng.randrange(420), rng.random()
            most = generated + rng.randrange(1, 300)
            longer = sorted(length for length in lengths if length > generated) + [NEVER] * doubt
            expected = min(most, longer[int(share * len(longer))]) if lengths and longer else most
            assert history.expected(generated, most, share) == expected


def test_lengths_are_unknown_at_first() -> None:
    """C40: max_new_tokens until there is a history, and where nobody was longer; answers that had to stop say
    nothing about their end.
    """
    history = AnswerLengths(doubt=0)
    assert history.expected(0, 50, 0.5) == 50
    history.add(7)
    assert history.expected(0, 50, 0.5) == 7
    assert history.expected(0, 5, 0.5) == 5
    assert history.expected(7, 50, 0.5) == 50
    for _ in range(3):
        history.add(7, limited=True)
    assert [history.expected(0, 50, share) for share in (0.0, 0.2, 0.3)] == [7, 7, 50]


def test_a_sequence_past_the_known_lengths_becomes_longer() -> None:
    """C40: for one and the same share the estimate never shrinks while an answer grows."""
    rng = random.Random(1)
    history = AnswerLengths()
    for _ in range(300):
        history.add(1 + int(rng.expovariate(1 / 80)))
    for share in (0.0, 0.3, 0.9):
        lengths = [history.expected(generated, 1000, share) for generated in range(600)]
        assert lengths == sorted(lengths)
        assert all(length > generated for generated, length in enumerate(lengths))


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ValueError, match="keep=-1"):
        AnswerLengths(-1)
    with pytest.raises(ValueError, match="got 0"):
        AnswerLengths().add(0)
    with pytest.raises(ValueError, match="share=1"):
        AnswerLengths().expected(0, 5, 1)
