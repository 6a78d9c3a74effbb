"""The rounding of a computation: its type, and what one more rounding of the embeddings does."""

from __future__ import annotations

import torch


def computing_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    """The computing dtype of a model of a type: autocast's, where that is on."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


def shaken(embeddings: torch.Tensor, chance: torch.Generator, by: float | None = None) -> torch.Tensor:
    """Embeddings, each off by what rounding may do to it, or by up to a share of its size."""
    chances = torch.rand(embeddings.shape, generator=chance, device=embeddings.device, dtype=torch.float32)
    share = torch.finfo(embeddings.dtype).eps / 2 if by is None else by
    return (embeddings * (1 + (chances * 2 - 1) * share)).to(embeddings.dtype)
