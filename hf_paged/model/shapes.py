"""Forwards without data: what they would compute has shapes and types, and no numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class ShapesOnly(TorchDispatchMode):
    """Run a forward on the "meta" device to its end, also where its code asks for numbers.

    A number that the host asks for is 0, and a search finds nothing: the shapes of keys and values depend on
    neither. Products of groups, which torch has on "meta" in bfloat16 alone, have their shape in all types.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet is aten._local_scalar_dense:
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        if packet is aten.nonzero:
            return args[0].new_empty(0, args[0].ndim, dtype=torch.long)
        if packet is aten._grouped_mm and args[0].ndim == 2 and args[1].ndim == 3:
            return args[0].new_empty(args[0].shape[0], args[1].shape[2])
        return func(*args, **(kwargs or {}))
