"""Launches of a captured step, counted on a CPU: every operation that is no view, and every kernel of ours
once. Kernels are interpreted, so what a step launches here it launches on a GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from captures import policy, reasons
from kernel_cases import load
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_paged.kv import ops
from hf_paged.model.capture import fusion
from hf_paged.model.capture.chains import Chains, Note, Noted
from hf_paged.model.lazy import LazyTensor, NotCapturable
from hf_paged.model.rehearsal import RECORDERS

aten = torch.ops.aten
NO_LAUNCH = ("empty", "new_empty", "_unsafe_view", "lift_fresh", "_local_scalar_dense")
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm", "convolution", "embedding"}
ATTENTION = ("decode", "prefill", "write", "rotary_write", "spans", "conv", "delta", "ssm", "scan")
"""Files of kernels that read or write keys, values and states."""
KINDS = ("product", "attention", "fused", "other")


class Launches(TorchDispatchMode):
    """The launches in a model's layers while it is on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = set(layers_of(model))
        self.counts: Counter[str] = Counter()
        """By kind and name; an operation of torch that is no product has its name alone."""
        self.met: set[nn.Module] = set()
        """The layers that have run."""
        self.aside = False
        """True while something is computed that no layer has asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        given = [x for x in _leaves([args, named]) if isinstance(x, torch.Tensor)]
        lazy = next((x for x in given if isinstance(x, LazyTensor)), None)
        if lazy is not None:
            with self:
                return type(lazy).__torch_dispatch__(func, types, args, named)
        answer = func(*args, **named)
        name = func.overloadpacket.__name__
        places = {x.untyped_storage().data_ptr() for x in given}
        views = any(
            isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() in places for x in _leaves(answer)
        )
        tensors = any(isinstance(x, torch.Tensor) for x in _leaves(answer))
        if tensors and (func._schema.is_mutable or not views) and not name.startswith(NO_LAUNCH):
            self.note(f"product {name}" if name in PRODUCTS else name)
        return answer

    def note(self, name: str) -> None:
        """One launch, if a layer runs."""
        layer = None if self.aside else self.running()
        if layer is not None:
            self.met.add(layer)
            self.counts[name] += 1

    def running(self) -> nn.Module | None:
        """The layer that runs."""
        frame = sys._getframe(1)
        code = nn.Module._call_impl.__code__
        while frame is not None:
            if frame.f_code is code and frame.f_locals["self"] in self.layers:
                layer: nn.Module = frame.f_locals["self"]
                return layer
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def kinds(self) -> dict[str, float]:
        """Launches a layer of each of KINDS."""
        found = dict.fromkeys(KINDS, 0.0)
        for name, count in self.counts.items():
            kind = name.split()[0]
            found[kind if kind in found else "other"] += count / len(self.met)
        return found


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The members of lists of modules that lie in no other such member."""
    for module in model.children():
        if isinstance(module, nn.ModuleList):
            yield from module
        else:
            yield from layers_of(module)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, list | tuple):
        return [leaf for each in tree for leaf in _leaves(each)]
    return _leaves(list(tree.values())) if isinstance(tree, dict) else [tree]


@contextmanager
def _counted(launches: Launches, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Note each launch of a kernel. A chain from before the layers belongs to none."""
    before: set[Note] = set()
    note, compute = Chains._note, Chains._compute

    def noting(chains: Chains, *given: Any) -> Noted | None:
        noted = note(chains, *given)
        if noted is not None and launches.running() is None:
            before.add(noted.note)
        return noted

    def computing(chains: Chains, note: Note) -> None:
        outer, launches.aside = launches.aside, launches.aside or note in before
        compute(chains, note)
        launches.aside = outer

    patch.setattr(Chains, "_note", noting)
    patch.setattr(Chains, "_compute", computing)
    package = load()
    for name, module in list(sys.modules.items()):
        if name.startswith(package.__name__ + ".") and hasattr(module, "launch"):
            file = name.rpartition(".")[2]
            patch.setattr(module, "launch", _noting(launches, file, module.launch))
    with launches:
        yield


def _noting(launches: Launches, file: str, launch: Callable[..., None]) -> Callable[..., None]:
    def noted(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        name = getattr(kernel, "__name__", None) or kernel.fn.__name__
        if arguments[0].is_meta or name == "_plan":  # one a step
            return
        writes = constants.get("WRITE", False)
        kind = "attention" if writes or file.startswith(ATTENTION) else "fused"
        kind = "product" if name == "_product" else kind
        launches.note(f"{kind} {name.strip('_')}")
        with _disable_current_modes():  # the interpreter computes in torch, too
            launch(kernel, grid, *arguments, **constants)

    return noted


def launches_of(model: Any, arguments: dict[str, Any], fused: bool = True) -> Launches:
    """The launches of a decoding step of generate() with these arguments, as it is captured on a GPU. Without
    `fused` modules compute as they are written. No blocks are read for several rows.
    """
    model = deepcopy(model)  # its captured steps go with it
    found: list[Launches] = []

    def count(step: Callable[[], Any], pools: Any, devices: Any) -> Any:
        launches = Launches(model)
        with pytest.MonkeyPatch.context() as patch, _counted(launches, patch):
            step()
        found.append(launches)
        raise NotCapturable("counted, and not to be replayed")

    with pytest.MonkeyPatch.context() as patch:
        policy(patch, after=1, least_steps=1)
        patch.setattr(ops, "_why_not_here", lambda device, dtype: None)
        patch.setitem(sys.modules, "hf_paged_kernels", load())
        patch.setitem(RECORDERS, "cpu", count)
        if not fused:
            make = fusion.Fusion.__init__
            patch.setattr(fusion.Fusion, "__init__", lambda self, model, kernels: make(self, model, None))
        options = {"cache_implementation": "paged", "cache_config": {"shared_reads": "off"}}
        model.generate(**arguments, max_new_tokens=6, do_sample=False, **options)
        why = reasons(model)
    if not found:
        raise NotCapturable(why or "no step was captured")
    return found[0]
