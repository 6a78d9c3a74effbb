"""The names of full blocks (contract C18, C24, C25)."""

import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged.blocks import ROOT, chain, extra_key

tokens = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)


def test_c18_a_name_is_decided_by_parent_tokens_and_extra():
    """C18: digest(parent digest, tokens of the block, extra keys); the same three give the same name."""
    name = chain(ROOT, [1, 2, 3, 4], b"x")
    assert name == chain(ROOT, (1, 2, 3, 4), b"x")
    assert len(name) == 32
    others = [
        chain(name, [1, 2, 3, 4], b"x"),
        chain(ROOT, [1, 2, 3, 5], b"x"),
        chain(ROOT, [2, 1, 3, 4], b"x"),
        chain(ROOT, [1, 2, 3], b"x"),
        chain(ROOT, [1, 2, 3, 4], b"y"),
        chain(ROOT, [1, 2, 3, 4]),
    ]
    assert len({name, *others}) == 7


@settings(max_examples=examples(30))
@given(tokens, st.binary(max_size=24), tokens, st.binary(max_size=24))
def test_c24_no_choice_of_tokens_imitates_another_extra(one, extra, other, other_extra):
    """C24, C25: names are equal only if tokens and extras are."""
    assert (chain(ROOT, one, extra) == chain(ROOT, other, other_extra)) == (
        (one, extra) == (other, other_extra)
    )


def test_c24_bytes_that_look_like_tokens_differ_from_tokens():
    """C24: the extra is keyed in by its length."""
    seven = (7).to_bytes(8, "little")
    assert len({chain(ROOT, [7, 7]), chain(ROOT, [7], seven), chain(ROOT, [], seven + seven)}) == 3


@settings(max_examples=examples(30))
@given(st.lists(plain, max_size=3), st.lists(plain, max_size=3))
def test_c24_extra_keys_are_equal_only_for_equal_parts(one, other):
    """C24: adapter, weight version and salt cannot be mistaken for each other."""
    assert (extra_key(*one) == extra_key(*other)) == (repr(one) == repr(other))


def test_c24_parts_differ_by_place_and_type():
    """C24: ("ab", "c") is not ("a", "bc"), and "1" is neither 1 nor b"1" nor True."""
    keys = [
        extra_key("ab", "c"),
        extra_key("a", "bc"),
        extra_key("abc"),
        extra_key(),
        extra_key(None),
        extra_key(""),
    ]
    keys += [extra_key(1), extra_key("1"), extra_key(b"1"), extra_key(True), extra_key((1,)), extra_key(1.0)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "part", [object(), [1], {"rank": 8}, ("lora", object())], ids=["object", "list", "dict", "inside a tuple"]
)
def test_c24_a_part_that_does_not_say_all_it_is_is_refused(part):
    """C24, never a stale hit: a representation may be abridged, or an address that another object gets
    later.
    """
    with pytest.raises(TypeError, match="hand over its content as bytes"):
        extra_key("salt", part)
