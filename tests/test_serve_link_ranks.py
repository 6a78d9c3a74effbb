"""`hf-paged serve --tensor-parallel-size N`: one command starts all ranks, and ends with them."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("fastapi")

import httpx
import peft
import torch
from commands import Command, ForkedPopen
from processes import LIMIT, ended
from releases import NAMED_PARTS
from safetensors.torch import save_file
from serving import until

from hf_paged import demo
from hf_paged.serve.link.ranks import MEETING_PORTS, free_port


def _lines(process: Command) -> queue.SimpleQueue[dict[str, Any] | None]:
    """The lines that a server logs, and None at the end."""
    found: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stderr:
            if line.startswith("{"):
                found.put(json.loads(line))
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found


def _until(lines: queue.SimpleQueue[dict[str, Any] | None], message: str) -> dict[str, Any]:
    while (line := lines.get(timeout=120)) is not None:
        if line["message"] == message:
            return line
    raise AssertionError(f"the server has ended before {message!r}")


def _adapted(folder: Path) -> Any:
    """The demo model with an adapter that lies in a folder, too."""
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    made = peft.get_peft_model(demo.model(), config).eval()
    made.save_pretrained(folder)
    return made


def _continued(model: Any) -> str:
    tokenizer = demo.tokenizer()
    ids = tokenizer("The fox", return_tensors="pt").input_ids
    whole = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    text: str = tokenizer.decode(torch.as_tensor(whole), skip_special_tokens=True)
    return text


def _listening(process: psutil.Process) -> set[str]:
    """The addresses at which a process and its children take connections."""
    family = [process, *process.children(recursive=True)]
    sockets = [each for one in family for each in one.net_connections("tcp") if each.status == "LISTEN"]
    assert len(sockets) > 2  # HTTP, the store by which ranks meet, and what they send each other
    return {each.laddr.ip for each in sockets}


@NAMED_PARTS
def test_a_server_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as of one process, of the model, of an adapter and of new weights; no other machine can
    reach the ranks; a signal drains it, and none is left behind. Ranks are forks.
    """
    monkeypatch.setattr(subprocess, "Popen", ForkedPopen)
    adapted = _adapted(tmp_path)
    flags = ["--tensor-parallel-size", "2", "--port", "0", "--log-format", "json"]
    flags += ["--lora-modules", f"poet={tmp_path}", "--dev"]
    process = Command("serve", "demo", *flags)
    try:
        lines = _lines(process)
        url = _until(lines, "listening")["url"]
        _until(lines, "ready")
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        assert _listening(psutil.Process(process.pid)) == {"127.0.0.1"}
        expected = {"demo": _continued(demo.model()), "poet": _continued(adapted)}
        assert expected["demo"] != expected["poet"]
        for name, text in expected.items():
            body = {"model": name, "prompt": "The fox", "max_tokens": 12, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT).json()
            assert answer["choices"][0]["text"] == text
        _load_others(url, tmp_path / "others.safetensors")
        process.terminate()
        assert process.wait(LIMIT) == 0
        assert ended(ranks)
    finally:
        process.kill()


def _load_others(url: str, file: Path) -> None:
    """Every rank reads its parts of the files; what none can read is an error of the request."""

    def post(route: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{url}{route}", json=body or None, timeout=LIMIT)

    model = demo.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    save_file({"no.such.weight": torch.ones(3)}, file)
    answer = post("/load_weights", path=str(file))
    assert answer.status_code == 400, answer.text
    assert "no.such.weight" in answer.text
    save_file({name: parameter.detach() for name, parameter in model.named_parameters()}, file)
    for _ in range(2):
        assert post("/load_weights", path=str(file)).json() == {"loaded": len(list(model.parameters()))}
        asked = {"model": "demo", "prompt": "The fox", "max_tokens": 12, "temperature": 0}
        assert post("/v1/completions", **asked).json()["choices"][0]["text"] == _continued(model)
    assert post("/reset_prefix_cache").json() == {"success": True}
    assert post("/pause").status_code == 200
    assert "resume" in post("/load_weights", path=str(file)).text
    assert post("/resume").status_code == 200


def test_a_first_rank_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says so, in few lines, and fails; no rank is left behind. Ranks are interpreters of their own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    process = Command("serve", "demo", "--tensor-parallel-size", "2", "--port", "0", "--log-format", "json")
    try:
        assert any('"ready"' in line for line in iter(process.stderr.readline, ""))
        ranks = psutil.Process(process.pid).children()
        assert all("HF_PAGED_STARTED" in each.environ() for each in ranks)  # they end with the command
        next(each for each in ranks if each.environ()["RANK"] == "0").kill()
        assert process.wait(LIMIT) == 1
        said = process.stderr.read()
        assert "hf-paged serve: rank 0 has ended with -9" in said
        assert "c10" not in said  # torch's own stacks of a store that is gone
        assert "Traceback" not in said
        assert ended(ranks)
    finally:
        process.kill()


def test_a_signal_while_ranks_load_ends_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the exit code of the signal, and not as if a rank had failed."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    process = Command("serve", "demo", "--tensor-parallel-size", "2", "--port", "0")
    try:
        command = psutil.Process(process.pid)
        until(lambda: len(command.children()) == 2)
        ranks = command.children()
        time.sleep(0.5)
        process.terminate()
        assert process.wait(LIMIT) == 128 + signal.SIGTERM  # not as if a rank had failed
        assert "has ended" not in process.stderr.read()
        assert ended(ranks)
    finally:
        process.kill()


def test_ranks_meet_where_no_other_process_is_sent() -> None:
    """Not at a port that the system gives to whoever asks for any: ranks take theirs seconds later."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert taken.getsockname()[1] not in range(*MEETING_PORTS)
    found = {free_port() for _ in range(20)}
    assert len(found) > 10
    assert all(port in range(*MEETING_PORTS) for port in found)
