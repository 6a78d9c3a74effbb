"""hf-paged generate: an answer as it grows, and lines of answers, in the terminal or in a file."""

from __future__ import annotations

import io
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged import demo
from hf_paged.engine import Answers
from hf_paged_cli.main import main


@cache
def wanted(prompt: str, tokens: int = 12) -> str:
    model, tokenizer = demo.model(), demo.tokenizer()
    inputs = tokenizer(prompt, return_tensors="pt")
    found = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def rows(text: str) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    return {row["index"]: row for row in found}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("The fox\n\nThe owl\n")
    return file


def test_an_answer_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "--prompt", "The fox", "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out == wanted("The fox") + "\n"
    assert main(["generate", "demo", "--prompt", "The fox", "--max-tokens", "12", "--json"]) == 0
    printed = capsys.readouterr()
    assert rows(printed.out)[0]["text"] == wanted("The fox")
    assert "request" not in printed.err, "one needs no bar"
    assert main(["generate", "demo", "--prompt", " "]) == 1
    assert "the prompt is empty" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_lines_have_an_index_and_their_usage(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    prompts: Path,
    source: str,
    terminal: bool,
) -> None:
    flags = ["--file", str(prompts)] if source == "file" else []
    monkeypatch.setattr(sys, "stdin", io.StringIO(prompts.read_text()))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main(["generate", "demo", "--lines", "--max-tokens", "12", *flags]) == 0
    printed = capsys.readouterr()
    assert (("2/2" if source == "file" else "2request") in printed.err) == terminal, "a bar"
    found = rows(printed.out)
    assert [(found[i]["prompt"], found[i]["text"]) for i in range(2)] == [
        (each, wanted(each)) for each in ("The fox", "The owl")
    ]
    assert found[0]["usage"] == {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 12} | {
        "cached_tokens": found[0]["usage"]["cached_tokens"]
    }
    assert set(found[0]) == {"index", "prompt", "text", "finish_reason", "usage"}


@pytest.fixture
def poet(tmp_path: Path) -> tuple[Path, str]:
    """The folder of an adapter, and its answer to "The fox"."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(demo.model(), config).eval()
    model.save_pretrained(tmp_path / "poet")
    inputs = demo.tokenizer()("The fox", return_tensors="pt")
    found = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tmp_path / "poet", demo.tokenizer().decode(found, skip_special_tokens=True)


def test_adapters_by_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, poet: tuple[Path, str]) -> None:
    folder, poem = poet
    lines: list[Any] = [
        "The fox",
        {"prompt": "The fox", "adapter": None},
        {"prompt": "The fox", "model": "demo"},
        {"prompt": "The fox", "model": "poet", "max_new_tokens": 3},
        "{The fox",
        {"prompt": "The fox", "adapter": "nobody"},
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    asked = ["generate", "demo", "--lines", "--file", str(file), "--max-tokens", "12"]
    assert main([*asked, "--lora-modules", f"poet={folder}", "--adapter", "poet"]) == 1
    found = rows(capsys.readouterr().out)
    assert poem != wanted("The fox")
    assert [found[i]["text"] for i in range(3)] == [poem, wanted("The fox"), wanted("The fox")]
    assert found[3]["usage"]["completion_tokens"] == 3
    assert found[4]["prompt"] == "{The fox"
    assert "there is no adapter 'nobody'" in found[5]["error"]


def test_the_adapter_of_one_prompt(capsys: pytest.CaptureFixture[str], poet: tuple[Path, str]) -> None:
    folder, poem = poet
    asked = ["generate", "demo", "--prompt", "The fox", "--max-tokens", "12"]
    assert main([*asked, "--lora-modules", f"poet={folder}", "--adapter", "poet"]) == 0
    assert capsys.readouterr().out == poem + "\n"
    assert main([*asked, "--lora-modules", f"poet={folder}", "--adapter", "pirate"]) == 1
    assert "there is no adapter 'pirate'" in capsys.readouterr().err


def test_lines_are_chats(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "demo", "--chat", "--prompt", "Tell me a story", "--max-tokens", "4"]
    assert main(asked) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    assert main([*asked, "--lines"]) == 0
    (row,) = rows(capsys.readouterr().out).values()
    assert row["text"] == text
    assert row["prompt"] == [{"role": "user", "content": "Tell me a story"}]


def test_a_line_that_fails_is_a_row(capsys: pytest.CaptureFixture[str], prompts: Path) -> None:
    """The exit code is 1, and the others have their answers."""
    prompts.write_text("The fox\n" + "fox " * 2000 + "\nThe owl\n")
    assert main(["generate", "demo", "--file", str(prompts), "--lines", "--max-tokens", "4"]) == 1
    found = rows(capsys.readouterr().out)
    assert [found[i]["finish_reason"] for i in range(3)] == ["length", "refused", "length"]
    assert "1024" in found[1]["error"]
    assert "error" not in found[0]


def test_answers_in_a_file_are_continued(
    capsys: pytest.CaptureFixture[str], prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    asked = ["generate", "demo", "--file", str(prompts), "--lines", "--max-tokens", "12", "--out", str(out)]
    assert main(asked) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "2 of 2 done, 0 of them before, 0 failed" in printed.err
    assert [rows(out.read_text())[i]["text"] for i in range(2)] == [wanted("The fox"), wanted("The owl")]
    assert main(asked) == 1
    assert "exists already; --resume continues it" in capsys.readouterr().err
    prompts.write_text("The fox\nThe bear\nThe owl\n")
    assert main([*asked, "--resume"]) == 0
    assert "3 of 3 done, 1 of them before" in capsys.readouterr().err
    assert rows(out.read_text())[1]["text"] == wanted("The bear")
    assert main([*asked, "--resume", "--num-beams", "2"]) == 1
    assert "made with no num_beams, and now there is num_beams=2" in capsys.readouterr().err
    assert main([*asked, "--overwrite", "--max-tokens", "3"]) == 0
    assert rows(out.read_text())[2]["usage"]["completion_tokens"] == 3


def test_an_interrupt_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, prompts: Path, tmp_path: Path
) -> None:
    def interrupted(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Answers, "_wait", interrupted)
    out = tmp_path / "answers.jsonl"
    assert main(["generate", "demo", "--file", str(prompts), "--lines", "--out", str(out)]) == 130
    assert (
        f"interrupted; the answers so far are in {out}, and --resume continues from there"
        in capsys.readouterr().err
    )
