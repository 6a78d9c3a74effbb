"""`engine.stats()`: its type names what it has, and says what is off, and why."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest
from families import BY_NAME, build
from tiny import build as tiny
from tiny import config_class

from hf_paged.engine import Engine, EngineStats
from hf_paged.model.rehearsal import RECORDERS


def disagreements(value: Any, hint: Any, where: str) -> list[str]:
    """Places of a value that are not as its type says."""
    kind = get_origin(hint)
    if is_typeddict(hint):
        hints = get_type_hints(hint)
        names = [f"{where}: {value.keys()}"] if value and value.keys() != hints.keys() else []
        return names + [
            place for name in value for place in disagreements(value[name], hints[name], f"{where}.{name}")
        ]
    if kind is dict:
        return [
            place
            for name in value
            for place in disagreements(value[name], get_args(hint)[1], f"{where}.{name}")
        ]
    if kind in (Union, types.UnionType):
        fits = any(not disagreements(value, each, where) for each in get_args(hint))
    elif kind is Literal:
        fits = value in get_args(hint)
    else:
        fits = isinstance(value, (int, float) if hint is float else kind or hint)
    return [] if fits else [f"{where}: {value!r} is no {hint}"]


@pytest.mark.parametrize("family", ["qwen2-window", "t5"])
def test_the_type_names_what_there_is(family: str) -> None:
    """Every key and no other, at every depth, before requests and behind them, and while paused."""
    with Engine(build(BY_NAME[family]), num_blocks=40, block_size=4) as engine:
        before = engine.stats()
        engine.generate([[5, 6, 7]], max_new_tokens=3, tenant="one")
        engine.pause()
        for found in (before, engine.stats()):
            assert disagreements(found, EngineStats, "stats") == []
        assert engine.stats()["paused"] == "recompute"
        engine.resume()


def test_what_is_off_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the option that turned it off, or by the model or machine that cannot have it."""
    model = build(BY_NAME["llama"])
    with Engine(model, num_blocks=40) as engine:
        off = engine.stats()["off"]
        assert off["graphs"] == "steps are captured on CUDA devices, the model is on cpu"
        assert off.keys() <= {"graphs", "run_ahead", "kernels"}
    monkeypatch.setitem(RECORDERS, "cpu", lambda step, pools, devices: None)  # as if steps were captured here
    with Engine(model, num_blocks=40, run_ahead=True) as engine:
        assert not engine.stats()["off"].keys() & {"graphs", "run_ahead"}
    options: dict[str, Any] = {
        "graphs": False, "prefix_caching": False, "preemption": "recompute", "kernels": "torch", "run_ahead": False,
    }  # fmt: skip
    with Engine(model, num_blocks=40, shared_reads="always", kernels="torch") as engine:
        found = engine.stats()["off"]["shared_reads"]
        assert found == "only the Triton kernels in captured steps and the C++ op of CPUs do"
    with Engine(model, num_blocks=40, shared_reads="off") as engine:
        assert engine.stats()["off"]["shared_reads"] == "shared_reads='off'"
    with pytest.raises(ValueError, match=r"shared_reads='on' is not one of \('auto', 'off', 'always'\)"):
        Engine(model, num_blocks=40, shared_reads="on")  # type: ignore[arg-type]
    with Engine(model, num_blocks=40, **options) as engine:
        assert engine.stats()["off"] == {
            "graphs": "graphs=False",
            "prefix_caching": "prefix_caching=False",
            "swap": "preemption='recompute'",
            "kernels": "kernels='torch'",
            "run_ahead": "run_ahead=False",
        }


def test_a_model_that_takes_no_flat_row_says_why() -> None:
    with Engine(build(BY_NAME["t5"]), num_blocks=40, host_blocks=0) as engine:
        off = engine.stats()["off"]
    assert off["flat"] == "T5ForConditionalGeneration is an encoder-decoder"
    assert off["graphs"] == "sequences are run one by one"
    assert "encoder's output" in off["prefix_caching"]
    assert off["swap"] == "host_blocks=0"
    assert "token ids" in off["embeddings"]


def test_rows_over_states_are_captured_though_no_row_is_flat() -> None:
    """Zaya advances its states by code of its own."""
    with Engine(tiny("causal", config_class("causal", "zaya")), num_blocks=40) as engine:
        off = engine.stats()["off"]
    assert "states" in off["flat"]
    assert off["graphs"].startswith("steps are captured on CUDA devices")
