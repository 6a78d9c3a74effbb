"""Kernels compiled in parallel before their first launch."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

import torch

from ..blocks import BlockPool, BlockTable, append
from .batch import Batch
from .batches import GroupBatches
from .flat import FlatBatch
from .forks import fork_safe_lock, in_forked_process
from .layout import Layout
from .ops import TritonOps, on
from .ops_torch import Pages, Seen
from .static import StaticBatch

logger = logging.getLogger("hf_paged")

MOST_THREADS = 6
MOST_LATER = 3
"""Threads that compile beside requests that are served."""
TURN = 0.0002
"""Seconds for which one thread may keep the interpreter while others compile."""
META = torch.device("meta")
PROMPT = 133
SHORT = 3
WRITTEN = 385
"""Tokens of a prompt, of one short enough for the tiles of short ones, and of a past to decode after: long
enough for the tiles of long ones, a multiple of nothing.
"""
PIECES = 100
NO_THREADS = "no thread can begin, as at the process's end: kernels are compiled when they are launched (%s)"
Job = Callable[[], object]

_turns: list[float] = []
"""How long a turn is to be again, once for each of those that want short ones; the last is what counts."""
_changing = fork_safe_lock()
# A forked process has none of the threads that compile.
in_forked_process(lambda: sys.setswitchinterval(_turns[-1]) if _turns else None)
in_forked_process(_turns.clear)


@contextmanager
def short_turns() -> Iterator[None]:
    """Let threads take the interpreter in short turns.

    One that computes on a device gives it up with each operation, and would wait 5 ms each time until one
    that compiles does the same: for seconds in a forward of some hundred operations.
    """
    with _changing:
        now = sys.getswitchinterval()
        _turns.append(_turns[-1] if _turns and math.isclose(now, min(_turns[-1], TURN)) else now)
        sys.setswitchinterval(min(_turns[-1], TURN))
    try:
        yield
    finally:
        with _changing:
            before = _turns.pop(0)
            short = math.isclose(sys.getswitchinterval(), min(before, TURN))
            if not _turns and short:  # no other code has set another meanwhile
                sys.setswitchinterval(before)


class Warming:
    """Jobs that compile kernels, run by threads: those that come first until `wait` returns, and the
    later ones while the engine works, a few at a time.

    The threads only compile, on the host: the jobs call kernels on tensors without data, so nothing is
    allocated, loaded or launched on a device, and a CUDA graph may be captured meanwhile. A kernel that is
    launched before its job is over is compiled twice, which only costs time. A job that fails is ignored: the
    launch of that kernel raises the same error.
    """

    def __init__(
        self,
        device: torch.device,
        first: Callable[[], Sequence[Job]],
        jobs: Callable[[], Sequence[Job]],
        later: Callable[[], Sequence[tuple[Hashable, Sequence[Job]]]] = list,
    ) -> None:
        """first: makes the jobs that all others need. jobs: makes the others that `wait` waits for, while
        those are done. later: makes the further ones by what needs them, in the order in which they are done.
        """
        self._device = device
        self._makers = [first, jobs, later]
        """Until they are called: what they were made from, a model for example, may go before the thread."""
        self._compiled = threading.Event()
        self._stopped = False
        self._context = copy_context()  # it says which arithmetic is wanted
        self.ready: set[Hashable] = set()
        """The keys of the later jobs that are done."""
        self.done = False
        """True once all later jobs are done."""
        # No daemon: one that frees a tensor of its jobs while the process ends aborts it.
        self._thread = threading.Thread(target=self._run, name="hf_paged warming", daemon=False)
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.debug(NO_THREADS, error)
            self._end()

    def wait(self) -> None:
        """Until all but the later jobs is done. Twice is once."""
        self._compiled.wait()

    def stop(self) -> None:
        """Begin no other job."""
        self._stopped = True

    def join(self) -> None:
        """Until all threads have ended."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        with short_turns():
            try:
                later = self._run_first()
                self._compiled.set()
                self._run_later(later)
            except RuntimeError as error:
                logger.debug(NO_THREADS, error)
            finally:
                self._end()

    def _end(self) -> None:
        """All is done that will be."""
        self._makers.clear()
        self._compiled.set()
        self.done = True

    def _run_first(self) -> Sequence[tuple[Hashable, Sequence[Job]]]:
        """Do the jobs that are waited for: the later ones."""
        make_first, make_jobs, make_later = self._makers
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "hf_paged warming") as threads:
            begun = [threads.submit(self._do, job) for job in self._do(make_first) or []]
            jobs = self._do(make_jobs) or []
            wait(begun)
            begun = [threads.submit(self._do, job) for job in jobs]
            later = self._do(make_later) or []
            self._makers.clear()
            wait(begun)
        return later

    def _run_later(self, later: Sequence[tuple[Hashable, Sequence[Job]]]) -> None:
        """Do jobs in their order, a few at a time: at its end a process waits for those that have begun."""
        count = min(MOST_LATER, os.cpu_count() or 1)
        room = threading.Semaphore(count)

        def note(label: Hashable, missing: list[Job], job: Future[None]) -> None:
            missing.pop()
            if not missing:
                self.ready.add(label)
            room.release()

        with ThreadPoolExecutor(count, "hf_paged warming") as threads:
            for label, jobs in later:
                missing = list(jobs)
                if not missing:
                    self.ready.add(label)
                for job in jobs:
                    room.acquire()
                    begun = threads.submit(self._do, job)
                    begun.add_done_callback(partial(note, label, missing))

    def _do(self, job: Callable[[], Any]) -> Any:
        if self._stopped:
            return None
        try:
            with on(self._device):
                return self._context.copy().run(job)
        except Exception as error:  # its result is not used
            logger.debug("a kernel is not compiled ahead (%s: %s)", type(error).__name__, error)
            return None


