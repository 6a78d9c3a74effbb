"""Shared by the tests: CHANGES, layer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_checks import change_precision
from torch import nn


def layer(model: Any) -> Any:
    return model.model.layers[0]


def _parameter_replaced(model: Any, patch: pytest.MonkeyPatch) -> None:
    layer(model).mlp.up_proj.weight = nn.Parameter(layer(model).mlp.up_proj.weight.detach().clone())


def _function_of_the_file(model: Any, patch: pytest.MonkeyPatch) -> None:
    place = sys.modules[type(layer(model).self_attn).__module__]
    stock = place.apply_rotary_pos_emb
    patch.setattr(place, "apply_rotary_pos_emb", lambda *args, **kwargs: stock(*args, **kwargs))


def _function_of_a_wrapped_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    place = sys.modules[type(model.model).__module__]
    stock = place.create_causal_mask
    patch.setattr(place, "create_causal_mask", lambda *args, **kwargs: stock(*args, **kwargs))


def _class_patched(model: Any, patch: pytest.MonkeyPatch) -> None:
    kind = type(layer(model).mlp)
    stock = kind.forward
    patch.setattr(kind, "forward", lambda self, x: stock(self, x) * 2)


def _forward_of_the_model(model: Any, patch: pytest.MonkeyPatch) -> None:
    stock = model.forward
    model.forward = lambda *args, **kwargs: stock(*args, **kwargs)


def _float32_precision(model: Any, patch: pytest.MonkeyPatch) -> None:
    change_precision(patch)


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "config": lambda model, patch: setattr(model.config, "rms_norm_eps", 0.5),
    "nested setting": lambda model, patch: model.config.rope_parameters.update(rope_theta=7.0),
    "number of a module": lambda model, patch: setattr(layer(model).self_attn, "scaling", 0.25),
    "parameter replaced": _parameter_replaced,
    "parameter moved": lambda model, patch: setattr(
        model.lm_head.weight, "data", model.lm_head.weight.data.clone()
    ),
    "buffer replaced": lambda model, patch: model.model.rotary_emb.register_buffer(
        "inv_freq", torch.ones(4), persistent=False
    ),
    "module replaced": lambda model, patch: setattr(layer(model).mlp, "act_fn", nn.ReLU()),
    "forward of a module": lambda model, patch: setattr(layer(model).mlp, "forward", lambda x: x),
    "forward of the model": _forward_of_the_model,
    "class": _class_patched,
    "class setting": lambda model, patch: patch.setattr(type(layer(model).mlp), "factor", 3, raising=False),
    "function of the file": _function_of_the_file,
    "function of a wrapped forward": _function_of_a_wrapped_forward,
    "object's number": lambda model, patch: setattr(layer(model).mlp.helper, "factor", 3),
    "hook": lambda model, patch: layer(model).mlp.register_forward_hook(lambda *_: None),
    "mode": lambda model, patch: layer(model).train(),
    "products": _float32_precision,
}
