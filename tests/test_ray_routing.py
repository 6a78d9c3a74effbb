"""hf_paged.ray without ray: the routing decision."""

from __future__ import annotations

import random
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import pytest

import hf_paged.ray
from hf_paged.blocks.prefix_lookup import Prompt
from hf_paged.ray.routing import LoadBound, PrefixIndex, ranked

NAMES = ["a", "b", "c", "d"]
IDLE = dict.fromkeys(NAMES, 0)


def ranks(
    index: PrefixIndex, digests: tuple[bytes, ...], loads: dict[str, int], **bound: Any
) -> list[list[str]]:
    return ranked(digests, loads, index, LoadBound(**bound), random.Random(0))


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_the_error_names_the_extra() -> None:
    with pytest.raises(ImportError, match=r"pip install 'hf_paged\[ray\]'"):
        hf_paged.ray.map_batches  # noqa: B018


def chained(tokens: Iterable[int], extra: bytes = b"") -> tuple[bytes, ...]:
    return tuple(Prompt(list(tokens), 16, extra).digests)


@pytest.mark.parametrize("blocks", range(5))
def test_the_longest_prefix_is_found(blocks: int) -> None:
    index = PrefixIndex()
    prompt = chained(range(64))
    index.add("a", prompt[:blocks])
    assert index.match("a", prompt) == blocks
    assert index.match("b", prompt) == 0


def test_the_replica_with_the_longest_prefix_comes_first() -> None:
    index = PrefixIndex()
    prompt = chained(range(160))
    index.add("a", prompt[:4])
    index.add("b", prompt[:8])
    index.add("c", prompt[:8])
    found = ranks(index, prompt, IDLE)
    assert sorted(found[0]) == ["b", "c"]
    assert len(found[1]) == 2
    assert found[2] == NAMES


def test_a_short_prefix_is_no_reason() -> None:
    index = PrefixIndex()
    prompt = chained(range(160))
    index.add("a", prompt[:2])
    assert len(ranks(index, prompt, IDLE)) == 2, "2 of 10 blocks: two at random, then all"
    assert ranks(index, prompt, IDLE, least_share=0.2)[0] == ["a"]


def test_a_replica_that_is_too_busy_is_passed_over() -> None:
    """Mean 9 with the next request: more than 12 are 1.25 times that."""
    index = PrefixIndex()
    prompt = chained(range(160))
    index.add("a", prompt)
    index.add("b", prompt[:5])
    loads = {"a": 11, "b": 8, "c": 8, "d": 8}
    assert ranks(index, prompt, loads)[0] == ["a"]
    loads = {"a": 12, "b": 8, "c": 8, "d": 7}
    assert ranks(index, prompt, loads)[0] == ["b"], "the next longest"
    assert ranks(index, prompt, loads, ratio=1.5)[0] == ["a"]


def test_few_requests_are_never_too_many() -> None:
    index = PrefixIndex()
    prompt = chained(range(16))
    index.add("a", prompt)
    assert ranks(index, prompt, {**IDLE, "a": 3})[0] == ["a"]
    assert ranks(index, prompt, {**IDLE, "a": 4})[0] != ["a"]


def test_one_replica_is_enough() -> None:
    assert ranks(PrefixIndex(), (), {"a": 100}) == [["a"], ["a"]]


def test_two_choices_are_spread() -> None:
    draw = random.Random(1)
    first = [ranked((), IDLE, PrefixIndex(), LoadBound(), draw)[0] for _ in range(400)]
    for name in NAMES:
        assert 150 < sum(name in pair for pair in first) < 250


def test_an_index_forgets_as_its_replica_evicts() -> None:
    """The least recently used prompt, its last blocks first."""
    index = PrefixIndex()
    index.keep({"a": 12, "b": None})
    old = chained(range(160), b"old")
    new = chained(range(128), b"new")
    index.add("a", old)
    index.add("a", new)
    assert index.match("a", new) == 8
    assert index.match("a", old) == 4
    index.add("a", old[:4])
    index.add("a", chained(range(96), b"third"))
    assert index.match("a", old) == 4
    assert index.match("a", new) == 2


def test_an_index_forgets_replicas_that_have_left() -> None:
    index = PrefixIndex()
    prompt = chained(range(64))
    index.keep({"a": 100, "b": 100})
    index.add("a", prompt)
    index.add("b", prompt)
    index.keep({"b": 100})
    assert index.match("a", prompt) == 0
    index.keep({"a": 100, "b": 100})
    assert index.match("a", prompt) == 0
    assert index.match("b", prompt) == 4
    index.forget("b")
    assert index.match("b", prompt) == 0


@pytest.mark.parametrize("wrong", [{"ratio": 0.9}, {"free": -1}, {"least_share": 2}])
def test_wrong_bounds_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*; give"):
        LoadBound(**wrong)


# ---- answers that are held


# ---- answers of /v1/responses


# ---- flags


# ---- autoscaling
