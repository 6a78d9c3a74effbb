"""Values as ranks send them: large tensors by themselves, the rest pickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

LARGE = 1 << 16
"""Bytes from which on a tensor is sent by itself: pickling would copy it several times."""


class Packed:
    """A value as it is sent. Pickling may raise, so it comes before the other ranks wait for the value."""

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(value)
        self.pickled = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        self.tensors = pickler.tensors
        """In the order in which they are unpickled, as bytes."""


def unpack(pickled: torch.Tensor, receive: Callable[[torch.Tensor], object]) -> Any:
    """The value that was packed. receive: fills a tensor of bytes, once for each large tensor."""
    return _Unpickler(io.BytesIO(pickled.numpy().tobytes()), receive).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        """The dtype and shape of a large tensor on the host; None for what is pickled."""
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return None
        if value.nbytes < LARGE or value.requires_grad or value.is_complex() or value.is_quantized:
            return None
        self.tensors.append(value.contiguous().flatten().view(torch.uint8))
        return value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, receive: Callable[[torch.Tensor], object]) -> None:
        super().__init__(file)
        self._receive = receive

    def persistent_load(self, form: Any) -> torch.Tensor:
        """The next large tensor."""
        dtype, shape = form
        found = torch.empty(shape, dtype=dtype, device="cpu")
        self._receive(found.flatten().view(torch.uint8))
        return found
