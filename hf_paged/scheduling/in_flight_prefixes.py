"""What running groups are about to compute."""

from __future__ import annotations

from collections import Counter

from .request import SequenceGroup


class InFlightPrefixes(Counter[bytes]):
    """Digests of the blocks that running groups are about to compute: twins wait for them instead of
    computing them too.
    """

    def make(self, group: SequenceGroup, names: list[bytes]) -> None:
        """The group will compute these blocks."""
        group.promised = names
        self.update(names)

    def uncache(self, group: SequenceGroup) -> None:
        """The group has computed its shared prefix, or will not do so: no other group waits
        for it any more.
        """
        for name in group.promised:
            self[name] -= 1
            if not self[name]:
                del self[name]
        group.promised = []
