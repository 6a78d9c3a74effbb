"""The engine that a manager of continuous batching runs on, and its model while it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..engine import Engine
from ..model.dispatch import runs_unknown_code
from ..model.support import why_dropped
from ..model.switch import original_implementation
from ..model.training import evaluating, why_random
from .engines import changing, drop_engine, end_on, engine_for, require_alone, running_with
from .options import WorkloadNeed, host_bytes, options_of_config

PAGED = "paged|"
"""The prefix of an attention that computes with the cache of transformers' own manager alone."""


class EngineLease:
    """An engine, made when first needed, and its model in a state that the engine computes: a manager borrows
    both until it has stopped.
    """

    def __init__(self, model: Any, config: Any, need: WorkloadNeed | None, alone: bool) -> None:
        """config: a ContinuousBatchingConfig. alone: no other manager may run with the model."""
        self.need = need
        self._model = model
        self._config = config
        self._options = options_of_config(config)
        self._alone = alone
        self._engine: Engine | None = None
        self._evaluating = contextlib.ExitStack()
        """Restores the modes of the model's modules, and its attention."""

    def engine(self, manager: Any) -> Engine:
        """The engine that computes the requests of the manager, which borrows the model with it."""
        if self._engine is None:
            most = host_bytes(self._config)
            with self.borrowed(manager):
                self._engine = engine_for(self._model, self._options, self.need, most)
        return self._engine

    def renew(self) -> None:
        """Have another engine made when the next is needed, if this one was closed."""
        if self._engine is not None and self._engine.closed:
            self._engine = None

    @contextlib.contextmanager
    def borrowed(self, manager: Any) -> Iterator[None]:
        """Borrow the model, and give it back at once if what follows fails."""
        try:
            self._borrow(manager)
            yield
        except BaseException:
            self.give_back(manager)
            raise

    def _borrow(self, manager: Any) -> None:
        """Put the model into a state that the engine computes, until the manager has stopped."""
        model = self._model
        if self._alone:
            require_alone(manager)
        own_code = model.training and runs_unknown_code(model)  # NEFTune's draws noise
        if why_random(model) or why_dropped(model) or own_code:
            self._evaluating.enter_context(evaluating(model))
        setting = original_implementation(model.config)
        if setting.startswith(PAGED):
            self._evaluating.callback(model.set_attn_implementation, setting)
            model.set_attn_implementation(setting.removeprefix(PAGED))

    def give_back(self, manager: Any) -> None:
        """Restore the model's modes and attention, or let another manager that runs with it do so. Until then
        this one runs.
        """
        with changing:
            restoring = self._evaluating.pop_all()
            heir = next((each for each in running_with(self._model) if each is not manager), None)
            if heir is None:
                restoring.close()
            else:
                heir.lease.inherit(restoring)
        if self._engine is not None:
            end_on(self._engine, manager)

    def inherit(self, restoring: contextlib.ExitStack) -> None:
        """Restore what another manager has changed on the model, too."""
        self._evaluating.callback(restoring.close)

    def end(self, manager: Any) -> None:
        """Give the model back, and the engine's pools unless a workload of known size made them."""
        if self.need is None:
            drop_engine(self._model)
        self._engine = None
        self.give_back(manager)
