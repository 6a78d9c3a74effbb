"""Text as it comes: the pieces joined are the text of all tokens up to the first stop string, and no piece is
half a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_paged import demo
from hf_paged.engine.outputs.text import BROKEN, AnswerText, Detokeniser


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


@settings(max_examples=examples(36))
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


@settings(max_examples=examples(36))
@given(ids=st.lists(st.integers(0, 255), min_size=1, max_size=30))
def test_bytes_that_are_no_text(tokenizer: Any, ids: list[int]) -> None:
    """The pieces of any answer, joined, are the text that the tokenizer gives for all of it."""
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


def expected(full: str, stops: list[str], keep: bool) -> str:
    found = [(full.find(stop), stop) for stop in stops if stop in full]
    if not found:
        return full
    begin, stop = min(found)
    return full[: begin + len(stop)] if keep else full[:begin]


def letters(tokens: Sequence[int]) -> str:
    """A decoder of tokens that are characters, so that a stop string ends anywhere."""
    return "".join(map(chr, tokens))


@settings(max_examples=examples(135))
@given(st.text("ab", max_size=24), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.booleans())
def test_nothing_behind_the_first_stop_string_is_shown(full: str, stops: list[str], keep: bool) -> None:
    """The string whose beginning comes first wins among those that are complete when one is."""
    text = AnswerText(letters, stops, keep, frozenset())
    shown = ""
    for i, letter in enumerate(full):
        shown += text.add([ord(letter)], last=i == len(full) - 1)
        assert full.startswith(shown)
        if text.stopped:
            assert shown == expected(full[: i + 1], stops, keep)
            assert text.add([ord("a")], last=True) == ""
            return
        assert not any(stop in full[: i + 1] for stop in stops)
    assert shown == full


@settings(max_examples=examples(135))
@given(
    st.text("ab", min_size=1, max_size=16),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 8),
    st.integers(1, 4),
)
def test_a_stop_string_ends_nothing_within_the_first_tokens(
    full: str, stops: list[str], least: int, size: int
) -> None:
    """It may begin there. `size`: how many tokens come at once."""
    text = AnswerText(letters, stops, False, frozenset(), least)
    shown = ""
    for i in range(0, len(full), size):
        shown += text.add([ord(letter) for letter in full[i : i + size]], last=i + size >= len(full))
    known = next((end for end in range(least + 1, len(full) + 1) if full[:end].endswith(tuple(stops))), None)
    assert text.stopped == (known is not None)
    if known is None:
        assert shown == full
    elif size == 1:
        assert shown == full[: min(known - len(stop) for stop in stops if full[:known].endswith(stop))]


def test_a_hidden_last_token_is_not_shown() -> None:
    text = AnswerText(letters, (), False, frozenset({ord("b")}))
    assert [text.add([ord("b")], False), text.add([ord("a")], False), text.add([ord("b")], True)] == [
        "b",
        "a",
        "",
    ]
