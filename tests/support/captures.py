"""Questions of tests to captured steps: of a model's in generate(), or of an engine's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from hf_paged.engine import Engine
from hf_paged.engine.worker import captured as engine_side
from hf_paged.model.capture import pool as both_sides
from hf_paged.model.capture import replay as generate_side
from hf_paged.model.capture import step as one_step
from hf_paged.model.capture.pool import CapturePool
from hf_paged.model.capture.replay import captures_of

PLACES = {
    "agree": (one_step, "AGREE"),
    "after": (both_sides, "AFTER"),
    "most": (both_sides, "MOST"),
    "most_bytes": (both_sides, "MOST_BYTES"),
    "later": (both_sides, "LATER"),
    "spare": (both_sides, "SPARE"),
    "padded": (both_sides, "PADDED"),
    "least_steps": (generate_side, "LEAST_STEPS"),
    "pairs": (engine_side, "MOST_PAIRS"),
    "pairs_in_torch": (engine_side, "MOST_IN_TORCH"),
}


def policy(monkeypatch: pytest.MonkeyPatch, **numbers: int) -> None:
    """Change numbers of the policy: which steps are captured, and how many are kept."""
    for name, number in numbers.items():
        monkeypatch.setattr(*PLACES[name], number)


def pool_of(of: Any) -> CapturePool:
    """The captured steps of a model in generate(), or of an engine."""
    if not isinstance(of, Engine):
        return captures_of(of).pool
    assert of.runner.captured is not None
    return of.runner.captured.captures


def counts(of: Any) -> Counter[str]:
    """How many steps were captured, compiled, replayed and refused."""
    found = of.stats()["graphs"] if isinstance(of, Engine) else captures_of(of).pool.stats()
    names = ("captured", "compiled", "replayed", "refused")
    return Counter({name: found[name] for name in names if found.get(name)})


def reasons(of: Any) -> str:
    """Why steps are not captured."""
    return " ".join(pool_of(of).reasons.values())


def kept(of: Any) -> int:
    """How many captured steps there are."""
    return len(pool_of(of))


def drop(of: Any) -> None:
    """Let all captured steps go."""
    pool_of(of).drop()


def notice(engine: Engine) -> None:
    """Have an engine read its model's state, as a capture does."""
    engine.runner.captured.check_captures()  # type: ignore[union-attr]


def sizes(engine: Engine, form: str) -> set[int]:
    """The rows of an engine's captured steps of a form."""
    return {step.size.rows for step in pool_of(engine) if step.size.form == form}


def forms(engine: Engine) -> set[str]:
    """The forms of an engine's captured steps."""
    return {str(step.size.form) for step in pool_of(engine)}


def compiled(engine: Engine) -> int:
    """How many of an engine's captured steps have compiled layers."""
    return sum(step.compiled for step in pool_of(engine))


def why_not_compiled(engine: Engine) -> str | None:
    """Why an engine compiles no layers any more."""
    return engine.runner.captured.compilation.why_not  # type: ignore[union-attr]


def logits_of(engine: Engine) -> list[torch.Tensor]:
    """Where an engine's captured steps answer."""
    return [step.logits for step in pool_of(engine)]  # type: ignore[attr-defined]
