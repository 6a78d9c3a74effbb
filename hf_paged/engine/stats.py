"""An engine in figures: `engine.stats()`, and the parts of it that are off, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, cast, get_args

from ..blocks.shared_reads import usage
from ..kv.ops import why_in_torch
from ..scheduling import Count
from .loop import StepLoop
from .state import EngineState
from .weights import PauseMode
from .worker.block_checks import VerifyStats
from .worker.pools import Pools


class BlockStats(TypedDict):
    """The blocks of one kind of layers: total = held + cached + free."""

    total: int
    held: int
    cached: int
    free: int
    cached_by_tenant: dict[str, int]
    taken_by_tenant: dict[str, int]
    """Cached blocks that each tenant has lost within its share."""
    bytes: int


class MemoryStats(TypedDict):
    """Bytes of all pools."""

    reserved_bytes: int
    used_bytes: int
    """Those of held or cached blocks."""
    most_bytes: int
    """Those of all blocks: what the pools can grow to."""


class HostStats(TypedDict):
    """The blocks of one kind of layers in the host's memory."""

    most: int
    total: int
    """Those that there is memory for by now."""
    held: int
    free: int
    bytes: int


class AdapterStats(TypedDict):
    """The adapters on the device."""

    on_device: int
    slots: int
    bytes: int
    forwards_apart: int
    """Forwards of adapters that peft's own modules compute, so far."""
    ms_apart: float
    """The milliseconds of these forwards, on a CUDA device those of its stream."""
    captured_apart: int
    """Captured steps of such adapters that are kept."""
    captured_apart_bytes: int


class SlotStats(TypedDict, total=False):
    """Slots of recurrent states; nothing where no layer keeps any."""

    slots: int
    used: int
    """Those of sequences that run."""
    snapshots: int
    hits: int
    """Prompts that went on from a snapshot."""
    evictions: int


class CaptureStats(TypedDict, total=False):
    """Captured steps; nothing where none are wanted."""

    captured: int
    compiled: int
    replayed: int
    refused: int
    kept: int
    bytes: int
    seconds: float
    sizes: dict[str, list[int]]
    """The rows of trusted steps, by their form."""


class SharedReadStats(TypedDict, total=False):
    """Rows that read common blocks together; nothing where steps are not captured."""

    groups: int
    """Those of the last step."""
    members: int
    tokens_unread: int
    """Tokens that no step has read again, so far."""


class EngineStats(TypedDict):
    """The answer of `engine.stats()`."""

    form: str
    """"flat" (all sequences of a step in one row) or "rows" (one after another)."""
    waiting: int
    running: int
    preempted: int
    future_peak: float
    """The most that all requests are expected to hold at once, as a share of the fullest pool."""
    blocks: dict[str, BlockStats]
    memory: MemoryStats
    host: dict[str, HostStats]
    states: SlotStats
    adapters: AdapterStats
    graphs: CaptureStats
    shared_reads: SharedReadStats
    steps: int
    tokens: int
    preemptions: int
    admissions: int
    finished: int
    hits: int
    misses: int
    swapped_out: int
    swapped_in: int
    recomputed: int
    blocks_out: int
    blocks_in: int
    held_back: int
    verify: VerifyStats
    slow_processors: dict[str, int]
    paused: PauseMode | None
    asleep: int
    weights_changed: int
    kv_kept: int
    bytes_out: int
    bytes_in: int
    copied: float
    exposed: float
    off: dict[str, str]
    """The parts of the engine that are off, and why."""


def stats_of(loop: StepLoop, state: EngineState, counts: Mapping[str, int]) -> EngineStats:
    """The figures of an engine's parts. counts: those of its lifecycle."""
    scheduler, runner = loop.scheduler, loop.runner
    found: dict[str, Any] = {
        "form": runner.form,
        "waiting": len(scheduler.waiting),
        "running": len(scheduler.running),
        "preempted": len(scheduler.preempted),
        "future_peak": scheduler.future_peak,
        "blocks": loop.pools.usage(),
        "memory": loop.pools.memory_usage(),
        "host": loop.pools.host_usage(),
        "states": loop.pools.slot_usage(),
        "adapters": loop.adapters.stats(),
        "graphs": {} if runner.captured is None else runner.captured.stats(),
        "shared_reads": _shared_reads(loop),
        **{name: scheduler.counts[name] for name in get_args(Count)},
        "verify": loop.pools.checks.stats(),
        "slow_processors": dict(loop.slow),
        "paused": state.mode if state.paused else None,
        "asleep": state.sleep_level,
        **counts,
        **loop.preemption.stats(),
        "off": parts_off(loop),
    }
    return cast(EngineStats, found)


