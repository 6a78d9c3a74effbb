"""The tokenizer's decode() without detours."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from ...engine.outputs.text import Decode


def decode_of(tokenizer: Any, skip_special_tokens: bool = True) -> Decode:
    """A tokenizer's decode() with `skip_special_tokens` fixed, without the detour through Python where that
    changes nothing.
    """
    decoder = tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    tidies = getattr(tokenizer, "clean_up_tokenization_spaces", True)
    if backend is not None and not tidies and _decodes_as_stock(tokenizer):
        decoder = backend
    return partial(decoder.decode, skip_special_tokens=skip_special_tokens)


def _decodes_as_stock(tokenizer: Any) -> bool:
    """True if decode() is its backend's and nothing else."""
    kind = type(tokenizer)
    stock = PreTrainedTokenizerFast
    return kind.decode is stock.decode and getattr(kind, "_decode", None) is stock._decode
