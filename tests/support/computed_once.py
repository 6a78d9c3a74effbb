"""Answers of stock generate(), computed once for models of the same content: many tests ask for the same ones."""

from __future__ import annotations

import copy
import copyreg
import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import torch


def _numbers(tensor: torch.Tensor) -> Any:
    numbers = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return tuple, ((tensor.dtype, tuple(tensor.shape), tensor.device, numbers.tobytes()),)


def _hooks(found: OrderedDict[Any, Any]) -> Any:
    """Without their keys, numbers that go up over all modules."""
    named = any(isinstance(key, str) for key in found)
    return found.__reduce_ex__(pickle.DEFAULT_PROTOCOL) if named else (list, (list(found.values()),))


class _Content(pickle.Pickler):
    """Equal bytes for models of equal settings, hooks and weights."""

    dispatch_table: ClassVar[dict[Any, Any]] = {  # a method would be called for every object
        **copyreg.dispatch_table,
        torch.Tensor: _numbers,
        torch.nn.Parameter: _numbers,
        OrderedDict: _hooks,
    }


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
