"""The comparison with stock is sensitive: with one thing taken out, some mode fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import both
from families import BY_NAME, VOCABULARY, build

import hf_paged_native
from hf_paged.blocks import table
from hf_paged.generate import dedupe, padding
from hf_paged.kv import rows, sequences, store

NEW = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False}


def _no_reorder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sequences.Sequences, "reorder", lambda self, index: self.flush())


def _no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store.Store, "copy", lambda self, copies: None)


def _write_into_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        table.BlockTable, "_own_last_block", lambda self: table.Copy(self.blocks[-1], self.blocks[-1])
    )


def _no_crop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rows.Rows, "crop", lambda self, columns: None)


def _no_padding(patch: pytest.MonkeyPatch) -> None:
    original = padding.look
    for user in (padding, dedupe):
        patch.setattr(user, "look", lambda mask: original(torch.ones_like(mask)))


def _no_window(patch: pytest.MonkeyPatch) -> None:
    from hf_paged.kv.batch import RowBatch

    patch.setattr(RowBatch, "first_visible", lambda self, window: 0)


def _beams(ids: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "num_beams": 4, **NEW}


def _padded(ids: torch.Tensor) -> dict[str, Any]:
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    return {"input_ids": ids, "attention_mask": mask, **NEW}


def _lookup(ids: torch.Tensor) -> dict[str, Any]:
    repeating = torch.cat([ids[:1, :6].repeat(1, 3), ids[:1, :5]], 1)
    return {
        "input_ids": repeating,
        "attention_mask": torch.ones_like(repeating),
        "prompt_lookup_num_tokens": 3,
        **NEW,
    }


MUTATIONS: list[
    tuple[str, Callable[[pytest.MonkeyPatch], None], str, Callable[[torch.Tensor], dict[str, Any]]]
] = [
    ("reorder", _no_reorder, "llama", _beams),
    ("copy", _no_copy_on_write, "llama", _beams),
    ("private-tail", _write_into_shared_blocks, "llama", _beams),
    ("crop", _no_crop, "llama", _lookup),
    ("padding", _no_padding, "llama", _padded),
    ("window", _no_window, "mistral-window", _padded),
]


def _alike(model: Any, arguments: dict[str, Any]) -> bool:
    """True if the mutated call still answers as stock; broken books are allowed to raise instead."""
    try:
        return torch.equal(*both(model, **arguments))
    except (RuntimeError, ValueError, AssertionError, IndexError):
        return False


@pytest.mark.parametrize(
    ("mutate", "family", "mode"), [case[1:] for case in MUTATIONS], ids=[case[0] for case in MUTATIONS]
)
def test_mutation_is_caught(mutate: Any, family: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right before, wrong (or an error) while it is missing, right again after."""
    # The C++ op, where another test has built it, has masks of its own.
    monkeypatch.setattr(hf_paged_native, "find", lambda: None)
    model = build(BY_NAME[family])
    ids = torch.randint(5, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(5))
    assert torch.equal(*both(model, **mode(ids)))
    with monkeypatch.context() as patch:
        mutate(patch)
        assert not _alike(model, mode(ids)), "the comparison did not notice"
    fresh = build(BY_NAME[family])
    assert torch.equal(*both(fresh, **mode(ids)))
