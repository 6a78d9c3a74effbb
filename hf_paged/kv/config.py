"""The user's choices for the cache: checked once, passed down frozen."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..blocks.hashing import check_salt
from ..blocks.options import check_flag, check_int, check_number
from ..blocks.pool import check_block_size

KERNELS = ("auto", "triton", "native", "torch")
VERIFY = (None, "tokens", "bytes")
STATE_DTYPES = (None, "bfloat16")
DROP_ENDED = ("auto", "off")
SHARED_READS = ("auto", "off", "always")


@dataclass(frozen=True)
class CacheConfig:
    """The options of `cache_config={...}` and of `PagedCache(model, ...)`.

    block_size: tokens in a block, a power of two from 1 to 256.
    num_blocks: blocks of every layer group, fixed. Without it the pool is sized by the call's need and grows.
    memory_fraction: instead of num_blocks, the share of the device's free memory that the pools get, fixed.
    state_slots: slots for recurrent states, fixed. A row of a step takes two. Without it their number grows.
    state_snapshots: with prefix_caching, slots beyond those for snapshots of states, from which later calls
        go on: 0 for none. None keeps some in slots that no row needs, and 16 for each row where they grow.
    state_every: with prefix_caching, tokens of a prompt between two snapshots.
    state_dtype: "bfloat16" keeps float32 states in that type, rounded after each step, in half the memory.
        They are computed in float32 either way. None keeps them as transformers does.
    kernels: what reads the pages: "torch"; "triton"; "native", the C++ op of CPUs, built if it is missing
        (both are an error where they cannot run); or "auto": Triton in captured steps where it can run, the
        C++ op where it is built, else torch.
    graphs: whether decoding steps are captured in CUDA graphs and replayed; a CPU has none.
    prefix_caching: whether a prompt may begin with blocks of earlier calls, and later calls with blocks of
        this one.
    salt: calls share blocks only with calls of the same salt: one salt per tenant keeps them apart.
    shared_reads: "auto" reads blocks that several rows of a step have in common once for all of them, where
        that saves more than it costs (captured steps with Triton's kernels, and the C++ op of CPUs); "always"
        from one common block on, for tests; "off" never.
    verify: "tokens" compares a prompt's tokens with those of every block found by its hash. "bytes" also
        takes a checksum of the keys and values in each full block, and compares it when the block is shared,
        copied, swapped or evicted.
    keep_pools: whether the pools, with the steps captured over them, stay when the model trains between
        calls. None keeps them where they fit beside what training was seen to take.
    drop_ended: "auto" takes rows that have ended out of the steps of a call, where nothing looks at more of
        them than their tokens. "off" computes all rows until the last one ends.

    return_routing: whether the experts of each token are kept beside its keys and values, and the call's
        answer has them as `routing`.

    prefix_caching, salt, state_every, verify, keep_pools and drop_ended describe how a call uses a pool, not
    the pool: configs that differ only there share one.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float | None = None
    state_slots: int | None = field(default=None, kw_only=True)
    state_snapshots: int | None = field(default=None, kw_only=True)
    state_every: int = field(default=512, compare=False, kw_only=True)
    state_dtype: str | None = field(default=None, kw_only=True)
    kernels: str = "auto"
    graphs: bool = True
    shared_reads: str = field(default="auto", kw_only=True)
    prefix_caching: bool = field(default=False, compare=False)
    salt: str = field(default="", compare=False)
    verify: str | None = field(default=None, compare=False)
    keep_pools: bool | None = field(default=None, compare=False)
    drop_ended: str = field(default="auto", compare=False, kw_only=True)
    return_routing: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        if self.kernels not in KERNELS:
            raise ValueError(f"kernels={self.kernels!r} is not one of {KERNELS}")
        check_flag("graphs", self.graphs)
        check_flag("prefix_caching", self.prefix_caching)
        check_flag("return_routing", self.return_routing)
        check_keep_pools(self.keep_pools)
        check_salt(self.salt)
        check_verify(self.verify)
        if self.shared_reads not in SHARED_READS:
            raise ValueError(
                f'shared_reads={self.shared_reads!r} is not one of {SHARED_READS}; "off" has every row read '
                "its own blocks"
            )
        if self.drop_ended not in DROP_ENDED:
            raise ValueError(
                f'drop_ended={self.drop_ended!r} is not one of {DROP_ENDED}; "off" computes rows that have '
                "ended until the last one ends"
            )
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(
                f"state_dtype={self.state_dtype!r} is not one of {STATE_DTYPES}; None keeps recurrent states "
                "in the type that transformers gives them"
            )
        if self.num_blocks is not None and self.memory_fraction is not None:
            raise ValueError(
                f"num_blocks={self.num_blocks} and memory_fraction={self.memory_fraction} both size the "
                "pool; give one of them"
            )
        for name in ("num_blocks", "state_slots"):
            size = getattr(self, name)
            if size is None:
                continue
            check_int(name, size)
            if size < 1:
                raise ValueError(f"{name}={size} is not a pool; give 1 or more, or leave it out")
        check_int("state_every", self.state_every)
        if self.state_every < 1:
            raise ValueError(f"state_every={self.state_every} is no number of tokens; give 1 or more")
        if self.state_snapshots is not None:
            check_int("state_snapshots", self.state_snapshots)
            if self.state_snapshots < 0:
                raise ValueError(
                    f"state_snapshots={self.state_snapshots} is no number of slots; give 0 or more"
                )
        if self.memory_fraction is not None:
            check_number("memory_fraction", self.memory_fraction)
            if not 0 < self.memory_fraction <= 1:
                raise ValueError(f"memory_fraction={self.memory_fraction} is not in (0, 1] of free memory")

    @property
    def slots(self) -> int | None:
        """The slots of recurrent states, those for snapshots among them; None if their number grows."""
        return None if self.state_slots is None else self.state_slots + (self.state_snapshots or 0)

    @property
    def fixed(self) -> bool:
        """True if the pool keeps its size whatever a call needs."""
        return self.num_blocks is not None or self.memory_fraction is not None

    @classmethod
    def of(cls, options: object) -> CacheConfig:
        """Read `cache_config` as a user gave it: nothing, a mapping or a CacheConfig."""
        if options is None:
            return cls()
        if isinstance(options, cls):
            return options
        if not isinstance(options, Mapping):
            raise TypeError(f"cache_config must be a dict, got {type(options).__name__}")
        known = [field.name for field in fields(cls)]
        for key in options:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"unknown option {key!r} in cache_config, expected one of {known}{hint}")
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        """As a generation config saves it."""
        return asdict(self)


def check_verify(value: object) -> None:
    """Raise unless this is a value of verify."""
    if value not in VERIFY:
        raise ValueError(f"verify={value!r} is not one of {VERIFY}")


def check_keep_pools(value: object) -> None:
    """Raise unless this is a value of keep_pools."""
    if not isinstance(value, bool) and value is not None:
        raise TypeError(f"keep_pools must be True, False or None (where they fit), got {value!r}")
