"""Items and events of /v1/responses, made of pieces of an answer."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi")

from hf_paged import demo
from hf_paged.serve.openai.generation import Piece, Usage
from hf_paged.serve.openai.images import Images
from hf_paged.serve.openai.responses import ResponsesRequest
from hf_paged.serve.openai.responses_format import ResponseForm
from hf_paged.serve.openai.tokens import Tokenizer
from hf_paged_cli.limits import ServerLimits


def test_answers_that_break_off() -> None:
    """A stream that ends early says so in its last event, behind what it has."""
    asked = ResponsesRequest(input="Tell me a story")

    tokenizer = Tokenizer(
        demo.tokenizer(), Images(None, ServerLimits()), vocabulary=848, longest=2000, chars_per_token=16
    )

    def form() -> ResponseForm:
        return ResponseForm(asked, "resp_1", "demo", tokenizer, [(5,)], 1)

    cut = form()
    chunk = cut.chunk(Piece(0, "One day", [7], [], [], "abort"))
    assert chunk.index(b"output_text.delta") < chunk.index(b"output_item.done")
    last = cut.closing(Usage(1, 1, 0), False)
    assert last.startswith(b"event: response.failed\n")
    body = json.loads(last.partition(b"data: ")[2])["response"]
    assert body["error"]["code"] == "server_error"
    assert body["output"][0]["content"][0]["text"] == "One day"
    silent = form()
    assert b'"text":""' in silent.chunk(Piece(0, "", [], [], [], "stop"))
