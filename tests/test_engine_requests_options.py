"""Options that were read once are read again only if something is different, and mean the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from families import BY_NAME, build
from transformers import GenerationConfig

from hf_paged.engine.requests import options as reading
from hf_paged.engine.requests.options import Options
from hf_paged.kv.warmup import short_turns


@pytest.fixture
def model() -> Any:
    return build(BY_NAME["llama"])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A list of the reads through transformers; it grows."""
    seen: list[dict[str, Any]] = []
    read = reading._read

    def counted(model: Any, generation_config: Any, keywords: dict[str, Any]) -> Any:
        seen.append(keywords)
        return read(model, generation_config, keywords)

    monkeypatch.setattr(reading, "_read", counted)
    return seen


def same(one: Any, other: Any) -> bool:
    """True if two configs say the same, tensors made of them included."""
    return {**vars(one), **{name: str(value) for name, value in vars(one).items() if isinstance(value, torch.Tensor)}} == {
        **vars(other), **{name: str(value) for name, value in vars(other).items() if isinstance(value, torch.Tensor)},
    }  # fmt: skip


def test_requests_of_one_kind_are_read_once(model: Any, reads: list[Any]) -> None:
    options, params = Options(), {"do_sample": True, "temperature": 0.7, "eos_token_id": 5}
    for new in (3, 9, 4):
        found = options.read(model, None, params | {"max_new_tokens": new})
        fresh = Options().read(model, None, params | {"max_new_tokens": new})
        assert same(found.config, fresh.config)
        assert (found.open, found.ends) == (fresh.open, fresh.ends) == ((True, True), frozenset({5}))
        found.config.max_length = 1  # a request's own
        found.config.temperature = 2.0
    assert len(reads) == 1 + 3


def test_requests_of_several_kinds_in_turns_are_read_once_each(model: Any, reads: list[Any]) -> None:
    """A server's users have temperatures of their own, and shortest lengths."""
    options = Options()
    for turn in range(3):
        for temperature in (0.5, 0.7, 1.0):
            new = {"max_new_tokens": 9 + turn, "min_new_tokens": 1 + turn}
            found = options.read(model, None, {"do_sample": True, "temperature": temperature, **new}).config
            assert (found.temperature, found.max_new_tokens, found.min_new_tokens) == (
                temperature,
                *new.values(),
            )
    assert len(reads) == 3
    assert options.read(model, None, {"do_sample": True, "temperature": 0.5}).config.min_new_tokens is None


def test_a_bounded_number_of_kinds_is_kept(model: Any, reads: list[Any]) -> None:
    options = Options()
    kinds = 2 * reading.MOST_KEPT
    for top_k in (*range(1, 1 + kinds), kinds, 1):
        assert options.read(model, None, {"top_k": top_k}).config.top_k == top_k
    assert len(reads) == kinds + 1


def test_several_threads_read_at_once(model: Any) -> None:
    """More kinds than are kept: none fails, and each gets its own."""
    options = Options()

    def read(top_k: int) -> int:
        found: int = options.read(model, None, {"top_k": top_k, "max_new_tokens": top_k}).config.top_k
        return found

    asked = [1 + i % (2 * reading.MOST_KEPT) for i in range(600)]
    with short_turns(), ThreadPoolExecutor(8) as threads:
        assert list(threads.map(read, asked)) == asked


CHANGES: dict[str, Any] = {
    "value": ({"max_new_tokens": 3, "top_k": 7}, None),
    "kind of a value": ({"max_new_tokens": 3, "top_k": 5.0}, None),
    "another option": ({"max_new_tokens": 3, "top_k": 5, "top_p": 0.5}, None),
    "the model's own": ({"max_new_tokens": 3, "top_k": 5}, lambda own: setattr(own, "temperature", 0.3)),
    "inside the model's own": ({"max_new_tokens": 3, "top_k": 5}, lambda own: own.eos_token_id.append(9)),
    "no length": ({"top_k": 5}, None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_different_is_read_again(change: str, model: Any, reads: list[Any]) -> None:
    model.generation_config.eos_token_id = [2, 3]
    options, (params, touch) = Options(), CHANGES[change]
    options.read(model, None, {"max_new_tokens": 3, "top_k": 5})
    if touch is not None:
        touch(model.generation_config)
    try:
        found: Any = options.read(model, None, params)
    except (TypeError, ValueError) as error:
        found = error
    assert len(reads) == 2
    if change == "kind of a value":
        assert isinstance(found, Exception) or type(found.config.top_k) is float
    elif change == "inside the model's own":
        assert found.ends == {2, 3, 9}
    else:
        assert same(found.config, Options().read(model, None, params).config)


def test_a_config_is_always_read(model: Any, reads: list[Any]) -> None:
    options = Options()
    for _ in range(2):
        options.read(model, GenerationConfig(max_new_tokens=3), {})
    assert len(reads) == 2


def test_a_list_of_numbers_is_read_when_it_changes(model: Any, reads: list[Any]) -> None:
    """Also in place: what is kept is a copy."""
    options = Options()
    ends = [2, 4]
    for _ in range(2):
        assert options.read(model, None, {"max_new_tokens": 3, "eos_token_id": ends}).ends == {2, 4}
    assert len(reads) == 1
    ends.append(5)
    assert options.read(model, None, {"max_new_tokens": 3, "eos_token_id": ends}).ends == {2, 4, 5}
    assert len(reads) == 2
    first = options.read(model, None, {"max_new_tokens": 3, "eos_token_id": [2, 4]})
    assert first.config.eos_token_id == [2, 4]


def test_what_is_read_while_the_model_changes_is_not_kept(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread submits then, with the options that the model has by now."""
    options = Options()
    check = reading.check_fields

    def slowly(config: Any, written: Any) -> None:
        monkeypatch.setattr(reading, "check_fields", check)
        model.generation_config.temperature = 0.3
        options.read(model, None, {"top_k": 6})
        check(config, written)

    monkeypatch.setattr(reading, "check_fields", slowly)
    options.read(model, None, {"top_k": 5})
    assert options.read(model, None, {"top_k": 5}).config.temperature == 0.3


def test_a_length_that_is_none_is_refused_every_time(model: Any) -> None:
    options = Options()
    options.read(model, None, {"max_new_tokens": 3})
    for _ in range(2):
        with pytest.raises(ValueError, match="max_new_tokens"):
            options.read(model, None, {"max_new_tokens": 0})
