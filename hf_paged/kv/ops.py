"""Operations on pages, behind one interface: plain torch, Triton or C++. Chosen when pages are allocated."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from .batch import PLANS, Batch, SpanTensors
from .layout import Layout
from .ops_torch import Ops, Pages, Seen
from .reference import invariant
from .upload import upload

logger = logging.getLogger("hf_paged")

WIDEST_HEAD = 512
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class NoKernels(ValueError):
    """The requested kernels cannot run here."""


class TritonOps(Ops):
    """Kernels that read the pages in place. What they have no words for (masks, biases, whole prompts) stays
    with torch.
    """

    def __init__(self, kernels: Any = None) -> None:
        """kernels: another package than the installed one."""
        import hf_paged_kernels

        self._kernels = kernels or hf_paged_kernels

    @property
    def kernels(self) -> Any:
        """The package of kernels, or the same in fixed orders."""
        return invariant_kernels("cuda") if invariant.get() else self._kernels

    @property
    def first(self) -> list[Callable[[], None]]:
        """Calls that every kernel's compilation waits for: they are made before it, in any thread."""
        return [self.kernels.find_driver, self.kernels.know_triton]

    def advance(self, table: torch.Tensor, *step: Any) -> None:
        with on(table.device):
            self.kernels.advance(table, *step)

    def write(self, pages: Pages, keys: torch.Tensor, values: torch.Tensor) -> None:
        keys = keys.to(pages.keys.dtype)
        values = values.to(pages.values.dtype)
        if keys.stride(3) != 1 or values.stride(3) != 1:
            keys = keys.contiguous()
            values = values.contiguous()
        blocks = [_by_block(data, pages.batch.block_size) for data in (pages.keys, pages.values)]
        with on(keys.device):
            self.kernels.write(keys, values, *blocks, pages.batch.targets(keys.device))

    def rotary_write(
        self,
        pages: Pages,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate query and key [rows, heads, new, dim] to their positions; the key is written to its slots
        with the value, the query is returned.
        """
        blocks = [_by_block(data, pages.batch.block_size) for data in (pages.keys, pages.values)]
        with on(key.device):
            rotated: torch.Tensor = self.kernels.rotary_write(
                query, key, value, cos, sin, *blocks, pages.batch.targets(key.device)
            )
            return rotated

    def gather(self, data: torch.Tensor, batch: Batch, first: int) -> torch.Tensor:
        if batch.captured or batch.strided is not None or batch.empty:
            return super().gather(data, batch, first)  # a view, or nothing at all
        batch.check()
        device = data.device
        starts = None if batch.starts is None else upload(batch.starts, device, torch.int32)
        with on(device):
            pages = _by_block(data, batch.block_size)
            found: torch.Tensor = self.kernels.gather(
                pages, batch.table(device), starts, first, batch.columns
            )
            return found

    def copy(self, pools: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
        with on(sources.device):
            self.kernels.copy(list(pools), sources, targets)

    def attend(
        self,
        query: torch.Tensor,
        pages: Pages,
        seen: Seen,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch = pages.batch
        # A whole prompt has its keys at hand, and rows of several lengths would have to be packed: both are
        # torch's.
        whole = query.shape[2] > 1 and (not seen.causal or batch.fresh or batch.starts is not None)
        # The encoder's output is visible whole, without a mask if no row is shorter.
        masked = not seen.causal and (seen.mask is not None or not batch.captured)
        if invariant.get():  # there is one order, and one kernel that has it
            whole = not seen.causal
        if masked or whole or query.dtype != pages.keys.dtype:
            return super().attend(query, pages, seen, new, scale=scale, softcap=softcap, sinks=sinks)
        options = {"scale": scale, "softcap": softcap, "sinks": sinks}
        with on(query.device):
            spans = batch.spans_on(query.device)
            if spans is not None:
                return self._spans(query, pages, spans, seen.window, options)
            rows, _, many, _ = query.shape
            tokens = query.transpose(1, 2).flatten(0, 1)
            tokens = tokens.contiguous() if batch.packed else tokens
            read = self._decode if many == 1 or batch.longest == 1 else self._prefill
            out = read(tokens, pages, seen.window, options)
            return out.view(rows, many, *out.shape[1:])

    def _decode(
        self, tokens: torch.Tensor, pages: Pages, window: int | None, options: dict[str, Any]
    ) -> torch.Tensor:
        """Attention of one token [query_heads, key_dim] of each sequence."""
        batch = pages.batch
        keys, values = (_by_block(data, batch.block_size) for data in (pages.keys, pages.values))
        lengths, groups = batch.lengths(tokens.device), batch.groups_on(tokens.device)
        plan = self._plan(tokens, keys, values, window, batch, lengths, groups)
        out: torch.Tensor = self.kernels.decode(
            tokens, keys, values, batch.table(tokens.device), plan, **options
        )
        return out

    def _plan(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None, batch: Batch,
        lengths: torch.Tensor, groups: torch.Tensor | None,
    ) -> Any:  # fmt: skip
        """The step's plan for layers of one shape and window. groups: of rows that read blocks together."""
        shared = groups is not None and window is None and not invariant.get()
        key = (
            query.shape, query.dtype, query.device, values.shape[2:], window, batch.columns.bit_length(),
            invariant.get(), shared,
        )  # fmt: skip

        def make() -> Any:
            return self.kernels.Plan(
                query, keys, values, mean_length=batch.columns, window=window, shared=shared
            )

        return _kept(
            batch, "plans", key, make, lambda plan: plan.update(lengths, groups=groups if shared else None)
        )

    def _prefill(
        self, tokens: torch.Tensor, pages: Pages, window: int | None, options: dict[str, Any]
    ) -> torch.Tensor:
        """Attention of tokens [tokens, query_heads, key_dim] of sequences of any lengths, in one launch."""
        batch = pages.batch
        device = tokens.device
        keys, values = (_by_block(data, batch.block_size) for data in (pages.keys, pages.values))
        out: torch.Tensor = self.kernels.prefill(
            tokens, keys, values, batch.table(device), batch.borders_on(device), batch.lengths(device),
            batch.longest, window=window, **options,
        )  # fmt: skip
        return out

    def _spans(
        self,
        query: torch.Tensor,
        pages: Pages,
        spans: SpanTensors,
        window: int | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Rows of one token by the decode kernel, the chunks after them by the prefill kernel."""
        batch = pages.batch
        table, alone = spans.table, spans.alone
        keys, values = (_by_block(data, batch.block_size) for data in (pages.keys, pages.values))
        packed = query[:, :, 0]
        few = min(len(table), batch.rows)
        out = packed.new_zeros(*packed.shape[:2], values.shape[3])
        groups = batch.groups_on(query.device)
        groups = None if groups is None else groups[:few]
        plan = self._plan(packed[:few], keys, values, window, batch, alone[:few], groups)
        self.kernels.decode(packed[:few], keys, values, table[:few], plan, out=out[:few], **options)
        self.read_chunks(packed, pages, spans, window, options, out)
        return out.unsqueeze(1)

    def read_chunks(
        self,
        packed: torch.Tensor,
        pages: Pages,
        spans: SpanTensors,
        window: int | None,
        options: dict[str, Any],
        out: torch.Tensor,
    ) -> None:
        """Attention of the chunks among tokens [tokens, query_heads, key_dim], into `out`."""
        batch = pages.batch
        keys, values = (_by_block(data, batch.block_size) for data in (pages.keys, pages.values))
        key = (packed.shape, packed.dtype, packed.device, values.shape[2:], invariant.get())
        tiles = _kept(
            batch, "spans", key,
            lambda: self.kernels.Spans(packed, keys, values, len(spans.table), least=2),
            lambda tiles: tiles.update(spans.borders),
        )  # fmt: skip
        self.kernels.prefill(
            packed, keys, values, spans.table, spans.borders, spans.totals, batch.rows, window=window,
            out=out, spans=tiles, **options,
        )  # fmt: skip


def _kept(
    batch: Batch, name: str, key: object, make: Callable[[], Any], update: Callable[[Any], None]
) -> Any:
    """The plan of one kind and key in the batch's workspace: kept from step to step, updated once in each."""
    plans = batch.workspace.setdefault(name, {})
    plan, updated_for = plans.get(key, (None, None))
    if plan is None:
        plan = make()
    if updated_for is not batch.step:
        update(plan)
        plans[key] = (plan, batch.step)
    return plan


FEW = 16
"""A step of more new tokens than this is a prompt's: its products are large, and torch's are faster."""


class NativeOps(Ops):
    """The C++ op of CPUs, which reads the pages in place. What it has no words for (masks, biases, prompts)
    stays with torch.
    """

    def __init__(self, library: Any) -> None:
        import hf_paged_native

        self.native = hf_paged_native
        self.library = library

    def write(self, pages: Pages, keys: torch.Tensor, values: torch.Tensor) -> None:
        batch = pages.batch
        views = batch.new_strided is not None and (batch.packed or batch.longest > 1)
        if views or (batch.packed and batch.longest > 1):
            super().write(pages, keys, values)
            return
        if batch.packed:
            keys = _by_sequence(keys)
            values = _by_sequence(values)
        pools = pages.keys, pages.values
        dtype = pages.keys.dtype
        if not (keys.dtype == values.dtype == dtype and keys.stride(3) == values.stride(3) == 1):
            keys = keys.to(dtype).contiguous()
            values = values.to(dtype).contiguous()
        key = (keys.shape, keys.stride(), values.shape, values.stride(), dtype)
        self._planned(batch, key, self.native.Write, keys, values, *pools).run(keys, values, *pools)

    def attend(
        self,
        query: torch.Tensor,
        pages: Pages,
        seen: Seen,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch = pages.batch
        given = query
        if invariant.get():
            return super().attend(given, pages, seen, new, scale=scale, softcap=softcap, sinks=sinks)
        several = batch.packed and batch.longest > 1
        if batch.packed and not several:
            query = _by_sequence(query)
        shape = query.shape
        strides = query.stride()
        prompt = shape[2] > FEW or (shape[2] > 1 and batch.fresh)
        learning = torch.is_grad_enabled() and query.requires_grad
        whole = batch.packed or shape[0] == batch.rows
        fits = query.dtype == pages.keys.dtype and whole and strides[3] == 1
        if seen.mask is not None or prompt or learning or not fits or several:
            return super().attend(given, pages, seen, new, scale=scale, softcap=softcap, sinks=sinks)
        batch.check()
        window = seen.window if seen.causal else None
        key = (shape, strides, pages.values.shape[1:], query.dtype, window, seen.causal)
        together = seen.causal and window is None
        plan = self._planned(
            batch, key, self.native.Attend, query, pages.keys, pages.values, together=together,
            window=window, causal=seen.causal,
        )  # fmt: skip
        out: torch.Tensor = plan.run(
            query,
            pages.keys,
            pages.values,
            scale,
            softcap,
            None if sinks is None else sinks.float().contiguous(),
        )
        return out if query is given else out.transpose(0, 1)

    def _planned(
        self,
        batch: Batch,
        key: object,
        make: Any,
        *tensors: torch.Tensor,
        together: bool = False,
        **options: Any,
    ) -> Any:
        """The step's plan for layers of one shape. together: whether rows may read common blocks together."""
        plans = batch.workspace.setdefault(PLANS, {})
        plan, updated_for = plans.get(key, (None, None))
        if plan is None:
            plan = make(self.library, *tensors, block_size=batch.block_size, **options)
        if updated_for is not batch.step:
            device = tensors[0].device
            groups = batch.groups_on(device) if together else None
            plan.update(batch.host_table(), batch.lengths(device), groups)
            plans[key] = (plan, batch.step)
        return plan


def _by_sequence(data: torch.Tensor) -> torch.Tensor:
    """A row [1, heads, sequences, dim] of one token of each sequence as [sequences, heads, 1, dim]."""
    return data[0].transpose(0, 1).unsqueeze(2)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launch on `device`; in the interpreter there is none."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _by_block(data: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots [slots, heads, dim] as [blocks, block_size, heads, dim]."""
    return data.view(-1, block_size, *data.shape[1:])


def choose(wanted: str, layout: Layout, captured: bool) -> Ops:
    """The ops for pages of `layout`, in steps that are `captured` or launched one operation at a time.

    "auto" means the Triton kernels where they can run and steps are captured: launched one by one from
    Python, they cost the host more than they save the device. On a CPU it means the C++ op if it has been
    built; "native" builds it.
    """
    if wanted == "native":
        return Ops() if captured else _native(layout)
    reason = why_no_kernels(layout)
    if wanted == "triton" and reason is not None:
        raise NoKernels(f"kernels='triton' cannot run here: {reason}; use kernels='auto'")
    if wanted == "triton" or (wanted == "auto" and captured and reason is None):
        return TritonOps()
    if wanted == "auto" and not captured and why_no_native(layout) is None:
        return _native_if_built()
    return Ops()


def choose_for(wanted: str, device: torch.device, dtype: torch.dtype) -> Ops:
    """The ops of captured steps over other content than pages."""
    return Ops() if triton_package(wanted, device, dtype) is None else TritonOps()


def _native(layout: Layout) -> Ops:
    import hf_paged_native

    reason = why_no_native(layout)
    if reason is None:
        try:
            return NativeOps(hf_paged_native.load(hf_paged_native.build()))
        except hf_paged_native.Unavailable as error:
            reason = str(error)
    raise NoKernels(f"kernels='native' cannot run here: {reason}; use kernels='auto'")


def _native_if_built() -> Ops:
    """The C++ op if it has been built. Without an explicit request no compiler runs."""
    import hf_paged_native

    file = hf_paged_native.find()
    if file is not None:
        try:
            return NativeOps(hf_paged_native.load(file))
        except hf_paged_native.Unavailable as error:
            _tell(f"plain torch reads the pages: {error}")
    elif hf_paged_native.compiler() is not None:
        _tell(
            "plain torch reads the pages; `python -m hf_paged_native` builds a C++ op for CPUs, once, in "
            "some seconds"
        )
    return Ops()


@cache
def _tell(message: str) -> None:
    """Log it, the first time."""
    logger.info(message)


def why_no_native(layout: Layout) -> str | None:
    """Why the C++ op cannot serve pages of `layout`, or None if it can where it is built."""
    if layout.device.type != "cpu":
        return f"the C++ op is made for CPUs, the keys are on {layout.device}"
    if layout.dtype not in KERNEL_DTYPES:
        return f"the C++ op knows {', '.join(map(str, KERNEL_DTYPES))}, the keys are {layout.dtype}"
    return None


def why_in_torch(wanted: str, layouts: Iterable[Layout]) -> str | None:
    """Why plain torch reads pages of these layouts, or None if faster code does. wanted: the option."""
    if wanted == "torch":
        return "kernels='torch'"
    for layout in layouts:
        on_cpu = layout.device.type == "cpu"
        reason = why_no_native(layout) or why_not_built() if on_cpu else why_no_kernels(layout)
        if reason is not None and wanted != "triton":  # which is an error where it cannot run
            return reason
    return None


def why_not_built() -> str | None:
    """Why there is no C++ op here, or None if it is built and loads. Nothing is built."""
    import hf_paged_native

    file = hf_paged_native.find()
    if file is None:
        found = hf_paged_native.compiler()
        return (
            "not built, `python -m hf_paged_native` builds it"
            if found
            else "not built, and there is no C++ compiler"
        )
    try:
        hf_paged_native.load(file)
    except hf_paged_native.Unavailable as error:
        return str(error)
    return None


@cache
def invariant_kernels(device: str) -> Any:
    """The batch-invariant functions of a type of devices; those of CPUs are built if they are not."""
    if device == "cuda":
        reason = _why_not_here(torch.device("cuda"), torch.float32)
        if reason is not None:
            raise NoKernels(f"batch_invariant() on a CUDA device needs the Triton kernels: {reason}")
        import hf_paged_kernels

        return hf_paged_kernels.Invariant(hf_paged_kernels)
    import hf_paged_native

    try:
        library = hf_paged_native.load(hf_paged_native.build())
    except hf_paged_native.Unavailable as error:
        raise NoKernels(f"batch_invariant() needs the C++ ops: {error}") from error
    return hf_paged_native.InvariantFunctions(library)


@cache
def digester(device: torch.device) -> Callable[[torch.Tensor, list[tuple[int, int]]], torch.Tensor] | None:
    """The kernel that digests tensors on `device` by their addresses, if there is one."""
    if device.type != "cuda" or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return None
    import hf_paged_kernels

    def digest(pieces: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor:
        with on(device):
            numbers: torch.Tensor = hf_paged_kernels.digest(pieces, ranges)
            return numbers

    return digest


def triton_package(wanted: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The package of kernels, None where plain torch computes instead."""
    if invariant.get() or wanted not in ("auto", "triton") or _why_not_here(device, dtype) is not None:
        return None
    import hf_paged_kernels

    return hf_paged_kernels


def why_no_kernels(layout: Layout) -> str | None:
    """Why the Triton kernels cannot serve pages of `layout`, or None if they can."""
    if max(layout.key_dim, layout.value_dim) > WIDEST_HEAD:
        widths = f"{layout.key_dim} and {layout.value_dim}"
        return f"the kernels know heads up to {WIDEST_HEAD} wide, these are {widths}"
    return _why_not_here(layout.device, layout.dtype)


def _why_not_here(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot compute on a device with a number type."""
    if device.type != "cuda":
        return f"the kernels need a CUDA device, the keys are on {device}"
    if torch.version.hip is not None:
        return "the kernels are made for CUDA, this torch is built for ROCm"
    if dtype not in KERNEL_DTYPES:
        return f"the kernels know {', '.join(map(str, KERNEL_DTYPES))}, the keys are {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None
