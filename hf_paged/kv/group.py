"""The pools of one model: for each kind of layer a block pool, and the stores that its blocks lie in."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from ..blocks import BlockPool, ColumnFillers, Copy, LayerKind, OutOfBlocks, SealedBlocks
from .budget import free_bytes, require_room_for_books
from .checksums import Checksums
from .config import CacheConfig
from .forks import fork_safe_lock
from .host import HostBlocks
from .layout import Layout, StateLayout
from .ops_torch import Ops
from .state_store import StateStore
from .store import Store
from .training import TrainingMemory

logger = logging.getLogger("hf_paged")

ROOM_FOR = 16
"""A pool that keeps prefixes is sized for so many calls like its first one."""
AFFORDABLE = 0.5
"""The share of the free memory that a pool takes ahead of need; beyond it, it grows with the tokens."""
MOST_AHEAD = 0.7
"""The same for a call that needs no more: a pool of more than half has no room to move later."""


class Holder(Protocol):
    """Holds blocks or pools and can give them back: the rows of a cache, the pools of an engine."""

    def free(self) -> None: ...


class Observer(Protocol):
    """Something that keeps the addresses of stores."""

    def drop(self, group: LayerGroup) -> None:
        """The stores of a group move, or go."""


class Arithmetic(NamedTuple):
    """Where and in what numbers a model computes. Caches from before and after a cast have pools apart."""

    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None

    @classmethod
    def of(cls, model: Any, device: torch.device) -> Arithmetic:
        """That of a model which computes on `device`, in this thread."""
        rounds = torch.is_autocast_enabled(device.type)
        return cls(model.dtype, device, torch.get_autocast_dtype(device.type) if rounds else None)


AnyLayout = Any
"""A Layout, or a StateLayout where layers keep recurrent states."""
AnyStore = Any
"""A Store or a StateStore."""
GroupKey = tuple[LayerKind, CacheConfig, object | None]  # the last one is the owner, or an `Arithmetic`


def option_of(kind: LayerKind) -> str:
    """The option that fixes the size of a pool of that kind."""
    return "num_blocks" if kind.fills else "state_slots"


class LayerGroup:
    """The layers of one kind: one pool of block ids, and a store per layout they come in."""

    def __init__(self, memory: Memory, key: GroupKey, layers: int, share: float) -> None:
        self.memory = memory
        self.key = key
        self.kind = key[0]
        self.config = config = key[1]
        self.share = share
        size = self.kind.block_size(config.block_size)
        self.fixed_blocks = config.num_blocks if self.kind.fills else config.slots
        """The size of a pool that does not grow."""
        self.pool = BlockPool(require_room_for_books(self.fixed_blocks or 0, option_of(self.kind)), size)
        self._expected_layers = layers
        self._place: dict[Hashable, tuple[AnyLayout, int]] = {}
        self._count: Counter[AnyLayout] = Counter()
        self.stores: dict[AnyLayout, AnyStore] = {}
        """The current stores, by layout."""
        self._found: dict[Hashable, tuple[AnyStore, int]] = {}
        """Answers of `store`, until a store is made or freed, or a layer's place changes."""
        self.devices: frozenset[torch.device] = frozenset()
        """The devices of the stores."""
        self.host: HostBlocks | None = None
        """The blocks in the host's memory, if blocks are swapped."""
        self.reserved: int | None = None
        """The first blocks of the pool, which have memory; None if all have."""
        self.tokens_behind: dict[int, int] = {}
        """Where blocks never fill: the tokens behind the state in each slot."""
        self.times_given_back = 0
        self.on_ranks = False
        """True if only rank 0 of several knows what is cached there."""
        self.checksums: Checksums | None = None
        """The checksums of its blocks, if their bytes are verified."""
        self.kept: bool | None = None
        """True if it stays where it is when the model trains; None if it does where it fits beside that."""

    # ---- layers and their stores

    def look_at(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Note the layout of layer number `layer` from its tensors in a step; it rarely changes."""
        known = self._place.get(layer)
        if known is None or not self.pool.held or not known[0].describes(keys, values):
            self.place(layer, Layout.of(keys, values))

    def place(self, layer: Hashable, layout: AnyLayout) -> None:
        """Note the layout of layer number `layer`, before its first token or when it has changed. Recurrent
        layers have a number for each of their states.
        """
        known = self._place.get(layer)
        if known is not None and known[0] == layout and (self.pool.held or self.pool.cached):
            return
        if known is not None and self.pool.held:
            raise ValueError(
                f"layer {layer} holds keys and values like {known[0]} and cannot take {layout}; drop the "
                "caches you keep"
            )
        if known is not None:
            # No block is held, so the layout may change.
            if known[0] != layout:
                self.give_back()
            self._place.clear()
            self._count.clear()
        self._place[layer] = (layout, self._count[layout])
        self._count[layout] += 1
        self._found.clear()

    def look_anew(self) -> None:
        """Forget the layouts of all layers, which may change from now on; only while no block is held."""
        if self.pool.held:
            raise ValueError(f"{self.pool.held} blocks are held; the layout of their layers cannot change")
        self.give_back()
        self._place.clear()
        self._count.clear()

    def layout(self, layer: Hashable) -> AnyLayout | None:
        """The layout of layer number `layer`; None before its first token."""
        known = self._place.get(layer)
        return None if known is None else known[0]

    def store(self, layer: Hashable) -> tuple[AnyStore, int]:
        """The store that layer number `layer` lives in, allocated when first needed, and its place there."""
        found = self._found.get(layer)
        if found is None:
            layout, index = self._place[layer]
            store = self.stores.get(layout)
            if store is None or index >= store.layers:
                store = self._make_store(layout, store)
            found = self._found[layer] = store, index
        return found

    def _make_store(self, layout: AnyLayout, old: AnyStore | None) -> AnyStore:
        # The first layer speaks for all until others show another layout.
        speaks = len(self._count) == 1 or not self.kind.fills
        layers = max(self._count[layout], self._expected_layers if speaks else 0)
        if old is not None:
            layers = max(layers, min(2 * old.layers, self._expected_layers))
        try:
            blocks = self.pool.total if self.reserved is None else self.reserved
            store = self._open(layout, layers, blocks)
        except (MemoryError, RuntimeError) as error:
            raise self._translate(error) from error
        if old is not None:
            store.take_layers(old)
            self.memory.moved(self)
        self.stores[layout] = store
        self._note_stores()
        if self.pool.sealed is not None:
            self.pool.sealed.clear()  # its layers have no checksums
        return store

    def _open(self, layout: AnyLayout, layers: int, blocks: int) -> AnyStore:
        if isinstance(layout, StateLayout):
            return StateStore(layout, layers, blocks, self.config.kernels)
        return Store(layout, layers, blocks, self.pool.block_size, self.config.kernels)

    def _note_stores(self) -> None:
        self._found.clear()
        self.devices = frozenset([layout.device for layout in self.stores])

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group, as far as they are known."""
        size = self.pool.block_size
        if not self.kind.fills:
            layers = self._expected_layers
            bytes_of = {each: each.block_bytes(size) for each in self._count}
            whole: int = sum(bytes_of[each] * max(layers, count) for each, count in self._count.items())
            return whole
        unseen = max(0, self._expected_layers - sum(self._count.values()))
        known: int = sum(layout.block_bytes(size) * count for layout, count in self._count.items())
        return known + unseen * next((layout.block_bytes(size) for layout in self._count), 0)

    @property
    def layouts(self) -> dict[AnyLayout, int]:
        """The known layouts of the layers, and how many layers have each."""
        return dict(self._count)

    @property
    def device(self) -> torch.device:
        """Where the stores lie, if that is one device."""
        found: torch.device = next(iter(self.stores)).device
        return found

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the stores."""
        return [data for store in self.stores.values() for data in store.tensors]

    @property
    def captured_ops(self) -> Ops:
        """The ops of captured steps, the same for all layers."""
        ops: Ops = next(iter(self.stores.values())).captured
        return ops

    @property
    def bytes(self) -> int:
        return sum(store.bytes for store in self.stores.values())

    def copy(self, copies: list[Copy]) -> None:
        """Carry out copies on write in every store."""
        for source, target in copies if not self.kind.fills else ():
            self.tokens_behind[target] = self.tokens_behind.get(source, 0)
        with self.copying(copies):
            for store in self.stores.values():
                store.copy(copies)

    def copy_pairs(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Carry out the copies of a captured step in every store."""
        for layout, store in self.stores.items():
            store.copy_pairs(sources.to(layout.device), targets.to(layout.device))

    # ---- checks of bytes

    def verify_bytes(self, wanted: bool, by_call: bool = False) -> None:
        """Verify the bytes of blocks from now on, or, once no block is held, no more. by_call: whether only
        the end of a call raises.
        """
        if wanted and self.checksums is None:
            self.checksums = Checksums(self, by_call)
            self.pool.sealed = SealedBlocks()
        elif not wanted and not self.pool.held:
            self.checksums = self.pool.sealed = None

    def check_bytes(self) -> None:
        """Before the next write: compare the blocks that are due, and take the checksums of full ones."""
        if self.checksums is not None:
            self.checksums.compare(self.checksums.sealed.take_due())
            self.checksums.take(self.checksums.sealed.take_fresh())

    def copying(self, copies: Sequence[Copy]) -> AbstractContextManager[None]:
        """Within, blocks are copied in every store."""
        return nullcontext() if self.checksums is None else self.checksums.copying(copies)

    def layer_numbers(self, layout: AnyLayout) -> list[int]:
        """The numbers of the layers in the store of a layout, by their places there."""
        numbers = list(range(self.stores[layout].layers))
        for layer, (own, place) in self._place.items():
            layer = layer[0] if isinstance(layer, tuple) else layer
            if own == layout and isinstance(layer, int):
                numbers[place] = layer
        return numbers

    @property
    def title(self) -> str:
        """The kind of its layers, for errors."""
        return self.kind.name

    def blocks_agree(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """True if the blocks of every pair hold the same in every layer, up to rounding."""
        return all(store.blocks_agree(pairs) for store in self.stores.values())

    # ---- size

    def refuse_hopeless(self, tokens: int, blocks: int) -> None:
        """Raise at once if a fixed pool cannot hold even one sequence of `tokens` tokens, which takes
        `blocks` (C11).
        """
        if self.fixed and not self.pool.total:
            self._grow_to(self._fraction_blocks())
        if self.fixed and blocks > self.pool.total:
            raise OutOfBlocks(
                f"{self._sized} cannot hold one sequence of {tokens} tokens (the {self.kind.name} layers "
                f"need {blocks} blocks of "
                f"{self.pool.block_size}, the pool has {self.pool.total}); raise it or lower max_length"
            )

    @property
    def fixed(self) -> bool:
        """True if the pool keeps its size whatever a call needs."""
        return self.config.fixed if self.kind.fills else self.fixed_blocks is not None

    @property
    def _sized(self) -> str:
        """The option that fixed the pool's size, as the user gave it."""
        config = self.config
        if not self.kind.fills:
            return f"state_slots={config.state_slots}"
        return (
            f"num_blocks={config.num_blocks}"
            if config.num_blocks
            else f"memory_fraction={config.memory_fraction}"
        )

    def make_room(self, need: int, hint: int) -> None:
        """Make `need` blocks available; `hint` is what a call that begins may come to need."""
        pool = self.pool
        fixed = self.fixed
        if not fixed and hint > pool.free:
            self._grow_ahead(need, hint)
        if need <= pool.available:
            return
        self.memory.drain()
        if need > pool.available and fixed:
            gc.collect()
            self.memory.drain()
        if need > pool.available and fixed:
            raise OutOfBlocks(self._explain(need))
        self._grow_to(max(pool.held + need, min(2 * pool.total, self._affordable())))

    def resize(self, total: int) -> None:
        """Set the pool to exactly `total` blocks, for a planner with a fixed number; only while no block is
        held.
        """
        if self.pool.held:
            raise ValueError(f"{self.pool.held} blocks are held; a pool in use cannot be resized")
        self.give_back()
        self.pool = BlockPool(total, self.pool.block_size)
        if self.checksums is not None:
            self.pool.sealed = SealedBlocks()
        self.reserved = None

    @property
    def backed(self) -> int:
        """How many of the first blocks have memory, or get it with the first token."""
        return self.pool.total if self.reserved is None else self.reserved

    def back(self, blocks: int) -> None:
        """Have memory for the first `blocks` blocks in all layers whose layout is known."""
        self.reserve(blocks)
        for layer in self._place:
            self.store(layer)

    def reserve(self, blocks: int) -> None:
        """Allocate memory for the first `blocks` blocks; it at least doubles, within the pool."""
        before = self.reserved
        if before is None or blocks <= before:
            return
        for wanted in (min(self.pool.total, max(blocks, 2 * before)), blocks):
            try:
                self._back(wanted)
                return
            except (MemoryError, RuntimeError) as error:
                if wanted == blocks or not is_out_of_memory(error):
                    raise self._translate(error, wanted) from error

    def _back(self, blocks: int) -> None:
        """Move the stores, with their content, to memory for `blocks` blocks."""
        logger.info(
            "the %s layers have memory for %d of %d blocks now", self.kind.name, blocks, self.pool.total
        )
        self.memory.moved(self)
        for store in self.stores.values():
            if store.blocks < blocks:
                store.grow(blocks)
        self.reserved = blocks

    def _grow_ahead(self, need: int, hint: int) -> None:
        """Grow beyond the need of the moment; while there is memory for it, rather than to give up what is
        cached.
        """
        pool = self.pool
        # A growing pool takes more than it needs: a long generation must not move it every time.
        whole = pool.held + pool.cached + hint
        # One of states has a slot a row from the beginning, so it need not double.
        wanted = max(whole, 2 * pool.total) if self.kind.fills else whole
        affordable = self._affordable()
        alone = not pool.held and not self.config.prefix_caching  # the hint is of this call and no more
        if alone and affordable < whole <= self._affordable(MOST_AHEAD):
            affordable = whole
        if hint > pool.available or wanted <= affordable:
            self._grow_to(max(pool.held + need, min(wanted, affordable)))

    def _grow_to(self, total: int) -> None:
        """Grow the books and the tensors. An idle group lets go of its tensors first; if it must, also of
        what it caches. One in use moves, by way of the host where the device has no room for both.
        """
        pool = self.pool
        if total <= pool.total:
            return
        if pool.total:
            logger.info(
                "the pool of the %s layers grows from %d to %d blocks", self.kind.name, pool.total, total
            )
        if not pool.held and not pool.cached:
            self.give_back()
        self.memory.moved(self)
        try:
            for store in self.stores.values():
                store.grow(total)
        except (MemoryError, RuntimeError) as error:
            if not (pool.held or pool.cached) or not is_out_of_memory(error):
                raise self._translate(error, total) from error
        if any(store.blocks < total for store in self.stores.values()):
            # Behind the error, which holds what was to move.
            if pool.held:
                total = max(total, min(2 * pool.total, self._affordable()))
                self._grow_by_host(total)
            else:
                self.give_back()
        pool.grow(total)

    def _grow_by_host(self, total: int) -> None:
        """Grow where the device has no room for what is held beside its new place."""
        begin = time.perf_counter()
        host = free_bytes(torch.device("cpu"))
        try:
            for store in self.stores.values():
                if store.bytes > host:
                    raise MemoryError(
                        f"{store.bytes} bytes are to wait on the host, and {host} are free there"
                    )
                store.grow_by_host(total)
        except (MemoryError, RuntimeError) as error:
            raise self._translate(error, total) from error
        logger.info("the pools moved by way of the host in %.1f s", time.perf_counter() - begin)

    def _affordable(self, share: float = AFFORDABLE) -> int:
        """The blocks that may be allocated ahead of need."""
        if not self._count:
            return self.pool.total  # nobody knows yet what a block takes
        device = next(iter(self._count)).device
        return self.pool.total + int(share * self.share * free_bytes(device)) // self.block_bytes

    def _fraction_blocks(self) -> int:
        assert self.config.memory_fraction is not None
        device = next(iter(self._count)).device
        blocks = int(self.config.memory_fraction * self.share * free_bytes(device)) // self.block_bytes
        if blocks < 1:
            raise OutOfBlocks(
                f"memory_fraction={self.config.memory_fraction} of the free memory on {device} is less than "
                f"one block of {self.block_bytes} bytes; raise it or lower block_size={self.pool.block_size}"
            )
        return blocks

    def _explain(self, need: int) -> str:
        pool = self.pool
        if not self.kind.fills:
            return (
                f"{need} more slots for recurrent states are needed, {pool.available} of {pool.total} are "
                f"free ({self._sized}); raise it, lower the batch size or num_beams, or drop caches that you "
                "keep"
            )
        return (
            f"{need} more blocks of {pool.block_size} tokens are needed for the {self.kind.name} layers, "
            f"{pool.available} of {pool.total} are free ({self._sized}, {self.block_bytes} bytes a block); "
            "raise it, lower the batch size, num_beams or max_length, or drop caches that you keep"
        )

    def _translate(self, error: Exception, total: int | None = None) -> Exception:
        """Turn an out-of-memory error of the device into the pool's own; any other error stays as it is."""
        if not is_out_of_memory(error):
            return error
        blocks = total or self.pool.total
        others = [group for group in self.memory.groups.values() if group is not self]
        idle = sum(group.bytes for group in others if not group.pool.held)
        return OutOfBlocks(
            f"no memory for a pool of {blocks} {'blocks' if self.kind.fills else 'slots'} of "
            f"{self.block_bytes} bytes for the {self.kind.name} layers ({error}); "
            + (f"hf_paged.release(model) gives back {idle} bytes of its idle pools; " if idle else "")
            + "lower the batch size, num_beams or max_length, drop caches that you keep, or fix a smaller "
            f"{option_of(self.kind)}"
        )

    def give_back(self) -> None:
        """Free the tensors, those on the host too; the books keep their size."""
        self.times_given_back += 1
        self.memory.moved(self)
        self.pool.forget()
        if self.pool.sealed is not None:
            self.pool.sealed.clear()
        self.stores.clear()
        self._note_stores()
        if self.host is not None:
            self.host.give_back()


class Memory:
    """All pools of one model. One lock guards books and tensors: a step of one cache runs at a time."""

    def __init__(self) -> None:
        self.lock = fork_safe_lock()
        self.groups: dict[GroupKey, LayerGroup] = {}
        self.observers: weakref.WeakSet[Observer] = weakref.WeakSet()
        """Objects that keep addresses of stores: captured steps."""
        self.suspect = False
        """True if a call failed since the books were last known to agree with the tables."""
        self._abandoned: deque[Holder] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        """The stream of each device that the last step ran on."""
        self.counts: Counter[str] = Counter()
        """Tokens of prompts that were "computed" and "reused", in calls that may reuse."""
        self.reasons: Counter[str] = Counter()
        """Why prompts were computed whole or not kept for others, and how often."""
        self.rows: Counter[str] = Counter()
        """Rows of the forwards of generate() that were "computed", and that were "left_out"."""
        self.rows_stay: str | None = None
        """Why ended rows stayed in the steps of the last call; None if they could leave."""
        self.paths: list[str] = []
        """How attention read each layer in the last call."""
        self.row_fillers = ColumnFillers()
        """The fillers of columns in generate(): each is given the places of all rows of the call."""
        self.training = TrainingMemory()
        """Memory of training beside the pools."""
        self._told_training = False
        """True once the log says why pools make way for training."""

    def group(
        self, kind: LayerKind, config: CacheConfig, layers: int, share: float, owner: object | None = None
    ) -> LayerGroup:
        """The group of `kind` under `config`: other options mean another pool, so no call changes the options
        of a pool in use. An owner's groups are shared with no other cache; an `Arithmetic` is all caches'
        that compute so.
        """
        key = kind, config, owner
        with self.lock:
            self.drain()
            for other in self.groups.values():
                used = other.pool.held or other.pool.cached or other.on_ranks
                if isinstance(owner, Arithmetic) and isinstance(other.key[2], Arithmetic):
                    # What is cached there was computed before a cast: nobody finds it any more.
                    used = other.pool.held or (used and other.key[2] == owner)
                if other.kind == kind and other.key != key and not used:
                    other.give_back()
            if key not in self.groups:
                self.groups[key] = LayerGroup(self, key, layers, share)
            return self.groups[key]

    def drop(self, group: LayerGroup) -> None:
        """Give a group back and forget it. Twice is once."""
        group.give_back()
        self.groups.pop(group.key, None)

    def moved(self, group: LayerGroup) -> None:
        """The stores of a group move, or go."""
        for observer in list(self.observers):
            observer.drop(group)

    def queue(self) -> None:
        """Let this step wait, on the device, for what another stream was given to do with the pools."""
        for group in self.groups.values():
            for device in group.devices:
                if device.type != "cuda":
                    continue
                stream = torch.cuda.current_stream(device)
                last = self._streams.get(device)
                if last is not None and last != stream:
                    stream.wait_stream(last)
                self._streams[device] = stream

    def abandon(self, holder: Holder) -> None:
        """Note the holdings of a cache that is gone.

        Finalizers call it, in any thread and at any point: it only notes.
        """
        self._abandoned.append(holder)

    def let_go(self) -> None:
        """The model is gone: free the pools that no cache has blocks of. They and their memory know each
        other, and only a collection would.

        A finalizer calls it, in any thread and at any point: it waits for no lock, and changes no books that
        are being changed.
        """
        if not self.lock.acquire(blocking=False):
            return
        try:
            if not self.suspect:
                self.drain()
                for group in [each for each in self.groups.values() if not each.pool.held]:
                    self.drop(group)
        finally:
            self.lock.release()

    def drain(self) -> None:
        """Free what finalizers have noted. If something broke into a change of the books, make them whole
        first.
        """
        with self.lock:
            if self.suspect:
                for group in self.groups.values():
                    group.pool.recover()
                self.suspect = False
            while self._abandoned:
                self.suspect = True
                self._abandoned[0].free()
                self._abandoned.popleft()
                self.suspect = False

    def forget(self) -> None:
        """Drop every hash: no prefix is found again, cached blocks become free, caches in use continue."""
        with self.lock:
            self.drain()
            self.suspect = True
            for group in self.groups.values():
                group.pool.forget()
            self.suspect = False

    @property
    def held(self) -> int:
        """Blocks that caches hold now."""
        self.drain()
        return sum(group.pool.held for group in self.groups.values())

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups.values())

    def release(self) -> int:
        """Give back the tensors of every idle group and answer with the number of their bytes."""
        with self.lock:
            self.drain()
            idle = [group for group in self.groups.values() if not group.pool.held]
            freed = sum(group.bytes for group in idle)
            self.suspect = True
            for group in idle:
                group.give_back()
            self.suspect = False
            return freed

    def make_way(self) -> None:
        """Training begins: idle groups give back their tensors, unless they were asked to stay or fit beside
        it. What they have cached is forgotten, for the weights are about to change.
        """
        with self.lock:
            self.drain()
            idle = [group for group in self.groups.values() if group.stores and not group.pool.held]
            devices = frozenset().union(*(group.devices for group in self.groups.values()))
            bytes_of: Counter[torch.device] = Counter()
            for store in (store for group in idle if group.kept is None for store in group.stores.values()):
                bytes_of[store.layout.device] += store.bytes
            reason = self.training.why_no_room(bytes_of)
            if reason is not None and not self._told_training:
                self._told_training = True
                logger.warning(
                    "the pools do not stay while the model trains: %s; keep_pools=True keeps them, with the "
                    "captured steps",
                    reason,
                )
            self.suspect = True
            for group in idle:
                if group.kept is False or (group.kept is None and reason is not None):
                    group.give_back()
                else:
                    group.pool.forget()
            self.suspect = False
            self.training.begin(devices)

    def check(self) -> None:
        """Recount the books of every group."""
        with self.lock:
            self.drain()
            for group in self.groups.values():
                group.pool.check()
                if group.host is not None:
                    group.host.pool.check()


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation failed for want of memory, on whatever device."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
