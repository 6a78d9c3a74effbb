"""Programs of others that run transformers' continuous batching, on the engine: its server, and TRL."""

from __future__ import annotations

import asyncio
import json
import runpy
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import LIMIT
from releases import NEEDS_MANAGERS
from transformers.utils.import_utils import is_serve_available

import hf_paged
from hf_paged import demo
from hf_paged.continuous.engines import PLACE

CHAT = "{% for each in messages %}{{ each.content }}{% endfor %}"
GUARD = LIMIT


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON of a page, or the answer to a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=GUARD) as answer:
        return json.load(answer)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of `python -m hf_paged transformers serve` on the demo model. Its thread is one of this
    process, which saves the seconds that another one takes to import everything.
    """
    program = "transformers.cli.transformers"
    pytest.importorskip(program, reason="needs transformers[serving]", exc_type=ImportError)
    uvicorn = pytest.importorskip("uvicorn", reason="needs transformers[serving]")
    tokenizer = demo.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.response_template = None  # it is the other template's
    for part in (demo.model().float(), tokenizer):
        part.save_pretrained(tmp_path)
    with socket.socket() as place:
        place.bind(("localhost", 0))
        port = str(place.getsockname()[1])
    running: list[Any] = []

    def run(self: Any) -> None:
        thread = threading.Thread(target=lambda: asyncio.run(self.serve()))
        running.extend((self, thread))
        thread.start()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    command = ["transformers", "serve", str(tmp_path), "--continuous-batching", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["hf_paged", *command, "--port", port])
    try:
        with pytest.raises(SystemExit):
            runpy.run_module("hf_paged", run_name="__main__")
        serving, thread = running
        while not serving.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://localhost:{port}"
        serving.should_exit = True
        thread.join(GUARD)
    finally:
        hf_paged.install(generate_batch=False)


@NEEDS_MANAGERS
@pytest.mark.skipif(not is_serve_available(), reason="needs transformers[serving]")
def test_transformers_serve_answers_with_the_engine(server: str, tmp_path: Path) -> None:
    model, tokenizer = demo.model().float(), demo.tokenizer()
    for prompt in demo.prompts()[:2]:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": str(tmp_path), "messages": messages, "max_tokens": 8, "temperature": 0.0}
        answer = ask(f"{server}/v1/chat/completions", body)
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        right = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids.input_ids.shape[1] :]
        assert answer["choices"][0]["message"]["content"] == tokenizer.decode(right, skip_special_tokens=True)
    assert "hf_paged-results" in [thread.name for thread in threading.enumerate()]
    assert ask(f"{server}/health")["status"] == "ok"


@NEEDS_MANAGERS
def test_trl_trains_with_continuous_batching_by_the_engine(tmp_path: Path) -> None:
    """`use_transformers_continuous_batching`; equal prompts are one request of each engine."""
    trl = pytest.importorskip("trl", reason="needs TRL, which is no dependency")
    from datasets import Dataset

    model = demo.model().float()
    rewards = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards.append([float(len(set(each))) for each in completion_ids])
        return rewards[-1]

    options = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 2,
    }
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    config = trl.GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, use_transformers_continuous_batching=True, **options, **quiet
    )
    data = Dataset.from_dict({"prompt": demo.prompts()[:4]})
    hf_paged.install(generate_batch=True)
    try:
        trl.GRPOTrainer(
            model=model,
            args=config,
            train_dataset=data,
            reward_funcs=reward,
            processing_class=demo.tokenizer(),
        ).train()
        engine = getattr(model, PLACE).engine
        assert engine.stats()["finished"] == 2 * 2
        engine.close()
    finally:
        hf_paged.install(generate_batch=False)
    assert [len(each) for each in rewards] == [8, 8]
