"""A key's view of the map: nothing of others but grey blocks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")


from hf_paged import trace
from hf_paged.serve.http.keys import Tenant
from hf_paged.serve.map.map_view import Owner, Owners, Sight, moves
from hf_paged.trace import MapState, Step


def test_a_name_that_came_while_the_holder_was_unknown_is_not_shown() -> None:
    """Another's request came and went between two records, in a block that was one's own."""
    kinds = (trace.Kind("full", None, 4),)
    owners = Owners()
    owners.add(0, Owner("red", "r", ()))
    state = MapState(kinds)
    sight = Sight(Tenant("red", None), owners, state)
    blocks = (trace.Blocks(0, 0, 0, 4),)

    def shown_of(**fields: Any) -> dict[str, Any]:
        step = Step(0, 0.0, blocks=blocks, **{"cached": (((), ()),), **fields})
        some = moves(state, step)
        state.apply(step)
        return sight.step(step, some)

    name = trace.Name(0, 0)
    change = {name: (trace.Change(0, 0, (1, 2)),)}
    assert shown_of(tables=change, names=({1: "own"},))["names"] == ({1: "own"},)
    assert "names" not in shown_of(tables={name: None}, cached=(((1,), ()),))
    assert "names" not in shown_of(names=({1: "other"},))
    assert "names" not in shown_of(names=({2: "another"},))
    assert sight.whole(Step(0, 0.0, blocks=blocks)).get("names") is None
    again = {name: (trace.Change(0, 0, (1,)),)}
    assert shown_of(tables=again, names=({1: "mine"},))["names"] == ({1: "mine"},)
