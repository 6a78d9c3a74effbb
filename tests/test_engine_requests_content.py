"""Digests of prompts and options: different for what differs, the same in every process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, MinLengthLogitsProcessor

from hf_paged.engine.requests.content import digest_of, is_plain


def processor(tokens: int) -> MinLengthLogitsProcessor:
    return MinLengthLogitsProcessor(tokens, eos_token_id=1, device="cpu")


def other(tokens: int) -> None:
    pass


DIFFERENT: list[Any] = [
    None, True, 1, 1.0, "1", b"1", [1], [1, 2], ["1"], [], {}, {"a": 1}, {"a": 2}, {"b": 1}, {1: 1}, [[1], 2], [1, [2]],
    [2**70], [[1, 2]], "\ud800", {"a": None},
    torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[1, 2]]), torch.tensor([1.0, 2.0]),
    np.array([1, 2]), np.array([[1], [2]]), GenerationConfig(top_k=3), GenerationConfig(top_k=4), processor(3), processor(4),
    processor, other, torch.float32, {5, 6},
]  # fmt: skip


def test_what_differs_has_another_digest() -> None:
    digests = [digest_of(each) for each in DIFFERENT]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ({"a": 1, "b": [2]}, {"b": (2,), "a": np.int64(1)}),
        (np.float32(0.5), 0.5),
        ({7, 6, 5}, {5, 6, 7}),
        (processor(3), processor(3)),
        (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous()),
        (GenerationConfig(top_k=3), GenerationConfig(top_k=3)),
    ],
)
def test_what_is_the_same_has_the_same(one: Any, same: Any) -> None:
    assert digest_of(one) == digest_of(same)


def test_pictures_are_known_by_their_pixels() -> None:
    image = pytest.importorskip("PIL.Image")
    black, white = (image.new("RGB", (4, 2), color) for color in ("black", "white"))
    assert digest_of(black) == digest_of(image.new("RGB", (4, 2), "black"))
    assert len({digest_of(each) for each in (black, white, image.new("RGB", (2, 4), "black"))}) == 3


def test_every_process_has_the_same() -> None:
    """Python's own hashes of texts, and so the order of sets, are others in each."""
    value = {"messages": [{"role": "user", "content": "狐"}], "stop": {"b", "a"}, "seed": 3}
    assert digest_of(value) == "ac00ef09ed0327ca50269e27fde26621"


def test_plain_values_are_those_of_json() -> None:
    assert is_plain({"a": [1, "b", None, 2.0, True, ("c",)]})
    assert not any(map(is_plain, ({1: 2}, [torch.ones(1)], {"a": {5}}, b"a")))
