"""The name of a full block: a digest over everything that decides its keys and values."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 32
ROOT = bytes(DIGEST_BYTES)
"""The parent of a sequence's first block."""
NO_EXTRA = bytes(8)
"""The length of extras that are not there."""


def chain(parent: bytes, tokens: Sequence[int], extra: bytes = b"") -> bytes:
    """The hash of a block that holds `tokens` after the block with the hash `parent`.

    `extra` carries what changes K and V for the same tokens (adapter, weights, salt: contract C24). It is
    hashed with its length, so no choice of tokens can imitate another choice of extras.
    """
    key = parent + len(extra).to_bytes(8, "little") + extra if extra else parent + NO_EXTRA
    return blake2b(key + array("q", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


def parent_key(parent: bytes, extra: bytes = b"") -> bytes:
    """The key of all blocks that follow the block with the hash `parent` under the same extras."""
    return parent + extra


def check_salt(salt: object) -> str:
    """A salt of blocks' names, as generate() and the engine take it."""
    if not isinstance(salt, str):
        raise TypeError(f"salt must be a str, got {salt!r}; requests of equal salts share blocks")
    return salt


def extra_key(*parts: object) -> bytes:
    """Join extras into one key. The parts stay distinct: ("ab", "c") is not ("a", "bc").

    Only plain values have a complete representation: a tensor's is abridged, and an object's may be an
    address that is reused.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        if not _is_plain(part):
            raise TypeError(
                f"an extra key was given a {type(part).__name__}, expected None, bool, int, float, str, "
                "bytes or tuples of them; hand over its content as bytes or a name that is never used twice"
            )
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(type(part).__name__.encode() + b"\0")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _is_plain(part: object) -> bool:
    if isinstance(part, tuple):
        return all(_is_plain(each) for each in part)
    return part is None or isinstance(part, (bool, int, float, str, bytes))
