"""The user's choices for an engine: checked once, passed down frozen."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, TypedDict, cast

from ...blocks.options import check_flag, check_int, check_number, is_number
from ...kv.config import CacheConfig, check_keep_pools, check_verify
from ...scheduling import ADMISSIONS, POLICIES, Limits

MOST_SEQUENCES = 256
FLAGS = (
    "prefix_caching", "check_hits", "compile", "fuse_projections", "graphs", "batch_invariant",
    "lm_head_fp32",
)  # fmt: skip
"""Options that are True or False."""
NEARLY = 0.85
"""How alike a name must be to that of an option to be taken for a mistake."""
MODELS_OWN = "type, device and ranks are those of the loaded model"
Policy = Literal["fcfs", "priority"]
PreemptionMode = Literal["auto", "recompute", "swap"]
Admission = Literal["watermark", "future"]
Kernels = Literal["auto", "triton", "native", "torch"]
Verify = Literal["tokens", "bytes"]
StateDtype = Literal["bfloat16"]
SharedReadsMode = Literal["auto", "off", "always"]


@dataclass(frozen=True)
class EngineConfig:
    """The options of `Engine(model, ...)`.

    block_size: tokens in a block, a power of two from 1 to 256.
    num_blocks: blocks of every layer group; for models without keys and values there is state_slots.
    state_slots: slots for recurrent states: one for each sequence that runs, each of its beams and samples.
        Default: as many as may run at once, within a share of the memory.
    state_snapshots: slots beyond those for snapshots of states, from which other prompts go on: 0 for none.
        Default: as many as state_slots, within the same share. What runs may take their place.
    state_every: tokens of a prompt between two snapshots. There is one behind every prompt and answer too,
        and where a prompt parts from one that is cached.
    state_dtype: "bfloat16" keeps float32 states in that type, rounded after each step, in half the memory;
        they are computed in float32 either way. None keeps them as transformers does.
    memory_fraction: instead of num_blocks, the share of the device's free memory for the blocks. Without
        either the engine takes what max_batch_sequences of the model's longest length need, within a share of
        the memory.
    max_batch_tokens: the most tokens of one step; longer prompts are computed in chunks.
    max_batch_sequences: the most sequences at once; a request of n samples or beams counts n. Default 256, or
        max_batch_tokens if that is less: a step must hold one token of each.
    watermark: the share of the blocks that new requests leave free for running ones.
    prefix_caching: whether blocks with the same tokens before them are computed once.
    verify: "tokens" compares the tokens of every hit. "bytes" also takes a checksum of the keys and values in
        each full block, compares it when the block is shared, copied, swapped or evicted, and ends the
        requests that hold a block with other bytes.
    check_hits: another name of verify="tokens".
    policy: "fcfs" (first come, first served) or "priority" (the higher first; there is no ageing, so a
        request waits as long as higher ones fill the engine).
    preemption: what happens to the newest request when blocks run out. "swap": its blocks wait in the host's
        memory, if there is room. "recompute": they are freed and computed again later. "auto": what costs
        less, by measured times.
    host_blocks: blocks of every layer group that may wait on the host, allocated at once; 0 for none.
        Of state slots at most as many as the pool has.
        Default: as many as the pool has, within a share of the host's free memory, allocated when they are
        needed.
    admission: "watermark" admits a request that fits now; "future" admits a request that is expected to fit
        to its end, which preempts less often.
    keep_pools: whether the pools, with the steps captured over them, stay when the model trains between
        requests. None keeps them where they fit beside what training was seen to take. Otherwise the first
        training forward takes their memory and the next request allocates them again. Cached blocks are
        dropped either way.
    kernels: "torch", "triton", "native" (the C++ op of CPUs) or "auto": Triton on a CUDA device, on a CPU the
        C++ op if it is built.
    graphs: whether decoding steps are captured in CUDA graphs and replayed.
    shared_reads: "auto" reads blocks that several rows of a step have in common once for all of them, where
        that saves more than it costs (captured steps with Triton's kernels, and the C++ op of CPUs); "always"
        from one common block on, for tests; "off" never.
    run_ahead: whether a step is launched before the last one's tokens have reached the host, except for
        requests whose next token needs the host (beams, processors). None means on CUDA devices.
    rank_timeout: where several processes compute the model (tensor parallel), the seconds after which a step
        that has not ended is given up on all of them, because one of them hangs.
    max_adapters: adapters that the device holds at once; a request whose adapter finds no place waits, and
        those behind it do not.
    max_adapter_forwards: adapters that peft's own modules compute, each in forwards of its own in every
        step, that running requests may have at once; a request for one more waits as for a place.
    cache_shares: numbers by tenant: how the tenants divide the blocks. A tenant without an entry has 1. No
        tenant evicts what another has cached within its share.
    compile: whether the decoder layers of captured steps are compiled by torch.compile, into one code for all
        that are alike. It takes seconds when the first steps are captured, and includes `fuse_projections`. A
        model whose layers cannot be compiled, or whose answers would change, is served without it, and a
        warning gives the reason.
    fuse_projections: whether captured steps multiply with weights that have one input (q, k and v; gate and
        up) at once. For it they are moved next to each other in memory: parameters stay the objects that they
        are, but a state dict or a view that was taken before no longer reaches them.
    batch_invariant: whether a token's logits have the same bits whatever is computed beside it, and the bits
        of a forward in `hf_paged.batch_invariant()`.
    lm_head_fp32: whether the logits of a model in half precision are computed in float32, from the head's
        weight converted in each step. Nothing changes where the head is float32.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float | None = None
    max_batch_tokens: int = 2048
    max_batch_sequences: int | None = None
    watermark: float = 0.01
    prefix_caching: bool = True
    verify: Verify | None = None
    check_hits: bool = False
    policy: Policy = "fcfs"
    preemption: PreemptionMode = "auto"
    admission: Admission = "watermark"
    host_blocks: int | None = None
    keep_pools: bool | None = None
    kernels: Kernels = "auto"
    compile: bool = False
    fuse_projections: bool = False
    graphs: bool = True
    shared_reads: SharedReadsMode = "auto"
    state_slots: int | None = None
    state_snapshots: int | None = None
    state_every: int = 512
    state_dtype: StateDtype | None = None
    run_ahead: bool | None = None
    rank_timeout: float = 300.0
    max_adapters: int = 16
    max_adapter_forwards: int = 4
    cache_shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    batch_invariant: bool = False
    lm_head_fp32: bool = False

    def __post_init__(self) -> None:
        self.pages()
        self.limits()
        if not isinstance(self.policy, str) or self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r} is not one of {sorted(POLICIES)}")
        if self.preemption not in ("auto", "recompute", "swap"):
            raise ValueError(f"preemption={self.preemption!r} is not one of 'auto', 'recompute', 'swap'")
        if not isinstance(self.admission, str) or self.admission not in ADMISSIONS:
            raise ValueError(f"admission={self.admission!r} is not one of {sorted(ADMISSIONS)}")
        self._check_host_blocks()
        for name in FLAGS:
            check_flag(name, getattr(self, name))
        if self.run_ahead is not None:
            check_flag("run_ahead", self.run_ahead)
        check_keep_pools(self.keep_pools)
        check_verify(self.verify)
        check_number("rank_timeout", self.rank_timeout, "a number of seconds")
        if not self.rank_timeout > 0:
            raise ValueError(
                f"rank_timeout={self.rank_timeout} leaves a step no time; give more than 0 seconds"
            )
        self._check_states()
        for name in ("max_adapters", "max_adapter_forwards"):
            value = getattr(self, name)
            check_int(name, value)
            if value < 1:
                raise ValueError(f"{name}={value} is not a number of adapters; give 1 or more")
        self._check_shares()
        if self.compile and not self.graphs:
            raise ValueError(
                "compile=True is for captured steps and graphs=False has none; leave one of them out"
            )

    def _check_states(self) -> None:
        for name, least in (("state_slots", 1), ("state_snapshots", 0), ("state_every", 1)):
            value = getattr(self, name)
            if value is None and name != "state_every":
                continue
            check_int(name, value)
            if value < least:
                raise ValueError(f"{name}={value} is too few; give {least} or more, or leave it out")

    @property
    def snapshots_every(self) -> int:
        """Tokens of a prompt between two snapshots of its states; 0 if there are none."""
        return self.state_every if self.prefix_caching and self.state_snapshots != 0 else 0

    @property
    def common_reads(self) -> SharedReadsMode:
        """How steps read blocks that rows have in common: each its own where sums have one order for all."""
        return "off" if self.batch_invariant else self.shared_reads

    def _check_shares(self) -> None:
        if not isinstance(self.cache_shares, Mapping):
            raise TypeError(f"cache_shares must be a dict of numbers by tenant, got {self.cache_shares!r}")
        for tenant, share in self.cache_shares.items():
            if not isinstance(tenant, str) or not is_number(share):
                raise TypeError(f"cache_shares has {tenant!r}: {share!r}, expected a name and a number")
            if not 0 < share < math.inf:
                raise ValueError(f"cache_shares has {share} for {tenant!r}; give a number above 0")

    def _check_host_blocks(self) -> None:
        blocks = self.host_blocks
        if blocks is None:
            return
        check_int("host_blocks", blocks)
        if blocks < 0:
            raise ValueError(
                f"host_blocks={blocks} is not a number of blocks; give 0 or more, or leave it out"
            )
        if blocks and self.preemption == "recompute":
            raise ValueError(
                f"host_blocks={blocks} and preemption='recompute': nothing would ever be swapped there; "
                "leave one of them out"
            )
        if not blocks and self.preemption == "swap":
            raise ValueError(
                "preemption='swap' needs blocks on the host and host_blocks=0 gives none; leave one of them "
                "out"
            )

    def pages(self) -> CacheConfig:
        """The options of the pools, checked."""
        return CacheConfig(
            self.block_size, self.num_blocks, self.memory_fraction, self.kernels, graphs=False,
            state_dtype=self.state_dtype, shared_reads=self.common_reads,
        )  # fmt: skip

    def limits(self) -> Limits:
        """The budgets of a step, checked."""
        return self._limits

    @cached_property
    def _limits(self) -> Limits:
        for name in ("max_batch_tokens", "max_batch_sequences"):
            value = getattr(self, name)
            if name == "max_batch_sequences" and value is None:
                continue
            check_int(name, value)
            if value < 1:
                raise ValueError(f"{name}={value} leaves a step nothing to compute; give 1 or more")
        check_number("watermark", self.watermark)
        sequences = self.max_batch_sequences
        if sequences is not None and sequences > self.max_batch_tokens:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens} cannot hold one token of each of {sequences} "
                "sequences; raise max_batch_tokens or lower max_batch_sequences"
            )
        return Limits(
            self.max_batch_tokens,
            min(MOST_SEQUENCES, self.max_batch_tokens) if sequences is None else sequences,
            self.watermark,
        )

    @classmethod
    def of(cls, config: object, options: Mapping[str, Any]) -> EngineConfig:
        """The config of `Engine(model, config=..., **options)`: one of the two."""
        if config is None:
            known = [each.name for each in fields(cls)]
            for name in options:
                if name not in known:
                    close = difflib.get_close_matches(name, known, 1)
                    hint = f"did you mean {close[0]!r}?" if close else MODELS_OWN
                    raise ValueError(f"unknown option {name!r} of the engine, which takes {known}; {hint}")
            return cls(**options)
        if not isinstance(config, cls):
            raise TypeError(f"config must be an EngineConfig, got {type(config).__name__}")
        if options:
            raise ValueError(
                f"config and the options {sorted(options)} both configure the engine; give one of them"
            )
        return config


