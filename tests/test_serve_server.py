"""The server's first words: where to look, and a request that can be copied."""

from __future__ import annotations

import json
import logging
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx
from serving import GUARD, serving, tokenizer, until


@pytest.mark.parametrize(
    "options", [{}, {"api_keys": ("red",), "root_path": "/demo"}, {"uds": True}], ids=["open", "keys", "uds"]
)
def test_the_first_request_of_the_log_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """And its pages are there; what has a chat template is asked by chat."""
    texts = tokenizer()
    if options.get("uds"):
        options = {"uds": str(tmp_path / "socket")}
        texts = type(texts)(tokenizer_object=texts.backend_tokenizer)
    with (
        caplog.at_level(logging.INFO, logger="hf_paged.serve"),
        serving(tokenizer=texts, **options),
    ):
        until(lambda: any("first request: " in each.message for each in caplog.records))
        message = next(each.message for each in caplog.records if "first request: " in each.message)
        pages, _, request = message.partition("first request: ")
        words = shlex.split(request)
        url = next(word for word in words if word.startswith("http://"))
        assert ("/chat/" in url) == (texts.chat_template is not None)
        headers = dict(word.split(": ") for flag, word in pairwise(words) if flag == "-H")
        headers = {name: value.replace("KEY", "red") for name, value in headers.items()}
        transport = httpx.HTTPTransport(uds=options.get("uds"))
        with httpx.Client(transport=transport, timeout=GUARD) as client:
            answer = client.post(url, content=words[words.index("-d") + 1], headers=headers)
            assert answer.status_code == 200, answer.text
            assert 1 <= json.loads(answer.text)["usage"]["completion_tokens"] <= 60  # it may end by itself
            found = [word.rstrip(";") for word in pages.split() if word.startswith("http")]
            assert len(found) == (0 if "uds" in options else 2)
            for page in found:
                assert client.get(page).status_code == 200, page
