"""What is done to pages, behind one interface: plain torch or Triton kernels. Chosen once, when the pages are allocated."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import reference
from .batch import Batch
from .static import StaticBatch
from .upload import upload

if TYPE_CHECKING:
    from .store import Layout, Pages

WIDEST_HEAD = 256
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Seen(NamedTuple):
    """What the new tokens of a layer look at: the columns from `first` on.

    mask: [rows or 1, query_heads or 1, new, columns - first], boolean or added. Without one, everything from `first` on, or
    if `causal` each token what is at or before it and, with a window, not further back than that.
    """

    first: int
    mask: torch.Tensor | None = None
    causal: bool = False
    window: int | None = None

    def biased(self, bias: torch.Tensor | None, batch: Batch | StaticBatch) -> Seen:
        """The same with a learned bias [rows or 1, query_heads, new, columns] on every score."""
        if bias is None:
            return self
        mask = batch.visible(self.first, self.window, bias.device) if self.causal else self.mask
        if mask is None:
            return Seen(self.first, bias)
        lowest = torch.finfo(bias.dtype).min
        return Seen(self.first, torch.where(mask, bias, lowest) if mask.dtype == torch.bool else mask + bias)


class Ops:
    """Plain torch: right on every device, and the path of CPUs."""

    kernels: Any = None
    """The kernels, where they are used, for whoever else can use some of them."""

    def advance(
        self,
        table: torch.Tensor,
        tokens: torch.Tensor,
        seen: torch.Tensor,
        slots: torch.Tensor,
        columns: torch.Tensor,
        new: int,
        block_size: int,
    ) -> None:
        """Begin a captured step: work out where its tokens go, and count them."""
        reference.advance(table, tokens, seen, slots, columns, new, block_size)

    def write(self, pages: Pages, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put a step's keys [rows, heads, new, key_dim] and values into their slots."""
        reference.write(pages, keys, values)

    def copy(self, pools: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
        """pool[:, targets[i]] = pool[:, sources[i]] for every pool [layers, blocks, ...]; no target is a source."""
        for pool in pools:
            pool.index_copy_(1, targets.long(), pool.index_select(1, sources))

    def gather(self, data: torch.Tensor, batch: Batch | StaticBatch, first: int) -> torch.Tensor:
        """Columns from `first` on of data [slots, heads, dim], as [rows, heads, columns - first, dim]; those of padding mean nothing."""
        return reference.gather(data, batch, first)

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
        """Attention of query [rows, query_heads, new, key_dim] over what it sees: [rows, new, query_heads, value_dim].

        `new` are the step's own keys and values, if the caller still has them: where they are all there is, they are read.
        """
        batch = pages.batch
        fresh = new is not None and batch.fresh and seen.first == 0
        keys, values = new if fresh and new else [self.gather(data, batch, seen.first) for data in (pages.keys, pages.values)]
        narrow = seen.window is not None and batch.columns > seen.window
        simply = seen.causal and batch.fresh and batch.new > 1 and batch.starts is None and not narrow
        mask = batch.visible(seen.first, seen.window, query.device) if seen.causal and not simply else seen.mask
        return reference.attend(query, keys, values, mask, causal=simply, scale=scale, softcap=softcap, sinks=sinks)

    def attend_latents(self, query: torch.Tensor, turned: torch.Tensor, pages: Pages, seen: Seen, *, scale: float) -> torch.Tensor:
        """Attention over one head of latents, which serve all heads of the query as keys and as values.

        query [rows, query_heads, new, rank] meets the latents, turned [rows, query_heads, new, rope] the part with positions,
        which lie in the pages as keys and values. The answer is [rows, query_heads, new, rank].
        """
        latents, positions = (self.gather(data, pages.batch, seen.first) for data in (pages.keys, pages.values))
        mask = pages.batch.visible(seen.first, seen.window, query.device) if seen.causal else seen.mask
        return reference.attend_latents(query, turned, latents, positions, mask, scale)


class TritonOps(Ops):
    """Kernels that read the pages in place. What they have no words for (masks, biases, whole prompts) stays with torch."""

    def __init__(self) -> None:
        import hf_paged_kernels

        self.kernels = hf_paged_kernels

    def advance(self, table: torch.Tensor, *step: Any) -> None:
        with _on(table.device):
            self.kernels.advance(table, *step)

    def write(self, pages: Pages, keys: torch.Tensor, values: torch.Tensor) -> None:
        keys, values = keys.to(pages.keys.dtype), values.to(pages.values.dtype)
        if keys.stride(3) != 1 or values.stride(3) != 1:
            keys, values = keys.contiguous(), values.contiguous()
        blocks = [_by_block(data, pages.batch.block_size) for data in (pages.keys, pages.values)]
        with _on(keys.device):
            self.kernels.write(keys, values, *blocks, pages.batch.targets(keys.device))

    def rotary_write(
        self, pages: Pages, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Give query and key [rows, heads, new, dim] their positions; the key goes to its slots with the value, the query comes back."""
        blocks = [_by_block(data, pages.batch.block_size) for data in (pages.keys, pages.values)]
        with _on(key.device):
            turned: torch.Tensor = self.kernels.rotary_write(query, key, value, cos, sin, *blocks, pages.batch.targets(key.device))
            return turned

    def gather(self, data: torch.Tensor, batch: Batch | StaticBatch, first: int) -> torch.Tensor:
        if not isinstance(batch, Batch) or batch.lane is not None or batch.empty:
            return super().gather(data, batch, first)  # a view, or nothing at all
        batch.check()
        device = data.device
        starts = None if batch.starts is None else upload(batch.starts, device, torch.int32)
        with _on(device):
            pages = _by_block(data, batch.block_size)
            found: torch.Tensor = self.kernels.gather(pages, batch.table(device), starts, first, batch.columns)
            return found

    def copy(self, pools: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
        with _on(sources.device):
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
        # A whole prompt has its keys at hand, and rows of several lengths would have to be packed: both are torch's.
        whole = query.shape[2] > 1 and (not seen.causal or batch.fresh or batch.starts is not None)
        # What an encoder said is seen whole, under no mask if none of its rows is shorter.
        masked = not seen.causal and (seen.mask is not None or not isinstance(batch, StaticBatch))
        if masked or whole or query.dtype != pages.keys.dtype:
            return super().attend(query, pages, seen, new, scale=scale, softcap=softcap, sinks=sinks)
        options = {"scale": scale, "softcap": softcap, "sinks": None if sinks is None else sinks.float()}
        with _on(query.device):
            if query.shape[2] == 1:
                return self._decode(query, pages, seen.window, options)
            return self._prefill(query, pages, seen.window, options)

    def _decode(self, query: torch.Tensor, pages: Pages, window: int | None, options: dict[str, Any]) -> torch.Tensor:
        batch = pages.batch
        keys, values = (_by_block(data, batch.block_size) for data in (pages.keys, pages.values))
        tokens = query[:, :, 0]
        plan = self._plan(tokens, keys, values, window, batch)
        out: torch.Tensor = self.kernels.decode(tokens, keys, values, batch.table(query.device), plan, **options)
        return out.unsqueeze(1)

    def _plan(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None, batch: Batch | StaticBatch) -> Any:
        """The step's plan for layers of one shape and window: kept from step to step, updated once in each."""
        key = (query.shape, query.dtype, query.device, values.shape[2:], window, batch.columns.bit_length())
        plans = batch.workspace.setdefault("plans", {})
        plan, planned = plans.get(key, (None, None))
        if plan is None:
            plan = self.kernels.Plan(query, keys, values, mean_length=batch.columns, window=window)
        if planned is not batch.step:
            plan.update(batch.lengths(query.device))
            plans[key] = (plan, batch.step)
        return plan

    def _prefill(self, query: torch.Tensor, pages: Pages, window: int | None, options: dict[str, Any]) -> torch.Tensor:
        rows, heads, new, dim = query.shape
        batch, device = pages.batch, query.device
        keys, values = (_by_block(data, batch.block_size) for data in (pages.keys, pages.values))
        borders = torch.arange(0, (rows + 1) * new, new, dtype=torch.int32, device=device)
        packed = query.transpose(1, 2).reshape(rows * new, heads, dim)
        out: torch.Tensor = self.kernels.prefill(
            packed, keys, values, batch.table(device), borders, batch.lengths(device), new, window=window, **options
        )
        by_row: torch.Tensor = out.unflatten(0, (rows, new))
        return by_row


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Launch on `device`; in the interpreter there is none."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _by_block(data: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots [slots, heads, dim] as [blocks, block_size, heads, dim]."""
    return data.view(-1, block_size, *data.shape[1:])


def choose(wanted: str, layout: Layout, captured: bool) -> Ops:
    """The ops for pages of `layout`, in steps that are `captured` or launched one operation at a time.

    "auto" is the kernels where they can run and steps are captured. Launched one by one from Python, they cost the host more
    than they save the device.
    """
    reason = why_no_kernels(layout)
    if wanted == "triton" and reason is not None:
        raise ValueError(f"kernels='triton' cannot run here: {reason}; use kernels='auto'")
    runs = wanted == "triton" or (wanted == "auto" and captured and reason is None)
    return TritonOps() if runs else Ops()


def why_no_kernels(layout: Layout) -> str | None:
    """Why the Triton kernels cannot serve pages of `layout`, or None if they can."""
    if layout.device.type != "cuda":
        return f"the kernels need a CUDA device, the keys are on {layout.device}"
    if torch.version.hip is not None:
        return "the kernels are made for CUDA, this torch is built for ROCm"
    if layout.dtype not in KERNEL_DTYPES:
        return f"the kernels know {', '.join(map(str, KERNEL_DTYPES))}, the keys are {layout.dtype}"
    if max(layout.key_dim, layout.value_dim) > WIDEST_HEAD:
        return f"the kernels know heads up to {WIDEST_HEAD} wide, these are {layout.key_dim} and {layout.value_dim}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None
