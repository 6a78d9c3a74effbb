"""A model in training mode whose answers are random."""

from __future__ import annotations

from typing import Any


def train_with_dropout(model: Any) -> Any:
    """Put a Llama into training mode, with dropout in its attention."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    return model.train()


def stop_dropout(model: Any) -> None:
    """Eval mode, without dropout, as it was."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    model.eval()
