"""A tokenizer that is made, not loaded."""

from __future__ import annotations

import random
from itertools import product

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BLANK = "Ġ"
"""How byte-level tokenizers write a blank."""


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `size` entries: words of one to four letters, and the same with a blank
    before them, which are one token each.
    """
    chance = random.Random(0)
    pairs = [first + last for first, last in product(LETTERS, LETTERS)]
    longer = [*product(pairs, LETTERS), *chance.sample(list(product(pairs, pairs)), k=size // 2)]
    merges = [
        *((BLANK, letter) for letter in LETTERS),
        *((BLANK + pair[0], pair[1]) for pair in pairs),
        *((pair[0], pair[1]) for pair in pairs),
        *((blank + first, last) for first, last in longer for blank in (BLANK, "")),
    ]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = merges[: size - len(symbols)]
    tokens = [*symbols, *(first + last for first, last in merges)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
