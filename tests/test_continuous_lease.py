"""The model of a manager while it runs: borrowed with the engine, given back as it was."""

from __future__ import annotations

from typing import Any

import pytest
from batch_managers import SMALL, batching_model  # noqa: F401  # a fixture
from dropout import stop_dropout, train_with_dropout
from transformers import ContinuousBatchingConfig

from hf_paged.continuous.engines import begin_on, end_on
from hf_paged.continuous.lease import EngineLease
from hf_paged.continuous.options import WorkloadNeed


class Manager:
    """As much of a manager as a lease reads of one."""

    def __init__(self, model: Any, need: WorkloadNeed | None = None, alone: bool = False) -> None:
        self.model = model
        self.lease = EngineLease(model, ContinuousBatchingConfig(**SMALL), need, alone)


def test_a_model_is_given_back_as_it_was(model: Any) -> None:
    """Its mode and its attention."""
    train_with_dropout(model)
    model.set_attn_implementation("paged|eager")
    manager = Manager(model)
    with manager.lease.borrowed(manager):
        assert not model.training
        assert model.config._attn_implementation == "eager"
    assert not model.training  # until it is given back
    for _ in range(2):
        manager.lease.give_back(manager)
        assert model.training
        assert model.config._attn_implementation == "paged|eager"
    stop_dropout(model)


def test_what_fails_gives_the_model_back(model: Any) -> None:
    manager = Manager(train_with_dropout(model))
    with pytest.raises(KeyError), manager.lease.borrowed(manager):
        raise KeyError
    assert model.training
    stop_dropout(model)


def test_the_last_manager_restores_the_model(model: Any) -> None:
    """The one that changed it has stopped before, while another ran with it."""
    train_with_dropout(model)
    first, last = Manager(model), Manager(model)
    engine = first.lease.engine(first)
    for each in (first, last):
        with each.lease.borrowed(each):
            assert begin_on(each.lease.engine(each), each, alone=False)
    assert last.lease.engine(last) is engine
    first.lease.give_back(first)
    assert not model.training
    last.lease.give_back(last)
    assert model.training
    stop_dropout(model)


def test_an_engine_that_was_closed_is_made_anew(model: Any) -> None:
    manager = Manager(model)
    engine = manager.lease.engine(manager)
    manager.lease.renew()
    assert manager.lease.engine(manager) is engine
    engine.close()
    manager.lease.renew()
    assert manager.lease.engine(manager) is not engine
    manager.lease.end(manager)


@pytest.mark.parametrize("need", [None, WorkloadNeed(2, 20)])
def test_the_end_keeps_the_engine_of_a_known_workload(model: Any, need: WorkloadNeed | None) -> None:
    manager = Manager(model, need)
    engine = manager.lease.engine(manager)
    manager.lease.end(manager)
    assert engine.closed == (need is None)


def test_a_lease_that_is_to_be_alone_refuses_another_manager(model: Any) -> None:
    first, other = Manager(model), Manager(model, alone=True)
    engine = first.lease.engine(first)
    assert begin_on(engine, first, alone=False)
    with pytest.raises(RuntimeError, match="another manager runs"):
        other.lease.engine(other)
    end_on(engine, first)
    assert other.lease.engine(other) is engine
