"""A real process: from the command to the first answer, and from SIGTERM to the end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx
import peft
import psutil
from commands import Command
from processes import LIMIT, ended
from serving import events, until
from slow_files import needs_leases, slow

from hf_paged import demo
from hf_paged.serve.link import engine_client, engine_host

DRAIN = 1.5
STREAMS = 12
LONG = {
    "prompt": "The fox",
    "max_tokens": 900,
    "ignore_eos": True,
    "temperature": 1.0,
    "n": 4,
    "stream": True,
}


class Process:
    """`hf-paged serve demo` on a free port, and what it logs. alone: in an interpreter of its own."""

    def __init__(self, *flags: str, alone: bool = False) -> None:
        arguments = ["serve", "demo", "--port", "0", "--log-format", "json", *flags]
        self.popen: subprocess.Popen[str] | Command
        if alone:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "hf_paged", *arguments],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            )
        else:
            self.popen = Command(*arguments)
        self.lines: list[dict[str, Any]] = []
        self.others: list[str] = []
        """Lines that are written beside the log, as a traceback."""
        self._news: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self.wait_for("listening")["url"]
        self.wait_for("ready")

    def _read(self) -> None:
        for line in self.popen.stderr:
            if line.startswith("{"):
                self._news.put(json.loads(line))
            else:
                self.others.append(line)
        self._news.put(None)

    def wait_for(self, message: str | None) -> dict[str, Any]:
        """The next log line with a message; None is the end."""
        while True:
            line = self._news.get(timeout=120)
            if line is None:
                assert message is None, f"the process has ended: {self.lines} {''.join(self.others)}"
                return {}
            self.lines.append(line)
            if line["message"] == message:
                return line


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[Process]:
    made = Process("--limit-drain-seconds", str(DRAIN), "--max-num-seqs", "16", alone=request.param)
    yield made
    made.popen.kill()
    made.popen.wait(LIMIT)


def assert_same_imports(process: Process) -> None:
    """The process of HTTP is a fork: no second interpreter imports torch and transformers."""
    [http] = psutil.Process(process.popen.pid).children()
    assert http.cmdline() == psutil.Process(process.popen.pid).cmdline()
    assert os.getsid(http.pid) == http.pid, "a terminal's interrupt comes by way of the engine's process"
    shared = http.memory_full_info()
    assert shared.pss < 0.7 * shared.rss


@pytest.mark.parametrize("process", [True], ids=["alone"], indirect=True)
def test_every_accepted_stream_ends_after_sigterm(process: Process) -> None:
    """Under load, with streams that run and streams that wait: each ends with a reason within the deadline, new
    ones are refused meanwhile, and the exit code is 0.
    """
    if sys.platform == "linux":  # processes are forked there alone
        assert_same_imports(process)
    begun = threading.Semaphore(0)
    texts: list[str] = []

    def read() -> None:
        with (
            httpx.Client(base_url=process.url, timeout=LIMIT) as client,
            client.stream("POST", "/v1/completions", json=LONG) as answer,
        ):
            begun.release()
            assert answer.status_code == 200
            texts.append(answer.read().decode())

    threads = [threading.Thread(target=read) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=LIMIT)
    with httpx.Client(base_url=process.url, timeout=LIMIT) as client:
        idle = client.get("/ready")
        assert idle.status_code == 200
        process.popen.send_signal(signal.SIGTERM)
        process.wait_for("draining")
        assert client.get("/ready").status_code == 503
        assert client.get("/live").status_code == 200
        refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
    for thread in threads:
        thread.join(LIMIT)
    assert len(texts) == STREAMS
    reasons = []
    for text in texts:
        found = [
            choice["finish_reason"]
            for each in events(text)
            for choice in each["choices"]
            if choice["finish_reason"]
        ]
        assert len(found) == 4
        reasons += found
    assert set(reasons) <= {"length", "abort"}
    assert process.popen.wait(LIMIT) == 0
    process.wait_for(None)
    assert not [line for line in process.lines if line["level"] in ("warning", "error")]
    assert (
        len([line for line in process.lines if line["message"] == "request" and line["status"] == 200])
        == STREAMS
    )


@pytest.mark.parametrize("process", [False], ids=["forked"], indirect=True)
def test_a_second_signal_ends_both_processes_with_one_line(process: Process) -> None:
    """During the drain, under streams: requests are cut off, and the log has no traceback of any."""
    [http] = psutil.Process(process.popen.pid).children()
    begun = threading.Semaphore(0)

    def read(body: dict[str, Any]) -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(base_url=process.url, timeout=LIMIT) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            begun.release()
            answer.read()

    threads = [threading.Thread(target=read, args=({**LONG, "stream": each < 4},)) for each in range(5)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        assert begun.acquire(timeout=LIMIT)
    process.popen.send_signal(signal.SIGTERM)
    process.wait_for("draining")
    process.popen.send_signal(signal.SIGINT)
    assert process.popen.wait(LIMIT) == 130
    process.wait_for(None)
    for thread in threads:
        thread.join(LIMIT)
    assert ended([http])
    told = [line["message"] for line in process.lines]
    place = next(i for i, each in enumerate(told) if each.startswith("Engine(LlamaForCausalLM, form='flat'"))
    assert "keys and values 1.5 KiB a token" in told[place]
    assert told[place + 1].startswith("pool of 1,040 blocks of 16 tokens")  # --max-num-seqs 16
    warned = [line for line in process.lines if line["level"] != "info"]
    assert [line["message"] for line in warned] == ["ending at once", "cut off"]
    assert warned[0]["signal"] == "SIGINT"
    assert warned[1]["requests"] >= 4
    assert not [line for line in process.lines if "trace" in line]


@needs_leases
def test_an_adapter_on_a_disk_that_hangs_stops_nothing_else(tmp_path: Path) -> None:
    """While its file does not open: answers, metrics and health are there, and SIGTERM ends the server."""
    config = peft.LoraConfig(r=8, target_modules=["q_proj"])
    peft.get_peft_model(demo.model(), config).save_pretrained(tmp_path)
    made = Process("--limit-drain-seconds", str(DRAIN), "--allow-runtime-lora-updating")
    answers: list[httpx.Response] = []
    body = {"lora_name": "poet", "lora_path": str(tmp_path)}

    def load() -> None:
        answers.append(httpx.post(f"{made.url}/v1/load_lora_adapter", json=body, timeout=LIMIT))

    thread = threading.Thread(target=load)
    try:
        with (
            slow(tmp_path / "adapter_model.safetensors") as wait,
            httpx.Client(base_url=made.url, timeout=LIMIT) as client,
        ):
            thread.start()
            wait()
            short = {"prompt": "The fox", "max_tokens": 2}
            assert client.post("/v1/completions", json=short).status_code == 200
            assert client.get("/metrics").status_code == 200
            assert client.get("/health").status_code == 200
            assert not answers
            made.popen.terminate()
            assert made.popen.wait(LIMIT) == 0
        thread.join(LIMIT)
        [answer] = answers
        assert answer.status_code in (400, 503)
        assert answer.json()["error"]["message"]
    finally:
        made.popen.kill()
        made.popen.wait(LIMIT)


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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["serve", "no/such-model"], "couldn't find them in the cached files"),
        (["serve", "demo", "--max-model-len", "99999"], "--max-model-len 99999 is beyond the"),
        (["serve", "demo", "--prot", "1"], "did you mean --port"),
        (["serve", "demo", "--response-template", "[{}]"], "is a JSON object"),
        (
            ["serve", "demo", "--lora-modules", "poet=no/such"],
            "--lora-modules poet=no/such cannot be loaded: ",
        ),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_no_process(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line on stderr from the command, and the end of all processes that have its stderr."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ended = Command(*arguments)
    guard = threading.Timer(LIMIT, ended.kill)
    guard.start()
    written = ended.stderr.read()
    guard.cancel()
    assert ended.wait(LIMIT) in (1, 2)
    assert reason in written
    assert "Traceback" not in written
