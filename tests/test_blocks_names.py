"""Which block bears which digest (contracts C17, C25)."""

import random

import pytest

from hf_paged.blocks.names import BlockName, BlockNames


class Log:
    """Blocks as a map of them reads their names."""

    def __init__(self) -> None:
        self.renamed: set[int] = set()
        self.evicted: set[int] = set()


def named(number: int, tokens: tuple[int, ...] = (), parent: bytes = b"") -> BlockName:
    return BlockName(number.to_bytes(32, "little"), 4, tokens, parent)


def test_a_name_is_found_from_both_sides():
    names = BlockNames()
    assert names.add(7, named(1, (5, 6))) == 7
    assert 7 in names
    assert names.lookup(named(1).digest) == 7
    assert (names.digest(7), names.covered(7), names.tokens(7)) == (named(1).digest, 4, (5, 6))
    assert names.digests() == {7: named(1).digest}
    assert names.digests([6, 7]) == {6: None, 7: named(1).digest}


def test_a_block_without_a_name_is_not_found():
    names = BlockNames()
    assert 7 not in names
    assert names.lookup(named(1).digest) is None
    assert names.tokens(7) == ()
    names.remove(7)
    names.check()


def test_a_naming_ends_with_the_name():
    """Equal content that is published again is another naming."""
    names = BlockNames()
    digest = named(1).digest
    assert names.naming(digest) is None
    names.add(7, named(1))
    first = names.naming(digest)
    names.add(7, named(1))
    assert names.naming(digest) is first
    names.remove(7)
    names.add(7, named(1))
    assert names.naming(digest) is not first


@pytest.mark.parametrize("change", ["add", "tokens", "remove", "clear"])
def test_logs_get_the_blocks_whose_names_change(change):
    names = BlockNames()
    if change != "add":
        names.add(7, named(1))
    names.logs.append(log := Log())
    if change in ("add", "tokens"):
        names.add(7, named(1, (5, 6)))
    elif change == "remove":
        names.remove(7)
    else:
        names.clear()
    assert log.renamed == {7}
    log.renamed.clear()
    names.remove(8)
    if change == "add":
        names.add(7, named(1))
    assert not log.renamed


def test_names_and_the_partial_index_agree():
    """After every change of a random walk."""
    rng = random.Random(1)
    names = BlockNames()
    for _ in range(500):
        block, number = rng.randrange(20), rng.randrange(30)
        tokens = (number, number + 1) if rng.random() < 0.5 else ()
        act = rng.random()
        if act < 0.6:
            names.add(block, named(number, tokens, b"parent" if tokens else b""))
        elif act < 0.98:
            names.remove(block)
        else:
            names.clear()
        names.check()
        for block, digest in names.digests().items():
            assert names.lookup(digest) == block
            assert not names.tokens(block) or names.partial.best(b"parent", names.tokens(block)) is not None


@pytest.mark.parametrize("fault", ["a name", "the tokens"])
def test_check_finds_names_that_were_tampered_with(fault):
    names = BlockNames()
    names.add(7, named(1, (5, 6), b"parent"))
    names.add(8, named(2))
    if fault == "a name":
        names.of[7], names.of[8] = names.of[8], names.of[7]
    else:
        names.partial.clear()
    with pytest.raises(AssertionError, match="disagree"):
        names.check()
