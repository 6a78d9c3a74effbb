"""Kernels of a captured step of generate(), compiled beside each other before the first one: exactly those
that it launches.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from captures import counts, drop
from compiling import (  # noqa: F401  # fixtures
    CHAINED,
    MODELS,
    ChainForms,
    Compiler,
    Specialisation,
    make,
    noting_chains,
    noting_compiler,
)
from generate_calls import call
from kernel_cases import GPU

from hf_paged.model.capture import pool, replay, warmup

pytestmark = pytest.mark.skipif(GPU, reason="the interpreted copy is the CPU's")

ROWS = {"one row": {}, "beams": {"num_beams": 3}, "a batch": {}}


def prompts(rows: int, length: int) -> torch.Tensor:
    return torch.tensor([[5 + (row + 1) * i % 90 for i in range(length)] for row in range(rows)])


def generate(model: Any, rows: int = 1, new: int = 18, **options: Any) -> torch.Tensor:
    given = call(prompts(rows, 21), max_new_tokens=new, min_new_tokens=new, **options)
    return model.generate(**given, cache_implementation="paged")


@pytest.mark.parametrize(
    ("name", "rows"), [*((name, "one row") for name in MODELS), ("llama", "beams"), ("llama", "a batch")]
)
def test_what_a_captured_step_launches_is_compiled_before(
    name: str, rows: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every specialisation, and none that is not launched, but for copies of blocks, which few calls need."""
    foreseen: list[set[Specialisation]] = []

    def foresee(*step: Any) -> None:
        assert not compiler.params  # one operation at a time launches none
        for job in warmup.jobs(*step):
            job()
        foreseen.append(set(compiler.params))
        compiler.params.clear()

    monkeypatch.setattr(replay, "compile_step", foresee)
    model = MODELS[name]()
    generate(model, 4 if rows == "a batch" else 1, **ROWS[rows])
    assert counts(model)["captured"]
    assert {"_plan", "_decode", "_advance"} <= {kernel for kernel, _ in compiler.params}
    assert foreseen == [{each for each in compiler.params if each[0] != "_copy"}]


def test_a_first_call_compiles_side_by_side(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """In other threads, which end, and once: further sizes are of the same code, but for chains of one row."""
    monkeypatch.setattr(warmup, "COMPILED_FOR", {"cpu"})
    model = make("Llama", num_hidden_layers=1)
    stock = model.generate(**call(prompts(1, 21), max_new_tokens=18, min_new_tokens=18))
    at_work: list[set[str]] = []
    begin = warmup.Warming

    def watched(*given: Any) -> Any:
        made = begin(*given)
        made.wait()
        at_work.append(set(compiler.here))
        return made

    monkeypatch.setattr(warmup, "Warming", watched)
    assert torch.equal(generate(model), stock)
    assert at_work[0] == set()
    assert len(at_work) == 2  # those that are known, and chains that a rehearsal has met
    assert not [each.name for each in threading.enumerate() if "warming" in each.name]
    generate(model, rows=4)
    generate(model, rows=2)
    assert counts(model)["captured"] == 3
    assert len(at_work) == 3


@pytest.mark.parametrize("name", CHAINED)
def test_chains_are_compiled_before_they_are_launched(
    name: str, chain_forms: ChainForms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for one row, and once for any more; torch computes chains meanwhile, with the same bits."""
    monkeypatch.setattr(warmup, "COMPILED_FOR", {"cpu"})
    compile_all = warmup.compile_chains

    def compiled(*given: Any) -> None:
        assert not chain_forms.launched
        compile_all(*given)
        assert chain_forms.ahead

    monkeypatch.setattr(pool, "compile_chains", compiled)
    model = CHAINED[name]()
    stock = model.generate(**call(prompts(1, 21), max_new_tokens=18, min_new_tokens=18))
    assert torch.equal(generate(model), stock)
    assert chain_forms.ahead == chain_forms.launched
    monkeypatch.setattr(pool, "compile_chains", compile_all)
    generate(model, rows=4)
    several = set(chain_forms.ahead)
    generate(model, rows=3)
    assert counts(model)["captured"] == 3
    assert chain_forms.ahead == chain_forms.launched == several


def test_trouble_in_there_harms_no_call(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that cannot be compiled ahead are compiled where they are launched."""
    monkeypatch.setattr(warmup, "COMPILED_FOR", {"cpu"})
    model = make("Llama", num_hidden_layers=1)
    stock = model.generate(**call(prompts(1, 21), max_new_tokens=18, min_new_tokens=18))
    for place in ("jobs", "attention_shape"):

        def breaks(*given: Any) -> Any:
            raise RuntimeError("nothing is known")

        with monkeypatch.context() as patch:
            patch.setattr(warmup, place, breaks)
            assert torch.equal(generate(model), stock)
        drop(model)
    assert counts(model)["captured"] == 2


@pytest.mark.parametrize("options", [{"kernels": "torch"}, {}], ids=["torch", "auto"])
def test_a_cpu_compiles_nothing(
    options: dict[str, Any], compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a model whose pages plain torch reads, wherever it is."""
    if options:
        monkeypatch.setattr(warmup, "COMPILED_FOR", {"cpu"})
    monkeypatch.setattr(warmup, "Warming", lambda *given: pytest.fail("threads for nothing"))
    model = make("Llama", num_hidden_layers=1)
    generate(model, cache_config=options)
    assert counts(model)["captured"]
