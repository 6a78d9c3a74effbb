"""Adapters as models: what clients call them, and those that come and go while the server runs."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ..http.errors import ApiError, invalid
from ..link.engine_client import CallError, EngineClient


@dataclass(eq=False)
class ServedAdapter:
    """An adapter that requests can name.

    name: for clients. own: what the engine calls it; a name that is given again means another adapter there.
    vocabulary: how many tokens it knows, if they are not the model's.
    """

    name: str
    own: str
    in_model: bool
    vocabulary: int | None = None
    created: float = field(default_factory=time.time)
    uses: int = 0
    """HTTP requests that have it."""
    left: bool = False
    """True if it goes with its last request."""

    def told(self, message: str) -> str:
        """A message of the engine's with the name that clients know."""
        return re.sub(rf"{re.escape(self.own)}(?!\d)", lambda _: self.name, message)


class Adapters:
    """The adapters of a server by the names that clients know. The event loop alone uses it.

    An adapter that is unloaded or replaced serves the requests that have it to their end.
    """

    def __init__(self, engine: EngineClient, models: tuple[str, ...], most: int) -> None:
        """models: names of the model itself. most: how many there may be."""
        self._engine = engine
        self._models = models
        self._most = most
        self._count = 0
        self._loading: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._known: dict[str, ServedAdapter] = {}
        for name, info in engine.facts.adapters.items():
            if name in models:
                raise ValueError(
                    f"{name!r} is the name of the model and of an adapter; give another --served-model-name"
                )
            self._known[name] = ServedAdapter(name, name, info.owner == "model", info.vocabulary)

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(self._known.values())

    def get(self, name: str) -> ServedAdapter | None:
        """The adapter of this name."""
        return self._known.get(name)

    def vocabulary(self, name: str) -> int:
        """How many tokens the model of a name knows."""
        found = self._known.get(name)
        return (found and found.vocabulary) or self._engine.facts.vocabulary

    @property
    def most_tokens(self) -> int:
        """How many tokens any of them, or the model, knows."""
        return max(self._engine.facts.vocabulary, *(each.vocabulary or 0 for each in self), 0)

    @contextmanager
    def used(self, name: str) -> Iterator[ServedAdapter | None]:
        """The adapter that a model's name means, which stays there until the block ends."""
        found = self._known.get(name)
        if found is None:
            yield None
            return
        found.uses += 1
        try:
            yield found
        finally:
            found.uses -= 1
            self._forget_if_idle(found)

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Load an adapter from a folder of this machine. One that cannot be loaded changes nothing."""
        old = self._known.get(name)
        if name in self._models or name in self._loading or (old is not None and old.in_model):
            raise invalid(f"the name {name!r} is taken; choose another one", "lora_name")
        if old is not None and not in_place:
            raise invalid(
                f"the adapter {name!r} is loaded already; unload it, or give load_inplace=true", "lora_name"
            )
        if old is None and len(self._known) + len(self._loading) >= self._most:
            raise invalid(f"there are {self._most} adapters; unload one, or raise --limit-adapters")
        self._count += 1
        own = f"{name}#{self._count}"
        self._loading.add(name)
        try:
            info = await self._load(own, path)
        finally:
            self._loading.discard(name)
        old = self._known.get(name)
        self._known[name] = ServedAdapter(name, own, False, info.vocabulary)
        if old is not None:
            self._leave(old)

    async def _load(self, own: str, path: str) -> Any:
        try:
            await self._engine.call("add_adapter", own, path)
            return (await self._engine.call("adapters"))[own]
        except CallError as error:  # whatever a reader of files raises
            if error.kind == "FileNotFoundError":
                raise ApiError(404, str(error), "lora_path") from error
            raise invalid(
                f"the adapter cannot be loaded: {error.kind}: {error!s:.500}", "lora_path"
            ) from error

    def unload(self, name: str) -> None:
        """Let no further request name an adapter. Those that have it go on."""
        found = self._known.get(name)
        if found is None:
            raise ApiError(404, f"there is no adapter {name[:80]!r}; GET /v1/models lists them", "lora_name")
        if found.in_model:
            raise invalid(f"{name!r} is a part of the model that is served and stays", "lora_name")
        del self._known[name]
        self._leave(found)

    def _leave(self, adapter: ServedAdapter) -> None:
        adapter.left = True
        self._forget_if_idle(adapter)

    def _forget_if_idle(self, adapter: ServedAdapter) -> None:
        if adapter.left and not adapter.uses:
            task = asyncio.get_running_loop().create_task(self._forget(adapter.own))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forget(self, own: str) -> None:
        with suppress(ApiError, CallError):  # the engine is closed
            await self._engine.call("remove_adapter", own, "idle")

    def shown(self, infos: Mapping[str, Any]) -> dict[str, Any]:
        """`engine.adapters()` by the names that clients know, without those that leave."""
        return {each.name: infos[each.own] for each in self if each.own in infos}
