"""The server's decode() is the tokenizer's, without the detour through Python where that changes nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import tokenizer

from hf_paged import demo
from hf_paged.engine.outputs.text import AnswerText
from hf_paged.serve.openai.text import decode_of

TOKENS = st.lists(st.integers(3, 847), min_size=1, max_size=30)


@settings(max_examples=examples(50))
@given(TOKENS, st.booleans())
def test_pieces_join_to_the_text(tokens: list[int], special: bool) -> None:
    decoder = decode_of(tokenizer(), skip_special_tokens=not special)
    text = AnswerText(decoder)
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
