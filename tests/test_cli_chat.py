"""hf-paged chat: a conversation whose turns are those of generate() on the whole chat."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged import demo
from hf_paged_cli.main import main


def talk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, said: str, *flags: str) -> Any:
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    assert main(["chat", "demo", *flags]) == 0
    return capsys.readouterr()


def wanted(messages: list[dict[str, str]], tokens: int) -> str:
    model, tokenizer = demo.model(), demo.tokenizer()
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_turns_are_those_of_the_whole_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Tell me a story"}]
    first = wanted(messages, 12)
    more = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "Go on"}]
    said = talk(
        capsys, monkeypatch, "Tell me a story\n\nGo on\n/help\n/reset\nTell me a story\n/exit\nnever\n",
        "--system", "Be short.", "--max-tokens", "12",
    )  # fmt: skip
    assert said.out == f"{first}\n{wanted(more, 12)}\n{first}\n"
    assert "/reset" in said.err


def test_a_conversation_that_is_full_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = talk(capsys, monkeypatch, "fox " * 2000 + "\nHello\n", "--max-tokens", "3")
    assert "no room is left" in said.err
    assert said.out == wanted([{"role": "user", "content": "Hello"}], 3) + "\n"


def test_lines_that_are_no_text_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = talk(capsys, monkeypatch, "\udcff\nHello\n", "--max-tokens", "3")
    assert "not UTF-8" in said.err
    assert said.out == wanted([{"role": "user", "content": "Hello"}], 3) + "\n"


def test_models_without_a_template_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bare = demo.tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    demo.model().save_pretrained(tmp_path)
    assert main(["chat", str(tmp_path)]) == 1
    assert "use hf-paged generate" in capsys.readouterr().err
