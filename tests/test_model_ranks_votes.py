"""hf_paged.model.ranks.votes: in one process its own values decide; several ranks: test_engine_parallel.py."""

from __future__ import annotations

from hf_paged.model.ranks.votes import Votes


def test_one_process_decides_alone() -> None:
    votes = Votes()
    assert votes.alone
    assert not votes.each_decides
    assert votes.model_group() is None
    assert votes.gather("a") == ["a"]
    assert votes.smallest([3, -3]) == [3, -3]
    assert votes.same("a", "here")
    assert votes.least(2, computed=False) == 2
