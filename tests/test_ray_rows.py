"""The bookkeeping of hf_paged.ray.map_batches, without ray: names, checkpoints, rows that fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_paged.ray.rows import Checkpoint, RowAnswer, row_name


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


def test_lines_are_json(tmp_path: Path) -> None:
    """As docs/ray.md shows them."""
    Checkpoint(tmp_path).add({"name": RowAnswer("text", "stop")})
    (file,) = tmp_path.glob("*.jsonl")
    assert json.loads(file.read_text()) == ["name", "text", "stop"]
