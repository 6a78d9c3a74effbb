"""Rows of a data set and their answers: each once, with its own error, and kept in a folder."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..engine import Engine, Handle, Output
from ..engine.outputs.rows import described
from ..engine.requests.content import digest_of

JOB = "job.json"
PART = ".jsonl"


class RowAnswer(NamedTuple):
    """The answer to a row. error: why it has none, or no complete one."""

    text: str | None
    finish_reason: str
    error: str | None = None


def row_name(key: Any, prompt: Any) -> str:
    """A row's name in a checkpoint. Rows with one key and two prompts have two names."""
    return digest_of([key, prompt])


class Checkpoint:
    """Complete answers in a folder, by the names of rows.

    Each batch is a file that appears whole, under a name of its own, so writers need no lock, and of a worker
    that is killed there is all or nothing of a batch. Rows with an error are not kept: they are tried again.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._places: dict[str, tuple[Path, int]] = {}
        """The file of each row's answer, and where its line begins."""
        self._read: set[str] = set()

    def begin(self, job: Mapping[str, Any]) -> None:
        """Make the folder for a job, or return to it. ValueError if it is another job's."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / JOB
        wanted = json.loads(json.dumps(job, default=repr, sort_keys=True))
        if not file.exists():
            _write(file, json.dumps(wanted, indent=1))
            return
        found = json.loads(file.read_text(encoding="utf-8"))
        other = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        if other:
            raise ValueError(
                f"{self._folder} has answers of another job: {other[0]} was {found.get(other[0])!r} and is "
                f"{wanted.get(other[0])!r}; give another folder"
            )

    def find(self, names: Iterable[str]) -> dict[str, RowAnswer]:
        """The answers of those rows that have one, by any worker."""
        self._look()
        return {name: self._answer(name) for name in names if name in self._places}

    def add(self, answers: Mapping[str, RowAnswer]) -> None:
        """Keep the answers of a batch."""
        complete = {name: each for name, each in answers.items() if each.error is None}
        lines = [json.dumps([name, each.text, each.finish_reason]) for name, each in complete.items()]
        if lines:
            _write(self._folder / f"{uuid.uuid4().hex}{PART}", "\n".join([*lines, ""]))

    def _look(self) -> None:
        """Read the names of rows in files that are new."""
        for entry in sorted(os.scandir(self._folder), key=lambda entry: entry.name):
            if not entry.name.endswith(PART) or entry.name in self._read:
                continue
            self._read.add(entry.name)
            place = 0
            for line in Path(entry.path).read_bytes().splitlines(keepends=True):
                self._places.setdefault(json.loads(line)[0], (Path(entry.path), place))
                place += len(line)

    def _answer(self, name: str) -> RowAnswer:
        file, place = self._places[name]
        with file.open("rb") as opened:
            opened.seek(place)
            _, text, reason = json.loads(opened.readline())
        return RowAnswer(text, reason)


def _write(file: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    draft = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, file)


async def answered(engine: Engine, prompts: Sequence[Any], keywords: Mapping[str, Any]) -> list[RowAnswer]:
    """The answers to prompts, in their order, beside whatever else the engine computes. What is wrong with
    one is its own error; if a step fails, the engine tries each of its requests alone.
    """
    handles = [_submitted(engine, prompt, keywords) for prompt in prompts]
    return [each if isinstance(each, RowAnswer) else _answer(await each) for each in handles]


def _submitted(engine: Engine, prompt: Any, keywords: Mapping[str, Any]) -> Handle | RowAnswer:
    try:
        return engine.submit(prompt, **keywords)
    except Exception as error:  # whatever is wrong with the prompt
        return RowAnswer(None, "refused", described(error))


def _answer(output: Output) -> RowAnswer:
    error = None if output.error is None else described(output.error)
    return RowAnswer(output.text, output.finish_reason, error)
