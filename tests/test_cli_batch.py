"""hf-paged batch: files of OpenAI's batch requests, continued behind an interrupt."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from processes import LIMIT

from hf_paged import demo
from hf_paged_cli.main import main

pytest.importorskip("fastapi")


def requests(count: int, **options: Any) -> str:
    body = {"max_tokens": 8, "temperature": 0, **options}
    return "".join(
        json.dumps(
            {
                "custom_id": str(i),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": f"The fox {i}", **body},
            }
        )
        + "\n"
        for i in range(count)
    )


def rows(out: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]
    assert len({row["custom_id"] for row in found}) == len(found)
    return {row["custom_id"]: row for row in found}


def test_a_batch_is_answered_and_continued(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By the model's name for clients; another template is another run, and is refused."""
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text(requests(2, model="gpt"))
    flags = ["batch", "demo", str(asked), str(out), "--num-blocks", "64", "--served-model-name", "gpt"]
    assert main(flags) == 0
    assert "2 done, 0 of them before, 0 failed" in capsys.readouterr().err
    model, tokenizer = demo.model(), demo.tokenizer()
    inputs = tokenizer("The fox 1", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    answer = rows(out)["1"]["response"]["body"]
    assert answer["choices"][0]["text"] == tokenizer.decode(ids, skip_special_tokens=True)
    assert answer["model"] == "gpt"
    assert main(flags) == 1
    assert "exists already; --resume continues it" in capsys.readouterr().err
    asked.write_text(requests(2, model="gpt") + requests(4, model="other").splitlines(keepends=True)[3])
    assert main([*flags, "--resume"]) == 1
    assert "3 done, 2 of them before, 1 failed" in capsys.readouterr().err
    assert rows(out)["3"]["response"]["status_code"] == 404
    assert main([*flags, "--resume", "--chat-template", "{{ messages }}"]) == 1
    assert "it has answers of another model, or with other templates" in capsys.readouterr().err
    assert main([*flags[:2], str(asked), str(asked), "--overwrite"]) == 1
    assert "is the file of prompts; give" in capsys.readouterr().err
    assert asked.read_text().startswith(requests(2, model="gpt"))


def test_an_interrupt_keeps_the_answers(tmp_path: Path) -> None:
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text(requests(400))
    flags = ["batch", "demo", str(asked), str(out), "--num-blocks", "64", "--max-num-seqs", "2"]
    command = Command(*flags)
    end = time.monotonic() + LIMIT
    while not out.exists() or out.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < end
        assert command.exitcode is None
        time.sleep(0.01)
    assert command.pid is not None
    os.kill(command.pid, signal.SIGINT)
    assert command.wait(LIMIT) == 130
    assert "interrupted; the answers so far are in" in command.stderr.read()
    kept = rows(out)
    assert 3 <= len(kept) < 400
    assert all(row["response"]["status_code"] == 200 for row in kept.values())
    asked.write_text("".join(requests(400).splitlines(keepends=True)[: len(kept) + 4]))
    resumed = Command(*flags, "--resume")
    assert resumed.wait(LIMIT) == 0
    assert f"{len(kept) + 4} done, {len(kept)} of them before, 0 failed" in resumed.stderr.read()
