"""Differences between the releases of transformers and peft that the tests run on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import pytest
import torch
import transformers as tf
from packaging.version import Version
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from hf_paged.model.cache_name import CACHE, OLDER
from hf_paged.model.mla import METHOD
from hf_paged.model.state_layers import NUMBERED

RENAMED = CACHE != OLDER
"""True if forwards call a cache `cache`, as from transformers 5.24 on."""
OWN_WORDS = RENAMED or Version(tf.__version__) < Version("5.10")
"""True if a model's assistant keeps the generation config that it had, so that no word for a cache reaches it."""
DROPPED_WITHOUT_GRADIENTS = not RENAMED
"""True if checkpointed layers drop their cache also where nothing has gradients, as before transformers 5.24.
"""
NEEDS_SLOTS = pytest.mark.skipif(
    not NUMBERED, reason="before transformers 5.14 recurrent states run on stock's cache"
)
FLAT_STATES = pytest.mark.skipif(
    Version(tf.__version__) < Version("5.17"),
    reason="before transformers 5.17 mixers hold their functions themselves",
)
NEEDS_MANAGERS = pytest.mark.skipif(
    Version(tf.__version__) < Version("5.14"),
    reason="install(generate_batch=True) needs the managers of transformers 5.14 or newer",
)
LATENTS = pytest.mark.skipif(
    not hasattr(DeepseekV3Attention, METHOD), reason="before transformers 5.15 caches hold expanded latents"
)
KEEPS_WHAT_LEFT = not hasattr(DynamicCache, "activate_past_recording")
"""True if stock keeps what has left a window while it drafts, since its windows cannot be cropped."""
NEWER_CACHES = pytest.mark.skipif(
    KEEPS_WHAT_LEFT, reason="the caches of this transformers have other methods than those that are compared"
)
OLD_RANKS = Version(tf.__version__) < Version("5.10")
"""True if steps on several ranks are not captured, and weights do not say which part of them a rank has."""
NAMED_PARTS = pytest.mark.skipif(
    OLD_RANKS,
    reason="ranks of transformers 5.9 take neither adapters nor other weights",
)
OMNI = pytest.mark.skipif(
    Version(tf.__version__) < Version("5.14"), reason="Qwen3-Omni hands pixels to its decoder"
)
NEWER_LOOPS = Version(tf.__version__) >= Version("5.23")
"""True if beams take processors that change the vocabulary, penalties a prompt to ignore by row, and drafts
criteria that answer with any number, as from transformers 5.23 on.
"""
CUTS_AXES = NEWER_LOOPS
"""True where stock cuts a prompt into chunks although positions have several axes; 5.17 fails."""


REFUSED = (
    "go to slots from transformers 5.14 on",
    "does not number recurrent states",
    "does not say which part of a weight a rank has",
    "has no experts in transformers' form",  # Granite's
    "Unsupported tensor parallel style",  # by transformers
    "paged is not supported for VoxtralRealtime",  # by transformers
)
"""Parts of the reasons with which older releases do without pages, an engine or routing."""


@contextmanager
def skipping_refused() -> Iterator[None]:
    """Skip where a release before transformers 5.14 lacks what a model needs and the user is told so: by a
    FallbackWarning, which is an error in tests, or by a call that is refused.
    """
    try:
        yield
    except Exception as error:
        if NUMBERED or not any(reason in str(error) for reason in REFUSED):
            raise
        pytest.skip(str(error))


def layers_say_dtype() -> bool:
    """True if stock's layers of keys and values say their dtype, as before transformers 5.24."""
    layer = DynamicLayer()
    layer.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
    return hasattr(layer, "dtype")


def prefixes_are_ignored() -> bool:
    """True if peft hands its prefixes over under the older name, which transformers ignores beside the new
    one.
    """
    return RENAMED and Version(version("peft")) < Version("0.22.0")


def require_decoders_of_whisper() -> None:
    """Skip where Whisper's decoder alone cannot be an assistant, with or without pages."""
    if Version(tf.__version__) < Version("5.10"):
        pytest.skip("WhisperForCausalLM of transformers 5.9 raises UnboundLocalError as an assistant")


def require_own_adapters() -> None:
    """Skip where transformers' own methods for adapters refuse the installed peft."""
    if Version(version("peft")) < Version(MIN_PEFT_VERSION):
        pytest.skip(
            f"peft {version('peft')} is refused by transformers {tf.__version__}'s own load_adapter, add_adapter "
            f"and set_adapter, which want peft >= {MIN_PEFT_VERSION}"
        )


def takes_as(stock: Callable[..., Any], *more: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function of (*args, **kwargs) that takes what a forward of stock takes in this release, and some more."""

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(stock)
        *known, last = signature.parameters.values()
        assert last.kind is inspect.Parameter.VAR_KEYWORD
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in more]
        function.__signature__ = signature.replace(parameters=[*known, *added, last])  # type: ignore[attr-defined]
        return function

    return named
