"""The server's end of the connection to its engine, in another process that hangs or dies."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import pytest

pytest.importorskip("fastapi")

import httpx
import psutil
from processes import LIMIT, ended
from server_process import LONG, Process
from serving import until

from hf_paged.serve.link import engine_client, engine_host


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_health_says_that_the_engine_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, as one whose interpreter is held; then it goes on."""
    monkeypatch.setattr(engine_client, "SILENT", 2.0)  # the processes are forks of this one
    monkeypatch.setattr(engine_host, "IDLE", 0.1)
    made = Process()
    try:
        with httpx.Client(base_url=made.url, timeout=LIMIT) as client:
            until(lambda: client.get("/health").status_code == 200)
            os.kill(made.popen.pid, signal.SIGSTOP)
            until(lambda: client.get("/health").status_code == 503)
            assert client.get("/health").json()["error"]["code"] == "engine_stuck"
            assert client.get("/ready").status_code == 503
            assert client.get("/live").status_code == 200
            os.kill(made.popen.pid, signal.SIGCONT)
            until(lambda: client.get("/health").status_code == 200)
            until(lambda: client.get("/ready").status_code == 200)
    finally:
        made.popen.kill()
        made.popen.wait(LIMIT)


@pytest.mark.parametrize("which", ["engine", "http"])
def test_if_one_process_dies_the_other_ends(which: str) -> None:
    """A stream ends with an error or is cut off, the port closes, and the exit code is not 0."""
    made = Process()
    try:
        [http] = psutil.Process(made.popen.pid).children()
        with (
            httpx.Client(base_url=made.url, timeout=LIMIT) as client,
            client.stream("POST", "/v1/completions", json=LONG) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            (made.popen if which == "engine" else http).kill()
            with contextlib.suppress(httpx.RemoteProtocolError):
                assert '"error"' in "".join(lines)
        assert made.popen.wait(LIMIT) == {"engine": -signal.SIGKILL, "http": 128 + signal.SIGKILL}[which]
        assert ended([http])
        with pytest.raises(httpx.ConnectError):
            httpx.get(made.url)
        if which == "http":
            made.wait_for(None)
            assert made.others[-1] == "hf-paged serve: the process of HTTP has ended with -9\n"
    finally:
        made.popen.kill()
        made.popen.wait(LIMIT)
