"""The case of capabilities beside ranks: the pairs of the matrix that test_together.py leaves to it."""

from __future__ import annotations

import pytest
from capabilities import (
    FAMILIES,
    PAIRS,
    UNTRIED,
    Pair,
    has_of,
    key_of,
    options_of,
    refusal_of,
    refused,
    requests_of,
    require_right,
)
from common_reads import read_common_blocks_once
from rank_support import led, loaded

from hf_paged.engine import Engine


def capabilities_together(rank: int) -> None:
    """Each on two ranks has the tokens of a request alone in one process, or is refused by name."""
    for pair in PAIRS:
        if any(each.ranks for each in pair) and key_of(pair) not in UNTRIED:
            on_ranks(rank, pair)


def on_ranks(rank: int, pair: Pair) -> None:
    """One pair, where an error must not end the engine's block: it would end the other ranks."""
    model = loaded(FAMILIES[has_of(pair)])
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    options, refusal = options_of(pair), refused(refusal_of(pair))
    if options.get("batch_invariant"):
        with refusal:
            Engine(model, **options)
        return

    def act(engine: Engine) -> None:
        with refusal:
            require_right(engine, pair, requests_of(pair, few=True))

    with pytest.MonkeyPatch.context() as patch:
        wrong = read_common_blocks_once(patch, with_adapters=False) if "shared_reads" in options else []
        led(rank, model, act, **options)
        assert not wrong
