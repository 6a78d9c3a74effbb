"""Batches: the items of a data set through the engine, some ahead of those that are computed."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

from ..model.caller import caller_level
from ..model.fingerprint import fingerprint
from .driver import Driver
from .handle import Handle, cancel_all
from .outputs.answer_file import AnswerFile, RowKey
from .outputs.output import Output
from .outputs.progress import Progress, shown
from .outputs.rows import described, error_of, failed_output, is_of_device, row_of
from .requests.content import digest_of, is_plain
from .requests.data import items_of, keywords_of, size_of
from .requests.fields import HONOURED
from .worker.adapters import ACTIVE, EngineAdapters
from .worker.chosen_adapters import virtual_of

MOMENT = 0.05
"""Seconds for which items are read, or steps are taken, before the other is due."""
AHEAD = 2
"""Requests under way at most, as a multiple of the sequences that run at once."""
MOST_SHOWN = 200
"""Characters of an option's value in a row; of a longer one its digest is there."""
WITHOUT_EFFECT = ("priority", "tenant", "salt")
"""Options that change no answer."""
ANY_PROMPT = [0]
"""Token ids of a prompt by which the options of all items are tried."""


class Answer(NamedTuple):
    """The output for the item of a data set at `index`."""

    index: int  # type: ignore[assignment]  # a tuple's own method is of no use here
    output: Output


class Item(NamedTuple):
    """An item of a data set. own: its prompt and its options, as keywords of `submit()`. digest: of these."""

    place: int
    own: dict[str, Any]
    digest: str | None


class AnsweredItem(NamedTuple):
    """An item and its output."""

    item: Item
    output: Output

    @property
    def row(self) -> dict[str, Any]:
        """Both as plain values: the index, the prompt if JSON has it, and the answer."""
        prompt = self.item.own.get("prompt")
        told = {"prompt": prompt} if prompt is not None and is_plain(prompt) else {}
        return {"index": self.item.place, **told, **row_of(self.output)}


class BatchSpec(NamedTuple):
    """The requests of a batch: where they go, and what all of them have.

    submit: the engine's. processor: the engine's, or its tokenizer. most: requests under way. options:
    keywords of all items.
    """

    submit: Callable[..., Handle]
    driver: Driver
    adapters: EngineAdapters
    processor: Any
    most: int
    options: Mapping[str, Any]

    @property
    def made_by(self) -> dict[str, Any]:
        """Facts that decide the answers beside the items, for the rows of a file."""
        model = self.driver.model
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        options = {name: _told(value) for name, value in self.options.items() if name not in WITHOUT_EFFECT}
        adapters = self.adapter_names(self.options.get("adapter", ACTIVE))
        options.pop("adapter", None)
        if adapters:
            options["adapter"] = adapters
        as_read: dict[str, Any] = json.loads(json.dumps({"options": options}))
        return {"model": f"{name}@{model_digest(model, self.processor)}", **as_read}

    def adapter_names(self, wanted: Any) -> list[str]:
        """The adapters that an option chooses, with a digest of those that the model does not have in it."""
        virtual = virtual_of(self.adapters, wanted)
        if virtual is not None:
            return [f"{virtual}@{self.adapters.contents.virtual.digest(virtual)}"]
        own = self.adapters.contents.own
        names = self.adapters.resolve(wanted)
        return [f"{name}@{own[name].digest}" if name in own else name for name in names]

    def digest(self, own: Mapping[str, Any]) -> str:
        """The content of an item."""
        if "adapter" not in own:
            return digest_of(own)
        try:
            return digest_of({**own, "adapter": self.adapter_names(own["adapter"])})
        except (TypeError, ValueError):  # submit() refuses it
            return digest_of(own)


