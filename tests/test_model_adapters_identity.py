"""Adapters that change under their names, by the tools of peft and transformers: never a stale hit (C24), and
the others keep their blocks.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapters import adapted, lora
from families import BY_NAME, build
from peft.utils.hotswap import hotswap_adapter
from releases import require_own_adapters

import hf_paged
from hf_paged import Engine
from hf_paged.model import identity

NEW = 6
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
BLOCK = 4


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Three saved adapters of one shape: "one", "two" and "other"."""
    made = adapted(lora(), lora(), lora())
    made.add_adapter("other", lora())
    made.save_pretrained(tmp_path)
    return tmp_path


def of_peft(folders: Path) -> Any:
    made = peft.PeftModel.from_pretrained(build(BY_NAME["llama"]), folders / "one", "one")
    made.load_adapter(folders / "two", "two")
    return made.eval()


def of_transformers(folders: Path) -> Any:
    require_own_adapters()
    made = build(BY_NAME["llama"]).eval()
    for name in ("one", "two"):
        made.load_adapter(str(folders / name), name)
    return made


@contextmanager
def active(model: Any, name: str | None) -> Iterator[None]:
    if name is not None:
        model.set_adapter(name)
        yield
    elif hasattr(model, "disable_adapter"):
        with model.disable_adapter():
            yield
    else:
        model.disable_adapters()
        yield
        model.enable_adapters()


def stock(model: Any, ids: list[int], name: str | None, **options: Any) -> list[int]:
    """The new tokens under an adapter alone."""
    call = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    with active(model, name):
        found: list[int] = model.generate(**call, **GREEDY, **options)[0, len(ids) :].tolist()
    return found


def _scale(model: Any, folders: Path) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.set_scale("one", 1.5)


CHANGES: dict[str, tuple[Callable[[Path], Any], Callable[[Any, Path], Any]]] = {
    "hotswap_adapter": (
        of_peft,
        lambda model, folders: hotswap_adapter(model, str(folders / "other"), "one"),
    ),
    "load_adapter(hotswap=True)": (
        of_transformers,
        lambda model, folders: model.load_adapter(str(folders / "other"), "one", hotswap=True),
    ),
    "set_scale": (of_peft, _scale),
}


@pytest.fixture(params=CHANGES)
def case(request: pytest.FixtureRequest, folders: Path) -> tuple[Any, Callable[[], None]]:
    """A model with "one" and "two", and what makes another adapter of "one"."""
    make, change = CHANGES[request.param]
    model = make(folders)
    return model, lambda: change(model, folders)


def test_generate_finds_no_stale_prefix(case: tuple[Any, Callable[[], None]]) -> None:
    model, change = case
    ids = prompt(1, 21)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    paged = {
        "cache_implementation": "paged",
        "cache_config": {"block_size": BLOCK, "prefix_caching": True},
    }

    def ask(name: str | None) -> tuple[list[int], int]:
        before = hf_paged.stats(base).reused
        found = stock(model, ids, name, **paged)
        assert found == stock(model, ids, name)
        return found, hf_paged.stats(base).reused - before

    names = ("one", "two", None)
    old = {name: ask(name)[0] for name in names}
    assert [ask(name)[1] for name in names] == [20, 20, 20]
    change()
    assert ask("one")[0] != old["one"]
    assert [ask(name) for name in ("two", None)] == [(old["two"], 20), (old[None], 20)]
    assert ask("one")[1] == 20


def test_the_engine_finds_no_stale_block(case: tuple[Any, Callable[[], None]]) -> None:
    model, change = case
    ids = prompt(2, 21)
    names = ("one", "two", None)
    with Engine(model, block_size=BLOCK, num_blocks=200) as engine:

        def ask(name: str | None) -> tuple[list[int], int]:
            output = engine.generate([ids], adapter=name, **GREEDY)[0]
            found = list(output.sequences[0].token_ids)
            assert found == stock(model, ids, name)
            return found, output.cached_tokens

        old = {name: ask(name)[0] for name in names}
        assert [ask(name)[1] for name in names] == [20, 20, 20]
        change()
        changed, cached = ask("one")
        assert changed != old["one"]
        assert cached == 0
        assert [ask(name) for name in ("two", None)] == [(old["two"], 20), (old[None], 20)]
        assert ask("one") == (changed, 20)
        engine.check()


def test_a_change_under_running_requests(folders: Path) -> None:
    """A scale is seen at once and ends its own requests. The other adapter's and the base's go on."""
    model = of_peft(folders)
    ids = prompt(3, 21)
    expected = {name: stock(model, ids, name) for name in ("two", None)}
    with Engine(model, block_size=BLOCK, num_blocks=200) as engine:
        handles = {name: engine.submit(ids, adapter=name, **GREEDY) for name in ("one", "two", None)}
        engine.step()
        engine.step()
        _scale(model, folders)
        outputs = {name: handle.result() for name, handle in handles.items()}
        assert "adapter 'one' have changed" in str(outputs["one"].error)
        for name in ("two", None):
            assert list(outputs[name].sequences[0].token_ids) == expected[name]
        again = engine.generate([ids], adapter="one", **GREEDY)[0]
        assert list(again.sequences[0].token_ids) == stock(model, ids, "one")
        assert again.cached_tokens == 0
        engine.check()