class EngineOptions(TypedDict, total=False):
    """The fields of an EngineConfig as keywords of `Engine(model, ...)`."""

    block_size: int
    num_blocks: int | None
    memory_fraction: float | None
    max_batch_tokens: int
    max_batch_sequences: int | None
    watermark: float
    prefix_caching: bool
    verify: Verify | None
    check_hits: bool
    policy: Policy
    preemption: PreemptionMode
    admission: Admission
    host_blocks: int | None
    keep_pools: bool | None
    kernels: Kernels
    compile: bool
    fuse_projections: bool
    graphs: bool
    shared_reads: SharedReadsMode
    state_slots: int | None
    state_snapshots: int | None
    state_every: int
    state_dtype: StateDtype | None
    run_ahead: bool | None
    rank_timeout: float
    max_adapters: int
    max_adapter_forwards: int
    cache_shares: Mapping[str, float]
    batch_invariant: bool
    lm_head_fp32: bool


def options_among(keywords: dict[str, Any]) -> EngineOptions:
    """Take the engine's options out of from_pretrained()'s keywords; raises for a name that is nearly one."""
    known = list(EngineOptions.__annotations__)
    for name in keywords.keys() - set(known):
        close = difflib.get_close_matches(name, known, 1, NEARLY)
        if close:
            raise ValueError(
                f"{name!r} is not an option of the engine or of from_pretrained(); did you mean {close[0]!r}?"
            )
    return cast(EngineOptions, {name: keywords.pop(name) for name in known if name in keywords})
