"""Grammars that the server has had compiled before their requests come."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from hosting import hosted, news

from hf_paged.serve.link.wire import Submit, frame


def test_a_request_compiles_no_grammar_in_the_thread_that_reads() -> None:
    """The server has it compiled before; one that is gone since is not waited for by all other requests."""
    with hosted() as (_, connection):
        asked = Submit(0, (5, 6), {"max_new_tokens": 4, "grammar": "any"}, True)
        connection.sendall(frame(asked))
        answers = next(message.answers for message in news(connection) if message.answers)
        assert answers[0].failure.kind == "NotCompiled"
        assert "send the request again" in answers[0].failure.message
