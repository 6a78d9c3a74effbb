"""Files of answers: what is there, torn lines, rows that others replace, and files that are none of these."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hf_paged.engine.outputs.answer_file import AnswerFile, RowKey


def read(row: Mapping[str, Any]) -> RowKey:
    return RowKey(row["key"], None if row.get("failed") else str(row["digest"]))


def opened(path: Path, overwrite: bool = False) -> AnswerFile:
    return AnswerFile(path, read, overwrite)


def add(file: AnswerFile, key: int, digest: str, **more: Any) -> None:
    row = {"key": key, "digest": digest, **more}
    file.add(read(row), row)


def lines(path: Path) -> list[tuple[int, str]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["key"], row["digest"]) for row in found]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def test_a_row_is_in_the_file_at_once(path: Path) -> None:
    file = opened(path)
    add(file, 1, "a")
    assert lines(path) == [(1, "a")]
    assert file.has(1, "a")
    assert not file.has(1, "b")
    assert not file.has(2, "a")
    file.close()
    file.close()


@pytest.mark.parametrize("tail", [b'{"key": 3, "dig', b"\0\0\0", b'{"key": 3, "digest": "c"}'])
def test_a_torn_last_line_is_cut_off(path: Path, tail: bytes) -> None:
    file = opened(path)
    add(file, 1, "a")
    add(file, 2, "b")
    file.close()
    path.write_bytes(path.read_bytes() + tail)
    again = opened(path)
    assert again.has(2, "b")
    assert not again.has(3, "c")
    add(again, 3, "d")
    again.close()
    assert lines(path) == [(1, "a"), (2, "b"), (3, "d")]


def test_the_last_row_of_a_key_is_left(path: Path) -> None:
    """The file's mode and a link to it stay; a row that failed is replaced, and one that fails replaces."""
    link = path.with_name("link")
    link.symlink_to(path)
    file = opened(link)
    add(file, 1, "a")
    add(file, 2, "b", failed=True)
    os.chmod(path, 0o640)
    file.close(finished=False)
    again = opened(link)
    assert not again.has(2, "b")
    add(again, 2, "b")
    add(again, 1, "c", failed=True)
    assert len(lines(path)) == 4
    again.close(finished=False)
    assert lines(path) == [(2, "b"), (1, "c")]
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(each.name for each in path.parent.iterdir()) == ["answers.jsonl", "link"]


def test_a_file_is_overwritten_by_its_first_row(path: Path) -> None:
    """Not before, so that what breaks off at its beginning costs nothing."""
    file = opened(path)
    add(file, 1, "a")
    file.close()
    broken = opened(path, overwrite=True)
    assert not broken.has(1, "a")
    broken.close(finished=False)
    assert lines(path) == [(1, "a")]
    file = opened(path, overwrite=True)
    add(file, 2, "b")
    file.close()
    assert lines(path) == [(2, "b")]
    opened(path, overwrite=True).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"my notes", "line 1 of .* is not a row of answers .it is not a JSON object."),
        (b"my notes\n", "line 1 of .* .it is not JSON.; give another path, or overwrite it"),
        (b'{"key": 1, "digest": "a"}\n{"key": 2}\n', "line 2 of .* .it has no 'digest'."),
        (b"[]\n", "line 1 of .* .it is not a JSON object."),
        (b'\xff\n{"key": 1, "digest": "a"}\n', "line 1 of .* .it is not JSON."),
    ],
)
def test_other_files_are_left_alone(path: Path, content: bytes, said: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        opened(path)
    assert path.read_bytes() == content


def test_a_path_that_cannot_be_a_file_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="is not a regular file"):
        opened(path.parent)
    with pytest.raises(ValueError, match="there is no folder"):
        opened(path / "a")


def test_one_writes_at_a_time(path: Path) -> None:
    """Also behind a file that was written anew."""
    file = opened(path)
    add(file, 1, "a")
    add(file, 1, "b")
    with pytest.raises(ValueError, match="is being written already"):
        opened(path)
    file.close()
    again = opened(path)
    assert again.has(1, "b")
    again.close()


def test_any_text_can_be_written(path: Path) -> None:
    """Line separators of Unicode end no line, and half a surrogate pair is escaped."""
    file = opened(path)
    for i, text in enumerate(("\u2028 \x85 \n", "狐", "\ud83e")):
        add(file, i, text)
    file.close()
    again = opened(path)
    assert all(again.has(i, text) for i, text in enumerate(("\u2028 \x85 \n", "狐", "\ud83e")))
    again.close()
    assert "狐" in path.read_text(encoding="utf-8")