def parts_off(loop: StepLoop) -> dict[str, str]:
    """The parts of an engine that are off, by the names of options where they have one, and why."""
    runner, config = loop.runner, loop.pools.config
    captured = runner.captured
    compilation = None if captured is None else captured.compilation
    reasons = {
        "flat": runner.why_rows,
        "beside": runner.eager.why_not_beside,
        "graphs": _why_no_graphs(loop),
        "compile": None if compilation is None else compilation.why_not,
        "kernels": why_in_torch(config.kernels, loop.pools.layouts),
        "shared_reads": _why_no_shared_reads(loop),
        "prefix_caching": _why_no_prefixes(loop),
        "swap": None if loop.pools.swaps else _why_no_swaps(loop.pools),
        "run_ahead": None if loop.ahead else _why_not_ahead(config.run_ahead, runner.eager.device.type),
        "adapters": loop.adapters.why_not,
        "embeddings": runner.why_no_embeddings,
        "pictures": runner.why_not_cross,
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _why_no_graphs(loop: StepLoop) -> str | None:
    """Why steps are not captured, or which of them are refused."""
    runner = loop.runner
    if runner.captured is None:
        return "graphs=False"
    if runner.why_rows is not None and not runner.captures_rows:
        return "sequences are run one by one"
    if not runner.captures:
        return f"steps are captured on CUDA devices, the model is on {runner.eager.device}"
    refused = dict.fromkeys(runner.captured.captures.reasons.values())
    if loop.adapters.table.why_eager is not None:
        refused[loop.adapters.table.why_eager] = None
    return "some steps: " + "; ".join(refused) if refused else None


def _shared_reads(loop: StepLoop) -> dict[str, int]:
    """The groups of the last steps: of the model's, and of adapters' that peft's modules compute."""
    runners = [loop.runner, *loop.adapters.apart.runners]
    forwards = [part for each in runners for part in (each.eager, each.captured) if part is not None]
    return usage(filter(None, [maker.shared for part in forwards for maker in part.makers.values()]))


def _why_no_shared_reads(loop: StepLoop) -> str | None:
    """Why no rows read common blocks together."""
    pools = loop.pools
    if pools.config.shared_reads == "off":
        return "shared_reads='off'"
    if pools.config.batch_invariant:
        return "batch_invariant=True: sums have one order, whatever is computed beside"
    if not any(kind.reads_all for kind in pools.paged):
        return "no layer attends to all tokens of a sequence"
    runner = loop.runner
    if runner.eager.expanding:
        return "latent attention (MLA) is read by plain torch, of each row by itself"
    if runner.eager.device.type == "cuda":
        possible = runner.captures and pools.config.kernels in ("auto", "triton")
    else:
        possible = runner.form == "flat" and why_in_torch(pools.config.kernels, pools.layouts) is None
    if pools.config.shared_reads == "always" and not possible:
        return "only the Triton kernels in captured steps and the C++ op of CPUs do"
    return None  # what else is off says why


def _why_no_prefixes(loop: StepLoop) -> str | None:
    if not loop.pools.config.prefix_caching:
        return "prefix_caching=False"
    if loop.pools.paged != loop.pools.own and not loop.pools.config.snapshots_every:
        return "layers keep recurrent states, and state_snapshots=0"
    if loop.runner.eager.encoder is not None:
        return "a decoder's keys and values depend on its encoder's output"
    return None


def _why_no_swaps(pools: Pools) -> str:
    if pools.config.preemption == "recompute":
        return "preemption='recompute'"
    return "recurrent states do not wait on the host" if pools.paged != pools.own else "host_blocks=0"


def _why_not_ahead(wanted: bool | None, device: str) -> str:
    return "run_ahead=False" if wanted is False else f"the default is on for CUDA devices, this is {device}"
