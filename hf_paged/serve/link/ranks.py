"""One server on several ranks: the command starts a process for each, and ends with them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

STARTED = "HF_PAGED_STARTED"
"""Set in the environment of ranks that `start` has started: their standard input ends with it."""
HERE = "127.0.0.1"
"""The address of the ranks that this module starts: what they send each other is pickled, so no other machine
may reach it.
"""
MEETING_PORTS = 20_000, 30_000
"""Below those that systems give to a process that asks for any."""
POLL = 0.1
LAST_SECONDS = 15.0
"""For the other ranks to end behind the first of them."""


def is_rank() -> bool:
    """True if this process was started as a rank: by this module, by torchrun, by accelerate."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """How many ranks compute the model."""
    return int(os.environ["WORLD_SIZE"]) if is_rank() else 1


def leads() -> bool:
    """True if this rank has the engine that is served."""
    return os.environ["RANK"] == "0"


def check_size(size: int) -> None:
    """Raise unless there are as many ranks as the flag says."""
    if world_size() != size:
        raise ValueError(
            f"--tensor-parallel-size {size} and WORLD_SIZE={world_size()} differ; start as many processes as "
            "ranks"
        )


def start(size: int, arguments: Sequence[str]) -> int:
    """Run this command on `size` ranks: the exit code of the first, or 1 if another ends before it."""
    asked: list[int] = []
    with _started(size, arguments, asked) as ranks:
        while True:
            codes = [process.poll() for process in ranks]
            if codes[0] is not None and codes[0] >= 0:  # else a signal has ended it
                return codes[0]
            if codes[0] is not None and -codes[0] in asked:  # this command's own, before rank 0 serves
                for process in ranks:
                    process.kill()
                return 128 - codes[0]
            failed = [rank for rank, code in enumerate(codes) if code]  # 0: the first is about to end, too
            if failed:
                print(f"hf-paged serve: rank {failed[0]} has ended with {codes[failed[0]]}", file=sys.stderr)
                ranks[0].send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    ranks[0].wait(LAST_SECONDS)
                return 1
            time.sleep(POLL)


@contextlib.contextmanager
def _started(
    size: int, arguments: Sequence[str], asked: list[int]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of all ranks, none of which is left behind. Signals are noted in `asked` and go to the
    first, which ends the others.
    """

    def take(number: int, frame: Any) -> None:
        asked.append(number)
        ranks[0].send_signal(number)

    ranks: list[subprocess.Popen[bytes]] = []
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        port = free_port()
        for rank in range(size):
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "hf_paged", *arguments],
                    env={**environment(rank, size, port), STARTED: "1"},
                    stdin=subprocess.PIPE,  # closed when this process ends, in whatever way
                    start_new_session=True,  # a terminal's interrupt comes by way of this process, once
                )
            )
        for each in before:
            signal.signal(each, take)
        yield ranks
    finally:
        end_all(ranks, LAST_SECONDS)
        for each, handler in before.items():
            signal.signal(each, handler)


def end_all(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Kill those of the processes that do not end by themselves within so many seconds."""
    end = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        process.kill()


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The whole environment of a process that is a rank."""
    threads = str(max(1, (os.cpu_count() or 1) // size))
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    given = {name: str(value) for name, value in own.items()}
    # Of a store that is gone torch writes a C++ stack for each question, before the one error that counts.
    unless = {"OMP_NUM_THREADS": threads, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if sys.platform == "linux":
        unless["GLOO_SOCKET_IFNAME"] = "lo"  # else the one of the machine's name
    return {**unless, **os.environ, **given, "MASTER_ADDR": HERE}


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """The store by which ranks on this machine find each other, until a process group has it. torch's own
    listens at all addresses of the machine.
    """
    store = None
    if world_size() > 1 and leads() and os.environ["MASTER_ADDR"] == HERE:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # where it is documented

        with socket.create_server((HERE, int(os.environ["MASTER_PORT"]))) as listener:
            store = TCPStore(
                HERE,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,  # so the process group takes it, instead of one at this port
                master_listen_fd=listener.detach(),
            )
    yield
    del store


def free_port() -> int:
    """A port at which the ranks can meet. They take it seconds later, so it is none of those that the system
    gives to any other process in between.
    """
    for port in random.SystemRandom().sample(range(*MEETING_PORTS), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HERE, port))
            return port
    raise OSError(f"found no free port in {MEETING_PORTS} for the ranks to meet")


def follow(engine: Any, in_pause: Callable[[Any, list[Any]], None]) -> int:
    """On all ranks but the first: compute until it closes. Signals are the first rank's. in_pause: called in
    each pause, with the engine and what the first rank has sent.
    """
    from ...engine import RankError

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    try:
        sent: list[Any] = []
        while engine.follow(sent.append):
            in_pause(engine, sent)
    except RankError as error:  # of another rank, which has said more
        print(f"hf-paged serve: rank {os.environ['RANK']} ends: {error}", file=sys.stderr)
        return 1
    return 0


def end_with_parent() -> None:
    """Begin the drain when the process that started the ranks has ended."""

    def wait() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    if STARTED in os.environ:
        threading.Thread(target=wait, daemon=True).start()
