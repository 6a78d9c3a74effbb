"""Prefix reuse across calls: what is cached is not computed again, and the tokens are stock's without a cache (contract C17 to C23)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_equal
from families import BY_NAME, VOCABULARY, build
from test_sharing import counted

from hf_paged.integration.registry import memory_of

NEW = 8


def words(*shape: int, seed: int = 5) -> torch.Tensor:
    """Token ids that no tokenizer would call special."""
    return torch.randint(5, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def ask(
    model: Any, ids: torch.Tensor, block_size: int = 16, options: dict[str, Any] | None = None, **arguments: Any
) -> tuple[Any, list[int]]:
    """Generate with prefix caching: the answer, which must be stock's, and the columns that entered the first layer, by forward."""
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, **arguments}
    config = {"block_size": block_size, "prefix_caching": True, **(options or {})}
    torch.manual_seed(0)
    with counted(model) as seen:
        answer = model.generate(**call, cache_implementation="paged", cache_config=config)
    torch.manual_seed(0)
    assert_equal(model.generate(**call), answer)
    memory_of(model).check()
    return answer, [columns for _, columns in seen]


def continued(ids: torch.Tensor, shared: int, own: int, seed: int = 9) -> torch.Tensor:
    """Prompts that begin with the first `shared` tokens of `ids` and go on with `own` others."""
    tail = words(ids.shape[0], own, seed=seed)
    if shared < ids.shape[1]:
        tail[:, 0] = torch.where(tail[:, 0] == ids[:, shared], tail[:, 0] - 1, tail[:, 0])
    return torch.cat([ids[:, :shared], tail], 1)


def test_a_long_prefix_is_computed_once() -> None:
    """The second of two calls that share 2,048 of 2,176 tokens computes at most 0.15 of the first."""
    model = build(BY_NAME["llama"])
    model.config.max_position_embeddings = 4096
    first = words(1, 2176)
    _, seen = ask(model, first)
    _, again = ask(model, continued(first, 2048, 128))
    assert seen[0] == 2176
    assert again[0] == 128
    assert sum(again) <= 0.15 * sum(seen)


@pytest.mark.parametrize(("shared", "computed"), [(0, 47), (1, 47), (15, 32), (16, 31), (33, 15), (34, 13), (37, 10), (46, 1), (47, 1)])
def test_reuse_is_to_the_token(llama: Any, shared: int, computed: int) -> None:
    """C21: whole blocks, and a copy of one that is shared in part, unless it is for a single token; the last is always computed."""
    first = words(1, 47)
    ask(llama, first)
    _, seen = ask(llama, continued(first, shared, 47 - shared))
    assert seen[0] == computed
