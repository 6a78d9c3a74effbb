"""The engine's own pools: one per kind of layer, of a size that stays."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...blocks import BlockTable, Copy, LayerKind, OutOfBlocks
from ...kv import HostBlocks, LayerGroup, Layout, Transfer
from ...kv.budget import Room, free_bytes
from ...kv.checksums import NO_CHECKS, ByteChecks
from ...kv.token_numbers import read_numbers
from ...model.registry import memory_of
from ...model.routing import ROUTING
from ...model.servable import Unservable
from ...model.slots import NO_CONTENT, Slot, slots_of
from ...scheduling import KVCacheGroup, StepPlan, Swaps
from ...scheduling import SequenceGroup as Requests
from ...trace import Kind as TracedKind
from ...trace import Trace
from .block_checks import BlockChecks
from .config import EngineConfig

logger = logging.getLogger("hf_paged")

SHARE_OF_CUDA = 0.8
SHARE_OF_CPU = 0.25
"""The largest share of the free memory that an engine takes by default."""
SEQUENCES_ON_CPU = 64
"""How many sequences of the longest length have blocks on a CPU by default. More run at once where they are
shorter; a CPU computes so many no faster.
"""
MOST_OF_STATES = 0.6
"""The largest share of the memory in which recurrent states lie by default, beside keys and values."""
SPARE_SLOTS = 8
"""Slots beyond those of the sequences that run at once."""
SHARE_AT_FIRST = 1 / 16
"""The share of its blocks that a pool on the host has memory for at first. On a device it has memory for all
of them, because growth would drop captured steps in service."""
SHARE_OF_HOST = 0.2
"""The largest share of the host's free memory in which preempted blocks wait by default."""
LONGEST = 4096
"""How long sequences are taken to become where the model has no limit."""


def _require_in_pools(model: nn.Module, slots: Iterable[Slot]) -> None:
    """Raise if layers keep anything that no pool has."""
    others = {
        type(slot.source).__name__
        for slot in slots
        if not (type(slot.source) in NO_CONTENT if slot.kind is None else slot.paged.complete)
    }
    if others:
        raise Unservable(
            f"{type(model).__name__} has layers that keep more than keys and values "
            f"({', '.join(sorted(others))}); the engine cannot preempt or fork them yet, use generate()"
        )


