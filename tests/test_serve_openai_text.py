"""Texts of answers: what is shown, joined, is the whole text up to its first stop string."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from hypothesis import given, settings
from hypothesis import strategies as st
from serving import tokenizer

from hf_paged import demo
from hf_paged.serve.openai.text import AnswerText, decode_of

TOKENS = st.lists(st.integers(3, 847), min_size=1, max_size=30)


def expected(full: str, stops: list[str], keep: bool) -> str:
    found = [(full.find(stop), stop) for stop in stops if stop in full]
    if not found:
        return full
    begin, stop = min(found)
    return full[: begin + len(stop)] if keep else full[:begin]


class Letters:
    """A tokenizer whose tokens are characters, so that a stop string ends anywhere."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, tokens))


@settings(max_examples=300)
@given(st.text("ab", max_size=24), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.booleans())
def test_nothing_behind_the_first_stop_string_is_shown(full: str, stops: list[str], keep: bool) -> None:
    """The string whose beginning comes first wins among those that are complete when one is."""
    text = AnswerText(decode_of(Letters()), stops, keep, frozenset())
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


@settings(max_examples=300)
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
    text = AnswerText(decode_of(Letters()), stops, False, frozenset(), least)
    shown = ""
    for i in range(0, len(full), size):
        shown += text.add([ord(letter) for letter in full[i : i + size]], last=i + size >= len(full))
    known = next((end for end in range(least + 1, len(full) + 1) if full[:end].endswith(tuple(stops))), None)
    assert text.stopped == (known is not None)
    if known is None:
        assert shown == full
    elif size == 1:
        assert shown == full[: min(known - len(stop) for stop in stops if full[:known].endswith(stop))]


@settings(max_examples=100)
@given(TOKENS, st.booleans())
def test_pieces_join_to_the_text(tokens: list[int], special: bool) -> None:
    decoder = decode_of(tokenizer(), skip_special_tokens=not special)
    text = AnswerText(decoder, (), False, frozenset())
    pieces = [text.add([token], i == len(tokens) - 1) for i, token in enumerate(tokens)]
    assert "".join(pieces) == tokenizer().decode(tokens, skip_special_tokens=not special)
    assert text.length == len("".join(pieces))


def test_a_decoder_of_the_tokenizers_own_is_asked() -> None:
    """A subclass that decodes in its own way is not bypassed, nor one that tidies blanks."""

    class Loud(type(tokenizer())):
        def decode(self, token_ids, **options):
            return super().decode(token_ids, **options).upper()

    loud = demo.tokenizer()
    loud.__class__ = Loud
    ids = tokenizer()("The fox", add_special_tokens=False)["input_ids"]
    assert decode_of(tokenizer())(ids) == "The fox"
    assert decode_of(loud)(ids) == "THE FOX"


def test_a_hidden_last_token_is_not_shown() -> None:
    text = AnswerText(decode_of(Letters()), (), False, frozenset({ord("b")}))
    assert [text.add([ord("b")], False), text.add([ord("a")], False), text.add([ord("b")], True)] == [
        "b",
        "a",
        "",
    ]
