"""The tokens in the rows of a cache, noted step by step and read once (contract C17)."""

from __future__ import annotations

import random

import torch

from hf_paged.kv import TokenHistory


def test_read_follows_every_change_of_rows() -> None:
    """Against lists that are changed at once: tokens fed, rows that move, columns taken back, in any
    order.
    """
    rng = random.Random(4)
    for _ in range(60):
        history, rows = TokenHistory(), [([], i) for i in range(rng.randint(1, 4))]
        for _ in range(rng.randint(1, 25)):
            what = rng.choice(["feed", "feed", "feed", "select", "crop"])
            if what == "feed":
                new = torch.randint(0, 99, (len(rows), rng.randint(1, 4)))
                history.feed(new)
                rows = [
                    (tokens + more, origin) for (tokens, origin), more in zip(rows, new.tolist(), strict=True)
                ]
            elif what == "select" and history.columns:
                sources = [rng.randrange(len(rows)) for _ in range(rng.randint(1, 5))]
                history.select(sources)
                rows = [rows[source] for source in sources]
            elif what == "crop":
                columns = rng.randint(0, history.columns)
                history.crop(columns)
                rows = [(tokens[: len(tokens) - columns], origin) for tokens, origin in rows]
        assert history.columns == len(rows[0][0])
        if history.columns:
            assert history.read() == [tokens for tokens, _ in rows]
            assert history.origins() == [origin for _, origin in rows]


def test_a_fork_goes_its_own_way() -> None:
    history = TokenHistory()
    history.feed(torch.tensor([[1, 2], [3, 4]]))
    twin = history.fork()
    twin.select([1])
    twin.feed(torch.tensor([[5]]))
    assert (history.read(), history.origins(), history.columns) == ([[1, 2], [3, 4]], [0, 1], 2)
    assert (twin.read(), twin.origins(), twin.columns) == ([[3, 4, 5]], [1], 3)


def test_an_empty_history() -> None:
    history = TokenHistory()
    history.select([0, 0])
    history.crop(0)
    assert (history.read(), history.origins(), history.columns) == ([], [], 0)
    history.feed(torch.tensor([[1, 2]]))
    history.clear()
    assert (history.read(), history.columns) == ([], 0)


def test_more_taken_back_than_was_noted_is_not_forgotten() -> None:
    """Somebody fed columns that were not noted, and took some back: the columns never agree again."""
    history = TokenHistory()
    history.feed(torch.tensor([[1, 2]]))
    history.crop(3)
    history.feed(torch.tensor([[7]]))
    assert history.columns == 0