class AttentionShape(NamedTuple):
    """The attention of a kind of layers, as far as its shape is known before it runs."""

    layout: Layout
    query_heads: int
    maker: GroupBatches
    """The maker of batches of its layers in captured steps."""
    softcap: float | None = None
    turns: bool = False
    """True if the kernel that writes keys in captured steps gives them their positions, too."""

    @property
    def block_size(self) -> int:
        return self.maker.group.pool.block_size

    @property
    def window(self) -> int | None:
        return self.maker.group.kind.window

    def jobs(self, ops: TritonOps, rows: int, width: int, captured: bool) -> Iterator[Job]:
        """Jobs of prompts and decoding, and if `captured`, of steps of `rows` rows with tables of `width`
        blocks. The longest come first.
        """
        yield partial(self._attend, ops, lambda: self._flat(PROMPT, PROMPT))
        yield partial(self._attend, ops, lambda: self._flat(SHORT, SHORT))
        yield partial(self._decode, ops, rows, width, captured)
        yield partial(self._write, ops, lambda: self._flat(WRITTEN, PROMPT))
        yield partial(self._write, ops, lambda: self._flat(WRITTEN, 1))
        if captured:
            yield from self._beside(ops, partial(self._captured, ops, rows, width))

    def step(self, ops: TritonOps, make: Callable[[], StaticBatch]) -> Iterator[Job]:
        """The jobs of a captured step with the batch that `make` makes. The longest come first."""
        yield partial(self._attend, ops, make)
        yield from self._beside(ops, make)
        if not self.turns:
            yield partial(self._write, ops, make)

    def spans(self, ops: TritonOps, rows: int, most: int, width: int) -> Iterator[Job]:
        """The jobs of captured steps with chunks of prompts, of `rows` tokens of at most `most` sequences.
        The longest come first.
        """
        yield partial(self._read_chunks, ops, rows, most, width)
        yield partial(self._attend, ops, partial(self._captured, ops, most, width))
        yield partial(self._update, ops, partial(self._captured, ops, most, width))
        yield lambda: self._captured(ops, rows, width).begin(ops.advance)
        if self.turns:
            yield partial(self._turn, ops, partial(self._captured, ops, rows, width))

    def singles(self, ops: TritonOps, rows: int, width: int, known: set[Any]) -> Iterator[Job]:
        """The jobs of captured steps of `rows` sequences that are not among the `known`."""
        make = partial(self._captured, ops, rows, width)
        tiling = self._plan(ops, make()).tiling._replace(per_sm=1)
        if tiling not in known:
            known.add(tiling)
            yield partial(self._attend, ops, make)
        yield partial(self._update, ops, make)

    def _beside(self, ops: TritonOps, make: Callable[[], StaticBatch]) -> Iterator[Job]:
        """The jobs of a captured step beside attention."""
        yield partial(self._update, ops, make)
        yield lambda: make().begin(ops.advance)
        if self.turns:
            yield partial(self._turn, ops, make)

    def _update(self, ops: TritonOps, make: Callable[[], StaticBatch]) -> None:
        batch = make()
        if batch.new == 1:
            lengths = torch.empty(batch.rows, dtype=torch.int32, device=META)
            self._plan(ops, batch).update(lengths, groups=batch.groups_on(META))

    def _plan(self, ops: TritonOps, batch: StaticBatch) -> Any:
        keys, values = self._blocks()
        query = self._heads(batch.rows, 1, self.query_heads, self.layout.key_dim)[:, :, 0]
        shared = batch.groups_on(META) is not None
        return ops.kernels.Plan(
            query, keys, values, mean_length=batch.columns, window=self.window, shared=shared
        )

    def _decode(self, ops: TritonOps, rows: int, width: int, captured: bool) -> None:
        if captured:
            self._attend(ops, lambda: self._captured(ops, rows, width))  # not begun, so it needs no plan
        self._attend(ops, lambda: self._flat(WRITTEN, 1))

    def _attend(self, ops: TritonOps, make: Callable[[], Batch]) -> None:
        batch = make()
        seen = Seen(0, causal=True, window=self.window)
        ops.attend(
            self._heads(batch.rows, batch.new, self.query_heads, self.layout.key_dim),
            self._pages(ops, batch),
            seen,
            softcap=self.softcap,
        )

    def _read_chunks(self, ops: TritonOps, rows: int, most: int, width: int) -> None:
        layout = self.layout
        batch = self.maker.static(rows, width, most=most, device=META, ops=ops)
        query = self._heads(rows, 1, self.query_heads, layout.key_dim)[:, :, 0]
        out = torch.empty(*query.shape[:2], layout.value_dim, dtype=layout.dtype, device=META)
        options = {"softcap": self.softcap}
        spans = batch.spans_on(META)
        assert spans is not None
        ops.read_chunks(query, self._pages(ops, batch), spans, self.window, options, out)

    def _write(self, ops: TritonOps, make: Callable[[], Batch]) -> None:
        batch = make()
        ops.write(self._pages(ops, batch), *self._new(batch))

    def _turn(self, ops: TritonOps, make: Callable[[], StaticBatch]) -> None:
        batch = make()
        key, value = self._new(batch)
        query = self._heads(batch.rows, batch.new, self.query_heads, self.layout.key_dim)
        cos, sin = (
            torch.empty(batch.rows, batch.new, self.layout.key_dim, dtype=self.layout.dtype, device=META)
            for _ in range(2)
        )
        ops.rotary_write(self._pages(ops, batch), query, key, cos, sin, value)

    # ---- tensors without data

    def _flat(self, length: int, new: int) -> FlatBatch:
        """A sequence of `length` tokens, of which `new` are this step's."""
        pool = BlockPool(-(-length // self.block_size), self.block_size)
        table = BlockTable(pool)
        append([table], [length])
        return FlatBatch([table], [new])

    def _captured(self, ops: TritonOps, rows: int, width: int) -> StaticBatch:
        return self.maker.static(rows, width, device=META, ops=ops)

    def _pages(self, ops: TritonOps, batch: Batch) -> Pages:
        keys, values = (data.flatten(0, 1) for data in self._blocks())
        return Pages(keys, values, batch, ops)

    def _blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one block [1, block_size, heads, dim]."""
        layout = self.layout
        keys, values = (
            torch.empty(1, self.block_size, layout.heads, dim, dtype=layout.dtype, device=META)
            for dim in (layout.key_dim, layout.value_dim)
        )
        return keys, values

    def _new(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """A step's new keys and values."""
        layout = self.layout
        keys, values = (
            self._heads(batch.rows, batch.new, layout.heads, dim)
            for dim in (layout.key_dim, layout.value_dim)
        )
        return keys, values

    def _heads(self, rows: int, new: int, heads: int, dim: int) -> torch.Tensor:
        """[rows, heads, new, dim], token by token as a projection makes them."""
        return torch.empty(rows, new, heads, dim, dtype=self.layout.dtype, device=META).transpose(1, 2)


def compile_digest(ops: TritonOps) -> None:
    """The kernel that hashes weights."""
    ops.kernels.digest(torch.empty(3, PIECES, dtype=torch.long, device=META), [(0, PIECES)])
