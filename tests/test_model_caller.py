"""Warnings name the caller's line, whatever lies between it and the code that warns."""

from __future__ import annotations

import inspect
from typing import Any

import peft
import pytest
from adapters import lora
from families import BY_NAME, build
from generate_calls import call
from prefix_reuse import words
from transformers import pipeline

from hf_paged import FallbackWarning, demo

IDS = words(2, 9)
FALLS_BACK = {"cache_implementation": "paged", "use_cache": False}


def _asked(how: str) -> tuple[Any, dict[str, Any]]:
    """A function that calls generate(), and its arguments."""
    if how == "pipeline":
        made = pipeline("text-generation", demo.model(), tokenizer=demo.tokenizer())
        return made, {"text_inputs": "The fox", "max_new_tokens": 2}
    model: Any = build(BY_NAME["llama"])
    if how == "peft":
        model = peft.get_peft_model(model, lora(r=2), "one")
    return model.generate, call(IDS)


@pytest.mark.parametrize("how", ["model", "peft", "pipeline"])
def test_a_fallback_names_the_line_that_asked(how: str) -> None:
    """Behind transformers' own decorators, peft's generate() and a pipeline."""
    generate, given = _asked(how)

    def ask() -> int:
        generate(**given, **FALLS_BACK)
        return inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]

    with pytest.warns(FallbackWarning) as caught:
        line = ask()
    found = [(each.filename, each.lineno) for each in caught if each.category is FallbackWarning]
    assert found == [(__file__, line)]
