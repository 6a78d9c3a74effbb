"""OpenAI's batch files: each line a request, answered by the server's own routes, without HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from ..engine.batches import AHEAD
from ..engine.outputs.answer_file import AnswerFile, RowKey
from ..engine.outputs.progress import Progress, shown
from ..engine.outputs.rows import is_of_device
from ..engine.requests.content import digest_of
from .app import make_app
from .http.errors import invalid
from .openai.service import Service

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Routes that a line may name."""
PREFIX = "batch_req_"
MOMENT = 0.05
"""Seconds between two looks whether the model is warm."""


class BatchLine(NamedTuple):
    """A line of the input. id: of its answer, by its content. trouble: why it is no request, if so."""

    id: str
    custom_id: str | None
    url: str
    body: bytes
    trouble: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        """The key of its row: a line that is no request may have the custom_id of another."""
        return self.id if self.trouble is not None or self.custom_id is None else self.custom_id


class LineError(Exception):
    """A line that is no request. code: a word for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def lines_of(content: Iterable[bytes], run: str) -> Iterator[BatchLine]:
    """The lines of an input file. run: what decides the answers beside the lines."""
    seen: set[str] = set()
    for number, line in enumerate(content, 1):
        if not line.strip():
            continue
        custom_id = None
        try:
            given = _object(line)
            custom_id = _custom_id(given)
            if custom_id in seen:
                raise LineError("duplicate_custom_id", f"custom_id {custom_id!r} is given before; rename it")
            seen.add(custom_id)
            yield _request(given, custom_id, run)
        except LineError as error:
            trouble = {"code": error.code, "message": f"line {number}: {error}"}
            yield BatchLine(id_of(run, [number, line]), custom_id, "", b"", trouble)


def id_of(run: str, content: Any) -> str:
    """The id of an answer: the run, and a digest of what it answers."""
    return f"{PREFIX}{run}_{digest_of(content)}"


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError("invalid_json", f"it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise LineError("invalid_json", f"it is a {type(found).__name__}, expected an object")
    return found


def _custom_id(given: Mapping[str, Any]) -> str:
    found = given.get("custom_id")
    if not isinstance(found, str) or not found:
        raise LineError("missing_custom_id", f"custom_id is {found!r:.80}, expected a text of its own")
    return found


def _request(given: Mapping[str, Any], custom_id: str, run: str) -> BatchLine:
    method, url, body = given.get("method"), given.get("url"), given.get("body")
    if method != "POST":
        raise LineError("invalid_method", f"method is {method!r:.80}, expected 'POST'")
    if url not in PATHS:
        raise LineError("invalid_url", f"url is {url!r:.80}, expected one of {', '.join(PATHS)}")
    if not isinstance(body, dict):
        raise LineError("invalid_body", f"body is a {type(body).__name__}, expected an object")
    return BatchLine(id_of(run, [custom_id, url, body]), custom_id, url, json.dumps(body).encode())


def reader(run: str) -> Callable[[Mapping[str, Any]], RowKey]:
    """Reads the key of a row; ValueError if another run has made it. Only rows with status 200 stay."""

    def read(row: Mapping[str, Any]) -> RowKey:
        number, custom_id, answer = str(row["id"]), row["custom_id"], row["response"]
        if not number.startswith(PREFIX):
            raise TypeError(f"its id is {number!r:.80}")
        if number.removeprefix(PREFIX).partition("_")[0] != run:
            raise ValueError(
                "it has answers of another model, or with other templates or adapters, than those given now"
            )
        complete = answer is not None and answer["status_code"] == 200
        return RowKey(custom_id if row["error"] is None else number, number if complete else None)

    return read


class BatchRun:
    """Answers the lines of a file by a service, some at once, and writes each down when it is there."""

    def __init__(self, service: Service, file: AnswerFile, run: str) -> None:
        """run: what decides the answers beside the lines, as `reader` was given it."""
        self.done = self.resumed = self.failed = 0
        self._service = service
        self._file = file
        self._run = run
        self._app = make_app(service)
        self._most = AHEAD * service.engine.facts.sequences
        self._show: Callable[[int], object] = lambda done: None

    def answer(self, path: str | os.PathLike[str], progress: Progress[int] = None) -> None:
        """Answer all lines and close the engine. If this is broken off, what has ended is in the file."""
        with open(path, "rb") as opened:
            total = sum(1 for line in opened if line.strip())
            opened.seek(0)
            finished = False
            try:
                with shown(progress, total) as self._show:
                    asyncio.run(self._answer_all(lines_of(opened, self._run)))
                finished = True
            finally:
                self._file.close(finished)

    @property
    def summary(self) -> str:
        """The counts in words."""
        return f"{self.done} done, {self.resumed} of them before, {self.failed} failed"

    async def _answer_all(self, lines: Iterable[BatchLine]) -> None:
        async with self._app.router.lifespan_context(self._app):
            await self._warm()
            under_way: set[asyncio.Task[None]] = set()
            try:
                for line in lines:
                    if self._file.has(line.key, line.id):
                        self.resumed += 1
                        self._count()
                        continue
                    under_way.add(asyncio.create_task(self._answer_line(line)))
                    while len(under_way) >= self._most:
                        under_way = await _fewer(under_way)
                while under_way:
                    under_way = await _fewer(under_way)
            finally:
                for task in under_way:
                    task.cancel()
                await asyncio.gather(*under_way, return_exceptions=True)

    async def _warm(self) -> None:
        while self._service.admission.state == "starting":
            await asyncio.sleep(MOMENT)
        if self._service.admission.state == "failed":
            raise RuntimeError("the model could not give a first answer; the log has the reason")

    async def _answer_line(self, line: BatchLine) -> None:
        row: dict[str, Any] = {"id": line.id, "custom_id": line.custom_id, "response": None, "error": None}
        if line.trouble is not None:
            row["error"] = line.trouble
        else:
            row["response"] = await self._response(line)
        complete = row["response"] is not None and row["response"]["status_code"] == 200
        self._file.add(RowKey(line.key, line.id if complete else None), row)
        self.failed += not complete
        self._count()

    def _count(self) -> None:
        self.done += 1
        self._show(self.done)

    async def _response(self, line: BatchLine) -> dict[str, Any]:
        """The response of the server's route; RuntimeError if it can answer no other line either."""
        number = uuid.uuid4().hex
        if json.loads(line.body).get("stream"):
            error = invalid("stream=true: a batch has whole answers; leave it out", "stream")
            return {"status_code": error.status, "request_id": number, "body": error.body}
        status, content = await _called(self._app, line.url, line.body, number)
        body = json.loads(content)
        told = body["error"]["message"] if status >= 500 else ""
        if status == 503 or is_of_device(told):
            raise RuntimeError(
                f"{told}; the answers so far are in the file, and --resume continues from there"
            )
        return {"status_code": status, "request_id": number, "body": body}


async def _fewer(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """The tasks that are left once at least one has ended; the error of one is raised."""
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return left


async def _called(app: ASGIApp, path: str, body: bytes, number: str) -> tuple[int, bytes]:
    """The status and the body with which a route answers a client that stays."""
    request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    answer: list[Message] = []

    async def receive() -> Message:
        if not request:
            await asyncio.Event().wait()
        return request.pop()

    async def send(message: Message) -> None:
        answer.append(message)

    headers = [(b"content-type", b"application/json"), (b"x-request-id", number.encode())]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
        "client": None, "server": None,
    }  # fmt: skip
    await app(scope, receive, send)
    return answer[0]["status"], b"".join(each.get("body", b"") for each in answer[1:])
