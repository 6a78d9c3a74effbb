"""The map of the blocks as it changes, for those who watch it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from ...trace import MapState, Step
from ..http.errors import ApiError
from ..http.keys import Tenant
from ..http.metrics import Metrics
from ..http.streams import event
from ..link.engine_client import CallError, EngineClient
from .map_view import Owners, Sight, moves

TIMES_EVERY = 1.0
"""Seconds between two events with times; they keep the connection alive, too."""
WINDOW = 10
"""Seconds over which times are averaged."""
BEHIND = 20
"""Events that wait for a slow viewer. One more drops them all, and it gets the whole map when it reads."""
END = event({"end": True})


class Viewer:
    """One stream of the map."""

    def __init__(self, sight: Sight) -> None:
        self.sight = sight
        self.waiting: deque[bytes] = deque()
        self.news = asyncio.Event()
        self.behind = True
        """True if it is to get the whole map next."""
        self.gone = False

    def begin(self, sight: Sight) -> None:
        """Send the whole map next."""
        self.sight = sight
        self.behind = True
        self.waiting.clear()
        self.news.set()

    def add(self, chunk: bytes) -> None:
        """Send an event soon."""
        if not self.behind:
            self.waiting.append(chunk)
            if len(self.waiting) > BEHIND:
                self.waiting.clear()
                self.behind = True
        self.news.set()

    def leave(self) -> None:
        """The client is gone."""
        self.gone = True
        self.news.set()


class LiveMap:
    """The engine's map and its viewers. The engine records nothing while there are none.

    What the engine reports is entered in the state, and made an event for each tenant that watches.
    """

    def __init__(self, engine: EngineClient, metrics: Metrics, most: int, name: str) -> None:
        """most: viewers at once. name: by which the model is served."""
        self.owners = Owners()
        self.seconds = 0.0
        """Time of the event loop for viewers, beside sending."""
        self.ended = False
        self._engine = engine
        self._metrics = metrics
        self._most = most
        self._name = name
        self.viewers: set[Viewer] = set()
        self._sights: dict[str, Sight] = {}
        self._steps: deque[Step] = deque()
        self._lag = False
        """True if the engine has dropped the steps behind these."""
        self._news = asyncio.Event()
        self._state: MapState | None = None
        self._last: Step | None = None
        self._header = b""
        self._task: asyncio.Task[None] | None = None
        self._past: deque[tuple[float, ...]] = deque(maxlen=WINDOW)

    # ---- viewers come and go

    def enter(self, tenant: Tenant) -> Viewer:
        """A new viewer, or 429."""
        if len(self.viewers) >= self._most:
            raise ApiError(
                429,
                f"{self._most} viewers watch the map; close one, or raise --limit-viewers",
                code="too_many_viewers",
                headers={"retry-after": "10"},
            )
        viewer = Viewer(Sight(tenant, self.owners, self._state or MapState(())))
        self.viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        elif self._last is not None:
            viewer.begin(self._sight(tenant))
        return viewer

    def close(self, viewer: Viewer) -> None:
        """A viewer's stream has ended."""
        self.viewers.discard(viewer)
        if not any(each.sight is viewer.sight for each in self.viewers):
            self._sights.pop(viewer.sight.tenant.name, None)
        if not self.viewers:
            self._news.set()

    def end(self) -> None:
        """End all streams now, and those that come."""
        self.ended = True
        self._news.set()
        for viewer in self.viewers:
            viewer.news.set()

    async def events(self, viewer: Viewer) -> AsyncIterator[bytes]:
        """The events of a viewer: the header and the whole map, then what changes."""
        yield b": map\n\n"
        while not self.ended:
            await viewer.news.wait()
            viewer.news.clear()
            if viewer.gone or self.ended:
                break
            if viewer.behind and self._last is not None:
                viewer.behind = False
                yield self._header + event(viewer.sight.whole(self._last))
            elif viewer.waiting:
                chunk = b"".join(viewer.waiting)
                viewer.waiting.clear()
                yield chunk
        yield END

    async def stop(self) -> None:
        """End with the server."""
        self.end()
        if self._task is not None:
            with suppress(Exception):
                await self._task

    # ---- what the engine reports

    def _report(self, steps: list[Step], lag: bool) -> None:
        self._steps += steps
        self._lag = self._lag or lag
        self._news.set()

    async def _run(self) -> None:
        """While there are viewers: hand on what the engine reports."""
        self._steps.clear()
        self._lag = False
        self._last = None
        self._sights.clear()
        try:
            kinds, header = await self._engine.watch(self._report)
        except (ApiError, CallError):  # the engine is closed
            self.end()
            return
        try:
            self._state = MapState(kinds)
            self._header = event({**header, "served": self._name})
            await self._hand_on()
        finally:
            self._last = None
            with suppress(ApiError, CallError):
                await self._engine.call("unwatch")
            if self.viewers and not self.ended:  # that came in the meantime
                self._task = asyncio.create_task(self._run())

    async def _hand_on(self) -> None:
        due = 0.0
        while self.viewers and not self.ended:
            with suppress(TimeoutError):
                async with asyncio.timeout(TIMES_EVERY):
                    await self._news.wait()
            self._news.clear()
            begin = time.perf_counter()
            while self._steps:
                self._take(self._steps.popleft())
            if time.monotonic() >= due:
                due = time.monotonic() + TIMES_EVERY
                self._send_times()
            self.seconds += time.perf_counter() - begin
            if not self._engine.driven:
                self.end()
            if self._lag:  # a gap: the map begins anew
                return

    def _take(self, step: Step) -> None:
        """Enter a step, and make an event of it for every tenant that watches."""
        assert self._state is not None
        some = (
            moves(self._state, step)
            if any(not each.tenant.sees_all for each in self._sights.values())
            else []
        )
        self._state.apply(step)
        first = self._last is None
        self._last = step
        chunks = {name: event(sight.step(step, some)) for name, sight in self._sights.items()}
        for viewer in self.viewers:
            if first:
                viewer.begin(self._sight(viewer.sight.tenant))
            else:
                viewer.add(chunks[viewer.sight.tenant.name])

    def _sight(self, tenant: Tenant) -> Sight:
        """The sight of a tenant, which all of its viewers share."""
        assert self._state is not None
        if tenant.name not in self._sights:
            self._sights[tenant.name] = Sight(tenant, self.owners, self._state)
        return self._sights[tenant.name]

    def _send_times(self) -> None:
        """The means of the last seconds: to the first token, and between two."""
        now = (*self._metrics.first_token.totals, *self._metrics.between_tokens.totals)
        before = self._past[0] if self._past else now
        self._past.append(now)
        first, firsts, between, betweens = (late - early for late, early in zip(now, before, strict=True))
        times: dict[str, Any] = {"first": first / firsts if firsts else None}
        times["between"] = between / betweens if betweens else None
        chunk = event({"times": times})
        for viewer in self.viewers:
            viewer.add(chunk)
