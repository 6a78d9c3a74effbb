"""Data sets of prompts: their items as keywords of `submit()`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from numbers import Integral
from operator import length_hint
from typing import Any

from .fields import OPENAI
from .keywords import ProcessorTensors, RequestKeywords
from .prompts import short

NAMES = ("prompt", "messages")
"""Keys under which an item has its prompt."""
TOKENIZED = ("input_ids", "inputs_embeds", "input_features", *ProcessorTensors.__annotations__)
"""Keys of an item that a tokenizer or a processor has made."""
OPTIONS = frozenset({*RequestKeywords.__annotations__, "generation_config"})
CLOSE = 0.85
"""From which ratio on a key is taken for a misspelt option."""


def items_of(data: Any) -> Iterator[Any]:
    """The items of any iterable, one after another; TypeError for a single prompt, and for a table."""
    if isinstance(data, (str, bytes)):
        raise TypeError(f"data is an iterable of prompts, got {short(data)}; for one of them write [prompt]")
    if isinstance(data, Mapping):
        keys = ", ".join(map(repr, list(data)[:3]))
        raise TypeError(
            f"data is an iterable of prompts, got a {type(data).__name__} with the keys {keys}; give one of "
            "its values, or put it into a list"
        )
    if hasattr(data, "columns") and hasattr(data, "to_dict"):  # pandas iterates over the names of columns
        raise TypeError(
            f"data is an iterable of prompts, got a {type(data).__name__}; give a column of it, as "
            'table["prompt"], or table.to_dict("records")'
        )
    if not hasattr(data, "__iter__") and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return (data[i] for i in range(len(data)))  # a data set of torch's, which need not end by IndexError
    try:
        return iter(data)
    except TypeError as error:
        raise TypeError(f"data is an iterable of prompts, got {short(data)}; give a list") from error


def size_of(data: Any) -> int | None:
    """The number of items; None if it is not known before they are read."""
    size = length_hint(data, -1)
    return None if size < 0 else size


def keywords_of(item: Any, key: str | None = None) -> dict[str, Any]:
    """An item as keywords of `submit()`: its prompt, and the options that it has of its own.

    key: under which each item has its prompt; nothing else of it is taken then. Keys that are no options, as
    the columns of a data set, are left alone, unless they look like a misspelt one.
    """
    if key is not None:
        if not isinstance(item, Mapping) or key not in item:
            had = f"one with {', '.join(map(repr, item))}" if isinstance(item, Mapping) else short(item)
            raise TypeError(f"key={key!r}: expected items with this key, got {had}")
        return {"prompt": item[key]}
    if isinstance(item, Integral):
        raise TypeError(f"data is an iterable of prompts, got token ids ({item}, ...); write [ids] for one")
    if not isinstance(item, Mapping):
        return {"prompt": item}
    names = [name for name in NAMES if item.get(name) is not None]
    if len(names) > 1:
        raise TypeError(f"an item has {' and '.join(map(repr, names))}; name one of them by key=")
    if not names and any(item.get(name) is not None for name in TOKENIZED):
        return dict(item)
    if not names:
        raise TypeError(_without_prompt(item))
    _check_names(item)
    own = {name: item[name] for name in item if name in OPTIONS and _is_given(name, item[name])}
    return {**own, "prompt": item[names[0]]}


def _without_prompt(item: Mapping[Any, Any]) -> str:
    if "role" in item and "content" in item:
        return 'an item is a prompt, got a message of a chat; a chat is a list: write {"messages": [message]}'
    keys = ", ".join(map(repr, item))
    return f"an item has a prompt under 'prompt' or 'messages', got the keys {keys}; name another by key="


def _is_given(name: str, value: Any) -> bool:
    """True unless a data set has written None for a key that an item lacks; adapter=None is a choice."""
    return value is not None or name == "adapter"


def _check_names(item: Mapping[Any, Any]) -> None:
    """Raise TypeError for a key that is almost an option."""
    for name in item:
        if name in OPTIONS or name in NAMES or not isinstance(name, str):
            continue
        close = [OPENAI[name]] if name in OPENAI else difflib.get_close_matches(name, OPTIONS, 1, CLOSE)
        if close:
            raise TypeError(
                f"an item has the key {name!r}, which is not an option of a request; did you mean "
                f"{close[0]!r}? For a data set with a column of that name give key='prompt'"
            )