def test_a_swap_while_the_engine_is_paused(case: tuple[Any, Callable[[], None]]) -> None:
    """Requests keep their tokens and go on with the new weights; the others' tokens are what they were."""
    model, change = case
    ids = prompt(3, 21)
    names = ("one", "two", None)
    before = {name: stock(model, ids, name) for name in names}
    with Engine(model, block_size=BLOCK, num_blocks=200) as engine:
        handles = {name: engine.submit(ids, adapter=name, **GREEDY) for name in names}
        engine.step()
        engine.step()
        engine.pause()
        said = {
            name: [token for each in handle.read() for token in each.token_ids]
            for name, handle in handles.items()
        }
        change()
        engine.resume()
        found = {name: list(handle.result().sequences[0].token_ids) for name, handle in handles.items()}
        assert (found["two"], found[None]) == (before["two"], before[None])
        begun = said["one"]
        assert 0 < len(begun) < NEW
        rest = stock(model, ids + begun, "one")[: NEW - len(begun)]
        assert found["one"] == begun + rest
        again = engine.generate([ids], adapter="one", **GREEDY)[0]
        assert list(again.sequences[0].token_ids) == stock(model, ids, "one")
        engine.check()


def test_merging_between_requests(folders: Path) -> None:
    """The weights of the model are others while an adapter is merged, and differ by rounding afterwards."""
    model = of_peft(folders)
    ids = prompt(4, 21)
    call = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, 21, dtype=torch.long)}
    paged = {
        "cache_implementation": "paged",
        "cache_config": {"block_size": BLOCK, "prefix_caching": True},
    }

    def both() -> list[int]:
        expected = model.generate(**call, **GREEDY)
        for _ in range(2):
            assert torch.equal(model.generate(**call, **GREEDY, **paged), expected)
            output = engine.generate([ids], **GREEDY)[0]
            assert list(output.sequences[0].token_ids) == expected[0, 21:].tolist()
        return expected[0, 21:].tolist()

    with Engine(model, block_size=BLOCK, num_blocks=200) as engine:
        one = both()
        model.set_adapter("two")
        two = both()
        model.merge_adapter()
        assert both() == two
        model.merge_adapter(["one"])
        assert both() not in (one, two)
        with pytest.raises(ValueError, match="merged"):
            engine.submit(ids, adapter="two")
        model.unmerge_adapter()
        assert both() == two
        output = engine.generate([ids], adapter="one", **GREEDY)[0]
        assert list(output.sequences[0].token_ids) == one
        engine.check()


@pytest.mark.parametrize("length", [600, 608], ids=["600 tokens", "whole blocks"])
def test_two_adapters_in_turns_over_one_prefix(length: int) -> None:
    """A request every few milliseconds from another thread, some cancelled after 15 and 19 ms, on one prefix:
    the tokens are those of the request's own adapter, prompts as long as whole blocks among them.
    """
    model = adapted(lora(), lora())
    model.config.max_position_embeddings = 1024
    shared = prompt(5, length)
    names = ("one", "two", None)
    tails = {"short": [], "long": prompt(6, 7), "block": prompt(7, 16)}
    expected = {(name, tail): stock(model, shared + tails[tail], name) for name in names for tail in tails}
    chance = random.Random(0)
    asked: list[tuple[tuple[str | None, str], Any]] = []
    engine = Engine(model, block_size=16, num_blocks=400, max_adapters=2).start()

    def ask_in_turns() -> None:
        for i in range(60):
            which = names[i % 2] if i % 7 else None, list(tails)[i % 3]
            asked.append((which, engine.submit(shared + tails[which[1]], adapter=which[0], **GREEDY)))
            if i % 4 == 1:
                threading.Timer(chance.choice([0.015, 0.019]), asked[-1][1].cancel).start()
            time.sleep(chance.choice([0.002, 0.004, 0.008]))

    try:
        driver = threading.Thread(target=ask_in_turns)
        driver.start()
        driver.join()
        outputs = [(which, handle.result(timeout=120)) for which, handle in asked]
        reasons = {output.finish_reason for _, output in outputs}
        assert reasons <= {"length", "stop", "abort"}
        for which, output in outputs:
            found = list(output.sequences[0].token_ids) if output.sequences else []
            assert found == expected[which][: len(found)], which
            assert output.finish_reason == "abort" or found == expected[which], which
        assert sum(output.finish_reason != "abort" for _, output in outputs) > 30
        assert sum(output.cached_tokens >= length - 16 for _, output in outputs) > 20
        engine.stop()
        engine.check()
    finally:
        engine.close()


def test_adapters_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that is asked for again has another number, however its tensors are: never a stale hit."""
    monkeypatch.setattr(identity, "ADAPTERS", 2)
    model = adapted(lora())
    ids = torch.tensor([prompt(1, 13)])
    reused = {"cache_implementation": "paged", "cache_config": {"block_size": BLOCK, "prefix_caching": True}}
    known = []
    for name in ("two", "three", "four", "two", "one"):
        if name not in model.peft_config:
            torch.manual_seed(len(known))
            model.add_adapter(name, lora())
        model.set_adapter(name)
        for _ in range(2):
            answer = model.generate(ids, **GREEDY, **reused)
            assert torch.equal(answer, model.generate(ids, **GREEDY))
        known.append(weakref.ref(identity.identity_of(model.get_base_model()).of_adapter(name)))
        if name == "two":
            model.set_adapter("one")
            model.delete_adapter("two")
    assert [each() is None for each in known] == [True, True, True, False, False]
    assert hf_paged.stats(model).reused >= 5 * 12
