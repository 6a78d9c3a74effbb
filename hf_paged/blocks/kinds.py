"""Kinds of layers: what a table of theirs holds as its sequence grows, keeps, and gives back."""

from __future__ import annotations

from typing import Any, ClassVar

from .pool import NEVER_FULL
from .table import BlockTable


class LayerKind:
    """Layers that hold the same tokens, so that one table serves them all. Equal kinds are one object.

    Whoever lays out, plans or looks up asks the kind. Only kernels and masks take its `window` as a number.
    """

    __slots__ = ("window",)
    name: ClassVar[str]
    grows: ClassVar[bool] = True
    """Its tables take a sequence's own tokens; others hold as many as they do in the first step."""
    releases: ClassVar[bool] = False
    """Its tables give back blocks that no later token attends to."""
    fills: ClassVar[bool] = True
    """Its blocks become full, so a table takes more of them as it grows. Otherwise a table has one block,
    which holds what all its tokens have come to: forks write in copies, and a prefix is found by its number
    of tokens.
    """
    reads_all: ClassVar[bool] = False
    """Every token attends to all before it: rows that begin with the same blocks read the same."""
    window: int | None

    def __new__(cls, window: int | None = None) -> LayerKind:
        made = _kinds.get((cls, window))
        if made is None:
            made = super().__new__(cls)
            made.window = window
            made = _kinds.setdefault((cls, window), made)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), () if self.window is None else (self.window,)

    def __repr__(self) -> str:
        return type(self).__name__ + ("()" if self.window is None else f"({self.window})")

    def block_size(self, size: int) -> int:
        """The tokens of a block, where the option is `size`."""
        return size if self.fills else NEVER_FULL

    def blocks_for(self, size: int, tokens: int, chunk: int) -> int:
        """The most blocks of `size` that a sequence of `tokens` tokens holds, if it grows by up to `chunk`
        at a time (C10).
        """
        return -(-tokens // size)

    def blocks_of_group(
        self, size: int, width: int, common: int, tokens: int, chunk: int, source: int = 0
    ) -> int:
        """The most blocks of `width` sequences whose first `common` tokens are the same (C11): blocks full of
        those exist once, the rest once for each sequence. source: the tokens that they attend to across.
        """
        shared = common // size
        tails = 1 if tokens == common and self.fills else width  # where none fills, forks take theirs at once
        return shared + tails * (-(-tokens // size) - shared)

    def holds(self, tokens: int, source: int) -> int:
        """The tokens of a table behind `tokens` of its sequence. source: those that it attends to across."""
        return tokens

    def growth(self, count: int, held: int, source: int) -> int:
        """The tokens by which a table that holds `held` grows in a step of `count`. source: those that its
        sequence attends to across.
        """
        return count

    def release(self, table: BlockTable) -> None:
        """Give back the blocks that the next token does not attend to (C10)."""

    def reach(self, position: int, size: int) -> int:
        """The first block that the token at a position attends to."""
        return 0

    def kept(self, tokens: int) -> int:
        """The last of so many tokens that the next one attends to."""
        return tokens

    @property
    def label(self) -> str:
        """Its name: "full", or "window" and its length."""
        return self.name if self.window is None else f"{self.name}{self.window}"

    @property
    def order(self) -> tuple[bool, bool]:
        """Its place in a list of groups: tables that grow with a sequence's tokens come first, and among them
        those whose blocks become full.
        """
        return not self.grows, not self.fills

    @property
    def adds(self) -> bool:
        """True if a table takes more blocks after those of its first tokens."""
        return self.grows and self.fills

    @property
    def linear(self) -> bool:
        """True if what a sequence holds grows with it to its end; else it has its most from early on."""
        return self.adds and not self.releases


class Full(LayerKind):
    """Every token attends to all before it."""

    __slots__ = ()
    name = "full"
    reads_all = True


class Window(LayerKind):
    """Every token attends to the last `window`, itself among them."""

    __slots__ = ()
    name = "window"
    releases = True
    window: int

    def blocks_for(self, size: int, tokens: int, chunk: int) -> int:
        seen = -(-(self.window - 1 + max(1, min(chunk, tokens))) // size)
        return min(super().blocks_for(size, tokens, chunk), seen + 1)

    def blocks_of_group(
        self, size: int, width: int, common: int, tokens: int, chunk: int, source: int = 0
    ) -> int:
        """Every sequence keeps what it sees, and one step's tokens are added."""
        whole = super().blocks_of_group(size, width, common, tokens, chunk)
        if width == 1:
            return min(whole, self.blocks_for(size, tokens, chunk))
        return min(whole, width * (-(-self.window // size) + 2) + -(-min(chunk, tokens) // size))

    def release(self, table: BlockTable) -> None:
        table.release_before(table.length - self.window + 1)

    def reach(self, position: int, size: int) -> int:
        return max(0, position - self.window + 1) // size

    def kept(self, tokens: int) -> int:
        return min(tokens, self.window - 1)


class Cross(LayerKind):
    """Every token attends to the output of its request's encoder, or to its pictures: to all of it from the
    first step on, or to nothing.
    """

    __slots__ = ()
    name = "cross"
    grows = False

    def blocks_of_group(
        self, size: int, width: int, common: int, tokens: int, chunk: int, source: int = 0
    ) -> int:
        """All sequences attend to the same."""
        return -(-source // size)

    def holds(self, tokens: int, source: int) -> int:
        return source if tokens else 0

    def growth(self, count: int, held: int, source: int) -> int:
        return source - held


class State(LayerKind):
    """Every token updates what all before it have come to: one block for a sequence of any length."""

    __slots__ = ()
    name = "state"
    fills = False


_kinds: dict[tuple[type[LayerKind], int | None], LayerKind] = {}
