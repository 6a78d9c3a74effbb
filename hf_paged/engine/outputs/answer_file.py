"""A file of answers, one JSON row a line, that outlives the process which writes it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

try:
    import fcntl
except ImportError:  # no Unix
    fcntl = None  # type: ignore[assignment]

NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
"""Errors of file systems that lock no files."""


class RowKey(NamedTuple):
    """Which input a row answers. digest: of its content; None if the row is no complete answer."""

    key: Hashable
    digest: str | None


class AnswerFile:
    """The rows of a file by their keys. A row is with the operating system when `add` returns.

    A file that is there is continued. Its last line may be torn: a process that is killed breaks off in it.
    Of several rows of a key the last one counts; `close` removes the others.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        read: Callable[[Mapping[str, Any]], RowKey],
        overwrite: bool = False,
    ) -> None:
        """read: the key of a row; ValueError, KeyError or TypeError if it is none of these answers.
        overwrite: begin anew, with the first row.
        """
        self.path = Path(os.path.realpath(path))
        self._name = os.fspath(path)
        self._read = read
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"{self._name} is not a regular file; give the path of one")
        if not self.path.parent.is_dir():
            raise ValueError(f"{self._name}: there is no folder {self.path.parent}; make it")
        self._known: dict[Hashable, str | None] = {}
        self._lines = 0
        self._stale = overwrite
        """True while the file has rows that are to be overwritten."""
        self._file = self.path.open("ab")
        try:
            _lock(self._file, self._name)
            if not overwrite:
                self._take_in()
        except BaseException:
            self._file.close()
            raise

    def has(self, key: Hashable, digest: str) -> bool:
        """True if the file has a complete answer to this content."""
        return self._known.get(key) == digest

    def add(self, key: RowKey, row: Mapping[str, Any]) -> None:
        """Write a row."""
        self._begin()
        self._lines += 1
        self._file.write(line_of(row))
        self._file.flush()
        self._known[key.key] = key.digest

    def close(self, finished: bool = True) -> None:
        """Close the file; of each key one row is left. finished: whether all rows are there."""
        if self._file.closed:
            return
        try:
            if finished:
                self._begin()
            self._file.flush()
            if self._lines > len(self._known):
                self._remove_earlier_rows()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _begin(self) -> None:
        if self._stale:
            self._file.truncate(0)
            self._stale = False

    # ---- what is there

    def _take_in(self) -> None:
        """Read the rows that are there, and cut a torn one off."""
        size = 0
        with self.path.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if not line.endswith(b"\n"):
                    if line.strip(b"\0") and not line.startswith(b"{"):  # a file system may leave zeros
                        raise self._foreign(number, "it is not a JSON object")
                    break
                key = self._key(number, line)
                self._known[key.key] = key.digest
                self._lines += 1
                size += len(line)
        if self.path.stat().st_size > size:
            self._file.truncate(size)

    def _key(self, number: int, line: bytes) -> RowKey:
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError("it is not a JSON object")
            return self._read(row)
        except (TypeError, KeyError) as error:
            raise self._foreign(
                number, f"it has no {error}" if isinstance(error, KeyError) else error
            ) from error
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise self._foreign(number, "it is not JSON") from error
        except ValueError as error:
            raise ValueError(f"{self._name}: {error}; give another path, or overwrite it") from error

    def _foreign(self, number: int, why: object) -> ValueError:
        return ValueError(
            f"line {number} of {self._name} is not a row of answers ({why}); give another path, "
            "or overwrite it"
        )

    # ---- rows that others have replaced

    def _remove_earlier_rows(self) -> None:
        """Leave the last row of each key: in a new file, which takes the place of this one as a whole."""
        last = {self._key(i, line).key: i for i, line in enumerate(self._all_lines())}
        kept = set(last.values())
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with draft.open("wb") as opened:
                _lock(opened, self._name)
                for i, line in enumerate(self._all_lines()):
                    if i in kept:
                        opened.write(line)
                opened.flush()
                os.fsync(opened.fileno())
                shutil.copymode(self.path, draft)
                os.replace(draft, self.path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def _all_lines(self) -> Iterator[bytes]:
        with self.path.open("rb") as opened:
            yield from opened


def line_of(row: Mapping[str, Any]) -> bytes:
    """A row as a line of UTF-8. Half a surrogate pair, which UTF-8 does not have, is escaped."""
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(row).encode() + b"\n"


def _lock(file: Any, name: str) -> None:
    """Let no other process write the file meanwhile, where the file system has locks."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{name} is being written already; wait for it, or give another path") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
