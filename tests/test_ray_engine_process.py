"""The engine's process of a replica on two ranks, without Ray: the first rank starts the other (C41, C42)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from commands import ForkedPopen
from processes import LIMIT, ended, has_ended
from safetensors.torch import save_file
from serving import until

from hf_paged import demo
from hf_paged.cli import serve as cli
from hf_paged.ray.engine_process import start
from hf_paged.serve.link.engine_client import CallError, EngineClient

TWO = {"model": "demo", "tensor-parallel-size": 2, "num-blocks": 300, "block-size": 8, "log-level": "error"}
IDS = tuple(range(20, 30))
NEW = 12


Started = tuple[socket.socket, subprocess.Popen[bytes]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """In interpreters of their own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield from _running()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """In forks of this one."""
    monkeypatch.setattr(subprocess, "Popen", ForkedPopen)
    yield from _running()


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """The second one loads for as long as it lives, and the first one waits for it."""
    load = cli.engine_of

    def loads(*given: Any) -> Any:
        return load(*given) if os.environ["RANK"] == "0" else time.sleep(LIMIT)

    monkeypatch.setattr(cli, "engine_of", loads)
    monkeypatch.setattr(subprocess, "Popen", ForkedPopen)
    yield from _running()


def _running() -> Iterator[Started]:
    connection, process = start(TWO)
    try:
        yield connection, process
    finally:
        connection.close()
        for each in [*psutil.Process(process.pid).children(), process] if process.poll() is None else []:
            each.kill()
        process.wait()


def with_client(connection: socket.socket, act: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> None:
    client = EngineClient(connection)

    async def run() -> None:
        await client.open()
        await asyncio.wait_for(act(client), 60)
        client.close()

    asyncio.run(run())


async def answer(client: EngineClient) -> list[int]:
    ended = asyncio.Event()
    request = await client.submit(IDS, {"max_new_tokens": NEW, "do_sample": False}, ended.set, False)
    while request.end is None and client.driven:
        await ended.wait()
        ended.clear()
    return [token for increment in request.read() for token in increment.token_ids]


def alone(model: Any) -> list[int]:
    found = model.generate(torch.tensor([IDS]), max_new_tokens=NEW, do_sample=False)
    tokens: list[int] = found[0, len(IDS) :].tolist()
    return tokens


def test_the_tokens_are_those_of_one_process(started: Started, tmp_path: Path) -> None:
    """Also with new weights, which both ranks read; none is left behind the connection."""
    connection, process = started
    model = demo.model()
    others = demo.model()
    with torch.no_grad():
        for parameter in others.parameters():
            parameter.mul_(0.9)
    save_file({name: each.detach() for name, each in others.named_parameters()}, tmp_path / "others")
    save_file({"no.such.weight": torch.ones(3)}, tmp_path / "wrong")
    second: list[psutil.Process] = []

    async def act(client: EngineClient) -> None:
        second.extend(psutil.Process(process.pid).children())
        assert len(second) == 1
        assert await answer(client) == alone(model)
        with pytest.raises(CallError, match=r"no\.such\.weight"):
            await client.call("load_weights", [str(tmp_path / "wrong")])
        assert await client.call("load_weights", [str(tmp_path / "others")]) == len(list(model.parameters()))
        assert await answer(client) == alone(others) != alone(model)

    with_client(connection, act)
    assert process.wait(LIMIT) == 0
    assert ended(second)


def test_a_rank_that_is_killed_stops_the_engine(started: Started) -> None:
    """The replica's health check sees that; nothing waits for the rank."""
    connection, process = started

    async def act(client: EngineClient) -> None:
        psutil.Process(process.pid).children()[0].kill()
        with contextlib.suppress(CallError):  # it may take the request and then fail
            await answer(client)
        while client.driven:
            await asyncio.sleep(0.05)

    with_client(connection, act)
    assert process.wait(LIMIT) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_it_loads(loading: Started, rank: int) -> None:
    """The others end as well, within seconds."""
    connection, process = loading
    command = psutil.Process(process.pid)
    until(lambda: len(command.children()) == 1)
    both = [command, *command.children()]
    both[rank].kill()
    until(lambda: process.poll() is not None)
    assert ended(both)
    with pytest.raises((EOFError, ConnectionError)):
        EngineClient(connection)


def test_a_process_that_loads_ends_with_its_connection(loading: Started) -> None:
    """Also while it waits for another rank."""
    connection, process = loading
    command = psutil.Process(process.pid)
    until(lambda: len(command.children()) == 1)
    (other,) = command.children()
    other.suspend()
    connection.close()
    assert process.wait(LIMIT) == 1
    other.resume()
    until(lambda: has_ended(other))


def test_ranks_end_with_the_first(forked: Started) -> None:
    connection, process = forked
    EngineClient(connection)
    (other,) = psutil.Process(process.pid).children()
    process.kill()
    until(lambda: has_ended(other))
