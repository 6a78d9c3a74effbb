"""What tests ask of captured steps: of a model's in generate(), or of an engine's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from hf_paged.engine import Engine
from hf_paged.engine import decoding as engine_side
from hf_paged.model.capture import pool as generate_side
from hf_paged.model.capture.pool import graphs_of
from hf_paged.model.registry import memory_of


def policy(monkeypatch: pytest.MonkeyPatch, **numbers: int) -> None:
    """Change numbers of the policy: least_steps, after, most, most_bytes, later of generate()'s pool; spare,
    padded, pairs, pairs_in_torch, after of an engine's.
    """
    places = {
        "least_steps": [(generate_side, "WORTH")],
        "after": [(generate_side, "AFTER"), (engine_side, "AFTER")],
        "most": [(generate_side, "MANY")],
        "most_bytes": [(generate_side, "LARGE")],
        "later": [(generate_side, "LATER")],
        "spare": [(engine_side, "SPARE")],
        "padded": [(engine_side, "WORTH")],
        "pairs": [(engine_side, "MOST_PAIRS")],
        "pairs_in_torch": [(engine_side, "MOST_IN_TORCH")],
    }
    for name, number in numbers.items():
        for module, constant in places[name]:
            monkeypatch.setattr(module, constant, number)


def counts(of: Any) -> Counter[str]:
    """How many steps were captured, compiled, replayed and refused."""
    found = of.stats()["graphs"] if isinstance(of, Engine) else graphs_of(of).counts
    names = ("captured", "compiled", "replayed", "refused")
    return Counter({name: found[name] for name in names if found.get(name)})


def reasons(of: Any) -> str:
    """Why steps are not captured."""
    if not isinstance(of, Engine):
        return " ".join(graphs_of(of).reasons.values())
    return "" if of._runner.decoding is None else " ".join(of._runner.decoding.reasons.values())


def kept(of: Any) -> int:
    """How many captured steps there are."""
    return len(steps(of)) if isinstance(of, Engine) else len(memory_of(of).captured)


def drop(of: Any) -> None:
    """Let all captured steps go."""
    if isinstance(of, Engine):
        of._runner.decoding.forget()  # type: ignore[union-attr]
    else:
        memory_of(of).captured.clear()


def notice(engine: Engine) -> None:
    """Have an engine read its model's state, as a capture does."""
    engine._runner.decoding._state()  # type: ignore[union-attr]


def steps(engine: Engine) -> dict[Any, Any]:
    """An engine's captured steps by their sizes."""
    return engine._runner.decoding._steps  # type: ignore[union-attr]


def sizes(engine: Engine, form: str) -> set[int]:
    """The rows of an engine's captured steps of a form."""
    return {shape.rows for shape in steps(engine) if shape.form == form}


def forms(engine: Engine) -> set[str]:
    """The forms of an engine's captured steps."""
    return {shape.form for shape in steps(engine)}


def compiled(engine: Engine) -> int:
    """How many of an engine's captured steps have compiled layers."""
    return sum(step.compiled for step in steps(engine).values())


def why_not_compiled(engine: Engine) -> str | None:
    """Why an engine compiles no layers any more."""
    return engine._runner.decoding.compilation.why_not  # type: ignore[union-attr]


def logits_of(engine: Engine) -> list[torch.Tensor]:
    """Where an engine's captured steps answer."""
    return [step.answer.logits for step in steps(engine).values()]
