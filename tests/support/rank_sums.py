"""Cases: sums of ranks that share memory, with the norms behind them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from engine_answers import PROMPTS, alone, answers, right
from fused_models import Kernels
from rank_support import CUDA, FEW, NEW, SMALL, asked, compare, led, loaded, whole
from tape import record

from hf_paged.engine import Engine
from hf_paged.kv import Ops
from hf_paged.model.capture.fusion import Fusion
from hf_paged.model.capture.pool import CapturePool
from hf_paged.model.ranks import symmetric_memory, tensor_parallel
from hf_paged.model.ranks.symmetric_memory import FUSED, MOST_BYTES, LazySum, SymmetricMemory
from hf_paged.model.ranks.tensor_parallel import mesh_of
from hf_paged.model.rehearsal import RECORDERS


class _HostMemory(SymmetricMemory):
    """Stands for memory that devices share: parts are summed by the ranks' own connections."""

    def __init__(self, group: Any) -> None:
        ranks = dist.get_world_size(group)
        self.fused_one_shot, self.most_fused = FUSED[2]
        self.bytes = torch.zeros(MOST_BYTES + self.most_fused, dtype=torch.uint8)
        self._group = weakref.ref(group)
        self._inboxes = [torch.zeros(2, ranks, self.most_fused, dtype=torch.uint8)] * ranks
        self._pads = [torch.zeros(512, dtype=torch.int32)] * ranks
        self._rank = dist.get_rank(group)
        self._multiple = 2
        self.sums = 0
        self.unmet = None
        self.sent: int | None = None
        """The inboxes to which parts were sent last, if ranks have not met since."""

    def sum_now(self, room: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        self.unmet = self.sent = None
        return self.summed(room)

    def summed(self, room: torch.Tensor) -> torch.Tensor:
        out = room.clone()
        dist.all_reduce(out, group=self._group())
        return out

    def add_norm(self, kernels: Any, room: torch.Tensor, *given: Any, **options: Any) -> Any:
        def reduce(part: Any, inboxes: Any, rank: int, *given: Any, shots: int, **options: Any) -> Any:
            assert inboxes[rank].data_ptr() != self.sent, (
                "a part is overwritten that a rank may not have read"
            )
            assert inboxes[rank][rank].numel() >= part.numel()
            self.sent = inboxes[rank].data_ptr()
            return kernels.add_rms_norm(self.summed(part), *given, **options)

        return super().add_norm(SimpleNamespace(reduce_add_rms_norm=reduce), room, *given, **options)

    @contextmanager
    def forward(self) -> Iterator[None]:
        assert self.sent is None, "a forward has ended before the ranks have met"
        with super().forward():
            yield


@contextmanager
def sums_on_the_host() -> Iterator[Counter[str]]:
    """Captured steps whose ranks sum as those of devices do, and how many sums were made with a norm."""
    made: Counter[str] = Counter()
    add_norm = LazySum.add_norm

    def counted(lazy: LazySum, *given: Any, **options: Any) -> Any:
        found = add_norm(lazy, *given, **options)
        made["with a norm"] += found is not None
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LazySum, "add_norm", counted)
        if not CUDA:
            patch.setitem(RECORDERS, "cpu", record)
            patch.setattr(Ops, "kernels", Kernels())
            known = weakref.WeakKeyDictionary()
            patch.setattr(symmetric_memory, "_known", known)
            patch.setattr(
                tensor_parallel,
                "symmetric_memory_of",
                lambda group: known.setdefault(group, known.get(group) or _HostMemory(group)),
            )
        yield made


def sums_with_norms(rank: int) -> None:
    """In captured steps a sum waits for the addition and the norm behind it, but for the last of a forward,
    and where a layer's code is not Llama's.
    """
    together = {}
    for family in ("llama", "qwen3", "olmo2"):
        with sums_on_the_host() as made:
            stats = compare(family, rank, FEW, twice=False)
        assert rank or stats["graphs"]["replayed"] > 5, stats
        together[family] = made["with a norm"]
    forwards, rest = divmod(together["llama"], 2 * whole("llama").config.num_hidden_layers - 1)
    assert forwards
    assert not rest
    assert together["qwen3"]
    assert not together["olmo2"]


def sums_of_half_a_layer(rank: int) -> None:
    """Where a plan divides attention alone, or feed-forward layers alone, no part is overwritten before the
    other rank has read it: all sums in a row wait for norms.
    """
    plan: dict[str, str] = tf.LlamaConfig.base_model_tp_plan
    for part in ("self_attn", "mlp"):
        with sums_on_the_host() as made, pytest.MonkeyPatch.context() as patch:
            half = {name: style for name, style in plan.items() if part in name}
            patch.setattr(tf.LlamaConfig, "base_model_tp_plan", half)
            stats = compare("llama", rank, FEW, twice=False)
        assert rank or stats["graphs"]["replayed"] > 5, stats
        assert made["with a norm"]


def a_forward_that_breaks_off(rank: int) -> None:
    """On all ranks behind a sum that waited for its norm: they meet before another uses the same inboxes."""
    broken: list[bool] = []
    met: list[bool] = []
    add_norm, capture = Fusion.add_norm, CapturePool.capture_or_compare

    def breaks(*given: Any) -> Any:
        found = add_norm(*given)
        if not broken:
            broken.append(True)
            raise RuntimeError("on purpose")
        return found

    def watched(*given: Any) -> None:
        capture(*given)
        memory = symmetric_memory.memory_of(mesh_of(model).get_group())
        met.append(memory is None or memory.unmet is None)

    with sums_on_the_host() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fusion, "add_norm", breaks)
        patch.setattr(CapturePool, "capture_or_compare", watched)
        model = loaded("llama")
        right = [alone(whole("llama"), prompt, max_new_tokens=NEW, do_sample=False) for prompt in PROMPTS]

        def act(engine: Engine) -> None:
            for prompt, expected in zip(PROMPTS, right, strict=True):
                asked = engine.submit(prompt, max_new_tokens=NEW, do_sample=False)
                assert answers(asked.result()) == expected

        led(rank, model, act, **SMALL)
    assert broken
    assert made["with a norm"]
    assert len(met) > 1
    assert all(met)


def ranks_that_run_different_code(rank: int) -> None:
    """A forward was replaced on one of them: sums would be of different things, so no step is captured."""

    def act(engine: Engine) -> dict[str, Any]:
        assert asked(engine, FEW) == [right("llama", p, k, NEW) for p, k in FEW]
        return engine.stats()["graphs"]

    with sums_on_the_host() as made:
        model = loaded("llama")
        if rank == 0:
            norm = model.model.norm
            own = norm.forward
            norm.forward = lambda x: own(x)
        graphs = led(rank, model, act)
        assert not made["with a norm"]
    assert rank or (graphs["refused"] and not graphs["replayed"]), graphs