class Answers(Iterable[Answer]):
    """The answers to the items of a data set, as (index, output) in the order in which they end.

    Items are read and submitted as answers are taken, at most `BatchSpec.most` ahead. A loop that is left
    ends what is under way, and so does `close()`. With a file all is done before the caller has this, and
    there is nothing to iterate over.

    total: the number of items, None if it is not known. done: how many have ended. resumed: how many of these
    the file had already. failed: how many have no complete answer.
    """

    def __init__(
        self,
        spec: BatchSpec,
        data: Any,
        key: str | None = None,
        progress: Progress[int | None] = None,
        out: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.total = size_of(data)
        self.done = self.resumed = self.failed = 0
        self._spec = spec
        self._items = enumerate(items_of(data))
        self._key = key
        self._progress = progress
        self._out = out
        self._pending: dict[int, tuple[Item, Handle]] = {}
        """Items under way, by their indices."""
        self._ended: deque[AnsweredItem] = deque()
        """Items that have ended, are counted and written, and are not taken."""
        self._all_read = False
        self._accepted = False
        """True once the engine has taken the options of all items."""
        self._file: AnswerFile | None = None
        if out is not None:
            self._made_by = spec.made_by
            self._file = AnswerFile(out, _reader(self._made_by), overwrite)
        self._answers = self._run()
        if out is not None:
            self._finish()

    def __repr__(self) -> str:
        where = "" if self._out is None else f"{os.fspath(self._out)}: "
        return f"Answers({where}{self.summary})"

    @property
    def summary(self) -> str:
        """The counts in words."""
        of = "" if self.total is None else f" of {self.total}"
        return f"{self.done}{of} done, {self.resumed} of them before, {self.failed} failed"

    def __iter__(self) -> Iterator[Answer]:
        with closing(self):
            for item, output in self._answers:
                yield Answer(item.place, output)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The answers as rows, as a file has them but for what decides them."""
        with closing(self):
            for answered in self._answers:
                yield answered.row

    def close(self) -> None:
        """End what is under way."""
        self._answers.close()

    def _finish(self) -> None:
        for _ in self._answers:
            pass
        if self.failed:
            warnings.warn(
                f"{self.failed} of {self.done} items have no complete answer: their rows in {self._out} have "
                "an error, and the next call with this file tries them again",
                stacklevel=caller_level(),
            )

    def _run(self) -> Generator[AnsweredItem, None, None]:
        finished = False
        try:
            with shown(self._progress, self.total) as show:
                while not self._all_read or self._pending:
                    before = self.done
                    self._read()
                    self._wait()
                    self._collect()
                    if self.done != before:
                        show(self.done)
                    while self._ended:
                        yield self._ended.popleft()
            finished = True
        finally:
            self._leave(finished)

    # ---- items in

    def _read(self) -> None:
        """Read and submit items until enough are under way, for a moment at most."""
        end = time.monotonic() + MOMENT
        while len(self._pending) < self._spec.most and time.monotonic() < end:
            found = next(self._items, None)
            if found is None:
                self._all_read = True
                return
            self._take_in(*found)

    def _take_in(self, index: int, given: Any) -> None:
        try:
            own = keywords_of(given, self._key)
        except TypeError as error:
            if index == 0:  # it is so with all items
                raise
            self._note(AnsweredItem(self._item(index, {"prompt": given}), failed_output(error)))
            return
        item = self._item(index, own)
        if self._file is not None and self._file.has(index, str(item.digest)):
            self.done += 1
            self.resumed += 1
            return
        try:
            handle = self._spec.submit(**{**self._spec.options, **own})
        except Exception as error:
            self._require_options(error)
            self._note(AnsweredItem(item, failed_output(error)))
            return
        self._pending[index] = item, handle
        self._accepted = True

    def _item(self, index: int, own: dict[str, Any]) -> Item:
        return Item(index, own, None if self._file is None else self._spec.digest(own))

    def _require_options(self, error: Exception) -> None:
        """Raise an error that any item would meet: the engine is closed, or an option of all is wrong."""
        self._spec.driver.books.require_open()
        if self._accepted:
            return
        options = self._spec.options
        seed = options.get("seed")
        try:
            self._spec.submit(ANY_PROMPT, **{**options, "seed": 0 if seed is None else seed}).cancel()
        except Exception as other:
            if described(other) == described(error):
                raise
        else:
            self._accepted = True

    # ---- answers out

    def _wait(self) -> None:
        """Wait for a moment, or until the first item under way has ended. Where a thread drives the engine
        more items are read meanwhile.
        """
        if not self._pending:
            return
        driver = self._spec.driver
        reads = not self._all_read and len(self._pending) < self._spec.most
        at_once = bool(self._ended) or (reads and driver.driven)
        _, handle = next(iter(self._pending.values()))
        driver.drive_for(handle._job, timeout=0.0 if at_once else MOMENT)

    def _collect(self) -> None:
        """Note the items that have ended."""
        for each in self._done_items():
            self._note(each)
            del self._pending[each.item.place]

    def _done_items(self) -> list[AnsweredItem]:
        """The items under way that have ended, the first one first."""
        handles = list(self._pending.values())
        found = [AnsweredItem(item, handle.output) for item, handle in handles if handle.output is not None]
        return sorted(found, key=lambda each: each.output.timing.finished or 0.0)

    def _note(self, answered: AnsweredItem) -> None:
        """Write an answer down and count it."""
        error = error_of(answered.output)
        if error is not None and is_of_device(error):
            where = "" if self._out is None else f"; answers so far are in {self._out}, start again to go on"
            raise RuntimeError(f"the device has failed ({error}){where}") from answered.output.error
        self._write(answered)
        self.done += 1
        self.failed += error is not None
        self._ended.append(answered)

    def _write(self, answered: AnsweredItem) -> None:
        if self._file is not None:
            index, _, digest = answered.item
            complete = error_of(answered.output) is None
            row = {**answered.row, "digest": digest, **self._made_by}
            self._file.add(RowKey(index, digest if complete else None), row)

    def _leave(self, finished: bool) -> None:
        """End what is under way, and keep what has ended."""
        try:
            cancel_all([handle for _, handle in self._pending.values()])
            for each in self._done_items():
                if error_of(each.output) is None:
                    self._write(each)
        finally:
            self._pending.clear()
            if self._file is not None:
                self._file.close(finished)


def model_digest(model: Any, processor: Any) -> str:
    """A digest of a model's weights, its generation_config and its chat template."""
    settings = vars(model.generation_config)
    defaults = {name: settings[name] for name in HONOURED if settings.get(name) is not None}
    return digest_of([fingerprint(model), defaults, getattr(processor, "chat_template", None)])[:16]


def _told(value: Any) -> Any:
    """An option's value in a row: itself if it is plain and short."""
    if is_plain(value) and len(repr(value)) <= MOST_SHOWN:
        return list(value) if isinstance(value, tuple) else value
    return f"{type(value).__name__}@{digest_of(value)}"


def _reader(made_by: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], RowKey]:
    """Reads the key of a row; ValueError if its answer was made in another way."""

    def read(row: Mapping[str, Any]) -> RowKey:
        index, digest = int(row["index"]), str(row["digest"])
        by, options = row["model"], row["options"]
        if by.rpartition("@")[2] != made_by["model"].rpartition("@")[2]:
            raise ValueError(
                f"it has answers of {by}, and the model is {made_by['model']} (the digest is of its weights, "
                "its generation_config and its chat template)"
            )
        if options != made_by["options"]:
            raise ValueError(_difference(options, made_by["options"]))
        return RowKey(index, None if "error" in row else digest)

    return read


def _difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first option that differs."""
    name = next(name for name in (*then, *now) if then.get(name, ...) != now.get(name, ...))
    before, after = (f"{name}={each[name]!r}" if name in each else f"no {name}" for each in (then, now))
    return f"it has answers made with {before}, and now there is {after}"
