"""Slots of recurrent states that no row holds or finds have no numbers: a read of one shows."""

from __future__ import annotations

from typing import Any

import pytest

from hf_paged.blocks.pool import FREE
from hf_paged.model.state_layers import StoredStates


def poison_free_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every run begins with NaN in the slots that no row or sequence holds, and no prompt finds."""
    original = StoredStates.begin

    def begin(self: StoredStates, rows: Any = ()) -> None:
        free = [slot for slot, state in enumerate(self.group.pool.states()) if state == FREE]
        for store in self.group.stores.values():
            store.data[:, [slot for slot in free if slot < store.blocks]] = (
                float("nan") if store.data.is_floating_point() else 0
            )
        original(self, rows)

    monkeypatch.setattr(StoredStates, "begin", begin)
