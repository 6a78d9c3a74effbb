"""Answers of stock generate(), computed once for models of the same content: many tests ask for the same ones."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch


class _Content(pickle.Pickler):
    """Equal bytes for models of equal settings, hooks and weights."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        numbers = obj.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return obj.dtype, obj.shape, obj.device, numbers.tobytes()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, OrderedDict) and not any(isinstance(key, str) for key in obj):
            return list, (list(obj.values()),)  # hooks, under numbers that go up over all modules
        return NotImplemented


def _content(*objects: Any) -> bytes | None:
    """None for those with functions that have no name."""
    file = io.BytesIO()
    try:
        _Content(file).dump(objects)
    except (AttributeError, TypeError, RuntimeError, pickle.PicklingError):
        return None
    return hashlib.sha256(file.getbuffer()).digest()


_KNOWN: dict[bytes, Any] = {}


def computed_once(compute: Callable[[], Any], model: Any, *given: Any) -> Any:
    """compute()'s answer, which rests on the model's content and on `given` alone: nothing is drawn."""
    key = _content(model, given)
    if key is None:
        return compute()
    if key not in _KNOWN:
        _KNOWN[key] = compute()
    return copy.deepcopy(_KNOWN[key])
