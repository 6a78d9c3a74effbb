"""Answers of an engine to requests with adapters, and of generate() to the same."""

from __future__ import annotations

from typing import Any

import torch
from computed_once import computed_once

from hf_paged import Engine

NEW = 6


def prompt(seed: int, length: int = 9) -> list[int]:
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model: Any, ids: list[int], adapter: Any, **options: Any) -> list[int]:
    """The answer of peft alone on an adapter."""
    call = {"input_ids": torch.tensor([ids]), "max_new_tokens": NEW, "do_sample": False, **options}
    call["attention_mask"] = torch.ones_like(call["input_ids"])
    return computed_once(lambda: _computed_alone(model, call, adapter), model, call, adapter)


def _computed_alone(model: Any, call: dict[str, Any], adapter: Any) -> list[int]:
    before = model.base_model.active_adapters if hasattr(model.base_model, "active_adapters") else None
    if adapter is None:
        with model.disable_adapter():
            out = model.generate(**call)
    else:
        model.base_model.set_adapter([adapter] if isinstance(adapter, str) else list(adapter))
        out = model.generate(**call)
        model.base_model.set_adapter(list(before))
    return list(out[0, call["input_ids"].shape[1] :].tolist())


def ask(engine: Engine, ids: list[int] | None = None, **options: Any) -> list[int]:
    call = {"max_new_tokens": NEW, "do_sample": False, **options}
    return first(engine.submit(ids, **call).result())


def first(output: Any) -> list[int]:
    """The tokens of a request's first answer."""
    return list(output.sequences[0].token_ids)


def tokens(handle: Any) -> list[int]:
    return first(handle.result())
