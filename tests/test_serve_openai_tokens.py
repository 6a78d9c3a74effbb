"""Prompts to ids: chat templates are a checkpoint's code, and run where they reach nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from hf_paged import demo
from hf_paged.serve.http.errors import ApiError
from hf_paged.serve.openai.images import Images
from hf_paged.serve.openai.protocol import ChatRequest
from hf_paged.serve.openai.tokens import Tokenizer
from hf_paged_cli.limits import ServerLimits


def shown(template: str | None, content: str = "a", **kwargs: Any) -> str:
    """The text of a chat with one message, through a template of the checkpoint's or its own."""
    hf = demo.tokenizer()
    if template is not None:
        hf.chat_template = template
    images = Images(None, ServerLimits())
    tokenizer = Tokenizer(hf, images, vocabulary=len(hf), longest=2000, chars_per_token=16)
    body = {"messages": [{"role": "user", "content": content}], "chat_template_kwargs": kwargs or None}
    try:
        return str(hf.decode(asyncio.run(tokenizer.chat(ChatRequest.model_validate(body))).ids))
    finally:
        tokenizer.close()
        images.close()


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch touched') }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''.__class__.__mro__[1] }}",
        "{{ raise_exception.__globals__ }}",
        "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ messages[0].content * 1000000 }}",
    ],
)
def test_a_hostile_template_reaches_nothing(
    template: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It ends its requests with 400 or 413."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ApiError) as refused:
        shown(template)
    assert refused.value.status in (400, 413)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("text", ["{{ 7 * 7 }}", "{% raw %}", "{{ messages.__class__ }}"])
def test_texts_of_requests_are_no_templates(text: str) -> None:
    assert text in shown(None, text)
    assert text in shown("{{ messages[0].content }}{{ more }}", "a", more=text)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation", "tokenizer_kwargs"])
def test_a_request_brings_no_template(name: str) -> None:
    """Nor other arguments of apply_chat_template than those that a template reads."""
    with pytest.raises(ApiError, match=f"must not have \\['{name}'\\]"):
        shown(None, "a", **{name: "{{ 7 * 7 }}"})
