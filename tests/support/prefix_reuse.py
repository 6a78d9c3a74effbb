"""Shared by the tests: ask, continued, words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from compare import assert_equal
from families import VOCABULARY

from hf_paged.model.registry import memory_of

NEW = 5


def words(*shape: int, seed: int = 5) -> torch.Tensor:
    """Token ids that no tokenizer would call special."""
    return torch.randint(5, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def continued(ids: torch.Tensor, shared: int, own: int, seed: int = 9) -> torch.Tensor:
    """Prompts that begin with the first `shared` tokens of `ids` and go on with `own` others."""
    tail = words(ids.shape[0], own, seed=seed)
    if shared < ids.shape[1]:
        tail[:, 0] = torch.where(tail[:, 0] == ids[:, shared], tail[:, 0] - 1, tail[:, 0])
    return torch.cat([ids[:, :shared], tail], 1)


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """The columns of everything that enters the first decoder layer."""
    inside = (
        model.get_decoder() if model.config.is_encoder_decoder else getattr(model, model.base_model_prefix)
    )
    inside = getattr(inside, "decoder", inside)
    layers = next(getattr(inside, name) for name in ("layers", "h", "block") if hasattr(inside, name))
    seen: list[int] = []
    handle = layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((*args, *kwargs.values())[0].shape[1]), with_kwargs=True
    )
    try:
        yield seen
    finally:
        handle.remove()


def ask(
    model: Any,
    ids: torch.Tensor,
    block_size: int = 16,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> tuple[Any, list[int]]:
    """Generate with prefix caching: the answer, which must be stock's, and the columns that entered the first
    layer, by forward.
    """
    call = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": NEW,
        "do_sample": False,
        **arguments,
    }
    config = {"block_size": block_size, "prefix_caching": True, **(options or {})}
    torch.manual_seed(0)
    with counted(model) as seen:
        answer = model.generate(**call, cache_implementation="paged", cache_config=config)
    torch.manual_seed(0)
    assert_equal(model.generate(**call), answer)
    memory_of(model).check()
    return answer, seen
