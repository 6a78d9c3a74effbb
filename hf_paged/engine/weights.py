"""Whether a model is still the one that the cached blocks were computed with (C24)."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..model.hooks import KINDS, only_looks_on
from ..model.identity import identity_of
from ..model.offloaded import offloaded, stored
from ..model.weights_digest import PLAIN_TENSORS, Unreadable
from .check_policy import CheckPolicy, WeightsChanged
from .settings import Settings

logger = logging.getLogger("hf_paged")
_version_of = attrgetter("_version")


class Weights:
    """What was last seen of a model: which state it is in, as prefixes of `generate()` know it, and how often
    torch wrote to it.
    """

    def __init__(self, model: nn.Module, checks: CheckPolicy, settings: Settings) -> None:
        self._model, self._checks, self._settings = model, checks, settings
        self._unreadable = False
        self._stepped = False
        """Whether an optimizer has taken a step on them: fused ones write without torch's counting it."""
        hook = register_optimizer_step_post_hook(partial(_note_step, weakref.ref(self)))
        weakref.finalize(self, hook.remove).atexit = False
        self._look()

    def touched(self) -> bool:
        """Whether a parameter was written by an optimizer, written or replaced in the way that torch counts,
        or a setting is another. Cheap, for every step."""
        if self._stepped or self._names != _names(self._holders) or self._kept != self._storage():
            return True
        return self._settings.changed()

    def require_untouched(self, running: int) -> None:
        """Raise if they were, under so many requests: WeightsChanged if steps were taken, else nothing is
        lost yet.
        """
        if self.touched():
            if self._checks.unseen:
                raise WeightsChanged(
                    f"the model's weights have changed while {running} requests were running; their latest "
                    "tokens may mix old and new weights, so they were ended. Call engine.pause() before a "
                    "change and engine.resume() after it"
                )
            raise RuntimeError(
                f"the model's weights have changed under {running} running requests; call engine.pause() "
                "before the change (or now) and engine.resume() after it"
            )
        self._checks.seen()

    def memory(self) -> list[object]:
        """Whatever holds the memory of the model's tensors: while somebody has it, that is not given to
        anybody else.
        """
        return [
            _memory_of(tensor)
            for tensor in chain.from_iterable([*self._holders, *self._buffers])
            if tensor is not None
        ]

    def changed(self) -> bool:
        """Whether anything is different since the last look, content, settings and adapters included; this is
        a look.

        Where nobody can look everything may be different.
        """
        before = self._state
        self._look()
        self._checks.seen()
        return self._state is None or self._state != before

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has taken a step, on whatever."""
        own = set(self._names[0])
        self._stepped |= any(
            id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]
        )

    def _look(self) -> None:
        # Modules' own dicts: a parameter that is replaced is seen, and nothing is walked in every step.
        modules = list(self._model.modules())
        self._offloaded = offloaded(modules)
        self._loaded_later = [module for module in modules if id(module) in self._offloaded]
        resident = [module for module in modules if id(module) not in self._offloaded]
        self._holders = [module._parameters.values() for module in resident if module._parameters]
        self._buffers = [module._buffers.values() for module in resident if module._buffers]
        self._names, self._kept = _names(self._holders), self._storage()
        self._stepped = False
        if self._settings.changed():
            self._settings = Settings(self._model, self._settings.restless)
        identity = identity_of(self._model)
        try:
            glance = identity.begin(self._model, self._model.forward)
            # Torch numbers hooks, and gives no number twice. Transformers' own, which collect hidden states,
            # come with the first picture.
            named = chain.from_iterable(
                vars(module)[kind].items() for module in glance.survey.hooked for kind in KINDS
            )
            hooks = [number for number, hook in named if not only_looks_on(hook)]
            self._state: Any = identity.number(glance), hooks
        except Unreadable as reason:
            self._state = None
            if not self._unreadable:
                logger.info("no request shares prefixes with those before an idle engine: %s", reason)
            self._unreadable = True

    def _storage(self) -> Any:
        """The identity of every offloaded weight: of its tensor or its file. None where that cannot be
        known.
        """
        if not self._offloaded:
            return None
        try:
            kept = stored(self._loaded_later, self._offloaded)
        except Unreadable:
            return None
        return _names([kept.tensors]), kept.files


def _note_step(whose: weakref.ref[Weights], optimizer: torch.optim.Optimizer, *_: object) -> None:
    weights = whose()
    if weights is not None:
        weights.note_step(optimizer)


def _names(holders: Iterable[Iterable[torch.Tensor | None]]) -> tuple[list[int], ...]:
    """Of every parameter which one it is, where it lies, and how often it was written. All at once: this is
    asked in every step.
    """
    parameters = [parameter for parameter in chain.from_iterable(holders) if parameter is not None]
    return (
        list(map(id, parameters)),
        list(map(torch.Tensor.data_ptr, parameters)),
        list(map(_version_of, parameters)),
    )


def _memory_of(tensor: torch.Tensor) -> object:
    """The memory that a tensor has now; it may be given another. A tensor that is made of others is its
    own.
    """
    return tensor.untyped_storage() if type(tensor) in PLAIN_TENSORS else tensor
