"""The matrix of what works together: each pair of capabilities gives the tokens of a request alone, or is refused by
name. support/capabilities.py has the table, of which docs/together.md is made; pairs with ranks are a case of
support/rank_together.py.
"""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import pytest
from capabilities import (
    CAPABILITIES,
    OFF,
    PAIRS,
    REFUSED,
    UNTRIED,
    Asked,
    Pair,
    has_of,
    key_of,
    model_of,
    options_of,
    refusal_of,
    refused,
    requests_of,
    require_right,
    right,
)
from common_reads import read_common_blocks_once
from releases import prefixes_are_ignored

from hf_paged.engine import Engine
from hf_paged.model.state_layers import NUMBERED

ROOT = Path(__file__).parent.parent
IN_ONE_PROCESS = [pair for pair in PAIRS if not any(each.ranks for each in pair)]


@pytest.mark.parametrize("pair", IN_ONE_PROCESS, ids=lambda pair: " + ".join(key_of(pair)))
def test_a_pair(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    if "states" in has_of(pair) and not NUMBERED:
        pytest.skip("before transformers 5.14 recurrent states run on stock's cache")
    if "prefixes" in key_of(pair) and prefixes_are_ignored():
        pytest.skip("stock's generate() computes without the prefix on this release")
    options = options_of(pair)
    shared = "shared_reads" in options
    wrong = []
    if shared:
        wrong = read_common_blocks_once(monkeypatch, with_adapters=any(each.adapter for each in pair))
    with refused(refusal_of(pair)), Engine(model_of(has_of(pair)), **options) as engine:
        require_right(engine, pair, requests_of(pair))
        if shared:
            stats = engine.stats()
            assert (stats["shared_reads"]["tokens_unread"] > 0) == (key_of(pair) not in OFF)
            if key_of(pair) in OFF:
                assert stats["off"]["shared_reads"] == OFF[key_of(pair)]
    assert not wrong


def test_adapters_change_the_answers() -> None:
    """Each of them, or the matrix would show nothing."""
    names = [frozenset({each.name}) for each in CAPABILITIES if each.adapter]
    if prefixes_are_ignored():
        names.remove(frozenset({"prefixes"}))
    found = [tuple(right(frozenset(), Asked(0, each))) for each in (*names, frozenset())]
    assert len(set(found)) == len(found)


def test_the_tables_name_pairs() -> None:
    """Each pair at most once, in the order of the capabilities."""
    named = [*REFUSED, *OFF, *UNTRIED]
    assert len(set(named)) == len(named)
    assert set(named) <= set(itertools.combinations([each.name for each in CAPABILITIES], 2))


def test_the_page_is_made_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = importlib.import_module("together")
    page = (ROOT / "docs" / "together.md").read_text()
    assert page == script.page(), "run scripts/together.py > docs/together.md"
