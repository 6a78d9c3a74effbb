"""The bytes of tokens beside their logprobs: those of the vocabulary, whatever kind it is."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from serving import ids, serving, tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hf_paged.serve.openai.text import decode_of
from hf_paged.serve.openai.token_bytes import bytes_of, text_of

CHARACTERS = {"▁": 0, "the": 1, "▁the": 2, "x": 3, "<0xE6>": 4}


def read(vocabulary: dict[str, int], decoder: Any, **options: Any) -> list[bytes]:
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], **options))
    made.decoder = decoder
    found = PreTrainedTokenizerFast(tokenizer_object=made)
    return list(map(bytes_of(found, decode_of(found, skip_special_tokens=False)), vocabulary.values()))


def test_a_vocabulary_of_characters_with_bytes() -> None:
    """As Llama 2's: alone, decode() strips the blank and breaks the byte."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    found = read(CHARACTERS, decoders.Sequence(steps), byte_fallback=True)
    assert found == [b" ", b"the", b" the", b"x", b"\xe6"]
    assert [text_of(each) for each in found] == [" ", "the", " the", "x", "bytes:\\xe6"]
    assert read({"▁the": 0}, decoders.Metaspace()) == [b" the"]


def test_a_vocabulary_of_bytes() -> None:
    assert read({"Ġthe": 0, "æ": 1, "Ċ": 2}, decoders.ByteLevel()) == [b" the", b"\xe6", b"\n"]


def test_one_without_a_known_decoder_is_decoded() -> None:
    assert read({"a": 0, "##b": 1}, decoders.WordPiece()) == [b"a", b"##b"]


def test_the_bytes_of_a_texts_tokens_are_the_texts() -> None:
    text = "The fox — 漢字 \U0001f98a"
    found = bytes_of(tokenizer(), decode_of(tokenizer(), skip_special_tokens=False))
    assert b"".join(map(found, ids(text)[1:])) == text.encode()


def test_alternatives_that_are_parts_of_characters_do_not_vanish() -> None:
    """Of a prompt of bytes each token is named, and so are all alternatives."""
    with serving() as served:
        token_bytes = served.service.tokenizer.bytes
        found = served.complete("漢", echo=True, logprobs=5, max_tokens=2)["choices"][0]["logprobs"]
        assert all(len(each) >= 5 for each in found["top_logprobs"][1:])
        assert found["tokens"][: len(ids("漢"))] == [text_of(token_bytes(each)) for each in ids("漢")]
        body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 3}
        bias = {str(ids("漢")[-1]): 100}
        chat = served.post("/v1/chat/completions", {**body, "max_tokens": 1, "logit_bias": bias}).json()
        [content] = chat["choices"][0]["logprobs"]["content"]
        assert bytes(content["bytes"]) == token_bytes(ids("漢")[-1])
