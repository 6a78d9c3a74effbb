"""A real process: from the command to the first answer, and from SIGTERM to the end."""

from __future__ import annotations

import contextlib
import os
import signal
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
from server_process import LONG, Process
from serving import events
from slow_files import needs_leases, slow

from hf_paged import demo

DRAIN = 1.5
STREAMS = 12


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
