"""The effects of training mode on a model's answers: active dropout, noise, statistics of the batch.

A model in training mode whose dropouts are all zero answers as in eval mode, and trainers generate like that.
So nothing asks for `model.training` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from .patches import wrapped_in
from .switch import modules_of

WORDS = ("drop", "jitter")
"""Words in the names of probabilities: attention_dropout, layerdrop, drop_prob, jitter_noise."""


def training_effect(modules: Iterable[nn.Module]) -> str | None:
    """The cause of random or batch-dependent answers in training mode; None if there is none."""
    for module in modules:
        if module.training and (effect := _effect_of(module)) is not None:
            return f"{type(module).__name__} has {effect}"
    return None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while. Then train() gives each module its mode again: parts may be in another."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        try:
            _set_modes(modes)
        finally:  # again, if an interrupt has broken it off; else there is nothing left to do
            _set_modes(modes)


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training != training:
            module.train(training)
    for module, training in modes:  # of two parents in different modes
        module.training = training


def why_random(model: nn.Module) -> str | None:
    """Why answers of a model in training mode are random, and what to do; None if they are not."""
    if (effect := training_effect(modules_of(model))) is None:
        return None
    return (
        f"{type(model).__name__} is in training mode, where its {effect}; set that to zero, or call "
        "model.eval() first"
    )


def _effect_of(module: nn.Module) -> str | None:
    if isinstance(module, _DropoutNd):
        return f"p={module.p}" if module.p else None
    if isinstance(module, _BatchNorm):
        return "statistics of the batch"
    own = module.__dict__
    config = getattr(own.get("config"), "__dict__", {})
    kind: Any = type(module)
    named, read = _probabilities(kind, tuple(own))
    for name, values in chain(((name, own) for name in named), ((name, config) for name in read)):
        value = values.get(name)
        if type(value) is float and value > 0:
            return f"{name}={value}"
    return None


@lru_cache(maxsize=1024)
def _probabilities(kind: Any, attributes: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Attributes of a kind of modules named like probabilities, and names it may read from its config."""
    named = [name for name in attributes if any(word in name for word in WORDS)]
    own = [base for base in kind.__mro__ if base.__module__.split(".")[0] not in ("torch", "builtins")]
    functions = [
        each
        for base in own
        if not base.__name__.startswith("PreTrainedModel")
        for name, value in vars(base).items()
        if name not in ("__init__", "_init_weights")
        for each in wrapped_in(value)
    ]
    read = {name for function in functions for name in function.__code__.co_names}
    return named, [name for name in read - set(named) if any(word in name for word in WORDS)]
