"""The content of a prompt and its options, as a digest that is the same in every process."""

from __future__ import annotations

import types
from array import array
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any

import torch

from ...model.weights_digest import host_bytes

OF_ARRAYS = ("dtype", "shape", "mode", "size")
"""Attributes of arrays and pictures that say how their bytes are read."""
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


def digest_of(value: Any) -> str:
    """A digest of plain values, tensors, arrays, pictures and configs, however deep they lie in containers.

    Functions count by their names, other objects by their class and the plain values that they hold.
    """
    digest = blake2b(digest_size=16)
    for piece in _pieces(value):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


def is_plain(value: Any) -> bool:
    """True if JSON has all of a value."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _pieces(value: Any, within: bool = False) -> Iterator[bytes]:
    """The bytes that stand for a value. within: it is held by an object, which may hold anything."""
    if value is None or isinstance(value, bool):
        yield repr(value).encode()
    elif isinstance(value, Integral):
        yield b"int %d" % int(value)
    elif isinstance(value, Real):
        yield b"float " + repr(float(value)).encode()
    elif isinstance(value, (str, bytes)):
        yield type(value).__name__.encode()
        yield value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    elif isinstance(value, Mapping):
        yield b"mapping %d" % len(value)
        for key in sorted(value, key=repr):
            yield from _pieces(key, within)
            yield from _pieces(value[key], within)
    elif isinstance(value, (list, tuple)):
        yield from _pieces_of_list(value, within)
    elif isinstance(value, (set, frozenset)):
        yield from _pieces_of_list(sorted(value, key=repr), within)
    else:
        yield from _pieces_of_object(value, within)


def _pieces_of_list(value: list[Any] | tuple[Any, ...], within: bool) -> Iterator[bytes]:
    yield b"list %d" % len(value)
    if set(map(type, value)) == {int} and all(-(2**63) <= each < 2**63 for each in value):
        yield b"ids"  # a long prompt has many
        yield array("q", value).tobytes()
        return
    for each in value:
        yield from _pieces(each, within)


def _pieces_of_object(value: Any, within: bool) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {list(value.shape)}".encode()
        yield host_bytes(value)
    elif callable(getattr(value, "tobytes", None)):
        yield repr([str(getattr(value, name, None)) for name in OF_ARRAYS]).encode()
        yield value.tobytes()
    elif isinstance(value, FUNCTIONS):
        yield f"function {value.__module__}.{value.__qualname__}".encode()
    else:
        yield f"object {type(value).__module__}.{type(value).__qualname__}".encode()
        if within:
            return
        if callable(getattr(value, "to_dict", None)):
            config = {name: each for name, each in value.to_dict().items() if each is not None}
            config.pop("transformers_version", None)
            yield from _pieces(config, within=True)
        elif hasattr(value, "__dict__"):
            yield from _pieces(vars(value), within=True)
        else:
            yield repr(value).encode()