class Pools:
    """The layer groups of a model as one engine has them, in the order of the scheduler's KV cache groups."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        slots = slots_of(model, cross=False)
        _require_in_pools(model, slots)
        kinds = [kind for slot in slots for kind in slot.kinds]
        has_encoder = getattr(model.config, "is_encoder_decoder", False)
        encoded = [kind for slot in slots_of(model, cross=True) for kind in slot.kinds] if has_encoder else []
        counts = Counter(sorted([*kinds, *encoded], key=attrgetter("order")))
        self.config = config
        self.agree: Callable[[Sequence[int]], list[int]] = list
        """Numbers of blocks as all ranks can have them, where several processes have a part of each."""
        self.routing = False
        """True once a request has asked for the experts of its tokens: those of all tokens are kept then."""
        self.checks = BlockChecks(())
        """The checks of the blocks' bytes, once the pools have their size."""
        self.slots = slots
        """The places of the model's layers."""
        self.encoded = encoded
        """The kinds of the layers that attend to an encoder's output, if it has one."""
        self._model = weakref.ref(model)
        self._dtype = getattr(model, "dtype", None)
        self.memory = memory_of(model)
        pages = config.pages()
        options = replace(pages, num_blocks=None, memory_fraction=None)
        owner = object()
        self.groups: dict[LayerKind, LayerGroup] = {
            kind: self.memory.group(kind, options, count, count / counts.total(), owner)
            for kind, count in counts.items()
        }
        self.own = {kind: group for kind, group in self.groups.items() if kind.grows}
        """The groups whose tables hold a sequence's own tokens, the first ones of all."""
        self.paged = {kind: group for kind, group in self.own.items() if kind.fills}
        """Those of keys and values, the first ones of these."""
        self.never_full = {kind: group for kind, group in self.own.items() if not kind.fills}
        """That of recurrent states, if layers keep any, which comes behind them."""
        for group in self.groups.values():
            group.kept = config.keep_pools
        if config.num_blocks is not None and not self.paged:
            logger.warning(
                "num_blocks=%d is not used: %s keeps no keys and values; state_slots sizes its pool",
                config.num_blocks,
                type(model).__name__,
            )

    def drop_cross(self) -> None:
        """Have no blocks for cross-attention layers: nothing will be stored in them."""
        with self.memory.lock:
            for kind in self.groups.keys() - self.own.keys():
                self.memory.drop(self.groups.pop(kind))

    def add_layers_of(self, twin: nn.Module) -> None:
        """Keep blocks of the layers that a twin has behind the model's own, in all blocks. Raises OutOfBlocks
        if there is no memory for that.
        """
        with self.memory.lock:
            for number, slot in enumerate(slots_of(twin, cross=False)):
                for kind in slot.kinds if number >= len(self.slots) else ():
                    if kind not in self.paged or len(self.paged[kind].layouts) != 1:
                        raise Unservable(
                            "its further layers keep other content than the model's; use generate()"
                        )
                    group = self.paged[kind]
                    if group.layout(number) is None:
                        group.place(number, next(iter(group.layouts)))
                    if group.stores:
                        group.store(number)

    @property
    def kv_groups(self) -> tuple[KVCacheGroup, ...]:
        """The same as the scheduler sees them."""
        return tuple(
            KVCacheGroup(kind, group.pool, None if group.host is None else group.host.pool)
            for kind, group in self.groups.items()
        )

    def fit_trial(self, tokens: int) -> None:
        """Have blocks for a trial of two sequences of `tokens` tokens."""
        with self.memory.lock:
            for group in self.groups.values():
                group.resize(2 * (group.pool.blocks_for(tokens) + 1))

    def settle(self, longest: int | None, longest_source: int | None = None, captures: int = 0) -> None:
        """Size the pools as planned, and let blocks wait on the host."""
        with self.memory.lock:
            totals = self.agree(self.planned(longest, longest_source, captures))
            devices = {group.kind: group.devices for group in self.groups.values()}
            for group in self.groups.values():
                group.give_back()  # what the trial has left
            self._require_room(totals)
            for group, total in zip(self.groups.values(), totals, strict=True):
                group.resize(total)
                if self.config.num_blocks is None and all(
                    device.type == "cpu" for device in devices[group.kind]
                ):
                    group.reserved = max(1, int(SHARE_AT_FIRST * total))
        self.checks = BlockChecks(self.groups.values() if self.config.verify == "bytes" else ())
        if self.config.preemption != "recompute" and self.config.host_blocks != 0:
            self._make_host()

    def planned(
        self, longest: int | None, longest_source: int | None, captures: int = 0, room: Room | None = None
    ) -> list[int]:
        """The blocks of every group by the options, or by the need of the most sequences of the longest
        length, within a share of the memory.

        Called after a trial, which has shown the layers' shapes. longest_source: the most tokens that an
        encoder makes, or that a picture becomes. captures: bytes that captured steps may come to take, which
        no pool is given. room: that of a device where the model is not; else of those where its layers are.
        """
        return [
            self._blocks(kind, (longest if kind.grows else longest_source) or LONGEST, captures, room)
            for kind in self.groups
        ]

    def _require_room(self, totals: Sequence[int]) -> None:
        """Raise if so many blocks of every group are none, or more than there is memory for: books of them
        alone may be too much.
        """
        need: Counter[torch.device] = Counter()
        for group, total in zip(self.groups.values(), totals, strict=True):
            for layout, layers in group.layouts.items():
                need[layout.device] += total * layers * layout.block_bytes(group.pool.block_size)
        given = self._given_sizes()
        for device, wanted in need.items() if given else ():
            if wanted > free_bytes(device):
                gc.collect()  # engines and caches that are no longer referenced
                self.memory.drain()
            if wanted > (free := free_bytes(device)):
                raise OutOfBlocks(
                    f"{' and '.join(given)} take {wanted} bytes on {device}, and {free} are free; lower "
                    f"{'them, or leave them' if given[1:] else 'it, or leave it'} out"
                )
        for group, total in zip(self.groups.values(), totals, strict=True):
            if total < 1:
                raise OutOfBlocks(
                    f"the memory that the engine may take is less than one block of {group.block_bytes} "
                    f"bytes (the {group.kind.name} layers); raise memory_fraction, lower "
                    f"{' or '.join([f'block_size={self.config.block_size}', *given])}, or free some"
                )

    def _given_sizes(self) -> list[str]:
        """The options that fix the size of a pool, and what each asks for."""
        config = self.config
        found = []
        if config.num_blocks is not None and self.paged:
            found.append(f"num_blocks={config.num_blocks} of {config.block_size} tokens")
        for states in self.never_full.values():
            slots = {"state_slots": config.state_slots, "state_snapshots": config.state_snapshots}
            found += [f"{name}={size} of {states.block_bytes} bytes" for name, size in slots.items() if size]
        return found

    def _make_host(self) -> None:
        """Let blocks wait on the host: as many as the options say, now; else as many as are ever held here,
        when they are needed.
        """
        for group in self.groups.values():
            wanted = self.config.host_blocks
            if wanted is not None and not group.kind.fills:
                wanted = min(wanted, group.pool.total)
            free = free_bytes(torch.device("cpu"))
            affordable = int(SHARE_OF_HOST * group.share * free) // group.block_bytes
            if wanted is not None and wanted * group.block_bytes > free:
                raise _no_host(wanted, group)
            most = min(group.pool.total, affordable) if wanted is None else wanted
            group.host = HostBlocks(group, *self.agree([most]))
            if wanted is not None and not group.host.reserve(wanted):
                raise _no_host(wanted, group)
            logger.info(
                "up to %d swapped blocks of the %s layers fit on the host", group.host.most, group.kind.name
            )

    def _blocks(self, kind: LayerKind, longest: int, captures: int, room: Room | None) -> int:
        config, group = self.config, self.groups[kind]
        if kind.fills and config.num_blocks is not None:
            return config.num_blocks
        if room is None:
            device = next(iter(group.devices))
            room = Room(device.type, free_bytes(device))
        share = config.memory_fraction or (SHARE_OF_CUDA if room.type == "cuda" else SHARE_OF_CPU)
        free = int(share * max(0, room.free - captures))
        states = next(iter(self.never_full.values()), None)
        shares = 1.0
        if states is not None:
            slots = self._slots(states, free)
            if not kind.fills:
                return slots
            free = max(0, free - slots * states.block_bytes)
            shares -= states.share
        affordable = int(free * group.share / shares) // group.block_bytes
        if config.memory_fraction is not None:
            return affordable
        sequences = config.limits().sequences
        if room.type == "cpu" and config.max_batch_sequences is None:
            sequences = min(sequences, SEQUENCES_ON_CPU)
        row = kind.blocks_for(group.pool.block_size, longest, config.max_batch_tokens)
        return min(affordable, sequences * (row + 1))

    def _slots(self, states: LayerGroup, free: int) -> int:
        """Slots for the states of all sequences that run at once, and of some that are forked from them; and
        for snapshots.
        """
        config = self.config
        share = MOST_OF_STATES if self.paged else 1
        affordable = int(share * free) // states.block_bytes
        wanted = config.limits().sequences + SPARE_SLOTS
        slots = config.state_slots or min(wanted, affordable)
        if not config.snapshots_every:
            return slots
        snapshots = config.state_snapshots
        return slots + (min(slots, max(0, affordable - slots)) if snapshots is None else snapshots)

    def expect(self, groups: Iterable[Requests]) -> None:
        """While no request runs: reserve memory for what these can come to hold, before they do.

        With prefix caching blocks of requests that have ended stay, so all of them count; else those that run
        at once.
        """
        if all(group.reserved is None for group in self.groups.values()):
            return
        sequences = self.config.limits().sequences
        needs = [group.pool.cached for group in self.groups.values()]
        for each in groups:
            sequences -= 0 if self.config.prefix_caching else len(each.sequences)
            if sequences < 0:
                break
            needs = [need + each.most(i, self.config.max_batch_tokens) for i, need in enumerate(needs)]
        for need, group in zip(needs, self.groups.values(), strict=True):
            with suppress(
                OutOfBlocks
            ):  # it may not be needed, and blocks in use claim no more than they need
                group.reserve(min(need, group.pool.total))

    def back(self, blocks: Sequence[int]) -> None:
        """Have memory for so many first blocks of every kind, before a step needs it."""
        with self.memory.lock:
            for count, group in zip(blocks, self.groups.values(), strict=True):
                group.back(count)

    def prepare(self, plan: StepPlan, checks: ByteChecks = NO_CHECKS) -> None:
        """Before the rows of a plan: have memory for every block that was handed out, check the bytes of
        blocks, swap, and copy.
        """
        for group in self.groups.values():
            if group.reserved is not None and group.pool.top > group.reserved:
                group.reserve(group.pool.top)
        self.checks.carry_out(checks)
        if plan.swaps.out or plan.swaps.back:
            self.swap(plan.swaps)
        if any(plan.copies):
            self.copy(plan.copies)

    def copy(self, copies: tuple[tuple[Copy, ...], ...]) -> None:
        """Carry out the copies on write of a step."""
        for group, pairs in zip(self.groups.values(), copies, strict=True):
            if pairs:
                group.copy(list(pairs))

    # ---- routing

    def require_room_for_routing(self, token_bytes: int) -> None:
        """Raise OutOfBlocks if there is no memory for the routing of all tokens, and none is kept yet."""
        group = next(group for kind, group in self.groups.items() if kind.linear)
        need = group.backed * group.pool.block_size * token_bytes
        pages = 0 if group.stores else group.backed * group.block_bytes  # which come with the first token
        for device in () if self.routing else {layout.device for layout in group.layouts}:
            if need + pages > (free := free_bytes(device)):
                raise OutOfBlocks(
                    f"return_routing=True takes {need} bytes beside {pages} of a pool on {device}, and "
                    f"{free} are free; lower memory_fraction or num_blocks"
                )

    def record_routing(self) -> None:
        """Keep the routing of all tokens from now on. Captured steps do not, and are made anew."""
        if not self.routing:
            with self.memory.lock:
                for group in self.groups.values():
                    self.memory.moved(group)
                self.routing = True

    def routing_of(self, tables: Sequence[BlockTable], tokens: int) -> torch.Tensor:
        """The routing int16 [tokens, layers, k] of the first tokens of a sequence with these tables."""
        kind, table = next(
            (kind, table) for kind, table in zip(self.groups, tables, strict=False) if kind.linear
        )
        return read_numbers(self.groups[kind], ROUTING, table.blocks, tokens)

    # ---- swaps

    @property
    def swaps(self) -> bool:
        """True if blocks may wait on the host."""
        return all(group.host is not None for group in self.groups.values())

    def bytes_of(self, blocks: Sequence[int]) -> int:
        """Bytes of so many blocks of every group."""
        return sum(
            count * group.block_bytes for count, group in zip(blocks, self.groups.values(), strict=True)
        )

    def reserve(self, blocks: Sequence[int]) -> bool:
        """True if the host has room for so many blocks more of every group; memory for them is taken as far
        as there is any.
        """
        return all(
            group.host is not None and group.host.reserve(count)
            for count, group in zip(blocks, self.groups.values(), strict=True)
        )

    def swap(self, swaps: Swaps) -> None:
        """Carry out the swaps of a step: all copies to the host, then all copies back."""
        for group, pairs in zip(self.groups.values(), swaps.out, strict=False):
            if pairs and group.host is not None:
                group.host.out(pairs)
        for group, pairs in zip(self.groups.values(), swaps.back, strict=False):
            if pairs and group.host is not None:
                group.host.back(pairs)

    def transfers(self) -> list[Transfer]:
        """The swaps that are over, measured, each once."""
        return [
            transfer
            for group in self.groups.values()
            if group.host is not None
            for transfer in group.host.transfers()
        ]

    # ---- what is there

    def forget(self) -> None:
        """Drop what is cached: it was computed with other weights, which may be of another dtype now."""
        before = self._dtype
        self._dtype = getattr(self._model(), "dtype", None)
        for group in self.groups.values():
            if self._dtype != before:
                group.look_anew()
            group.pool.forget()

    def free(self) -> None:
        """Give the pools back. Twice is once."""
        with self.memory.lock:
            for group in self.groups.values():
                self.memory.drop(group)

    def described(self, model: str) -> Trace:
        """The header of a trace."""
        kinds = tuple(
            TracedKind(kind.label, kind.window, group.pool.total) for kind, group in self.groups.items()
        )
        limits = self.config.limits()
        host = tuple(0 if group.host is None else group.host.most for group in self.groups.values())
        return Trace(
            model,
            self.config.block_size,
            kinds,
            limits.tokens,
            limits.sequences,
            (),
            host=host if any(host) else (),
        )

    @property
    def layouts(self) -> set[Layout]:
        """The layouts of all layers of keys and values, as far as they are known."""
        groups = [group for group in self.groups.values() if group.kind.fills]
        found = {layout for group in groups for layout in group.layouts}
        return {layout for layout in found if isinstance(layout, Layout)}

    def usage(self) -> dict[str, dict[str, Any]]:
        """Blocks of every kind: total, held, cached (also by tenant), free; and how many tenants have lost
        within their shares (C43).
        """
        return {
            kind.label: {
                "total": group.pool.total,
                "held": group.pool.held,
                "cached": group.pool.cached,
                "free": group.pool.free,
                "cached_by_tenant": group.pool.cached_by_tenant,
                "taken_by_tenant": dict(group.pool.taken),
                "bytes": group.bytes,
            }
            for kind, group in self.groups.items()
        }

    def memory_usage(self) -> dict[str, int]:
        """Bytes of all pools: reserved ones, those of held or cached blocks, and the most that can be
        reserved.
        """
        groups = self.groups.values()
        return {
            "reserved_bytes": sum(group.bytes for group in groups),
            "used_bytes": sum((group.pool.held + group.pool.cached) * group.block_bytes for group in groups),
            "most_bytes": sum(group.pool.total * group.block_bytes for group in groups),
        }

    def slot_usage(self) -> dict[str, int]:
        """Slots of recurrent states: all, those of running sequences, snapshots, and what became of these."""
        pool = next((group.pool for group in self.never_full.values()), None)
        if pool is None:
            return {}
        return {
            "slots": pool.total,
            "used": pool.held,
            "snapshots": pool.cached,
            "hits": pool.counts["hits"],
            "evictions": pool.counts["evictions"],
        }

    def host_usage(self) -> dict[str, dict[str, Any]]:
        """Blocks of every kind on the host: the most there may be, those that there is memory for by now,
        held ones, free ones.
        """
        return {
            kind.label: {
                "most": group.host.most,
                "total": group.host.pool.total,
                "held": group.host.pool.held,
                "free": group.host.pool.free,
                "bytes": group.host.bytes,
            }
            for kind, group in self.groups.items()
            if group.host is not None
        }


def _no_host(wanted: int, group: LayerGroup) -> OutOfBlocks:
    return OutOfBlocks(
        f"the host has no memory for host_blocks={wanted} of {group.block_bytes} bytes (the "
        f"{group.kind.name} layers); lower it"
    )
