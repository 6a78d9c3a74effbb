"""Text as it comes: the pieces joined are the text of all tokens, and no piece is half a character."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_paged import demo
from hf_paged.engine.outputs.text import BROKEN, Detokeniser


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte: every character beyond ASCII is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="Ā")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return bytes_tokenizer()


def reader_of(tokenizer: Any) -> Detokeniser:
    return Detokeniser(partial(tokenizer.decode, skip_special_tokens=True))


@settings(max_examples=80)
@given(text=st.text(max_size=30), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_pieces_of_any_text(tokenizer: Any, text: str, sizes: list[int]) -> None:
    """One token at a time or several: characters come whole."""
    text = text.replace("\0", "").replace(BROKEN, "")
    ids = tokenizer(text)["input_ids"]
    reader, pieces = reader_of(tokenizer), []
    while ids:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(reader.add(ids[:size], last=len(ids) <= size))
        ids = ids[size:]
    assert not any(BROKEN in piece for piece in pieces)
    assert "".join(pieces) == text


@settings(max_examples=80)
@given(ids=st.lists(st.integers(0, 255), min_size=1, max_size=30))
def test_bytes_that_are_no_text(tokenizer: Any, ids: list[int]) -> None:
    """Whatever a model says, the pieces joined are what the tokenizer says about all of it."""
    reader = reader_of(tokenizer)
    pieces = [reader.add([token], last=i == len(ids) - 1) for i, token in enumerate(ids)]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_the_demo_tokenizer() -> None:
    """Words of a real vocabulary, special tokens left out."""
    tokenizer = demo.tokenizer()
    ids = tokenizer("The tailor and the heron met. They talked until dark!")["input_ids"] + [
        tokenizer.eos_token_id
    ]
    reader = reader_of(tokenizer)
    pieces = [reader.add([token], last=token == tokenizer.eos_token_id) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert sum(bool(piece) for piece in pieces) > 5


def test_a_character_waits_for_its_end(tokenizer: Any) -> None:
    reader = reader_of(tokenizer)
    ids = tokenizer("a€b")["input_ids"]
    assert [reader.add([token]) for token in ids] == ["a", "", "", "€", "b"]
    reader = reader_of(tokenizer)
    assert [reader.add(ids[1:2]), reader.add([], last=True)] == ["", BROKEN]
