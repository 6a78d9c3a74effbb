"""Beam searches of one shape are scored together: the number of operations does not grow with them."""

from __future__ import annotations

from typing import Any

import pytest
from families import BY_NAME, build
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.engine import Engine


@pytest.fixture(scope="module")
def model() -> Any:
    return build(BY_NAME["llama"])


class Counter(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(model: Any, searches: int) -> int:
    """The most operations of a step in which so many searches go on."""
    found = []
    with Engine(
        model, num_blocks=200, max_batch_tokens=256, max_batch_sequences=40, prefix_caching=False
    ) as engine:
        for i in range(searches):
            engine.submit(
                [5 + i, 6, 7],
                num_beams=4,
                max_new_tokens=16,
                eos_token_id=None,
                do_sample=False,
                length_penalty=1.0 + i,
            )
        for _ in range(12):
            with Counter() as counter:
                engine.step()
            found.append(counter.count)
        assert engine.stats()["running"] == searches
    return max(found[2:])


def test_operations_do_not_grow_with_the_searches(model: Any) -> None:
    """All searches of a shape are compared in the same few operations."""
    assert operations(model, 8) == operations(model, 2)
