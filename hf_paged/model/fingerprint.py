"""A short name of a model's weights that is the same in every process."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import torch
from torch import nn

from .weights_digest import host_bytes, memory_of_parts

SAMPLES = 16
"""Elements of each tensor that are read, evenly spread."""


def fingerprint(model: nn.Module) -> str:
    """A digest of the names, shapes and dtypes of all weights, and of some elements of each.

    It tells checkpoints apart, and the weights before and after training: an optimizer's step changes every
    element. Weights that are not in memory (offloaded ones) count by name and shape alone. Of a model on
    several ranks these are the parts of this one.
    """
    digest = blake2b(digest_size=8)
    for name, tensor in _weights(model):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for part in memory_of_parts([tensor]) or [tensor.detach()]:
            if part.device.type != "meta" and part.numel():
                flat = part.reshape(-1)
                digest.update(host_bytes(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]))
    return digest.hexdigest()


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers: quantized layers keep their weights as either."""
    yield from model.named_parameters()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer
