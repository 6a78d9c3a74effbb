"""Properties that layers have in common to share a block table, and to share a store."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """The layout of a layer's keys and values, read off the tensors (tensor parallel, MLA, device maps)."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Layout:
        """Read the layout off keys [rows, heads, tokens, key_dim] and values [rows, heads, tokens,
        value_dim].
        """
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"Invalid shape of values: expected [{', '.join(map(str, keys.shape[:3]))}, value_dim], got "
                f"{list(values.shape)}"
            )
        # Under autocast the two may differ; the wider one holds both.
        return cls(
            keys.device,
            torch.promote_types(keys.dtype, values.dtype),
            keys.shape[1],
            keys.shape[3],
            values.shape[3],
        )

    def describes(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """True if these keys [rows, heads, tokens, key_dim] and values have this layout; cheaper than making
        another layout.
        """
        _, heads, _, key_dim = keys.shape
        _, value_heads, _, value_dim = values.shape
        same = heads == value_heads == self.heads and key_dim == self.key_dim and value_dim == self.value_dim
        return same and keys.dtype == values.dtype == self.dtype and keys.device == self.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block in one layer."""
        return self.token_bytes * block_size


class StateLayout(NamedTuple):
    """The layout of a recurrent state of one sequence."""

    device: torch.device
    dtype: torch.dtype
    """The type in which slots hold it."""
    shape: tuple[int, ...]
    computed: torch.dtype
    """The type in which layers compute with it."""

    @classmethod
    def of(cls, states: torch.Tensor, dtype: torch.dtype | None = None) -> StateLayout:
        """That of states [rows, ...], held in their own type or in another one."""
        return cls(states.device, dtype or states.dtype, tuple(states.shape[1:]), states.dtype)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one slot: a state is as large behind any number of tokens."""
        return prod(self.shape) * self.dtype.itemsize
