"""Scores beside cached blocks: found as long as the blocks are, within their bytes."""

from __future__ import annotations

from hf_paged.blocks import BlockPool, PromptScores

ROWS = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def pool_of(*digests: bytes) -> BlockPool:
    pool = BlockPool(4, 2)
    for i, digest in enumerate(digests):
        pool.cache(pool.take(), digest, 2 * i + 2)
    return pool


def test_leading_blocks_with_enough_numbers_are_known() -> None:
    pool = pool_of(b"a", b"b", b"c")
    scores = PromptScores(pool)
    scores.add(b"a", ROWS)
    scores.add(b"b", [row[:1] for row in ROWS])
    scores.add(b"c", ROWS)
    assert scores.known([b"a", b"b", b"c"], 1) == 3
    assert scores.known([b"a", b"b", b"c"], 3) == 1
    assert scores.known([b"b"], 3) == 0
    assert [list(row) for row in scores.rows(b"a")] == ROWS
    scores.add(b"b", ROWS)
    scores.add(b"b", [row[:1] for row in ROWS])  # fewer do not replace more
    assert scores.known([b"a", b"b", b"c"], 3) == 3


def test_scores_cease_with_the_name_of_their_block() -> None:
    pool = pool_of(b"a")
    scores = PromptScores(pool)
    scores.add(b"unknown", ROWS)
    scores.add(b"a", ROWS)
    assert scores.known([b"unknown"], 1) == 0
    pool.drop(0)
    assert scores.known([b"a"], 1) == 1  # cached blocks are found
    pool.uncache(pool.take())
    for _ in range(3):
        pool.take()  # the last one evicts it
    assert scores.known([b"a"], 1) == 0
    pool.cache(1, b"a", 2)
    assert scores.known([b"a"], 1) == 0  # the same name anew
    scores.add(b"a", ROWS)
    assert scores.known([b"a"], 1) == 1
    pool.forget()
    assert scores.known([b"a"], 1) == 0


def test_the_least_recently_used_go_when_bytes_run_out() -> None:
    pool = pool_of(b"a", b"b", b"c")
    scores = PromptScores(pool, most_bytes=2 * 6 * 8)
    scores.add(b"a", ROWS)
    scores.add(b"b", ROWS)
    scores.rows(b"a")
    scores.add(b"c", ROWS)
    assert [scores.known([digest], 1) for digest in (b"a", b"b", b"c")] == [1, 0, 1]
    assert scores.bytes == 96
