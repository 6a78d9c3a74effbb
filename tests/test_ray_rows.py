"""The bookkeeping of hf_paged.ray.map_batches, without ray: names, checkpoints, rows that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_paged import Engine, demo
from hf_paged.ray.rows import Checkpoint, RowAnswer, answered, row_name

PROMPTS = demo.prompts()
POISON = 400
"""A token at which the model below fails."""
GREEDY = {"max_new_tokens": 3, "do_sample": False}


def test_names_tell_rows_apart() -> None:
    names = {row_name(key, prompt) for key in (1, "1", 2) for prompt in ("a", "b", [1, 2], None)}
    assert len(names) == 12
    assert row_name(1, "a") == row_name(1, "a")


def test_answers_are_kept_for_every_worker(tmp_path: Path) -> None:
    mine = Checkpoint(tmp_path)
    other = Checkpoint(tmp_path)
    mine.add({"a": RowAnswer("one\ntwo", "stop"), "b": RowAnswer("ü", "length")})
    other.add({"c": RowAnswer("three", "stop")})
    for checkpoint in (mine, other, Checkpoint(tmp_path)):
        found = checkpoint.find(["a", "b", "c", "d"])
        assert found == {
            "a": RowAnswer("one\ntwo", "stop"),
            "b": RowAnswer("ü", "length"),
            "c": RowAnswer("three", "stop"),
        }


def test_rows_with_an_error_are_tried_again(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.add({"a": RowAnswer(None, "refused", "too long"), "b": RowAnswer("x", "stop")})
    assert checkpoint.find(["a", "b"]).keys() == {"b"}
    checkpoint.add({"a": RowAnswer(None, "refused", "too long")})
    assert len(list(tmp_path.iterdir())) == 1


def test_a_row_that_is_kept_twice_has_one_answer(tmp_path: Path) -> None:
    """A worker that was given up may still write: one that knows an answer keeps to it."""
    Checkpoint(tmp_path).add({"a": RowAnswer("first", "stop")})
    asked = Checkpoint(tmp_path)
    before = asked.find(["a"])
    Checkpoint(tmp_path).add({"a": RowAnswer("second", "stop")})
    assert asked.find(["a"]) == before


def test_what_a_killed_worker_was_writing_is_not_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    (tmp_path / ".half.jsonl.1").write_text('["a", "on')
    assert checkpoint.find(["a"]) == {}


def test_a_folder_belongs_to_one_job(tmp_path: Path) -> None:
    job = {"model": "demo", "keywords": {"max_new_tokens": 4}}
    Checkpoint(tmp_path / "new").begin(job)
    Checkpoint(tmp_path / "new").begin(job)
    with pytest.raises(ValueError, match=r"keywords was \{'max_new_tokens': 4\} and is .*5.*another folder"):
        Checkpoint(tmp_path / "new").begin({**job, "keywords": {"max_new_tokens": 5}})


# ---- rows that fail


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model = demo.model()

    def choke(module: Any, args: tuple[Any, ...]) -> None:
        if (args[0] == POISON).any():
            raise RuntimeError("the model chokes")

    model.get_input_embeddings().register_forward_pre_hook(choke)
    with Engine(model, demo.tokenizer(), num_blocks=200, max_batch_sequences=16) as made:
        yield made


def ids(prompt: str) -> list[int]:
    return list(demo.tokenizer()(prompt)["input_ids"])


def expected(engine: Engine, prompt: Any) -> RowAnswer:
    (output,) = engine.generate([prompt], **GREEDY)
    return RowAnswer(output.text, output.finish_reason)


def test_a_row_has_its_own_error(engine: Engine) -> None:
    found = asyncio.run(
        answered(engine, [PROMPTS[0], None, [2] * 5000, PROMPTS[1], {"no": "prompt"}], GREEDY)
    )
    engine.stop()
    assert [found[0], found[3]] == [expected(engine, PROMPTS[0]), expected(engine, PROMPTS[1])]
    assert [found[i].finish_reason for i in (1, 2, 4)] == ["refused"] * 3
    assert all(found[i].error and found[i].text is None for i in (1, 4))
    assert "5003 tokens" in (found[2].error or "")


def test_a_step_that_fails_is_the_error_of_its_row(engine: Engine) -> None:
    """Two batches are under way: only the row with the poison has an error."""
    assert not any(POISON in ids(prompt) for prompt in PROMPTS)
    bad = [*ids(PROMPTS[0]), POISON]

    async def both() -> list[list[RowAnswer]]:
        return await asyncio.gather(
            answered(engine, [*PROMPTS[:3], bad], GREEDY), answered(engine, PROMPTS[3:6], GREEDY)
        )

    first, second = asyncio.run(both())
    engine.stop()
    assert [*first[:3], *second] == [expected(engine, prompt) for prompt in PROMPTS[:6]]
    assert first[3] == RowAnswer("", "error", "RuntimeError: the model chokes")
    engine.check()


def test_lines_are_json(tmp_path: Path) -> None:
    """As docs/ray.md shows them."""
    Checkpoint(tmp_path).add({"name": RowAnswer("text", "stop")})
    (file,) = tmp_path.glob("*.jsonl")
    assert json.loads(file.read_text()) == ["name", "text", "stop"]
