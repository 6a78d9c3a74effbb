"""Batch files of OpenAI's form: the answers of the server, line by line, continued behind an interrupt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")

from serving import ENGINE, Served, serving, tokenizer, until

from hf_paged import demo
from hf_paged.engine import Engine
from hf_paged.engine.outputs.answer_file import AnswerFile
from hf_paged.engine.outputs.progress import Progress
from hf_paged.serve.batches import BatchRun, reader
from hf_paged.serve.http.options import ServerOptions
from hf_paged.serve.link.in_process import connected
from hf_paged.serve.openai.service import Service
from hf_paged_cli.limits import ServerLimits

CHAT = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 8, "temperature": 0}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, "model": "demo"}),
    (
        "/v1/chat/completions",
        {**CHAT, "n": 2, "seed": 4, "temperature": 0.8, "logprobs": True, "top_logprobs": 2},
    ),
    ("/v1/completions", {"prompt": ["The fox", "The owl 狐"], "max_tokens": 4, "seed": 1, "stop": "the"}),
    (
        "/v1/completions",
        {
            "prompt": "The fox",
            "max_tokens": 5,
            "echo": True,
            "temperature": 0,
            "logprobs": 1,
            "logit_bias": {"9": 2},
        },
    ),
    ("/v1/responses", {"input": "Tell me a story", "max_output_tokens": 5, "temperature": 0}),
    ("/v1/completions", {"prompt": "The fox", "max_token": 4}),
    ("/v1/completions", {"prompt": "The fox", "model": "gpt-4"}),
    ("/v1/completions", {"prompt": "fox " * 2000}),
    ("/v1/completions", {"prompt": "The fox", "temperature": "hot"}),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


def line(custom_id: str, url: str, body: dict[str, Any]) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def answered(asked: Path, out: Path, engine: Engine | None = None, progress: Progress = False) -> BatchRun:
    """A batch on an engine of its own."""
    made = engine or Engine(demo.model(), **ENGINE)
    options = ServerOptions(names=("demo",), limits=ServerLimits(waiting=2**31))
    service = Service.of(connected(made, tokenizer()), tokenizer(), options)
    batch = BatchRun(service, AnswerFile(out, reader("run")), "run")
    batch.answer(asked, progress)
    if engine is None:
        until(lambda: made.closed)  # its side is a thread that sees the connection close
    return batch


def rows(out: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(each) for each in out.read_text().splitlines()]
    assert all(set(each) == {"id", "custom_id", "response", "error"} for each in found)
    assert len({each["id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def lasting(body: Any) -> Any:
    """A body without what is new in every answer."""
    if isinstance(body, dict):
        new = ("id", "created", "created_at", "completed_at", "prompt_tokens_details", "input_tokens_details")
        return {name: lasting(value) for name, value in body.items() if name not in new}
    if isinstance(body, float):
        return round(body, 3)  # other rows in a step round otherwise
    return [lasting(each) for each in body] if isinstance(body, list) else body


def test_answers_are_those_of_the_server(served: Served, tmp_path: Path) -> None:
    """Errors of requests among them."""
    asked = tmp_path / "in.jsonl"
    asked.write_text("".join(line(str(i), url, body) for i, (url, body) in enumerate(BODIES)))
    batch = answered(asked, out := tmp_path / "out.jsonl")
    found = rows(out)
    assert len(found) == len(BODIES)
    for i, (url, body) in enumerate(BODIES):
        answer = served.post(url, body)
        row = found[str(i)]
        assert row["error"] is None
        assert row["response"]["status_code"] == answer.status_code
        assert lasting(row["response"]["body"]) == lasting(answer.json())
        assert row["response"]["request_id"]
    assert (batch.done, batch.failed) == (9, 4)


NO_REQUESTS = [
    ("no JSON\n", "invalid_json", "line 2: it is not JSON"),
    ("[]\n", "invalid_json", "line 3: it is a list, expected an object"),
    ('{"method": "POST"}\n', "missing_custom_id", "line 4: custom_id is None"),
    (line("a", "/v1/completions", {"prompt": "The owl"}), "duplicate_custom_id", "'a' is given before"),
    (line("b", "/v1/embeddings", {"input": "a"}), "invalid_url", "expected one of /v1/chat/completions"),
    (line("c", "/v1/completions", []), "invalid_body", "body is a list, expected an object"),
    ('{"custom_id": "d", "method": "GET", "url": "/v1/models"}\n', "invalid_method", "expected 'POST'"),
]


def test_lines_that_are_no_requests_are_rows(tmp_path: Path) -> None:
    """Blank lines are none. The next call tries them again, beside answers that stay."""
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = line("a", "/v1/completions", {"prompt": "The fox", "max_tokens": 2})
    asked.write_text(
        good
        + "".join(text for text, _, _ in NO_REQUESTS)
        + "\n"
        + line("e", "/v1/completions", {"prompt": "The", "stream": True})
    )
    for resumed in (0, 1):
        batch = answered(asked, out)
        assert (batch.done, batch.failed, batch.resumed) == (9, 8, resumed)
        found = [json.loads(each) for each in out.read_text().splitlines()]
        assert len(found) == 9
        assert {each["custom_id"] for each in found if each["response"] is not None} == {"a", "e"}
        errors = {
            each["error"]["code"] + each["error"]["message"] for each in found if each["error"] is not None
        }
        for _, code, said in NO_REQUESTS:
            assert any(each.startswith(code) and said in each for each in errors)
    assert "a batch has whole answers" in rows(out)["e"]["response"]["body"]["error"]["message"]


def test_a_batch_is_continued_by_content(tmp_path: Path) -> None:
    """Answers from before it broke off stay; a changed body is answered again; another run is refused."""
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"prompt": f"The fox {i}", "max_tokens": 2 + i, "temperature": 0} for i in range(6)]
    asked.write_text("".join(line(str(i), "/v1/completions", body) for i, body in enumerate(bodies)))

    def progress(done: int, total: int | None) -> None:
        assert total == 6
        if done == 3:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        answered(asked, out, progress=progress)
    kept = rows(out)
    assert len(kept) >= 3
    bodies[int(next(iter(kept)))]["max_tokens"] = 9
    asked.write_text("".join(line(str(i), "/v1/completions", body) for i, body in enumerate(bodies)))
    batch = answered(asked, out)
    assert (batch.done, batch.resumed, batch.failed) == (6, len(kept) - 1, 0)
    found = rows(out)
    for i, body in enumerate(bodies):
        usage = found[str(i)]["response"]["body"]["usage"]
        assert usage["completion_tokens"] == body["max_tokens"]
    with pytest.raises(ValueError, match="it has answers of another model, or with other templates"):
        AnswerFile(out, reader("other"))


def test_an_engine_that_stops_ends_the_batch(tmp_path: Path) -> None:
    """Other lines would have the same error: they have no rows, and the next call answers them."""
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "The fox", "max_tokens": 20, "min_tokens": 20}
    lines = [line(str(i), "/v1/completions", body) for i in range(200)]
    asked.write_text("".join(lines))
    engine = Engine(demo.model(), **{**ENGINE, "max_batch_sequences": 1})

    def change(done: int, total: int | None) -> None:
        with torch.no_grad():
            engine.model.model.norm.weight *= 1.5

    with pytest.raises(RuntimeError, match=r"the engine has stopped .* --resume continues from there"):
        answered(asked, out, engine, progress=change)
    kept = rows(out)
    complete = [each for each in kept.values() if each["response"]["status_code"] == 200]
    assert 0 < len(complete) <= len(kept) < 200
    asked.write_text("".join(lines[: len(kept) + 2]))
    batch = answered(asked, out)
    assert (batch.resumed, batch.failed, len(rows(out))) == (len(complete), 0, len(kept) + 2)
